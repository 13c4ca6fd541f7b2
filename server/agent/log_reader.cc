#include "server/agent/log_reader.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/attempt_log.h"

namespace hierad {

v1::LogPiece ReadLogPiece(const v1::LogWanted& wanted, const RankRights& rights) {
  v1::LogPiece piece;
  piece.set_id(wanted.id());
  const auto failed = [&piece](const absl::Status& status) {
    piece.set_missing(absl::IsNotFound(status));
    piece.set_problem(std::string(status.message()));
    return piece;
  };
  const auto account = AccountFor(rights, wanted.user());
  if (!account.ok()) return failed(account.status());
  const FilesAs files(*account);
  if (!files.status().ok()) return failed(files.status());
  LogAsk ask{wanted.job_id(), wanted.attempt(), wanted.find(), {wanted.head(), wanted.offset()}, wanted.tail_lines()};
  auto slice = ReadAttemptLog(wanted.run_folder(), wanted.rank(), ask);
  if (!slice.ok()) return failed(slice.status());
  piece.set_head(std::move(slice->at.head));
  piece.set_offset(slice->at.offset);
  piece.set_bytes(std::move(slice->bytes));
  piece.set_ended(slice->ended);
  piece.set_gap(slice->gap);
  piece.set_lines(slice->lines);
  return piece;
}

LogReader::LogReader(RankRights rights, std::function<void()> ready)
    : rights_(std::move(rights)), ready_(std::move(ready)), thread_([this] { Run(); }) {}

LogReader::~LogReader() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void LogReader::Want(const v1::AgentOrders& orders) {
  std::lock_guard lock(mutex_);
  wanted_.clear();
  for (const v1::LogWanted& wanted : orders.logs()) wanted_[wanted.id()] = wanted;
  std::erase_if(pieces_, [this](const auto& piece) { return !wanted_.contains(piece.first); });
  changed_.notify_all();
}

void LogReader::AddPieces(v1::AgentReport* report) {
  std::lock_guard lock(mutex_);
  for (const auto& [id, piece] : pieces_) *report->add_log_pieces() = piece;
}

void LogReader::Run() {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    const auto next = std::find_if(wanted_.begin(), wanted_.end(), [this](const auto& wanted) { return !pieces_.contains(wanted.first); });
    if (next == wanted_.end()) {
      changed_.wait(lock);
      continue;
    }
    const v1::LogWanted wanted = next->second;
    lock.unlock();
    v1::LogPiece piece = ReadLogPiece(wanted, rights_);
    lock.lock();
    if (!wanted_.contains(wanted.id())) continue;   // no longer
    pieces_[wanted.id()] = std::move(piece);
    ready_();
  }
}

}  // namespace hierad
