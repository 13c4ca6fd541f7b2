// The mode of a step, decided in one place.
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "worker/step/step.h"

namespace hierad {

absl::StatusOr<std::unique_ptr<Step>> MakeStep(const StepOptions& options, const Geometry& geometry,
                                               const ParameterTable& table, Communicator* communicator) {
  if (options.spec.step().mode() != "fused") return MakeTorchStep(options, geometry, table, communicator);
  if (options.cuda) {
    return ErrorOf(v1::REASON_USER_ERROR, "step.mode: fused runs on a CPU rank only; on a GPU use graph_safe.");
  }
  return MakeFusedCpuStep(options, table, communicator);
}

}  // namespace hierad
