#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/failpoint.h"
#include "base/fs.h"
#include "base/sha256.h"
#include "base/status.h"
#include "worker/checkpoint/checkpoint.h"
#include "worker/checkpoint/manifest.h"
#include "worker/checkpoint/safetensors.h"

namespace hierad {
namespace {

constexpr char kTemporary[] = ".writing-";   // not yet there
constexpr char kRemoved[] = ".removing-";    // no longer there
constexpr int64_t kOverheadBytes = 1 << 20;  // headers, state, manifest, folder blocks
constexpr int64_t kJsonBytes = 64 << 20;

std::vector<TensorView> Views(const ParameterTable& table, const std::vector<float>& flat, const std::string& suffix) {
  std::vector<TensorView> views;
  for (const Parameter& p : table.parameters) views.push_back({p.name + suffix, p.shape, flat.data() + p.offset});
  return views;
}

absl::Status CheckFinite(const std::string& name, const float* values, int64_t size, const char* what) {
  for (int64_t i = 0; i < size; ++i) {
    if (std::isfinite(values[i])) continue;
    return ErrorOf(v1::REASON_NUMERICS, absl::StrCat(what, " of \"", name, "\" holds ", values[i],
                                                     ": no checkpoint is made of it; lower the learning rate or check the data"));
  }
  return absl::OkStatus();
}

absl::Status CheckFinite(const ParameterTable& table, const std::vector<float>& flat, const char* what) {
  for (const Parameter& p : table.parameters) RETURN_IF_ERROR(CheckFinite(p.name, flat.data() + p.offset, p.size, what));
  return absl::OkStatus();
}

// Out of space in words that say what is needed.
absl::Status WriteFailed(const absl::Status& status, const std::string& what, const std::string& folder, int64_t needed) {
  if (status.ok() || ReasonOf(status) == v1::REASON_NUMERICS) return status;
  const auto free = FreeBytes(folder);
  return ErrorOf(v1::REASON_CHECKPOINT,
                 absl::StrCat(what, " could not be written to \"", Printable(folder), "\" (it needs ", needed,
                              " bytes, ", free.ok() ? absl::StrCat(*free) : std::string("an unknown number"), " are free): ",
                              std::string(status.message()), "; what was there before is untouched"));
}

absl::Status WriteSynced(const std::string& path, const std::string& data) {
  UniqueFd fd(open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (!fd) return ErrnoStatus(errno, "cannot create", path);
  RETURN_IF_ERROR(WriteAll(fd.get(), data, path));
  if (fsync(fd.get()) != 0) return ErrnoStatus(errno, "cannot sync", path);
  return absl::OkStatus();
}

absl::StatusOr<int64_t> FileBytes(const std::string& path) {
  struct stat info{};
  if (stat(path.c_str(), &info) != 0) return ErrnoStatus(errno, "cannot read", path);
  return int64_t(info.st_size);
}

}  // namespace

absl::Status CheckpointFolder::Stage(const std::string& stage) const {
  if (stage_hook_) stage_hook_(stage.c_str());
  std::string point = "checkpoint." + stage;
  std::replace(point.begin(), point.end(), ' ', '_');
  return Failpoint(point.c_str());
}

absl::StatusOr<CheckpointFolder> CheckpointFolder::Open(const std::string& run_folder) {
  CheckpointFolder opened;
  opened.folder_ = JoinPath(run_folder, "checkpoints");
  RETURN_IF_ERROR(MakeFolders(opened.folder_));
  ASSIGN_OR_RETURN(const auto names, ListFolder(opened.folder_));
  for (const std::string& name : names) {
    if (name.rfind(kTemporary, 0) == 0 || name.rfind(kRemoved, 0) == 0) RETURN_IF_ERROR(RemoveTree(JoinPath(opened.folder_, name)));
  }
  return opened;
}

absl::StatusOr<v1::CheckpointInfo> CheckpointFolder::Write(const CheckpointContents& contents, const ParameterTable& table,
                                                           const v1::JobSpec& spec) {
  const TrainState& state = contents.state;
  for (const auto* flat : {&state.parameters, &state.exp_avg, &state.exp_avg_sq}) {
    if (int64_t(flat->size()) != table.flat_size) {
      return absl::InternalError(absl::StrCat("a state of ", flat->size(), " numbers for a table of ", table.flat_size));
    }
  }
  RETURN_IF_ERROR(CheckFinite(table, state.parameters, "the weight"));
  RETURN_IF_ERROR(CheckFinite(table, state.exp_avg, "the first moment"));
  RETURN_IF_ERROR(CheckFinite(table, state.exp_avg_sq, "the second moment"));
  if (!state.ema.empty()) RETURN_IF_ERROR(CheckFinite(table, state.ema, "the average of the weight"));
  const std::string what = absl::StrCat("the checkpoint of step ", state.step);
  const int64_t needed = (state.ema.empty() ? 3 : 4) * table.num_elements * int64_t(sizeof(float)) + kOverheadBytes;
  const auto free = FreeBytes(folder_);
  if (free.ok() && *free < needed) {
    return WriteFailed(absl::ResourceExhaustedError("no space left on the device"), what, folder_, needed);
  }
  const std::string path = JoinPath(folder_, CheckpointName(state.step));
  const std::string temporary = JoinPath(folder_, kTemporary + CheckpointName(state.step));
  v1::CheckpointInfo info;
  info.set_step(state.step);
  info.set_path(path);
  absl::Status status = WriteFiles(temporary, contents, table, spec, &info);
  if (status.ok()) status = Publish(temporary, path);
  if (!status.ok()) {
    (void)RemoveTree(temporary);
    return WriteFailed(status, what, folder_, needed);
  }
  return info;
}

absl::Status CheckpointFolder::WriteFiles(const std::string& temporary, const CheckpointContents& contents,
                                          const ParameterTable& table, const v1::JobSpec& spec,
                                          v1::CheckpointInfo* info) const {
  const TrainState& state = contents.state;
  RETURN_IF_ERROR(Stage("clear"));
  RETURN_IF_ERROR(RemoveTree(temporary));
  RETURN_IF_ERROR(Stage("make folder"));
  (void)mkdir(folder_.c_str(), 0755);   // removed while the run goes on
  if (mkdir(temporary.c_str(), 0755) != 0) return ErrnoStatus(errno, "cannot make folder", temporary);
  Manifest manifest;
  manifest.step = state.step;
  manifest.created_ms = Clock::System().UnixMs();
  manifest.eval_loss = contents.eval_loss;
  const std::map<std::string, std::string> metadata = {{"format", "pt"}, {"hierad.step", absl::StrCat(state.step)}};
  RETURN_IF_ERROR(Stage("write model"));
  ASSIGN_OR_RETURN(manifest.files[kModelFile].sha256,
                   WriteSafetensors(JoinPath(temporary, kModelFile), Views(table, state.parameters, ""), metadata));
  RETURN_IF_ERROR(Stage("write optimizer"));
  std::vector<TensorView> moments = Views(table, state.exp_avg, ".exp_avg");
  auto add = [&](const std::vector<TensorView>& views) { moments.insert(moments.end(), views.begin(), views.end()); };
  add(Views(table, state.exp_avg_sq, ".exp_avg_sq"));
  if (!state.ema.empty()) add(Views(table, state.ema, ".ema"));
  ASSIGN_OR_RETURN(manifest.files[kOptimizerFile].sha256, WriteSafetensors(JoinPath(temporary, kOptimizerFile), moments, metadata));
  RETURN_IF_ERROR(Stage("write state"));
  const std::string state_text = StateToText(contents, spec);
  manifest.files[kStateFile].sha256 = Sha256Hex(state_text);
  RETURN_IF_ERROR(WriteSynced(JoinPath(temporary, kStateFile), state_text));
  int64_t total = 0;
  for (auto& [name, file] : manifest.files) {
    ASSIGN_OR_RETURN(file.bytes, FileBytes(JoinPath(temporary, name)));
    total += file.bytes;
  }
  RETURN_IF_ERROR(Stage("write manifest"));
  const std::string text = manifest.ToText();
  RETURN_IF_ERROR(WriteSynced(JoinPath(temporary, kManifestFile), text));
  RETURN_IF_ERROR(Stage("sync folder"));
  RETURN_IF_ERROR(SyncFolder(temporary));
  info->set_bytes(total + int64_t(text.size()));
  info->set_sha256(Sha256Hex(text));
  info->set_created_ms(manifest.created_ms);
  if (contents.eval_loss) {
    info->set_eval_loss(*contents.eval_loss);
    info->set_best(contents.has_best && *contents.eval_loss == contents.best_eval_loss);
  }
  return absl::OkStatus();
}

// One of that name (a damaged one, or the same step run again) changes places with the new one, so that the name always
// leads to a whole folder.
absl::Status CheckpointFolder::Publish(const std::string& temporary, const std::string& path) const {
  RETURN_IF_ERROR(Stage("rename"));
  if (!Exists(path)) {
    if (rename(temporary.c_str(), path.c_str()) != 0) return ErrnoStatus(errno, "cannot put in place", path);
  } else if (renameat2(AT_FDCWD, temporary.c_str(), AT_FDCWD, path.c_str(), RENAME_EXCHANGE) != 0) {
    // A file system without exchange (NFS).
    RETURN_IF_ERROR(Remove(path));
    if (rename(temporary.c_str(), path.c_str()) != 0) return ErrnoStatus(errno, "cannot put in place", path);
  }
  RETURN_IF_ERROR(Stage("sync parent"));
  RETURN_IF_ERROR(SyncFolder(folder_));
  RETURN_IF_ERROR(Stage("remove replaced"));
  return RemoveTree(temporary);
}

absl::Status CheckpointFolder::Remove(const std::string& path) const {
  const std::string removed = JoinPath(folder_, kRemoved + path.substr(path.rfind('/') + 1));
  RETURN_IF_ERROR(Stage("rename old"));
  RETURN_IF_ERROR(RemoveTree(removed));
  // By name first: half a folder never has a checkpoint's name.
  if (rename(path.c_str(), removed.c_str()) != 0) return ErrnoStatus(errno, "cannot remove", path);
  RETURN_IF_ERROR(Stage("remove old"));
  return RemoveTree(removed);
}

absl::Status CheckpointFolder::Retain(const v1::CheckpointSpec& spec) {
  ASSIGN_OR_RETURN(const auto infos, List());
  int kept = 0;
  std::vector<std::string> goes;
  for (const v1::CheckpointInfo& info : infos) {
    const bool newest = !info.damaged() && kept < spec.keep_last();
    kept += newest;
    if (!newest && !(spec.keep_best() && info.best())) goes.push_back(info.path());
  }
  if (kept == 0) return absl::OkStatus();
  std::reverse(goes.begin(), goes.end());
  for (const std::string& path : goes) RETURN_IF_ERROR(Remove(path));
  if (goes.empty()) return absl::OkStatus();
  RETURN_IF_ERROR(Stage("sync retention"));
  return SyncFolder(folder_);
}

absl::StatusOr<std::vector<v1::CheckpointInfo>> CheckpointFolder::List() const {
  ASSIGN_OR_RETURN(const auto names, ListFolder(folder_));
  std::vector<v1::CheckpointInfo> infos;   // oldest first until the end
  v1::CheckpointInfo* best = nullptr;
  infos.reserve(names.size());
  for (const std::string& name : names) {
    const int64_t step = StepOfName(name);
    if (step < 0) continue;
    v1::CheckpointInfo& info = infos.emplace_back();
    info.set_step(step);
    info.set_path(JoinPath(folder_, name));
    const auto text = ReadFile(JoinPath(info.path(), kManifestFile), kJsonBytes);
    const auto manifest = text.ok() ? Manifest::FromText(*text) : absl::StatusOr<Manifest>(text.status());
    info.set_damaged(!manifest.ok() || Exists(JoinPath(info.path(), kDamagedMark)));
    if (!manifest.ok()) continue;
    info.set_sha256(Sha256Hex(*text));
    info.set_created_ms(manifest->created_ms);
    int64_t total = int64_t(text->size());
    for (const auto& [file, entry] : manifest->files) total += entry.bytes;
    info.set_bytes(total);
    if (!manifest->eval_loss) continue;
    info.set_eval_loss(*manifest->eval_loss);
    const bool less = std::isfinite(info.eval_loss()) && (best == nullptr || info.eval_loss() < best->eval_loss());
    if (!info.damaged() && less) best = &info;
  }
  if (best != nullptr) best->set_best(true);
  std::sort(infos.begin(), infos.end(), [](const auto& a, const auto& b) { return a.step() > b.step(); });
  return infos;
}

absl::Status WriteModel(const std::string& path, const std::vector<TensorView>& tensors, int64_t step,
                        std::map<std::string, std::string> metadata) {
  int64_t needed = kOverheadBytes;
  for (const TensorView& tensor : tensors) {
    int64_t size = 1;
    for (const int64_t axis : tensor.shape) size *= axis;
    RETURN_IF_ERROR(CheckFinite(tensor.name, tensor.data, size, "the weight"));
    needed += size * int64_t(sizeof(float));
  }
  metadata["format"] = "pt";
  metadata["hierad.step"] = absl::StrCat(step);
  const std::string folder = FolderOf(path), temporary = path + ".writing";
  const auto write = [&]() -> absl::Status {
    RETURN_IF_ERROR(WriteSafetensors(temporary, tensors, metadata).status());
    if (rename(temporary.c_str(), path.c_str()) != 0) return ErrnoStatus(errno, "cannot put in place", path);
    return SyncFolder(folder);
  };
  const absl::Status status = write();
  if (status.ok()) return status;
  unlink(temporary.c_str());
  return WriteFailed(status, absl::StrCat("the weights of step ", step), folder, needed);
}

absl::StatusOr<std::string> ExportModel(const std::string& run_folder, const TrainState& state, const ParameterTable& table,
                                        const v1::JobSpec& spec) {
  const std::string folder = JoinPath(run_folder, "exported");
  const std::string path = JoinPath(folder, kModelFile);
  RETURN_IF_ERROR(MakeFolders(folder));
  const std::map<std::string, std::string> metadata = {{"hierad.task", spec.model().task()}};
  if (!state.ema.empty()) RETURN_IF_ERROR(WriteModel(JoinPath(folder, kAverageFile), Views(table, state.ema, ""), state.step, metadata));
  RETURN_IF_ERROR(WriteModel(path, Views(table, state.parameters, ""), state.step, metadata));
  return path;
}

}  // namespace hierad
