// The log of one rank as its keeper writes it: rank-N.log, which grows, and rank-N.log.1 with what stood in it before it was last
// emptied. Each attempt begins with a line that names it, as does each file that goes on with one. Read attempt by attempt, by a
// reader that keeps nothing but a place, while the log grows and is emptied.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace hierad {

std::string RankLogName(int rank);   // in the run folder
std::string RankLogPath(const std::string& run_folder, int rank);

// The line at the head of an attempt: "---- job 7, attempt 2, rank 0, cpu-0, 2026-12-01 07:31:00 UTC"; "..., continued" at the head of a
// file that goes on with it.
struct AttemptLine {
  uint64_t job_id = 0;
  int attempt = 0;
  bool continued = false;
};
std::string AttemptLineText(uint64_t job_id, int attempt, int rank, const std::string& slot, int64_t unix_ms, bool continued);
std::optional<AttemptLine> ParseAttemptLine(std::string_view line);   // without its end; nullopt: another line

// A place in a log. Files are known by what they begin with, for their names are exchanged.
struct LogCursor {
  std::string head;     // the first bytes of the file, at most kLogHeadBytes; "": no place yet
  int64_t offset = 0;   // in that file
};
inline constexpr size_t kLogHeadBytes = 256;

struct LogAsk {
  uint64_t job_id = 0;
  int attempt = 0;
  bool find = false;         // the beginning of the attempt, from `from` on; else what follows `from`
  LogCursor from;
  uint64_t tail_lines = 0;   // with find, not 0: the beginning of the last so many lines instead
};

struct LogSlice {
  LogCursor at;          // where the bytes begin
  std::string bytes;     // at most limits::kLogChunkBytes; none: nothing new yet, or `ended`
  bool ended = false;    // another attempt's lines follow
  bool gap = false;      // lines before these, that were asked for, are gone
  uint64_t lines = 0;    // with tail_lines: so many lines were found of them
};

// NotFound: there is no log, or no line of that attempt in it. No link is followed: the folder belongs to the job's user.
absl::StatusOr<LogSlice> ReadAttemptLog(const std::string& run_folder, int rank, const LogAsk& ask);

}  // namespace hierad
