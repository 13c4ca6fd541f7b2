// The log of a job's rank, wherever it is: in the run folder as hierad sees it, else, of a node that shares no storage with hierad,
// piece by piece from its agent. One thread, not the coordinator's.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "server/coordinator.h"
#include "server/job_log.h"

namespace hierad {

class RankLog {
 public:
  // `tail_lines` > 0: begins at the last so many lines of what is there at the first read.
  RankLog(Coordinator* coordinator, const v1::Job& job, int rank, uint64_t tail_lines, std::optional<Account> account);

  // The next bytes, at most limits::kLogChunkBytes; empty: nothing new. NotFound: there is no log yet. Unavailable: its node does
  // not answer.
  absl::StatusOr<std::string> Read();

 private:
  Coordinator* const coordinator_;
  JobLog here_;
  LogPlace there_;
  bool remote_ = false;   // it was found there
};

}  // namespace hierad
