// What the modes share by default.
#include "worker/step/step.h"

#include <bit>
#include <utility>

#include "base/status.h"

namespace hierad {
namespace {

class CopiedState : public StateSnapshot {
 public:
  explicit CopiedState(TrainState state) : state_(std::move(state)) {}
  absl::StatusOr<TrainState> Read() override { return state_; }

 private:
  const TrainState state_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<StateSnapshot>> Step::Snapshot() {
  ASSIGN_OR_RETURN(TrainState state, Save());
  return std::make_unique<CopiedState>(std::move(state));
}

absl::StatusOr<Reconstruction> Step::Reconstruct(const MicroBatch&) { return absl::UnimplementedError("only a masked auto-encoder has pictures"); }

absl::StatusOr<uint64_t> Step::ParameterHash() {
  ASSIGN_OR_RETURN(const TrainState state, Save());
  return HashOf(state.parameters);
}

absl::StatusOr<StepResult> Step::RunAndTake(absl::Span<const MicroBatch> micro_batches, int64_t real_samples, double lr,
                                            StepSignals signals) {
  RETURN_IF_ERROR(Run(micro_batches, real_samples, lr, signals));
  return Take();
}

uint64_t HashOf(const std::vector<float>& values) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const float value : values) hash = (hash ^ std::bit_cast<uint32_t>(value)) * 0x100000001b3;
  return hash;
}

int64_t NanLimit(const v1::StepSpec& step) { return step.on_nan() == "stop" ? 1 : step.max_nan_steps(); }

LossScale LossScaleFrom(const TrainState& state, const v1::StepSpec& step) {
  if (step.precision() != "fp16") return {};
  return state.loss_scale.value > 0 ? state.loss_scale : LossScale{step.loss_scale(), 0};
}

}  // namespace hierad
