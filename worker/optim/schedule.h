// Learning rate as a function of the step: linear warm-up from 0, then cosine to min_lr, or constant.
#pragma once

#include <cstdint>

#include "hierad/v1/job.pb.h"

namespace hierad {

// Rate of 0-based optimizer step `step` of `total_steps`. Warm-up: peak * (step + 1) / warmup_steps while
// step < warmup_steps = round(warmup_ratio * total_steps); then min + (peak - min) * (1 + cos(pi * p)) / 2 with
// p = (step - warmup_steps) / max(1, total_steps - warmup_steps).
double LearningRate(const v1::JobSpec& spec, int64_t step, int64_t total_steps);

}  // namespace hierad
