// A checkpoint: a folder `checkpoints/step-NNNNNNNNN/` that is either whole or not there. It is written as a temporary
// folder, every file fsynced, the manifest (sizes and SHA-256 of the others) last, then renamed and the parent synced.
//   model.safetensors      parameters by FAIR's names, fp32
//   optimizer.safetensors  exp_avg and exp_avg_sq as "<name>.exp_avg", "<name>.exp_avg_sq"; "<name>.ema" where there is one
//   state.json             step, updates, loss scale, position, seed, job, the products' algorithms: no mode, no memory layout, no world size dependence
//   manifest.json
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/plan/parameters.h"
#include "hierad/v1/job.pb.h"
#include "worker/checkpoint/safetensors.h"
#include "worker/data/dataset.h"
#include "worker/step/step.h"

namespace hierad {

struct CheckpointContents {
  TrainState state;
  ChannelStatistics statistics;          // of the training set; applied to evaluation and probe
  std::optional<double> eval_loss;
  double best_eval_loss = 0;             // least so far; meaningful with has_best
  bool has_best = false;
  std::string algorithms;                // Step::algorithms of who wrote it
};

class CheckpointFolder {
 public:
  // For tests: called with the name of each change to the disk before it is made.
  using StageHook = std::function<void(const char* stage)>;

  // `run_folder`/checkpoints, made if missing; left-over temporary folders are removed (rank 0 only opens it for writing).
  static absl::StatusOr<CheckpointFolder> Open(const std::string& run_folder);

  // Durable when it returns. Non-finite parameters or moments are refused (REASON_NUMERICS). Out of space: REASON_CHECKPOINT with folder, bytes needed and free; nothing else touched.
  absl::StatusOr<v1::CheckpointInfo> Write(const CheckpointContents& contents, const ParameterTable& table,
                                           const v1::JobSpec& spec);
  // Keeps the newest `keep_last` and, if asked, the best; removes others, oldest first, only after a new one is durable.
  absl::Status Retain(const v1::CheckpointSpec& spec);
  // Complete ones, newest first; manifest read, contents not verified. Damaged ones are there too, marked.
  absl::StatusOr<std::vector<v1::CheckpointInfo>> List() const;

  void set_stage_hook(StageHook hook) { stage_hook_ = std::move(hook); }

 private:
  absl::Status Stage(const std::string& stage) const;   // also the failpoint "checkpoint.<stage>"
  absl::Status WriteFiles(const std::string& temporary, const CheckpointContents& contents, const ParameterTable& table,
                          const v1::JobSpec& spec, v1::CheckpointInfo* info) const;
  absl::Status Publish(const std::string& temporary, const std::string& path) const;
  absl::Status Remove(const std::string& path) const;

  std::string folder_;
  StageHook stage_hook_;
};

// Verifies every hash, then reads. Damage is DataLoss of REASON_CHECKPOINT and names the file and what is wrong; a whole
// checkpoint of another model is FailedPrecondition (REASON_USER_ERROR); what cannot be read now (permission, input or
// output error) is REASON_CHECKPOINT of another code.
absl::StatusOr<CheckpointContents> ReadCheckpoint(const std::string& path, const ParameterTable& table);

// The newest one that verifies. Damaged ones are marked (file DAMAGED inside) and named in `damaged`; they are not tried
// again. None there: NotFound. All damaged: REASON_CHECKPOINT.
absl::StatusOr<CheckpointContents> ReadNewest(const std::string& run_folder, const ParameterTable& table,
                                              std::vector<std::string>* damaged);

// The job that a checkpoint was made by, as its state.json says; nothing else of it is verified.
absl::StatusOr<v1::JobSpec> JobOfCheckpoint(const std::string& path);

// Weights for use elsewhere as a safetensors file, replaced as a whole; its folder is there. Non-finite ones are refused
// (REASON_NUMERICS); out of space is REASON_CHECKPOINT with folder, bytes needed and free. Format and step are added to
// `metadata`.
absl::Status WriteModel(const std::string& path, const std::vector<TensorView>& tensors, int64_t step,
                        std::map<std::string, std::string> metadata);
// `run_folder`/exported/model.safetensors: the parameters alone, by FAIR's names; replaced as a whole. Returns its path. Their
// average, where there is one, lies beside it as model_ema.safetensors.
absl::StatusOr<std::string> ExportModel(const std::string& run_folder, const TrainState& state, const ParameterTable& table,
                                        const v1::JobSpec& spec);

}  // namespace hierad
