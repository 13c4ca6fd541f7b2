// A job as it is stored: what the store writes, the job machine changes and the coordinator keeps in memory while the
// job lives. Plain values.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "hierad/v1/job.pb.h"
#include "hierad/v1/worker.pb.h"

namespace hierad {

// One rank of the current (or, at rest, the last) attempt.
struct RankRow {
  int rank = 0;
  std::string node;
  v1::Slot slot;
  int local_rank = 0;
  int local_world_size = 1;
  int pid = 0;          // 0: its agent has not yet reported it; -1: reported, its pid not yet
  bool ended = false;   // why it ended is known
  bool gone = false;    // its process is no more, or its node is lost
  v1::Reason reason = v1::REASON_UNSPECIFIED;
};

struct JobRow {
  uint64_t id = 0;
  std::string client_key;
  std::string submitter;
  v1::JobSpec spec;                 // defaults filled in
  std::string run_folder;
  v1::JobState state = v1::QUEUED;
  v1::DesiredState desired = v1::DESIRED_RUN;
  int attempt = 0;                  // 0 until first placed
  v1::Reason reason = v1::REASON_UNSPECIFIED;   // of the end, or of the last lost attempt, or of the attempt that is ending
  std::string message;              // the sentence that goes with it
  int64_t submitted_ms = 0, started_ms = 0, finished_ms = 0;   // Unix; 0: not yet
  int64_t retry_at_ms = 0;          // queued, not before; 0: at once
  int failures = 0;                 // attempts that count against retry.max_attempts
  std::map<v1::Reason, int> failures_of;        // of each class, which has a count of its own
  v1::Reason failed_reason = v1::REASON_UNSPECIFIED;   // of the last such attempt, and where it was
  int64_t failed_step = -1;
  bool killed_outside = false;      // the ending attempt's cause was a kill signal sent by someone else
  std::string credential;           // of the current attempt
  int64_t step = 0, total_steps = 0, first_step = 0, nan_steps = 0;
  std::optional<double> best_eval_loss;
  std::vector<RankRow> ranks;
  std::vector<v1::CheckpointInfo> checkpoints;   // newest first
};

inline bool IsTerminal(v1::JobState state) {
  return state == v1::SUCCEEDED || state == v1::FAILED || state == v1::CANCELLED;
}
// Holds slots: an attempt exists that is not over.
inline bool IsActive(v1::JobState state) {
  return state == v1::STARTING || state == v1::RUNNING || state == v1::STOPPING;
}

}  // namespace hierad
