// One training step of one rank: masks, forward, backward, all-reduce, clipping, AdamW. The header is free of torch;
// the modes (eager, optimized, graph_safe, fused) live behind it and share parameters, parameter table and geometry, so a run
// begun in one mode continues in another.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "base/plan/geometry.h"
#include "base/plan/loss_scale.h"
#include "base/plan/parameters.h"
#include "base/plan/row_format.h"
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
  std::vector<float> ema;        // average of the parameters (optimizer.ema_decay); empty: none
  LossScale loss_scale{};        // of the next step (step.precision fp16); value 0: none yet
};

// Raised by any rank, seen by all at the same step: they ride in the gradients' all-reduce.
struct StepSignals {
  bool stop = false;         // end after this step (pause, cancel, SIGTERM)
  bool checkpoint = false;   // checkpoint after this step
};

struct StepResult {
  int64_t step = 0;          // 1-based
  double loss = 0;           // global mean over real masked elements (classify: samples)
  double grad_norm = 0;      // global, before clipping
  bool skipped = false;      // non-finite loss or gradient: no update
  // Of the skipped: gradients overflowed under a loss scale that falls for it. Counts not among nan_in_row.
  bool overflowed = false;
  double loss_scale = 0;     // of this step's gradients (step.precision fp16); 0: they are not scaled
  int64_t nan_in_row = 0;    // skipped steps in a row, this one included
  // step.on_nan is stop, or step.max_nan_steps are reached: nothing changes from this step on, whatever is run, until a
  // state is loaded.
  bool halted = false;
  StepSignals signals;       // OR over the ranks
  bool input_not_finite = false;              // a sample of some rank holds a value that is not finite
  std::optional<uint64_t> not_finite_visit;   // of this rank: the sample's visit (the largest, of several)
  // Of the device, by its own clock, in seconds; idle: between the step before and this one. Not told by every mode.
  struct Times { double idle_s, forward_s, backward_s, communication_s, optimizer_s; };
  std::optional<Times> times;
};

// The training state as it was after some step. May be read by another thread while the next steps run; goes before its step.
class StateSnapshot {
 public:
  virtual ~StateSnapshot() = default;
  virtual absl::StatusOr<TrainState> Read() = 0;
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
  bool epilogues = true;     // fused on a GPU: GELU in the epilogue of products, where there is a kernel for it
  bool priorities = true;    // fused on a GPU: weight gradients take what the chain of operations leaves of the card
  bool deterministic = true; // eager, optimized, graph_safe on a GPU: kernels whose sums have one order (fused has no others)
  int64_t bucket_elements = 0;   // fused: PlanOptions::bucket_elements; 0: its default
  RowFormat rows;            // of the batches; nothing: fp32, as it is
};

// One thread uses a step.
class Step {
 public:
  virtual ~Step() = default;

  // Parameters from the seed (each parameter from its own Philox stream), moments zero.
  virtual absl::Status Initialize() = 0;
  virtual absl::Status Load(const TrainState& state) = 0;
  virtual absl::StatusOr<TrainState> Save() = 0;
  // The state after the Runs so far, without waiting for them. One at a time: the one before has gone. Of rank 0; the others
  // have none, and call it (for nullptr) only where shared_state().
  virtual absl::StatusOr<std::unique_ptr<StateSnapshot>> Snapshot();
  // Parts of the state are held by one rank each: all ranks call Save and Snapshot after the same Run.
  virtual bool shared_state() const { return false; }
  // The collective that the device is in, empty: none. Any thread.
  virtual std::string WaitingIn() const { return ""; }
  // A hash of the parameters, the same where they are the same bit for bit. Waits for the Runs so far.
  virtual absl::StatusOr<uint64_t> ParameterHash();

  // One optimizer step over spec.step.accumulation micro-batches. `real_samples`: of the whole step over all ranks, the
  // divisor of the loss. `lr`: of this step. Micro-batches without a real sample are passed over. On a GPU it returns when
  // the step is enqueued and its batches' memory is free again; what came of it is told by Take.
  virtual absl::Status Run(absl::Span<const MicroBatch> micro_batches, int64_t real_samples, double lr, StepSignals signals) = 0;
  // Of the first step whose result was not taken: waits until it is there.
  virtual absl::StatusOr<StepResult> Take() = 0;
  // Steps that may be under way while the next is prepared; taking a step's result only so many Runs later never makes the
  // device wait. 0: Run returns when the step is over.
  virtual int records_behind() const { return 0; }
  // Results that were overwritten before they were taken.
  virtual int64_t records_lost() const { return 0; }
  absl::StatusOr<StepResult> RunAndTake(absl::Span<const MicroBatch> micro_batches, int64_t real_samples, double lr, StepSignals signals);

  // Before a Run: the first micro-batch of the Run after it. Its copy to the device then hides behind that step. The memory
  // stays as it is until the later Run returns; a later Run with another batch copies anew.
  virtual void Prefetch(const MicroBatch&) {}
  // Sum of the loss numerator over this micro-batch's real samples, and how many elements it covers; local to the rank.
  // Masks from Draw::kEvalMask with epoch 0: the same at every evaluation. No drop path or dropout.
  // not_finite_visit as StepResult's.
  struct LossSum { double numerator = 0; double weight = 0; std::optional<uint64_t> not_finite_visit; };
  virtual absl::StatusOr<LossSum> Evaluate(const MicroBatch& batch) = 0;
  // Mean over tokens of the encoder's last output (after its norm, nothing masked): [real, encoder_dim_out], row-major.
  // Classify: what the head sees, the norm of the mean.
  virtual absl::StatusOr<std::vector<float>> Features(const MicroBatch& batch) = 0;

  // Task mae (else Unimplemented): the real samples of `batch` with what is predicted for their removed mask units, drawn as for
  // Evaluate; reconstruct.h says how. Waits for the Runs so far.
  virtual absl::StatusOr<Reconstruction> Reconstruct(const MicroBatch& batch);
  virtual int64_t peak_memory_bytes() const { return 0; }   // GPU: of torch's allocator; CPU: of the process
  // By what a library makes the products (card, version, hash of its algorithms): where it is another, the same job gives other
  // bits. Empty: nothing but the code decides.
  virtual std::string algorithms() const { return ""; }
  virtual std::string Describe() const = 0;   // mode, device, precision, attention backend: one line for the log
};

// FNV-1a of the bits.
uint64_t HashOf(const std::vector<float>& values);
// Non-finite steps in a row that halt a run.
int64_t NanLimit(const v1::StepSpec& step);
// That a step goes on with from `state`: what it was, at first step.loss_scale; value 0 where the precision is not fp16.
LossScale LossScaleFrom(const TrainState& state, const v1::StepSpec& step);

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
