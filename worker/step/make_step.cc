// The mode of a step, decided in one place.
#include "worker/step/step.h"

namespace hierad {

absl::StatusOr<std::unique_ptr<Step>> MakeStep(const StepOptions& options, const Geometry& geometry,
                                               const ParameterTable& table, Communicator* communicator) {
  if (options.spec.step().mode() != "fused") return MakeTorchStep(options, geometry, table, communicator);
  if (options.cuda) return MakeFusedGpuStep(options, table, communicator);
  return MakeFusedCpuStep(options, table, communicator);
}

}  // namespace hierad
