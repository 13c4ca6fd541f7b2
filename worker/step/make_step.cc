// The mode of a step, decided in one place.
#include "base/job_validate.h"
#include "worker/step/step.h"

namespace hierad {

absl::StatusOr<std::unique_ptr<Step>> MakeStep(const StepOptions& options, const Geometry& geometry,
                                               const ParameterTable& table, Communicator* communicator) {
  StepOptions resolved = options;
  resolved.spec.mutable_step()->set_mode(ResolvedMode(options.spec.step(), options.cuda));
  if (resolved.spec.step().mode() != "fused") return MakeTorchStep(resolved, geometry, table, communicator);
  if (options.cuda) return MakeFusedGpuStep(resolved, table, communicator);
  return MakeFusedCpuStep(resolved, table, communicator);
}

}  // namespace hierad
