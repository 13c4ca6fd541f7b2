#include "server/rank_log.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/status.h"
#include "server/await.h"

namespace hierad {
namespace {

constexpr std::chrono::seconds kFailureKept{10};   // a node that did not answer is not waited for again and again
constexpr size_t kOtherNodes = 8;                  // that are asked for what a node has which does not answer

}  // namespace

RankLog::RankLog(Coordinator* coordinator, const v1::Job& job, RankLogOptions options, std::optional<Account> account)
    : coordinator_(coordinator), job_(job), options_(options), account_(std::move(account)) {}

absl::StatusOr<RankLog::Text> RankLog::Read() {
  if (after_) return *std::exchange(after_, std::nullopt);
  if (!known_) {
    RETURN_IF_ERROR(Refresh());
    if (options_.tail_lines > 0) RETURN_IF_ERROR(FindTail());
  }
  while (!ended()) {
    if (at_ >= attempts_.size()) {
      const size_t before = attempts_.size();
      if (options_.follow) RETURN_IF_ERROR(Refresh());
      if (attempts_.size() == before) return Text();
    }
    ASSIGN_OR_RETURN(const std::optional<Text> text, source_ ? GoOn() : Begin());
    if (text) return *text;
  }
  return Text();
}

// Of the attempts that are not known yet.
absl::Status RankLog::Refresh() {
  ASSIGN_OR_RETURN(LogAttempts news, Await<LogAttempts>([&](auto reply) { coordinator_->AttemptsOf(job_.id(), options_.rank, newest_, reply); }));
  for (LogAttempt& attempt : news.attempts) {
    newest_ = attempt.attempt;
    if (options_.attempt == 0 || options_.attempt == attempt.attempt) attempts_.push_back(std::move(attempt));
  }
  terminal_ = news.terminal;
  known_ = true;
  return absl::OkStatus();
}

absl::Status RankLog::FindTail() {
  uint64_t lines = options_.tail_lines;
  for (at_ = attempts_.size(); at_ > 0 && lines > 0;) {
    --at_;
    Absence absence;
    ASSIGN_OR_RETURN(std::optional<Found> found, Locate(attempts_[at_], lines, &absence));
    if (!found) continue;   // said when its turn comes
    lines -= std::min(lines, found->slice.lines);
    found->slice.bytes.clear();
    tails_[attempts_[at_].attempt] = *std::move(found);
  }
  return absl::OkStatus();
}

absl::StatusOr<LogSlice> RankLog::Ask(const Source& source, int attempt, bool find, const LogCursor& from, uint64_t tail_lines) {
  if (source.empty()) {
    const FilesAs rights(account_);
    RETURN_IF_ERROR(rights.status());
    return ReadAttemptLog(job_.run_folder(), options_.rank, {job_.id(), attempt, find, from, tail_lines});
  }
  v1::LogWanted wanted;
  wanted.set_job_id(job_.id());
  wanted.set_rank(options_.rank);
  wanted.set_run_folder(job_.run_folder());
  wanted.set_user(job_.submitter());
  wanted.set_attempt(attempt);
  wanted.set_find(find);
  wanted.set_head(from.head);
  wanted.set_offset(from.offset);
  wanted.set_tail_lines(tail_lines);
  ASSIGN_OR_RETURN(v1::LogPiece piece, Await<v1::LogPiece>([&](auto reply) { coordinator_->ReadLog(source, wanted, reply); }));
  if (piece.missing()) return absl::NotFoundError(piece.problem());
  if (!piece.problem().empty()) return absl::UnavailableError(absl::StrCat("node ", source, ": ", piece.problem()));
  if (piece.head().empty() && !piece.bytes().empty()) {
    return absl::UnavailableError(absl::StrCat("the agent of node ", source, " is older than this hierad; upgrade it to read logs there"));
  }
  return LogSlice{{piece.head(), piece.offset()}, std::move(*piece.mutable_bytes()), piece.ended(), piece.gap(), piece.lines()};
}

// The first that has it of: hierad's own view of the run folder, the node that it ran on, and, where that does not answer, nodes of other
// attempts, which may share storage with it.
absl::StatusOr<std::optional<RankLog::Found>> RankLog::Locate(const LogAttempt& attempt, uint64_t tail_lines, Absence* absence) {
  const auto look = [&](const Source& source) { return Ask(source, attempt.attempt, true, left_[source], tail_lines); };
  auto slice = look("");
  if (slice.ok()) return Found{"", *std::move(slice)};
  if (!absl::IsNotFound(slice.status())) *absence = {absl::StrCat(" is missing: ", std::string(slice.status().message())), true};
  if (attempt.node.empty()) {
    if (absence->why.empty()) absence->why = " has no log here, and no node is known to have run it";
    return std::nullopt;
  }
  const auto now = Clock::System().Monotonic();
  const auto reach = [&](const Source& node) -> absl::StatusOr<LogSlice> {
    const auto failed = failed_.find(node);
    if (failed != failed_.end() && now - failed->second.second < kFailureKept) return failed->second.first;
    auto answer = look(node);
    if (absl::IsUnavailable(answer.status())) failed_[node] = {answer.status(), now};
    return answer;
  };
  if (attempt.attempt == newest_ && !terminal_) failed_.erase(attempt.node);
  slice = reach(attempt.node);
  if (slice.ok()) return Found{attempt.node, *std::move(slice)};
  if (absl::IsNotFound(slice.status())) {
    if (absence->why.empty()) {
      absence->why = absl::StrCat(" has no log on node ", attempt.node, ": it did not begin to run, newer lines have taken its place, or its run folder was removed");
    }
    return std::nullopt;
  }
  if (!absl::IsUnavailable(slice.status())) return slice.status();
  *absence = {absl::StrCat(", which ran on node ", attempt.node, ", is missing: ", std::string(slice.status().message())), true};
  std::set<Source> asked = {attempt.node, ""};
  for (size_t i = attempts_.size(); i-- > 0 && asked.size() < kOtherNodes + 2;) {
    if (!asked.insert(attempts_[i].node).second) continue;
    slice = reach(attempts_[i].node);
    if (slice.ok()) return Found{attempts_[i].node, *std::move(slice)};
  }
  return std::nullopt;
}

// The first bytes of the attempt at at_, or why there are none; nothing: go on with what is known now.
absl::StatusOr<std::optional<RankLog::Text>> RankLog::Begin() {
  if (auto tail = tails_.extract(attempts_[at_].attempt)) {
    source_ = tail.mapped().source;
    return Take(std::move(tail.mapped().slice), "first lines");
  }
  const bool over = Over();
  Absence absence;
  ASSIGN_OR_RETURN(std::optional<Found> found, Locate(attempts_[at_], 0, &absence));
  if (found) {
    source_ = std::move(found->source);
    waiting_said_ = false;
    return Take(std::move(found->slice), "first lines");
  }
  const std::string words = absl::StrCat("attempt ", attempts_[at_].attempt, " of rank ", options_.rank, absence.why);
  if (!over) return Rest(words, absence.unreachable);
  const Text notice = Notice(words);
  if (absence.unreachable && missing_.empty()) missing_ = words;
  Next();
  return notice;
}

absl::StatusOr<std::optional<RankLog::Text>> RankLog::GoOn() {
  const bool over = Over();   // asked before reading: what is read after it is all there is
  const int attempt = attempts_[at_].attempt;
  auto slice = Ask(*source_, attempt, false, cursor_, 0);
  if (!slice.ok()) {
    if (!absl::IsUnavailable(slice.status()) && !absl::IsNotFound(slice.status())) return slice.status();
    const std::string words = absl::StrCat("the rest of attempt ", attempt, " of rank ", options_.rank, " is missing: ", std::string(slice.status().message()));
    if (!over) return Rest(words, true);
    const Text notice = Notice(words);
    if (missing_.empty()) missing_ = words;
    Next();
    return notice;
  }
  waiting_said_ = false;
  const bool last = slice->bytes.empty() && (slice->ended || over);
  const bool nothing = slice->bytes.empty();
  std::optional<Text> text = Take(*std::move(slice), "lines");
  if (last) Next();
  if (text || last) return text;
  return nothing ? Rest("", false) : std::optional<Text>();
}

// Nothing for now of an attempt that was not over: is it by now? Else whoever follows waits, and anyone else has seen what there is.
absl::StatusOr<std::optional<RankLog::Text>> RankLog::Rest(const std::string& trouble, bool unreachable) {
  RETURN_IF_ERROR(Refresh());
  if (Over()) return std::nullopt;
  if (!options_.follow) {
    const Text notice = Notice(trouble);
    if (unreachable && missing_.empty()) missing_ = trouble;
    Next();
    return unreachable ? std::optional<Text>(notice) : std::nullopt;
  }
  if (!unreachable || std::exchange(waiting_said_, true)) return Text();
  return Notice(trouble + "; waiting for it");
}

// The bytes of a slice, after a notice where lines are gone before them.
std::optional<RankLog::Text> RankLog::Take(LogSlice slice, const char* gone) {
  std::optional<Text> text;
  if (slice.gap) {
    text = Notice(absl::StrCat(gone, " of attempt ", attempts_[at_].attempt, " of rank ", options_.rank,
                               " are gone: newer ones have taken their place (hierad-agent --log-bytes)"));
  }
  cursor_ = {slice.at.head, slice.at.offset + int64_t(slice.bytes.size())};
  left_[*source_] = cursor_;
  if (slice.bytes.empty()) return text;
  found_ = true;
  Text bytes{std::move(slice.bytes), "", attempts_[at_].attempt};
  if (!text) return bytes;
  after_ = std::move(bytes);
  return text;
}

RankLog::Text RankLog::Notice(const std::string& words) const { return {"", "---- " + words, attempts_[at_].attempt}; }

void RankLog::Next() {
  ++at_;
  source_.reset();
  cursor_ = {};
  waiting_said_ = false;
}

}  // namespace hierad
