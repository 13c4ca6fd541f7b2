#include "server/agent/log_reader.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <utility>

#include "base/fs.h"
#include "base/limits.h"
#include "base/log_tail.h"
#include "base/status.h"

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
  const std::string path = JoinPath(wanted.run_folder(), "rank-" + std::to_string(wanted.rank()) + ".log");
  // No link: the folder belongs to the job's user.
  const UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  struct stat info;
  if (!fd || fstat(fd.get(), &info) != 0) return failed(ErrnoStatus(errno, "cannot read the log", path));
  if (!S_ISREG(info.st_mode)) return failed(absl::FailedPreconditionError("\"" + Printable(path) + "\" is not a file"));
  int64_t offset = wanted.tail_lines() > 0 ? TailOffset(fd.get(), info.st_size, wanted.tail_lines()) : wanted.offset();
  if (offset > info.st_size) offset = 0;   // it was rotated, or is of another attempt
  std::string bytes(size_t(limits::kLogChunkBytes), '\0');
  const ssize_t got = pread(fd.get(), bytes.data(), bytes.size(), offset);
  if (got < 0) return failed(ErrnoStatus(errno, "cannot read the log", path));
  bytes.resize(size_t(got));
  piece.set_offset(offset);
  piece.set_bytes(std::move(bytes));
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
