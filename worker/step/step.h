// One training step of one rank: masks, forward, backward, all-reduce, clipping, AdamW. The header is free of torch;
// the modes (eager, optimized, graph_safe, fused) live behind it and share parameters, parameter table and geometry, so a run
// begun in one mode continues in another.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "base/plan/geometry.h"
#include "base/plan/parameters.h"
#include "hierad/v1/job.pb.h"
#include "worker/comm/communicator.h"
#include "worker/data/loader.h"
#include "worker/metrics/reconstruction.h"

namespace hierad {

// What training has made, in no mode's layout: flat fp32 host buffers over the parameter table's offsets.
struct TrainState {
  int64_t step = 0;              // optimizer steps done (skipped ones count)
  int64_t updates = 0;           // AdamW's t: updates made (skipped ones do not count)
  int64_t nan_steps_in_row = 0;
  std::vector<float> parameters, exp_avg, exp_avg_sq;   // flat_size each
};

// Raised by any rank, seen by all at the same step: they ride in the gradients' all-reduce.
struct StepSignals {
  bool stop = false;         // end after this step (pause, cancel, SIGTERM)
  bool checkpoint = false;   // checkpoint after this step
};

struct StepResult {
  double loss = 0;           // global mean over real masked elements (classify: samples)
  double grad_norm = 0;      // global, before clipping
  bool skipped = false;      // non-finite loss or gradient: no update
  StepSignals signals;       // OR over the ranks
  // Where this rank's time went, seconds; all 0: the mode does not tell. comm: all-reduce that nothing hides.
  double forward_s = 0, backward_s = 0, comm_s = 0, optimizer_s = 0;
};

// Memory for batches that a step copies to its device: pinned for a GPU; for a CPU both are empty: the loader's own.
struct HostMemory {
  std::function<void*(size_t bytes)> allocate;
  std::function<void(void* memory)> release;
};
HostMemory BatchMemory(bool cuda);

struct StepOptions {
  v1::JobSpec spec;          // defaults filled in, mode and device resolved
  bool cuda = false;         // device 0 of the process
  int threads = 1;           // compute threads (CPU)
  bool tune = false;         // fused on a GPU: time the candidates of every matrix product and keep the fastest
  bool beside = true;        // fused on a GPU: weight gradients on a second stream
};

// One thread uses a step.
class Step {
 public:
  virtual ~Step() = default;

  // Parameters from the seed (each parameter from its own Philox stream), moments zero.
  virtual absl::Status Initialize() = 0;
  virtual absl::Status Load(const TrainState& state) = 0;
  virtual absl::StatusOr<TrainState> Save() = 0;

  // One optimizer step over spec.step.accumulation micro-batches. `real_samples`: of the whole step over all ranks, the
  // divisor of the loss. `lr`: of this step. Non-finite: no update, `skipped`; REASON_NUMERICS once step.on_nan or
  // step.max_nan_steps says so. Micro-batches without a real sample are passed over.
  virtual absl::StatusOr<StepResult> Run(absl::Span<const MicroBatch> micro_batches, int64_t real_samples, double lr,
                                         StepSignals signals) = 0;
  // Before a Run: the first micro-batch of the Run after it. Its copy to the device then hides behind that step. The memory
  // stays as it is until the later Run returns; a later Run with another batch copies anew.
  virtual void Prefetch(const MicroBatch&) {}
  // Sum of the loss numerator over this micro-batch's real samples, and how many elements it covers; local to the rank.
  // Masks from Draw::kEvalMask with epoch 0: the same at every evaluation. No drop path or dropout.
  struct LossSum { double numerator = 0; double weight = 0; };
  virtual absl::StatusOr<LossSum> Evaluate(const MicroBatch& batch) = 0;
  // Mean over tokens of the encoder's last output (after its norm, nothing masked): [real, encoder_dim_out], row-major.
  // Classify: what the head sees, the norm of the mean.
  virtual absl::StatusOr<std::vector<float>> Features(const MicroBatch& batch) = 0;

  // Task mae, 1-D and 2-D: the real samples of `batch` with what is predicted for their removed mask units, drawn as for
  // Evaluate. With model.norm_target the prediction is put back to each patch's own mean and variance. Unimplemented where
  // the mode does not tell (fused).
  virtual absl::StatusOr<Reconstruction> Reconstruct(const MicroBatch&) {
    return absl::UnimplementedError("step.mode fused draws no pictures; the other modes do");
  }
  virtual int64_t peak_memory_bytes() const { return 0; }   // GPU: of torch's allocator; CPU: of the process
  virtual std::string Describe() const = 0;   // mode, device, precision, attention backend: one line for the log
};

// The step that spec.step.mode names. `communicator` outlives the step.
absl::StatusOr<std::unique_ptr<Step>> MakeStep(const StepOptions& options, const Geometry& geometry,
                                               const ParameterTable& table, Communicator* communicator);
// eager, optimized, graph_safe.
absl::StatusOr<std::unique_ptr<Step>> MakeTorchStep(const StepOptions& options, const Geometry& geometry,
                                                    const ParameterTable& table, Communicator* communicator);
// fused, over plain kernels; for CI and small shapes.
absl::StatusOr<std::unique_ptr<Step>> MakeFusedCpuStep(const StepOptions& options, const ParameterTable& table,
                                                       Communicator* communicator);
// fused, recorded in CUDA graphs; FailedPrecondition in builds without CUDA.
absl::StatusOr<std::unique_ptr<Step>> MakeFusedGpuStep(const StepOptions& options, const ParameterTable& table,
                                                       Communicator* communicator);

}  // namespace hierad
