#include <sys/stat.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/fs.h"
#include "base/job_paths.h"
#include "base/limits.h"
#include "base/status.h"
#include "worker/data/npy_file.h"
#include "worker/data/signal_source.h"

namespace hierad {
namespace {

constexpr char kLabelsEnd[] = "_labels.npy", kClassesName[] = "classes.txt";
constexpr int64_t kClassesBytes = 16 << 20;

// One array and its labels, of the samples from `begin` on.
struct Shard {
  NpyFile file;
  std::vector<int64_t> labels;   // empty: none
  int64_t begin = 0;
};

class NpySource : public SignalSource {
 public:
  NpySource(std::vector<Shard> shards, std::vector<std::string> class_names, int64_t num_classes, int64_t channels, std::vector<int64_t> axes)
      : shards_(std::move(shards)), class_names_(std::move(class_names)), num_classes_(num_classes), channels_(channels), axes_(std::move(axes)),
        row_type_(RowTypeOf(shards_)) {}
  int64_t count() const override { return shards_.back().begin + shards_.back().file.header().shape[0]; }
  int64_t channels() const override { return channels_; }
  const std::vector<int64_t>& axes() const override { return axes_; }
  int64_t num_classes() const override { return num_classes_; }
  std::string class_name(int64_t label) const override {
    return label < static_cast<int64_t>(class_names_.size()) ? class_names_[label] : absl::StrCat(label);
  }
  int64_t label(uint64_t sample) const override {
    const Shard& shard = Of(sample);
    return shard.labels.empty() ? -1 : shard.labels[sample - shard.begin];
  }
  absl::Status Read(uint64_t sample, float* x_CT) const override {
    const Shard& shard = Of(sample);
    return shard.file.ReadRow(sample - shard.begin, x_CT);
  }
  DType row_type() const override { return row_type_; }
  absl::Status ReadRow(uint64_t sample, int64_t first, int64_t count, void* row) const override {
    const Shard& shard = Of(sample);
    return shard.file.ReadRow(sample - shard.begin, channels_, first, count, row_type_, row);
  }
  std::string SampleName(uint64_t sample) const override {
    const Shard& shard = Of(sample);
    return absl::StrCat(shard.file.name(), ", sample ", sample - shard.begin, shards_.size() > 1 ? absl::StrCat(" (", sample, " of all)") : "");
  }
  bool always_finite() const override {
    return std::all_of(shards_.begin(), shards_.end(), [](const Shard& shard) {
      const NpyType type = shard.file.header().type;
      return type != NpyType::kF16 && type != NpyType::kF32 && type != NpyType::kF64;
    });
  }
  int64_t sample_bytes() const override {
    const NpyFile& file = shards_.front().file;
    return file.row_elements() * file.header().item_bytes;
  }
  std::string Describe() const override {
    const NpyHeader& header = shards_.front().file.header();
    return absl::StrCat("npy ", header.descr, shards_.size() > 1 ? absl::StrCat(" in ", shards_.size(), " files") : "",
                        header.fortran ? " in Fortran order (mapped; slow where it does not fit in memory)" : "");
  }

 private:
  // Whole numbers of two widths share the wider one, other mixtures fp32.
  static DType RowTypeOf(const std::vector<Shard>& shards) {
    DType common = shards.front().file.row_type();
    for (const Shard& shard : shards) {
      const DType type = shard.file.row_type();
      const auto whole = [](DType t) { return t == DType::kU8 || t == DType::kI16; };
      if (type != common) common = whole(type) && whole(common) ? DType::kI16 : DType::kF32;
    }
    return common;
  }

  const Shard& Of(uint64_t sample) const {
    const auto after = std::upper_bound(shards_.begin(), shards_.end(), static_cast<int64_t>(sample),
                                        [](int64_t s, const Shard& shard) { return s < shard.begin; });
    return *(after - 1);
  }

