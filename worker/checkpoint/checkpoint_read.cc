#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/fs.h"
#include "base/sha256.h"
#include "base/status.h"
#include "worker/checkpoint/checkpoint.h"
#include "worker/checkpoint/manifest.h"
#include "worker/checkpoint/safetensors.h"

namespace hierad {
namespace {

constexpr int64_t kJsonBytes = 64 << 20;

// Of REASON_CHECKPOINT; the code stays, since it tells damage (DataLoss) from what may pass.
absl::Status Refusal(const std::string& path, const absl::Status& status) {
  const std::string message = absl::StrCat("checkpoint \"", Printable(path), "\": ", std::string(status.message()));
  absl::Status refusal(status.code(), message);
  const absl::Status of_reason = ErrorOf(v1::REASON_CHECKPOINT, message);
  of_reason.ForEachPayload([&](absl::string_view url, const absl::Cord& payload) { refusal.SetPayload(url, payload); });
  return refusal;
}

// A file that is missing or too long is damage, unlike one that may not be read now.
absl::Status AsDamage(const absl::Status& status) {
  if (absl::IsNotFound(status) || absl::IsInvalidArgument(status)) return absl::DataLossError(status.message());
  return status;
}

absl::Status CheckFile(const std::string& folder, const std::string& name, const Manifest::File& expected) {
  const auto seen = Sha256OfFile(JoinPath(folder, name));
  if (!seen.ok()) return AsDamage(seen.status());
  if (*seen != expected.sha256) {
    return absl::DataLossError(absl::StrCat(name, " is damaged: its SHA-256 is ", *seen, ", the manifest says ", expected.sha256));
  }
  return absl::OkStatus();
}

std::string Shape(const std::vector<int64_t>& shape) { return absl::StrCat("[", absl::StrJoin(shape, ", "), "]"); }

absl::Status Fill(const SafetensorsFile& file, const ParameterTable& table, const std::string& suffix, std::vector<float>* flat) {
  flat->assign(size_t(table.flat_size), 0.0f);
  for (const Parameter& p : table.parameters) {
    const auto found = file.tensors.find(p.name + suffix);
    if (found == file.tensors.end()) {
      return absl::FailedPreconditionError(absl::StrCat("it is of another model: it has no \"", p.name + suffix,
                                                        "\"; use another output.folder, or the model it was made with"));
    }
    const Tensor& tensor = found->second;
    if (tensor.shape != p.shape) {
      return absl::FailedPreconditionError(absl::StrCat("it is of another model: \"", p.name + suffix, "\" has shape ", Shape(tensor.shape),
                                                        ", the job's model ", Shape(p.shape),
                                                        "; use another output.folder, or the model it was made with"));
    }
    std::copy(tensor.data.begin(), tensor.data.end(), flat->begin() + p.offset);
  }
  return absl::OkStatus();
}

absl::Status CheckCount(const SafetensorsFile& file, size_t expected, const char* name) {
  if (file.tensors.size() == expected) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("it is of another model: ", name, " holds ", file.tensors.size(),
                                                    " tensors, the job's model makes ", expected,
                                                    "; use another output.folder, or the model it was made with"));
}

absl::StatusOr<CheckpointContents> Read(const std::string& path, const ParameterTable& table) {
  auto text = ReadFile(JoinPath(path, kManifestFile), kJsonBytes);
  if (!text.ok()) return AsDamage(text.status());
  ASSIGN_OR_RETURN(const Manifest manifest, Manifest::FromText(*text));
  for (const auto& [name, file] : manifest.files) RETURN_IF_ERROR(CheckFile(path, name, file));
  ASSIGN_OR_RETURN(text, ReadFile(JoinPath(path, kStateFile), kJsonBytes));
  ASSIGN_OR_RETURN(CheckpointContents contents, StateFromText(*text));
  if (contents.state.step != manifest.step || CheckpointName(manifest.step) != path.substr(path.rfind('/') + 1)) {
    return absl::DataLossError(absl::StrCat("its name, manifest (step ", manifest.step, ") and state (step ", contents.state.step, ") differ"));
  }
  {
    ASSIGN_OR_RETURN(const SafetensorsFile model, ReadSafetensors(JoinPath(path, kModelFile)));
    RETURN_IF_ERROR(Fill(model, table, "", &contents.state.parameters));
    RETURN_IF_ERROR(CheckCount(model, table.parameters.size(), kModelFile));
  }
  ASSIGN_OR_RETURN(const SafetensorsFile moments, ReadSafetensors(JoinPath(path, kOptimizerFile)));
  RETURN_IF_ERROR(Fill(moments, table, ".exp_avg", &contents.state.exp_avg));
  RETURN_IF_ERROR(Fill(moments, table, ".exp_avg_sq", &contents.state.exp_avg_sq));
  const bool averaged = moments.tensors.size() == 3 * table.parameters.size();
  if (averaged) RETURN_IF_ERROR(Fill(moments, table, ".ema", &contents.state.ema));
  RETURN_IF_ERROR(CheckCount(moments, (averaged ? 3 : 2) * table.parameters.size(), kOptimizerFile));
  return contents;
}

}  // namespace

