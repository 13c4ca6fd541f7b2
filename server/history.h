// Every step of every job, exactly, on disk: what `hierctl metrics` shows and what a watch begins with. A file a job of
// blocks that are only ever appended (a report's steps each, with a checksum), so a kill at any moment costs at most the
// block in the writing. A step that comes again (a resumed attempt) takes the place of its former self and of all after it.
//
// Bounds: a file beyond `job_bytes` is written anew with every second step of its older half; beyond `total_bytes` the
// files longest untouched go. Numbers are the bits that the worker sent.
//
// Threads: Append is the coordinator's; Read is any thread's.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/limits.h"
#include "hierad/v1/job.pb.h"

namespace hierad {

struct HistoryQuery {
  int64_t from = 0;    // steps; 0: from the first
  int64_t to = 0;      // 0: to the newest
  int64_t every = 0;   // steps that it divides, and the newest of all; 0: every one
  int64_t last = 0;    // the newest so many of them; 0: all
};
struct HistorySteps {
  std::vector<v1::StepMetrics> steps;   // rising
  int64_t thinned_before = 0;           // older steps are kept in part; 0: none are
};

class History {
 public:
  struct Limits {
    int64_t job_bytes = limits::kHistoryJobBytes, total_bytes = limits::kHistoryBytes;
  };

  // `folder` is made if missing.
  static absl::StatusOr<std::unique_ptr<History>> Open(std::string folder, Limits limits);
  static absl::StatusOr<std::unique_ptr<History>> Open(std::string folder) { return Open(std::move(folder), Limits()); }

  absl::Status Append(uint64_t job_id, const std::vector<v1::StepMetrics>& steps);
  // A job without history: no steps, OK. Damaged blocks are passed over.
  absl::StatusOr<HistorySteps> Read(uint64_t job_id, const HistoryQuery& query) const;

 private:
  History(std::string folder, Limits limits) : folder_(std::move(folder)), limits_(limits) {}
  std::string PathOf(uint64_t job_id) const;
  absl::Status Thin(uint64_t job_id);
  void DropOld();

  const std::string folder_;
  const Limits limits_;
  int64_t written_ = 0;   // since the folder was last measured
};

// The form of a block, for the tests: packed, with its head.
std::string HistoryBlock(const std::vector<v1::StepMetrics>& steps, int64_t thinned_before);

}  // namespace hierad
