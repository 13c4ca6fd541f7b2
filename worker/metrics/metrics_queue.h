// Metrics on their way to hierad: the trainer adds, the session takes, hierad's acknowledgement removes. Bounded: while
// hierad is away the oldest go (they are in metrics.jsonl). Thread-safe.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

#include "base/limits.h"
#include "hierad/v1/job.pb.h"

namespace hierad {

class MetricsQueue {
 public:
  explicit MetricsQueue(size_t capacity = size_t(limits::kMetricsUnacknowledged)) : capacity_(capacity) {}

  // Steps rise; one that does not (a step run again) replaces those from it on.
  void Add(const v1::StepMetrics& metrics);
  // Oldest first, those after step `after`, at most `most`.
  std::vector<v1::StepMetrics> After(int64_t after, size_t most) const;
  void Acknowledge(int64_t step);
  size_t size() const;
  int64_t dropped() const;
  int64_t last_step() const;   // of the newest held; 0: none

 private:
  const size_t capacity_;
  mutable std::mutex mutex_;
  std::deque<v1::StepMetrics> held_;
  int64_t dropped_ = 0;
};

}  // namespace hierad