  const std::vector<Shard> shards_;   // none is empty
  const std::vector<std::string> class_names_;
  const int64_t num_classes_, channels_;
  const std::vector<int64_t> axes_;
  const DType row_type_;
};

absl::StatusOr<std::vector<int64_t>> LabelsOf(const NpyFile& file, int64_t count) {
  const std::vector<int64_t>& shape = file.header().shape;
  if (shape.size() != 1 || shape[0] != count)
    return ErrorOf(v1::REASON_DATA_ERROR, absl::StrCat(file.name(), ": labels of shape (", absl::StrJoin(shape, ", "), "); (", count, ") is needed, one a sample"));
  ASSIGN_OR_RETURN(std::vector<int64_t> labels, file.ReadIntegers());
  for (size_t i = 0; i < labels.size(); ++i)
    if (labels[i] < -1 || labels[i] >= 1'000'000)
      return ErrorOf(v1::REASON_DATA_ERROR, absl::StrCat(file.name(), ": label ", labels[i], " of sample ", i, " is not in [-1, 999999] (-1: none)"));
  return labels;
}

std::string ShapeText(const NpyFile& file) { return absl::StrCat("(", absl::StrJoin(file.header().shape, ", "), ")"); }

// What one array must be to hold samples; the axes of a sample are shape[1..].
absl::Status CheckArray(const NpyFile& file, int dims, int64_t in_chans) {
  const NpyHeader& header = file.header();
  const int axes = static_cast<int>(header.shape.size());
  if (header.type == NpyType::kI64)
    return ErrorOf(v1::REASON_DATA_ERROR, absl::StrCat(file.name(), ": npy of type '", header.descr, "'; accepted: |b1, |u1, |i1, i2, i4, f2, f4, f8 (fp32 cannot hold 64-bit integers)"));
  // [N, C, axes...]; [N, axes...] for one channel; [N, C, T] also for a 2-D or 3-D model, which reshapes T.
  const bool bare = axes == dims + 1 && in_chans == 1;
  if (axes != dims + 2 && axes != 3 && !bare)
    return ErrorOf(v1::REASON_USER_ERROR, absl::StrCat("data.path ", file.name(), ": array of shape ", ShapeText(file), "; the model's input needs (samples, channels and ",
                                                       dims, dims == 1 ? " axis)" : " axes)", in_chans == 1 ? ", or without channels" : ""));
  if (std::find(header.shape.begin() + 1, header.shape.end(), 0) != header.shape.end())
    return ErrorOf(v1::REASON_DATA_ERROR, absl::StrCat(file.name(), ": array of shape ", ShapeText(file), " holds ", header.shape[0], " samples of 0 values; at least 1 is needed"));
  if (header.elements / std::max<int64_t>(1, header.shape[0]) > limits::kSampleElements)
    return ErrorOf(v1::REASON_USER_ERROR, absl::StrCat(file.name(), ": array of shape ", ShapeText(file), " has samples of more than ", limits::kSampleElements, " numbers"));
  return absl::OkStatus();
}

// Adds an array that has samples; an empty shard is passed over.
absl::Status AddShard(NpyFile file, std::vector<int64_t> labels, std::vector<Shard>* shards) {
  if (!shards->empty()) {
    const NpyFile& first = shards->front().file;
    if (!std::equal(first.header().shape.begin() + 1, first.header().shape.end(), file.header().shape.begin() + 1, file.header().shape.end()))
      return ErrorOf(v1::REASON_DATA_ERROR, absl::StrCat(file.name(), ": array of shape ", ShapeText(file), ", but ", first.name(), " is of shape ", ShapeText(first), "; samples of one set have one shape"));
    if (labels.empty() != shards->front().labels.empty() && file.header().shape[0] > 0)
      return ErrorOf(v1::REASON_DATA_ERROR, absl::StrCat(file.name(), labels.empty() ? " has no labels, but " : " has labels, but ", first.name(), labels.empty() ? " has" : " has none", "; give them to all or to none"));
  }
  if (file.header().shape[0] == 0) return absl::OkStatus();
  const int64_t begin = shards->empty() ? 0 : shards->back().begin + shards->back().file.header().shape[0];
  shards->push_back({std::move(file), std::move(labels), begin});
  return absl::OkStatus();
}

absl::Status AddFile(const std::string& path, bool keep_open, int dims, int64_t in_chans, std::vector<Shard>* shards) {
  ASSIGN_OR_RETURN(NpyFile file, NpyFile::Open(path, keep_open));
  RETURN_IF_ERROR(CheckArray(file, dims, in_chans));
  const std::string labels_path = absl::StrCat(absl::EndsWithIgnoreCase(path, ".npy") ? path.substr(0, path.size() - 4) : path, kLabelsEnd);
  std::vector<int64_t> labels;
  if (JobPathExists(labels_path)) {
    ASSIGN_OR_RETURN(const NpyFile labels_file, NpyFile::Open(labels_path));
    ASSIGN_OR_RETURN(labels, LabelsOf(labels_file, file.header().shape[0]));
  }
  return AddShard(std::move(file), std::move(labels), shards);
}

// The array of samples is the only one, or the one called x or data; that of labels is called y, label or labels.
absl::Status AddNpz(const std::string& path, int dims, int64_t in_chans, std::vector<Shard>* shards) {
  ASSIGN_OR_RETURN(auto arrays, NpyFile::OpenNpz(path));
  NpyFile* samples = nullptr;
  NpyFile* labels = nullptr;
  std::string names;
  int others = 0;
  for (auto& [name, file] : arrays) {
    absl::StrAppend(&names, names.empty() ? "" : ", ", Printable(name, 60));
    if (name == "y" || name == "label" || name == "labels") labels = &file;
    else if (name == "x" || name == "X" || name == "data") samples = &file;
    else ++others;
  }
  if (!samples && others == 1) {
    for (auto& [name, file] : arrays)
      if (&file != labels) samples = &file;
  }
  if (!samples)
    return ErrorOf(v1::REASON_DATA_ERROR, absl::StrCat(Printable(path), " holds ", arrays.size(), " arrays (", names.empty() ? "none" : names, "); samples are read from the one called x or data, or the only one beside y"));
  RETURN_IF_ERROR(CheckArray(*samples, dims, in_chans));
  std::vector<int64_t> values;
  if (labels) {
    ASSIGN_OR_RETURN(values, LabelsOf(*labels, samples->header().shape[0]));
  }
  return AddShard(std::move(*samples), std::move(values), shards);
}

bool IsNpz(const std::string& name) { return absl::EndsWithIgnoreCase(name, ".npz"); }

absl::Status AddFolder(const std::string& path, int dims, int64_t in_chans, std::vector<Shard>* shards) {
  ASSIGN_OR_RETURN(std::vector<std::string> names, ListJobFolder(path));
  std::erase_if(names, [](const std::string& name) {
    return name[0] == '.' || (!absl::EndsWithIgnoreCase(name, ".npy") && !IsNpz(name)) || absl::EndsWithIgnoreCase(name, kLabelsEnd);
  });
  if (static_cast<int64_t>(names.size()) > limits::kArrayShards) return ErrorOf(v1::REASON_USER_ERROR, absl::StrCat("data.path ", Printable(path), ": ", names.size(), " arrays; at most ", limits::kArrayShards));
  if (names.empty()) return ErrorOf(v1::REASON_DATA_ERROR, absl::StrCat("data.path ", Printable(path), ": 0 arrays (.npy, .npz) in this folder; at least 1 is needed"));
  const bool keep_open = static_cast<int64_t>(names.size()) <= limits::kOpenShards;
  for (const std::string& name : names) {
    const std::string file = JoinPath(path, name);
    RETURN_IF_ERROR(IsNpz(name) ? AddNpz(file, dims, in_chans, shards) : AddFile(file, keep_open, dims, in_chans, shards));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<SignalSource>> OpenNpy(const std::string& path, int dims, int64_t in_chans) {
  struct stat status{};
  std::vector<Shard> shards;
  std::vector<std::string> class_names;
  if (StatJobPath(path, &status).ok() && S_ISDIR(status.st_mode)) {
    RETURN_IF_ERROR(AddFolder(path, dims, in_chans, &shards));
    if (const std::string classes = JoinPath(path, kClassesName); JobPathExists(classes)) {
      ASSIGN_OR_RETURN(const std::string text, ReadJobFile(classes, kClassesBytes));
      class_names = Split(text, '\n');
      if (!class_names.empty() && class_names.back().empty()) class_names.pop_back();
    }
  } else {
    RETURN_IF_ERROR(IsNpz(path) ? AddNpz(path, dims, in_chans, &shards) : AddFile(path, true, dims, in_chans, &shards));
  }
  if (shards.empty()) return ErrorOf(v1::REASON_DATA_ERROR, absl::StrCat("data.path ", Printable(path), ": 0 samples; at least 1 is needed"));
  int64_t num_classes = class_names.size();
  for (const Shard& shard : shards)
    for (const int64_t label : shard.labels) num_classes = std::max(num_classes, label + 1);
  const std::vector<int64_t>& shape = shards.front().file.header().shape;
  const bool bare = static_cast<int>(shape.size()) == dims + 1 && in_chans == 1;
  const int64_t channels = bare ? 1 : shape[1];
  std::vector<int64_t> axes(shape.begin() + (bare ? 1 : 2), shape.end());
  return std::make_unique<NpySource>(std::move(shards), std::move(class_names), num_classes, channels, std::move(axes));
}

}  // namespace hierad
