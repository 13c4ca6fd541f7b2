#include "base/status.h"
#include "worker/step/step.h"

namespace hierad {

HostMemory BatchMemory(bool) { return {}; }

absl::StatusOr<std::unique_ptr<Step>> MakeFusedGpuStep(const StepOptions&, const ParameterTable&, Communicator*) {
  return ErrorOf(v1::REASON_USER_ERROR, "step.mode: fused on a GPU needs a hiera-worker built with CUDA; this one was built without.");
}

}  // namespace hierad
