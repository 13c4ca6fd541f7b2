#include "worker/step/numerics.h"

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace hierad {

absl::Status CheckNumerics(const v1::JobSpec& spec, const StepResult& result, int64_t step, int64_t nan_steps_in_row, double lr) {
  if (!result.skipped) return absl::OkStatus();
  const bool stop = spec.step().on_nan() == "stop";
  if (!stop && nan_steps_in_row < spec.step().max_nan_steps()) return absl::OkStatus();
  return ErrorOf(v1::REASON_NUMERICS,
                 absl::StrCat("step ", step, ": the loss is ", result.loss, " and the gradient norm ", result.grad_norm,
                              " at learning rate ", lr, "; ",
                              stop ? "step.on_nan is stop" : absl::StrCat(nan_steps_in_row, " such steps in a row are the "
                                                                          "most step.max_nan_steps allows"),
                              "; try a lower optimizer.lr, more warm-up, or step.precision fp32."));
}

}  // namespace hierad
