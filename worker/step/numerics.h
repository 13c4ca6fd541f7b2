// The policy for steps whose loss or gradients are not finite, the same in every mode.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "hierad/v1/job.pb.h"
#include "worker/step/step.h"

namespace hierad {

// After step `step` (1-based): REASON_NUMERICS where it was skipped and step.on_nan is stop, or it is the
// step.max_nan_steps-th in a row.
absl::Status CheckNumerics(const v1::JobSpec& spec, const StepResult& result, int64_t step, int64_t nan_steps_in_row, double lr);

}  // namespace hierad
