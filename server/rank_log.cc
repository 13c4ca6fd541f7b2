#include "server/rank_log.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "server/await.h"

namespace hierad {

RankLog::RankLog(Coordinator* coordinator, const v1::Job& job, int rank, uint64_t tail_lines, std::optional<Account> account)
    : coordinator_(coordinator), here_(JoinPath(job.run_folder(), absl::StrCat("rank-", rank, ".log")), tail_lines, std::move(account)),
      there_{job.id(), rank, 0, tail_lines, ""} {}

absl::StatusOr<std::string> RankLog::Read() {
  absl::Status missing;
  if (!remote_) {
    auto chunk = here_.Read();
    if (chunk.ok() || !absl::IsNotFound(chunk.status())) return chunk;
    missing = chunk.status();
  }
  ASSIGN_OR_RETURN(LogAnswer answer, Await<LogAnswer>([&](auto reply) { coordinator_->ReadLog(there_, reply); }));
  if (answer.piece.missing() && remote_) return std::string();   // of another attempt, on another node: to come
  if (answer.piece.missing()) return missing;
  if (!answer.piece.problem().empty()) return absl::UnavailableError(answer.piece.problem());
  remote_ = true;
  there_.node = std::move(answer.node);
  there_.offset = answer.piece.offset() + int64_t(answer.piece.bytes().size());
  there_.tail_lines = 0;
  return std::move(*answer.piece.mutable_bytes());
}

}  // namespace hierad