absl::StatusOr<v1::JobSpec> JobOfCheckpoint(const std::string& path) {
  const auto text = ReadFile(JoinPath(path, kStateFile), kJsonBytes);
  if (!text.ok()) return Refusal(path, AsDamage(text.status()));
  const auto spec = JobFromStateText(*text);
  return spec.ok() ? spec : Refusal(path, spec.status());
}

absl::StatusOr<CheckpointContents> ReadCheckpoint(const std::string& path, const ParameterTable& table) {
  auto contents = Read(path, table);
  if (contents.ok()) return contents;
  if (absl::IsFailedPrecondition(contents.status())) {
    return Annotate(contents.status(), absl::StrCat("checkpoint \"", Printable(path), "\""));
  }
  return Refusal(path, contents.status());
}

absl::StatusOr<CheckpointContents> ReadNewest(const std::string& run_folder, const ParameterTable& table,
                                              std::vector<std::string>* damaged) {
  const std::string folder = JoinPath(run_folder, "checkpoints");
  const auto names = ListFolder(folder);
  if (absl::IsNotFound(names.status())) return absl::NotFoundError(absl::StrCat("no checkpoint in \"", Printable(folder), "\""));
  if (!names.ok()) return Refusal(folder, names.status());
  std::vector<int64_t> steps;
  for (const std::string& name : *names) {
    if (const int64_t step = StepOfName(name); step >= 0) steps.push_back(step);
  }
  if (steps.empty()) return absl::NotFoundError(absl::StrCat("no checkpoint in \"", Printable(folder), "\""));
  std::sort(steps.rbegin(), steps.rend());
  std::string first_damage;
  for (const int64_t step : steps) {
    const std::string path = JoinPath(folder, CheckpointName(step));
    const std::string mark = JoinPath(path, kDamagedMark);
    if (Exists(mark)) {
      if (damaged != nullptr) damaged->push_back(path);
      continue;
    }
    auto contents = ReadCheckpoint(path, table);
    if (contents.ok() || !absl::IsDataLoss(contents.status())) return contents;
    if (first_damage.empty()) first_damage = std::string(contents.status().message());
    if (damaged != nullptr) damaged->push_back(path);
    // Best effort: without the mark it is verified, and refused, again.
    (void)WriteFileAtomic(mark, absl::StrCat(std::string(contents.status().message()), "\n"));
  }
  return ErrorOf(v1::REASON_CHECKPOINT,
                 absl::StrCat("all ", steps.size(), " checkpoints in \"", Printable(folder), "\" are damaged",
                              first_damage.empty() ? "" : "; the newest: ", first_damage,
                              "; restore one from a copy, or remove the folder to start anew"));
}

}  // namespace hierad
