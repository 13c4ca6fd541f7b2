// The life of a job as a pure function: (row, event, time) -> new row and what must follow. One table says which event
// does what in which state; an event that is not in the table for a state changes nothing. No I/O, no clock, no locks.
#pragma once

#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "server/job_row.h"

namespace hierad {

// Slots were found and the run folder is there.
struct Placed {
  std::vector<RankRow> ranks;
  std::string credential;
};
// Slots were found, but the attempt cannot begin (run folder).
struct PlacementFailed {
  v1::Reason reason;
  std::string message;
};
struct ProcessSeen {
  int rank;
  int pid;
};
// Every rank has begun to train.
struct AllTraining {};
// Why a rank ended: by its own word, or by its agent's.
struct RankEnded {
  int rank;
  v1::Reason reason;
  std::string message;
  bool by_agent = false;   // no word of the worker's own
  int signal = 0;          // that ended it, as the agent saw; 0: none
};
// The rank's process is no more, or its node is lost. A rank that is gone without RankEnded has crashed.
struct RankGone {
  int rank;
};
// The driver says that the GPU of a rank has a fault: that is why the attempt ends, if its own words fit.
struct GpuFaulted {
  int rank;
  std::string message;
};
struct CancelAsked {};
struct PauseAsked {};
struct ResumeAsked {};

using JobEvent =
    std::variant<Placed, PlacementFailed, ProcessSeen, AllTraining, RankEnded, RankGone, CancelAsked, PauseAsked, ResumeAsked, GpuFaulted>;
inline constexpr int kJobEventKinds = std::variant_size_v<JobEvent>;

enum class JobAction {
  kIgnore,
  kStart,            // a new attempt on its slots
  kFailPlacement,    // the attempt that could not begin counts as one
  kNoteProcess,
  kRun,
  kNoteEnd,          // the first error ends the gang
  kNoteGone,         // the last one concludes the attempt
  kStop,             // cancel: end the attempt
  kCancelAtRest,     // cancel: nothing runs
  kPause,            // end the attempt at a checkpoint
  kPauseAtRest,      // leave the queue
  kResume,           // back to the queue
  kUnpause,          // the attempt that ends for a pause is followed by another
  kBlameGpu,         // why it ends is a fault of a GPU
};

// What the table says. Out-of-table pairs: kIgnore.
JobAction ActionFor(v1::JobState state, size_t event_index);

struct JobStep {
  JobRow row;
  bool changed = false;          // the row is to be stored
  bool stopping_began = false;   // the agents are to end what is left of the attempt
  bool attempt_over = false;     // `finished` describes it; its slots are free
  v1::Reason attempt_reason = v1::REASON_UNSPECIFIED;
  std::string attempt_message;
};

JobStep Apply(const JobRow& row, const JobEvent& event, int64_t now_unix_ms);

// How often attempts that end for a reason are made again, of job.yaml's retry section.
struct RetryRule {
  std::optional<int> retries;   // none: as often as max_attempts allows
  double backoff_s = 0;         // before the first
  const char* key = "";         // "hang_retries"
  bool counts = true;           // against max_attempts
};
RetryRule RuleFor(const v1::RetrySpec& retry, v1::Reason reason);

// Wait before the next attempt after `failures` of a class (>= 1), milliseconds: doubles each time, up to a minute or to
// the first wait if that is more.
int64_t BackoffMs(double backoff_s, int failures);
inline constexpr int64_t kLongestBackoffMs = 86'400'000;

}  // namespace hierad
