#include "worker/optim/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/job_validate.h"

namespace hierad {

double LearningRate(const v1::JobSpec& spec, int64_t step, int64_t total_steps) {
  const double peak = PeakLr(spec);
  const v1::ScheduleSpec& schedule = spec.schedule();
  const int64_t warmup = std::llround(schedule.warmup_ratio() * double(total_steps));
  if (step < warmup) return peak * double(step + 1) / double(warmup);
  if (schedule.decay() == "constant") return peak;
  const double progress = double(step - warmup) / double(std::max<int64_t>(1, total_steps - warmup));
  const double least = schedule.min_lr();
  return least + (peak - least) * (1 + std::cos(std::numbers::pi * std::min(progress, 1.0))) / 2;
}

}  // namespace hierad
