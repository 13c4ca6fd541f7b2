// The newest metrics of one job, in memory for Watch. An entry's number counts up for ever, also when a later attempt
// reports a step again, so a watcher's place in it stays valid.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>

#include "base/limits.h"
#include "hierad/v1/job.pb.h"

namespace hierad {

class MetricRing {
 public:
  void Push(const v1::StepMetrics& metrics) {
    entries_.push_back(metrics);
    if (entries_.size() > limits::kMetricsInMemory) {
      entries_.pop_front();
      ++first_;
    }
  }
  bool empty() const { return entries_.empty(); }
  uint64_t first() const { return first_; }                      // number of the oldest entry
  uint64_t end() const { return first_ + entries_.size(); }      // number of the next entry
  const v1::StepMetrics& at(uint64_t number) const { return entries_[number - first_]; }
  const v1::StepMetrics& newest() const { return entries_.back(); }

 private:
  std::deque<v1::StepMetrics> entries_;
  uint64_t first_ = 0;
};

}  // namespace hierad
