#include "worker/metrics/metrics_queue.h"

#include <algorithm>

namespace hierad {

void MetricsQueue::Add(const v1::StepMetrics& metrics) {
  std::lock_guard lock(mutex_);
  while (!held_.empty() && held_.back().step() >= metrics.step()) held_.pop_back();
  held_.push_back(metrics);
  if (held_.size() > capacity_) {
    held_.pop_front();
    ++dropped_;
  }
}

std::vector<v1::StepMetrics> MetricsQueue::After(int64_t after, size_t most) const {
  std::lock_guard lock(mutex_);
  const auto begin = std::upper_bound(held_.begin(), held_.end(), after,
                                      [](int64_t step, const v1::StepMetrics& m) { return step < m.step(); });
  return {begin, begin + std::min(held_.end() - begin, std::ptrdiff_t(most))};
}

void MetricsQueue::Acknowledge(int64_t step) {
  std::lock_guard lock(mutex_);
  while (!held_.empty() && held_.front().step() <= step) held_.pop_front();
}

size_t MetricsQueue::size() const {
  std::lock_guard lock(mutex_);
  return held_.size();
}

int64_t MetricsQueue::dropped() const {
  std::lock_guard lock(mutex_);
  return dropped_;
}

int64_t MetricsQueue::last_step() const {
  std::lock_guard lock(mutex_);
  return held_.empty() ? 0 : held_.back().step();
}

}  // namespace hierad
