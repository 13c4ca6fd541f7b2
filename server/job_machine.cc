#include "server/job_machine.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "base/limits.h"
#include "base/text.h"

namespace hierad {
namespace {

template <typename T, size_t I = 0>
constexpr size_t IndexOf() {
  if constexpr (std::is_same_v<std::variant_alternative_t<I, JobEvent>, T>) {
    return I;
  } else {
    return IndexOf<T, I + 1>();
  }
}

struct Rule {
  v1::JobState state;
  size_t event;
  JobAction action;
};

constexpr Rule kTable[] = {
    {v1::QUEUED, IndexOf<Placed>(), JobAction::kStart},
    {v1::QUEUED, IndexOf<PlacementFailed>(), JobAction::kFailPlacement},
    {v1::QUEUED, IndexOf<CancelAsked>(), JobAction::kCancelAtRest},
    {v1::QUEUED, IndexOf<PauseAsked>(), JobAction::kPauseAtRest},

    {v1::STARTING, IndexOf<ProcessSeen>(), JobAction::kNoteProcess},
    {v1::STARTING, IndexOf<AllTraining>(), JobAction::kRun},
    {v1::STARTING, IndexOf<RankEnded>(), JobAction::kNoteEnd},
    {v1::STARTING, IndexOf<RankGone>(), JobAction::kNoteGone},
    {v1::STARTING, IndexOf<CancelAsked>(), JobAction::kStop},
    {v1::STARTING, IndexOf<PauseAsked>(), JobAction::kPause},

    {v1::RUNNING, IndexOf<ProcessSeen>(), JobAction::kNoteProcess},
    {v1::RUNNING, IndexOf<RankEnded>(), JobAction::kNoteEnd},
    {v1::RUNNING, IndexOf<RankGone>(), JobAction::kNoteGone},
    {v1::RUNNING, IndexOf<CancelAsked>(), JobAction::kStop},
    {v1::RUNNING, IndexOf<PauseAsked>(), JobAction::kPause},

    {v1::STOPPING, IndexOf<ProcessSeen>(), JobAction::kNoteProcess},
    {v1::STOPPING, IndexOf<RankEnded>(), JobAction::kNoteEnd},
    {v1::STOPPING, IndexOf<RankGone>(), JobAction::kNoteGone},
    {v1::STOPPING, IndexOf<CancelAsked>(), JobAction::kStop},
    {v1::STOPPING, IndexOf<PauseAsked>(), JobAction::kPause},
    {v1::STOPPING, IndexOf<ResumeAsked>(), JobAction::kUnpause},
    {v1::STOPPING, IndexOf<GpuFaulted>(), JobAction::kBlameGpu},

    {v1::PAUSED, IndexOf<CancelAsked>(), JobAction::kCancelAtRest},
    {v1::PAUSED, IndexOf<ResumeAsked>(), JobAction::kResume},
};

std::string Sentence(const std::string& text) { return PrintableSentence(text, limits::kMessageBytes); }

// A fault that may well lie in the job or its machine, not in a passing event: twice at one step is no chance.
bool MayRepeat(v1::Reason reason) {
  switch (reason) {
    case v1::REASON_CHECKPOINT:
    case v1::REASON_HOST_OOM:
    case v1::REASON_CUDA_OOM:
    case v1::REASON_GPU_FAULT:
    case v1::REASON_HANG:
    case v1::REASON_CRASHED:
    case v1::REASON_INTERNAL:
      return true;
    case v1::REASON_UNSPECIFIED:
    case v1::REASON_COMPLETED:
    case v1::REASON_CANCELLED:
    case v1::REASON_USER_ERROR:
    case v1::REASON_DATA_ERROR:
    case v1::REASON_NUMERICS:
    case v1::REASON_PEER_LOST:
    case v1::REASON_PREEMPTED:
    case v1::REASON_NODE_LOST:
      return false;
    case v1::Reason_INT_MIN_SENTINEL_DO_NOT_USE_:
    case v1::Reason_INT_MAX_SENTINEL_DO_NOT_USE_:
      break;
  }
  return false;
}

void End(JobStep* step, v1::JobState state, v1::Reason reason, const std::string& message, int64_t now) {
  step->row.state = state;
  step->row.reason = reason;
  step->row.message = Sentence(message);
  step->row.finished_ms = now;
  step->row.retry_at_ms = 0;
}

void Pause(JobStep* step, const std::string& message) {
  JobRow& row = step->row;
  row.state = v1::PAUSED;
  row.message = Sentence(message);
  row.retry_at_ms = 0;
}

// The attempt ended with row.reason and row.message: again, or the end.
void RetryOrFail(JobStep* step, int64_t now) {
  JobRow& row = step->row;
  if (row.reason == v1::REASON_CANCELLED) {
    End(step, v1::CANCELLED, row.reason, row.message, now);
    return;
  }
  const RetryRule rule = RuleFor(row.spec.retry(), row.reason);
  const int of_class = ++row.failures_of[row.reason];
  if (rule.counts) {
    const bool repeats = row.failures > 0 && MayRepeat(row.reason) && !row.killed_outside &&
                         row.reason == row.failed_reason && row.step == row.failed_step;
    ++row.failures;
    row.failed_reason = row.killed_outside ? v1::REASON_UNSPECIFIED : row.reason;
    row.failed_step = row.step;
    if (repeats) {
      End(step, v1::FAILED, row.reason,
          absl::StrCat("failed the same way twice at step ", row.step, ", so it is not tried again: ", row.message), now);
      return;
    }
  }
  const bool class_used_up = rule.retries && of_class > *rule.retries;
  if (class_used_up || (rule.counts && row.failures >= row.spec.retry().max_attempts())) {
    const int times = class_used_up ? of_class : row.failures;
    End(step, v1::FAILED, row.reason,
        times == 1 ? row.message
                   : absl::StrCat("failed ", times, " times (retry.", class_used_up ? rule.key : "max_attempts", "); the last: ", row.message), now);
    return;
  }
  if (row.desired == v1::DESIRED_PAUSE) {
    Pause(step, row.reason == v1::REASON_PREEMPTED ? absl::StrCat("paused by the user at step ", row.step)
                                                   : absl::StrCat("paused; its last attempt ended: ", row.message));
    return;
  }
  const int64_t wait_ms = BackoffMs(rule.backoff_s, of_class);
  row.state = v1::QUEUED;
  row.retry_at_ms = wait_ms > 0 ? now + wait_ms : 0;
}

// Every rank is gone.
void Conclude(JobStep* step, int64_t now) {
  JobRow& row = step->row;
  step->attempt_over = true;
  const bool completed = std::all_of(row.ranks.begin(), row.ranks.end(),
                                     [](const RankRow& rank) { return rank.reason == v1::REASON_COMPLETED; });
  if (completed) {
    step->attempt_reason = v1::REASON_COMPLETED;
    End(step, v1::SUCCEEDED, v1::REASON_COMPLETED, absl::StrCat("completed ", row.step, " steps"), now);
    step->attempt_message = row.message;
  } else if (row.desired == v1::DESIRED_CANCEL) {
    step->attempt_reason = v1::REASON_CANCELLED;
    End(step, v1::CANCELLED, v1::REASON_CANCELLED, absl::StrCat("cancelled by the user at step ", row.step), now);
    step->attempt_message = row.message;
  } else {
    step->attempt_reason = row.reason;
    step->attempt_message = row.message;
    RetryOrFail(step, now);
  }
  row.killed_outside = false;
  row.credential.clear();
}

// Whether `event` explains the attempt's end better than what is there: a rank's own error beats the loss its peers saw.
// Deaths that follow from our ending the gang explain nothing; they come as PREEMPTED or CANCELLED (an agent tells its own
// kills from others').
bool IsBetterCause(const JobRow& row, const RankEnded& event) {
  if (row.reason == v1::REASON_UNSPECIFIED) return true;
  if (row.reason != v1::REASON_PEER_LOST) return false;
  switch (event.reason) {
    case v1::REASON_UNSPECIFIED:
    case v1::REASON_COMPLETED:
    case v1::REASON_CANCELLED:
    case v1::REASON_PREEMPTED:
    case v1::REASON_PEER_LOST:
      return false;
    default:
      return true;
  }
}

void NoteEnd(JobStep* step, const RankEnded& event) {
  JobRow& row = step->row;
  if (event.rank < 0 || event.rank >= static_cast<int>(row.ranks.size())) return;
  RankRow& rank = row.ranks[event.rank];
  if (rank.ended) return;
  step->changed = true;
  rank.ended = true;
  rank.reason = event.reason == v1::REASON_UNSPECIFIED ? v1::REASON_CRASHED : event.reason;
  if (rank.reason == v1::REASON_COMPLETED) return;
  if (row.state != v1::STOPPING) {
    row.state = v1::STOPPING;
    step->stopping_began = true;
  }
  if (row.desired == v1::DESIRED_CANCEL || !IsBetterCause(row, event)) return;
  row.reason = rank.reason;
  row.killed_outside = event.by_agent && event.signal == 9 && rank.reason == v1::REASON_CRASHED;
  row.message = Sentence(row.ranks.size() > 1 ? absl::StrCat("rank ", event.rank, ": ", event.message) : event.message);
}

// What a fault of a GPU looks like to the worker, its peers and its agent.
bool MayBeGpus(v1::Reason reason) {
  return reason == v1::REASON_CRASHED || reason == v1::REASON_INTERNAL || reason == v1::REASON_PEER_LOST || reason == v1::REASON_HANG ||
         reason == v1::REASON_GPU_FAULT;
}

void BlameGpu(JobStep* step, const GpuFaulted& event) {
  JobRow& row = step->row;
  const std::string blame = row.ranks.size() > 1 ? absl::StrCat("rank ", event.rank, ": ", event.message) : event.message;
  if (!MayBeGpus(row.reason) || row.message.rfind(blame, 0) == 0) return;
  step->changed = true;
  row.reason = v1::REASON_GPU_FAULT;
  row.killed_outside = false;
  row.message = Sentence(absl::StrCat(blame, "; what ended: ", row.message));
}

void NoteGone(JobStep* step, const RankGone& event, int64_t now) {
  JobRow& row = step->row;
  if (event.rank < 0 || event.rank >= static_cast<int>(row.ranks.size()) || row.ranks[event.rank].gone) return;
  if (!row.ranks[event.rank].ended) {
    // While the gang is being ended this is what was asked for.
    NoteEnd(step, RankEnded{event.rank, row.state == v1::STOPPING ? v1::REASON_PREEMPTED : v1::REASON_CRASHED,
                            "the worker is gone without a word", true, 0});
  }
  step->changed = true;
  row.ranks[event.rank].gone = true;
  if (std::all_of(row.ranks.begin(), row.ranks.end(), [](const RankRow& rank) { return rank.gone; })) Conclude(step, now);
}

void Start(JobStep* step, const Placed& placed, int64_t now) {
  JobRow& row = step->row;
  row.state = v1::STARTING;
  ++row.attempt;
  row.ranks = placed.ranks;
  row.credential = placed.credential;
  row.reason = v1::REASON_UNSPECIFIED;
  row.message.clear();
  row.started_ms = now;
  row.retry_at_ms = 0;
  row.nan_steps = 0;
  row.first_step = 0;
  step->changed = true;
}

void FailPlacement(JobStep* step, const PlacementFailed& event, int64_t now) {
  JobRow& row = step->row;
  ++row.attempt;
  row.ranks.clear();
  row.reason = event.reason;
  row.message = Sentence(event.message);
  row.started_ms = now;
  step->changed = true;
  step->attempt_over = true;
  step->attempt_reason = row.reason;
  step->attempt_message = row.message;
  RetryOrFail(step, now);
}

// Ends the attempt by the user's wish; a cancel is never taken back.
void Stop(JobStep* step, v1::DesiredState wish) {
  JobRow& row = step->row;
  if (row.desired == v1::DESIRED_CANCEL || row.desired == wish) return;
  row.desired = wish;
  step->changed = true;
  if (row.state == v1::STOPPING) return;
  row.state = v1::STOPPING;
  step->stopping_began = true;
}

}  // namespace

JobAction ActionFor(v1::JobState state, size_t event_index) {
  for (const Rule& rule : kTable) {
    if (rule.state == state && rule.event == event_index) return rule.action;
  }
  return JobAction::kIgnore;
}

JobStep Apply(const JobRow& row, const JobEvent& event, int64_t now_unix_ms) {
  JobStep step;
  step.row = row;
  switch (ActionFor(row.state, event.index())) {
    case JobAction::kIgnore:
      break;
    case JobAction::kStart:
      Start(&step, std::get<Placed>(event), now_unix_ms);
      break;
    case JobAction::kFailPlacement:
      FailPlacement(&step, std::get<PlacementFailed>(event), now_unix_ms);
      break;
    case JobAction::kNoteProcess: {
      const ProcessSeen& seen = std::get<ProcessSeen>(event);
      if (seen.rank < 0 || seen.rank >= static_cast<int>(step.row.ranks.size())) break;
      step.changed = step.row.ranks[seen.rank].pid != seen.pid;
      step.row.ranks[seen.rank].pid = seen.pid;
      break;
    }
    case JobAction::kRun:
      step.row.state = v1::RUNNING;
      step.changed = true;
      break;
    case JobAction::kNoteEnd:
      NoteEnd(&step, std::get<RankEnded>(event));
      break;
    case JobAction::kNoteGone:
      NoteGone(&step, std::get<RankGone>(event), now_unix_ms);
      break;
    case JobAction::kStop:
      Stop(&step, v1::DESIRED_CANCEL);
      break;
    case JobAction::kPause:
      Stop(&step, v1::DESIRED_PAUSE);
      break;
    case JobAction::kPauseAtRest:
      step.row.desired = v1::DESIRED_PAUSE;
      step.changed = true;
      Pause(&step, "paused by the user");
      break;
    case JobAction::kResume:
      step.row.state = v1::QUEUED;
      step.row.message.clear();
      step.row.reason = v1::REASON_UNSPECIFIED;
      [[fallthrough]];
    case JobAction::kUnpause:
      step.changed = step.row.desired == v1::DESIRED_PAUSE;
      if (step.changed) step.row.desired = v1::DESIRED_RUN;
      break;
    case JobAction::kBlameGpu:
      BlameGpu(&step, std::get<GpuFaulted>(event));
      break;
    case JobAction::kCancelAtRest:
      step.row.desired = v1::DESIRED_CANCEL;
      step.changed = true;
      End(&step, v1::CANCELLED, v1::REASON_CANCELLED, "cancelled by the user", now_unix_ms);
      break;
  }
  return step;
}

RetryRule RuleFor(const v1::RetrySpec& r, v1::Reason reason) {
  // A class that the job says nothing of: those that a retry cannot mend are not retried.
  const auto rule = [&r](const char* key, bool has_retries, int retries, bool mendable, bool has_backoff, double backoff_s) {
    RetryRule made{std::nullopt, has_backoff ? backoff_s : r.backoff_s(), key, true};
    if (has_retries) made.retries = retries;
    else if (!mendable) made.retries = 0;
    return made;
  };
#define HIERAD_RULE(name, mendable) \
  rule(#name "_retries", r.has_##name##_retries(), r.name##_retries(), mendable, r.has_##name##_backoff_s(), r.name##_backoff_s())
  switch (reason) {
    case v1::REASON_USER_ERROR: return HIERAD_RULE(user_error, false);
    case v1::REASON_DATA_ERROR: return HIERAD_RULE(data_error, false);
    case v1::REASON_NUMERICS: return HIERAD_RULE(numerics, false);
    case v1::REASON_CHECKPOINT: return HIERAD_RULE(checkpoint, true);
    case v1::REASON_HOST_OOM: return HIERAD_RULE(host_oom, true);
    case v1::REASON_CUDA_OOM: return HIERAD_RULE(cuda_oom, true);
    case v1::REASON_PEER_LOST: return HIERAD_RULE(peer_lost, true);
    case v1::REASON_GPU_FAULT: return HIERAD_RULE(gpu_fault, true);
    case v1::REASON_HANG: return HIERAD_RULE(hang, true);
    case v1::REASON_NODE_LOST: return HIERAD_RULE(node_lost, true);
    case v1::REASON_PREEMPTED: {
      RetryRule made = HIERAD_RULE(preempted, true);
      if (!r.has_preempted_backoff_s()) made.backoff_s = 0;
      made.counts = false;   // being asked to make room is no failure
      return made;
    }
    default: return HIERAD_RULE(unknown, true);
  }
#undef HIERAD_RULE
}

int64_t BackoffMs(double backoff_s, int failures) {
  const double seconds = std::min(std::max(60.0, backoff_s), backoff_s * std::pow(2.0, std::clamp(failures - 1, 0, 30)));
  return static_cast<int64_t>(std::lround(seconds * 1000));
}

}  // namespace hierad
