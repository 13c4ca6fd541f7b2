#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/fs.h"
#include "base/status.h"
#include "worker/data/npy_file.h"
#include "worker/data/signal_source.h"

namespace hierad {
namespace {

class NpySource : public SignalSource {
 public:
  NpySource(NpyFile file, std::vector<int64_t> labels, int64_t num_classes, int64_t channels, std::vector<int64_t> axes)
      : file_(std::move(file)), labels_(std::move(labels)), num_classes_(num_classes), channels_(channels), axes_(std::move(axes)) {}
  int64_t count() const override { return file_.header().shape[0]; }
  int64_t channels() const override { return channels_; }
  const std::vector<int64_t>& axes() const override { return axes_; }
  int64_t num_classes() const override { return num_classes_; }
  std::string class_name(int64_t label) const override { return absl::StrCat(label); }
  int64_t label(uint64_t sample) const override { return labels_.empty() ? -1 : labels_[sample]; }
  absl::Status Read(uint64_t sample, float* x_CT) const override { return file_.ReadRow(sample, x_CT); }
  std::string SampleName(uint64_t sample) const override { return absl::StrCat(Printable(file_.path()), ", sample ", sample); }
  std::string Describe() const override {
    return absl::StrCat("npy ", file_.header().descr, file_.header().fortran ? " in Fortran order (mapped; slow where it does not fit in memory)" : "");
  }

 private:
  const NpyFile file_;
  const std::vector<int64_t> labels_;
  const int64_t num_classes_, channels_;
  const std::vector<int64_t> axes_;
};

std::string LabelsPath(const std::string& path) {
  return absl::StrCat(absl::EndsWithIgnoreCase(path, ".npy") ? path.substr(0, path.size() - 4) : path, "_labels.npy");
}

absl::StatusOr<std::vector<int64_t>> ReadLabels(const std::string& path, int64_t count) {
  ASSIGN_OR_RETURN(const NpyFile file, NpyFile::Open(path));
  const std::vector<int64_t>& shape = file.header().shape;
  if (shape.size() != 1 || shape[0] != count)
    return ErrorOf(v1::REASON_DATA_ERROR, absl::StrCat(Printable(path), ": labels of shape (", absl::StrJoin(shape, ", "), "); (", count, ") is needed, one a sample"));
  ASSIGN_OR_RETURN(std::vector<int64_t> labels, file.ReadIntegers());
  for (size_t i = 0; i < labels.size(); ++i)
    if (labels[i] < -1 || labels[i] >= 1'000'000)
      return ErrorOf(v1::REASON_DATA_ERROR, absl::StrCat(Printable(path), ": label ", labels[i], " of sample ", i, " is not in [-1, 999999] (-1: none)"));
  return labels;
}

}  // namespace

absl::StatusOr<std::unique_ptr<SignalSource>> OpenNpy(const std::string& path, int dims, int64_t in_chans) {
  ASSIGN_OR_RETURN(NpyFile file, NpyFile::Open(path));
  const NpyHeader& header = file.header();
  const std::vector<int64_t>& shape = header.shape;
  const int axes = static_cast<int>(shape.size());
  if (header.type == NpyType::kI64)
    return ErrorOf(v1::REASON_DATA_ERROR, absl::StrCat(Printable(path), ": npy of type '", header.descr, "'; accepted: |b1, |u1, |i1, i2, i4, f2, f4, f8 (fp32 cannot hold 64-bit integers)"));
  // [N, C, axes...]; [N, axes...] for one channel; [N, C, T] also for a 2-D or 3-D model, which reshapes T.
  const bool bare = axes == dims + 1 && in_chans == 1;
  if (axes != dims + 2 && axes != 3 && !bare)
    return ErrorOf(v1::REASON_USER_ERROR, absl::StrCat("data.path ", Printable(path), ": array of shape (", absl::StrJoin(shape, ", "), "); the model's input needs (samples, channels and ",
                                                       dims, dims == 1 ? " axis)" : " axes)", in_chans == 1 ? ", or without channels" : ""));
  if (header.elements == 0)
    return ErrorOf(v1::REASON_DATA_ERROR, absl::StrCat(Printable(path), ": array of shape (", absl::StrJoin(shape, ", "), ") holds ", shape[0], " samples of ", shape[0] ? "0 values" : "any size", "; at least 1 is needed"));
  std::vector<int64_t> labels;
  const std::string labels_path = LabelsPath(path);
  if (Exists(labels_path)) {
    ASSIGN_OR_RETURN(labels, ReadLabels(labels_path, shape[0]));
  }
  const int64_t num_classes = labels.empty() ? 0 : *std::max_element(labels.begin(), labels.end()) + 1;
  const int64_t channels = bare ? 1 : shape[1];
  std::vector<int64_t> sample_axes(shape.begin() + (bare ? 1 : 2), shape.end());
  return std::make_unique<NpySource>(std::move(file), std::move(labels), num_classes, channels, std::move(sample_axes));
}

}  // namespace hierad
