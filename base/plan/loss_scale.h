// Dynamic loss scaling of step.precision fp16: the gradient of the loss is multiplied by a scale, so that small gradients stay
// above half precision's least number, and the update divides by it. The rule is torch.amp.GradScaler's: gradients that are
// not finite leave the step out and halve the scale, so many finite ones in a row double it; here it never falls below 1.
// Plain data, also for device code.
#pragma once

#include <cstdint>

#include "base/random.h"   // HIERAD_HOST_DEVICE

namespace hierad {

struct LossScale {
  double value = 0;         // 0: gradients are not scaled
  int64_t good_steps = 0;   // since it last changed
};

inline constexpr double kLeastLossScale = 1, kMostLossScale = 4294967296.0;
inline constexpr double kLossScaleGrowth = 2, kLossScaleBackoff = 0.5;

// After a step with `scale`, whose gradients were finite or not.
HIERAD_HOST_DEVICE inline LossScale NextLossScale(LossScale scale, bool finite, int64_t growth_steps) {
  if (!finite) {
    const double less = scale.value * kLossScaleBackoff;
    return {less > kLeastLossScale ? less : kLeastLossScale, 0};
  }
  if (scale.good_steps + 1 < growth_steps) return {scale.value, scale.good_steps + 1};
  const double more = scale.value * kLossScaleGrowth;
  return {more < kMostLossScale ? more : kMostLossScale, 0};
}

}  // namespace hierad
