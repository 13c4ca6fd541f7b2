// What a job's step costs by its plan, for the exporter: plans are made once per kind of job and kept, a few a scrape, so
// that a thousand new jobs do not make one scrape slow. One thread at a time.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "base/clock.h"
#include "hierad/v1/job.pb.h"

namespace hierad {

struct JobCost {
  double flops = 0;           // of an optimizer step, all ranks
  double floor_s = 0;         // 0: the card's rates are not known
  double flops_per_s = 0;     // that the card reaches at best, one rank; 0: not known
};

class JobCosts {
 public:
  static constexpr size_t kKept = 4096;
  static constexpr std::chrono::milliseconds kPlanning{20};   // a scrape

  explicit JobCosts(const Clock* clock) : clock_(clock) {}
  void BeginScrape() { planning_until_ = clock_->Monotonic() + kPlanning; }
  // `card`: the slot's model; empty or unknown: no rates. None: not yet planned, or the plan does not cover the job.
  std::optional<JobCost> Of(const v1::JobSpec& spec, const std::string& card);

 private:
  const Clock* const clock_;
  std::chrono::nanoseconds planning_until_{0};
  std::map<std::string, std::optional<JobCost>> known_;   // by what a plan depends on
};

}  // namespace hierad
