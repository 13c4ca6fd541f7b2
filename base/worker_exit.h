// hiera-worker's exit codes, for who could not hear its last report: 0 completed, 1 wrong usage, 40 fenced (hierad no longer
// knew the attempt), else 40 + the reason's number.
#pragma once

#include "hierad/v1/job.pb.h"

namespace hierad {

inline constexpr int kWorkerExitUsage = 1;
inline constexpr int kWorkerExitFenced = 40;

inline int WorkerExitCode(v1::Reason reason) { return reason == v1::REASON_COMPLETED ? 0 : kWorkerExitFenced + int(reason); }

// REASON_UNSPECIFIED: none of these.
inline v1::Reason ReasonOfWorkerExit(int code) {
  if (code == 0) return v1::REASON_COMPLETED;
  return code > kWorkerExitFenced && v1::Reason_IsValid(code - kWorkerExitFenced) ? v1::Reason(code - kWorkerExitFenced)
                                                                                   : v1::REASON_UNSPECIFIED;
}

}  // namespace hierad
