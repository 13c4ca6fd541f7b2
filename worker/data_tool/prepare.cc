#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/fs.h"
#include "base/job_yaml.h"
#include "base/plan/geometry.h"
#include "base/sha256.h"
#include "base/status.h"
#include "spdlog/spdlog.h"
#include "worker/data/recording_files.h"
#include "worker/data/signal_source.h"
#include "worker/data_tool/data_tool.h"

namespace hierad {
namespace {

constexpr int kManifestVersion = 1;
constexpr int64_t kManifestBytes = 256 << 20;

// An .npy file, version 1, in C order.
std::string NpyHeader(const std::string& descr, const std::string& shape) {
  std::string header = absl::StrCat("{'descr': '", descr, "', 'fortran_order': False, 'shape': (", shape, "), }");
  while ((10 + header.size() + 1) % 64 != 0) header += ' ';
  header += '\n';
  return absl::StrCat(std::string("\x93NUMPY\x01\x00", 8), std::string(1, static_cast<char>(header.size() & 255)), std::string(1, static_cast<char>(header.size() >> 8)), header);
}

// Written beside its name and moved there when whole.
class ShardFile {
 public:
  static absl::StatusOr<ShardFile> Create(const std::string& path) {
    ShardFile file;
    file.path_ = path;
    file.fd_ = UniqueFd(open(absl::StrCat(path, ".part").c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
    if (!file.fd_) return ErrnoStatus(errno, "cannot create", path);
    return file;
  }
  absl::Status Write(std::string_view data) {
    hash_.Update(data);
    return WriteAll(fd_.get(), data, path_);
  }
  absl::StatusOr<std::string> Finish() {
    if (fsync(fd_.get()) != 0) return ErrnoStatus(errno, "cannot write", path_);
    if (rename(absl::StrCat(path_, ".part").c_str(), path_.c_str()) != 0) return ErrnoStatus(errno, "cannot rename", path_);
    RETURN_IF_ERROR(SyncFolder(FolderOf(path_)));
    return hash_.HexDigest();
  }

 private:
  std::string path_;
  UniqueFd fd_;
  Sha256 hash_;
};

class Preparation {
 public:
  Preparation(const PrepareOptions& options, Subset subset, std::string folder) : options_(options), subset_(subset), folder_(std::move(folder)) {}

  absl::StatusOr<Report> Run() {
    RETURN_IF_ERROR(MakeFolders(folder_));
    const v1::DataSpec& data = options_.spec.data();
    ASSIGN_OR_RETURN(const Geometry geometry, Geometry::From(options_.spec.model()));
    ASSIGN_OR_RETURN(source_, OpenRecordings(data, data.path(), geometry, subset_));
    ASSIGN_OR_RETURN(manifest_, Wanted());
    RETURN_IF_ERROR(TakeWhatIsThere());
    const int64_t sample_bytes = source_->channels() * source_->axes()[0] * static_cast<int64_t>(sizeof(float));
    const int64_t a_shard = std::max<int64_t>(1, options_.shard_bytes / sample_bytes);
    kept_ = manifest_["shards"].size();
    for (int64_t begin = kept_ * a_shard; begin < source_->count(); begin += a_shard) {
      RETURN_IF_ERROR(WriteShard(begin, std::min(source_->count(), begin + a_shard)));
      RETURN_IF_ERROR(WriteFileAtomic(JoinPath(folder_, "manifest.json"), manifest_.dump(1) + "\n"));
    }
    if (data.labels_size() > 0) RETURN_IF_ERROR(WriteFileAtomic(JoinPath(folder_, "classes.txt"), absl::StrCat(absl::StrJoin(data.labels(), "\n"), "\n")));
    Report report;
    report["folder"] = Printable(folder_);
    report["samples"] = source_->count();
    report["shards"] = manifest_["shards"].size();
    report["kept_from_before"] = kept_;
    report["bytes"] = source_->count() * sample_bytes;
    return report;
  }

 private:
  // What a manifest must say for its shards to be these: everything that they follow from.
  absl::StatusOr<Report> Wanted() const {
    v1::JobSpec chain;
    *chain.mutable_data() = options_.spec.data();
    Report wanted;
    wanted["version"] = kManifestVersion;
    wanted["source"] = source_->Describe();
    wanted["data"] = ToJobYaml(chain);
    wanted["shape"] = {source_->count(), source_->channels(), source_->axes()[0]};
    wanted["shard_bytes"] = options_.shard_bytes;
    const v1::DataSpec& data = options_.spec.data();
    ASSIGN_OR_RETURN(const RecordingFiles files, FindRecordings(data.path(), data.held_out(), data.subject() == "folder", subset_));
    wanted["inputs"] = Report::array();
    for (const std::string& recording : files.paths) {
      std::vector<std::string> paths = {recording};
      if (const auto beside = files.annotations.find(recording); beside != files.annotations.end()) paths.insert(paths.end(), beside->second.begin(), beside->second.end());
      for (const std::string& path : paths) {
        ASSIGN_OR_RETURN(const std::string hash, Sha256OfFile(path));
        wanted["inputs"].push_back({{"path", Printable(path, 4096)}, {"sha256", hash}});
      }
    }
    wanted["shards"] = Report::array();
    return wanted;
  }

  // Shards of an interrupted call, as far as they are whole and of the same inputs and chain.
  absl::Status TakeWhatIsThere() {
    const std::string path = JoinPath(folder_, "manifest.json");
    if (!Exists(path)) return absl::OkStatus();
    ASSIGN_OR_RETURN(const std::string text, ReadFile(path, kManifestBytes));
    Report there = Report::parse(text, nullptr, false);
    Report shards = there.is_object() && there.contains("shards") ? there["shards"] : Report();
    if (there.is_object()) there["shards"] = Report::array();
    if (there != manifest_ || !shards.is_array())
      return ErrorOf(v1::REASON_USER_ERROR, absl::StrCat(Printable(folder_), " holds shards of other inputs or of another data: section (its manifest.json differs); name another --out, or remove it"));
    for (const Report& shard : shards) {
      const std::string file = JoinPath(folder_, shard.value("file", "-"));
      const auto hash = Sha256OfFile(file);
      if (!hash.ok() || *hash != shard.value("sha256", "-")) {
        spdlog::warn("{} is missing or damaged: made again, with those after it", Printable(file));
        break;
      }
      manifest_["shards"].push_back(shard);
    }
    return absl::OkStatus();
  }

  absl::Status WriteShard(int64_t begin, int64_t end) {
    const std::string name = absl::StrFormat("shard-%06d", manifest_["shards"].size());
    const int64_t channels = source_->channels(), points = source_->axes()[0];
    if (source_->num_classes() > 0) {
      std::vector<int32_t> labels;
      for (int64_t i = begin; i < end; ++i) labels.push_back(static_cast<int32_t>(source_->label(i)));
      RETURN_IF_ERROR(WriteFileAtomic(JoinPath(folder_, name + "_labels.npy"),
                                      NpyHeader("<i4", absl::StrCat(end - begin, ",")) + std::string(reinterpret_cast<const char*>(labels.data()), labels.size() * 4)));
    }
    ASSIGN_OR_RETURN(ShardFile file, ShardFile::Create(JoinPath(folder_, name + ".npy")));
    RETURN_IF_ERROR(file.Write(NpyHeader("<f4", absl::StrCat(end - begin, ", ", channels, ", ", points))));
    std::vector<float> x(channels * points);
    for (int64_t i = begin; i < end; ++i) {
      RETURN_IF_ERROR(source_->Read(i, x.data()));
      RETURN_IF_ERROR(file.Write({reinterpret_cast<const char*>(x.data()), x.size() * sizeof(float)}));
    }
    ASSIGN_OR_RETURN(const std::string hash, file.Finish());
    manifest_["shards"].push_back({{"file", name + ".npy"}, {"samples", end - begin}, {"sha256", hash}});
    return absl::OkStatus();
  }

  const PrepareOptions& options_;
  const Subset subset_;
  const std::string folder_;
  std::unique_ptr<SignalSource> source_;
  Report manifest_;
  int64_t kept_ = 0;
};

}  // namespace

absl::StatusOr<Report> Prepare(const PrepareOptions& options) {
  const v1::DataSpec& data = options.spec.data();
  if (data.source() != "edf") return ErrorOf(v1::REASON_USER_ERROR, absl::StrCat("data.source is ", data.source(), "; prepare takes edf: the others are read as they are"));
  Report report;
  std::string folder = options.out;
  if (data.held_out() > 0) {
    folder = JoinPath(options.out, "training");
    ASSIGN_OR_RETURN(report["held_out"], Preparation(options, Subset::kHeldOut, JoinPath(options.out, "held_out")).Run());
    report["held_out"] = Report::array({report["held_out"]});
  }
  ASSIGN_OR_RETURN(const Report training, Preparation(options, data.held_out() > 0 ? Subset::kTraining : Subset::kAll, folder).Run());
  report["training"] = Report::array({training});
  report["job_yaml"] = absl::StrCat("  data:\n    source: npy\n    path: ", Printable(folder, 4096), "\n    (mean_pool, clip, crop, normalize, pad and the transforms stay as they are; channels, unit, sample_rate, band_pass, notch, window_s, stride_s, labels, held_out go)\n",
                                    data.held_out() > 0 ? absl::StrCat("  eval:\n    path: ", Printable(JoinPath(options.out, "held_out"), 4096), "\n") : "");
  return report;
}

}  // namespace hierad
