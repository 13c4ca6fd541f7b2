// The log of a job's rank, attempt after attempt, wherever each is: in the run folder as hierad sees it, else, of a node that shares no
// storage with hierad, piece by piece from that node's agent. What cannot be had is said at its place. One thread, not the
// coordinator's.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/account.h"
#include "base/attempt_log.h"
#include "server/coordinator.h"

namespace hierad {

struct RankLogOptions {
  int rank = 0;
  uint64_t tail_lines = 0;   // not 0: begins at the last so many lines of what is there at the first read
  int attempt = 0;           // only this one; 0: all
  bool follow = false;       // goes on to attempts to come, and waits for a node that does not answer
};

class RankLog {
 public:
  RankLog(Coordinator* coordinator, const v1::Job& job, RankLogOptions options, std::optional<Account> account);

  struct Text {
    std::string bytes;    // at most limits::kLogChunkBytes
    std::string notice;   // not empty, and then no bytes: what is missing here, a line without its end
    int attempt = 0;
    bool empty() const { return bytes.empty() && notice.empty(); }
  };
  // What comes next; empty: nothing new.
  absl::StatusOr<Text> Read();

  // All that there will ever be was read.
  bool ended() const { return known_ && at_ >= attempts_.size() && (terminal_ || (options_.attempt > 0 && newest_ > options_.attempt)); }
  bool found() const { return found_; }                     // there were bytes
  const std::string& missing() const { return missing_; }   // a sentence on what could not be reached first; empty: nothing

 private:
  // Where an attempt's log is: "" for the run folder as hierad sees it, else a node.
  using Source = std::string;
  struct Found {
    Source source;
    LogSlice slice;
  };
  // Why nothing of an attempt was found.
  struct Absence {
    std::string why;            // after "attempt 1 of rank 0"
    bool unreachable = false;   // there may be a log, where nobody answers
  };

  absl::Status Refresh();
  absl::Status FindTail();
  bool Over() const { return terminal_ || attempts_[at_].attempt < newest_; }   // the attempt that is being read
  absl::StatusOr<LogSlice> Ask(const Source& source, int attempt, bool find, const LogCursor& from, uint64_t tail_lines);
  absl::StatusOr<std::optional<Found>> Locate(const LogAttempt& attempt, uint64_t tail_lines, Absence* absence);
  absl::StatusOr<std::optional<Text>> Begin();
  absl::StatusOr<std::optional<Text>> GoOn();
  absl::StatusOr<std::optional<Text>> Rest(const std::string& trouble, bool unreachable);
  std::optional<Text> Take(LogSlice slice, const char* gone);
  Text Notice(const std::string& words) const;
  void Next();

  Coordinator* const coordinator_;
  const v1::Job job_;
  const RankLogOptions options_;
  const std::optional<Account> account_;
  bool known_ = false, terminal_ = false, found_ = false;
  int newest_ = 0;                     // attempt that is known of
  std::vector<LogAttempt> attempts_;   // those to be read, oldest first
  size_t at_ = 0;                      // in attempts_: the one that is being read
  std::optional<Source> source_;       // of its log; none: not found yet
  LogCursor cursor_;                   // what follows it comes next
  std::optional<Text> after_;          // comes after the notice that was given last
  bool waiting_said_ = false;
  std::string missing_;
  std::map<int, Found> tails_;         // where the tail begins in an attempt; without bytes
  std::map<Source, LogCursor> left_;   // where a source was left: newer attempts come after it
  std::map<Source, std::pair<absl::Status, std::chrono::nanoseconds>> failed_;   // nodes that did not answer, and when
};

}  // namespace hierad
