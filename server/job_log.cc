#include "server/job_log.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "base/limits.h"
#include "base/log_tail.h"
#include "base/status.h"

namespace hierad {

absl::Status JobLog::Open() {
  // No link: the folder belongs to the job's user, the reader may be another.
  fd_ = UniqueFd(open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (!fd_) return ErrnoStatus(errno, "cannot read the log", path_);
  struct stat info;
  if (fstat(fd_.get(), &info) != 0) return ErrnoStatus(errno, "cannot read the log", path_);
  if (!S_ISREG(info.st_mode)) {
    fd_.reset();
    return absl::FailedPreconditionError("\"" + path_ + "\" is not a file");
  }
  offset_ = tail_lines_ > 0 ? TailOffset(fd_.get(), info.st_size, tail_lines_) : 0;
  tail_lines_ = 0;
  return absl::OkStatus();
}

absl::StatusOr<std::string> JobLog::Read() {
  const FilesAs rights(account_);
  if (!fd_) RETURN_IF_ERROR(Open());
  std::string chunk(limits::kLogChunkBytes, '\0');
  const ssize_t got = pread(fd_.get(), chunk.data(), chunk.size(), offset_);
  if (got < 0) return ErrnoStatus(errno, "cannot read the log", path_);
  chunk.resize(static_cast<size_t>(got));
  offset_ += got;
  if (got > 0) return chunk;
  // At its end: has another file taken the name, or was it cut?
  struct stat open_file, named;
  if (fstat(fd_.get(), &open_file) == 0 && stat(path_.c_str(), &named) == 0 &&
      (open_file.st_ino != named.st_ino || open_file.st_dev != named.st_dev || named.st_size < offset_)) {
    fd_.reset();
    RETURN_IF_ERROR(Open());
    return Read();
  }
  return chunk;
}

}  // namespace hierad
