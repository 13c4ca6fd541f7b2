#include "base/fs.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <dirent.h>
#include <fcntl.h>
#include <memory>
#include <random>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <system_error>
#include <unistd.h>

#include "base/failpoint.h"
#include "base/fs_descriptor.h"
#include "base/limits.h"
#include "base/status.h"
#include "base/text.h"

namespace hierad {

UniqueFd& UniqueFd::operator=(UniqueFd&& other) noexcept {
  if (this != &other) {
    reset();
    fd_ = other.release();
  }
  return *this;
}

UniqueFd::~UniqueFd() { reset(); }

void UniqueFd::reset() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

absl::Status ErrnoStatus(int error, std::string_view what, std::string_view path) {
  // Not strerror: it shares a buffer between threads.
  const std::string message = std::string(what) + " \"" + Printable(path) + "\": " +
                              std::generic_category().message(error);
  switch (error) {
    case ENOENT:
    case ENOTDIR: return absl::NotFoundError(message);
    case EACCES:
    case EPERM:
    case EROFS: return absl::PermissionDeniedError(message);
    case ENOSPC:
    case EDQUOT: return absl::ResourceExhaustedError(message);
    default: return absl::InternalError(message);
  }
}

absl::StatusOr<std::string> ReadFile(const std::string& path, int64_t max_bytes) {
  UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd) return ErrnoStatus(errno, "cannot open", path);
  return ReadDescriptor(fd.get(), path, max_bytes);
}

absl::StatusOr<std::string> ReadDescriptor(int fd, const std::string& path, int64_t max_bytes) {
  std::string data;
  char buffer[64 << 10];
  while (true) {
    const ssize_t n = ::read(fd, buffer, sizeof buffer);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return ErrnoStatus(errno, "cannot read", path);
    if (n == 0) return data;
    if (int64_t(data.size()) + n > max_bytes) {
      return absl::InvalidArgumentError("\"" + Printable(path) + "\" is larger than " + std::to_string(max_bytes) +
                                        " bytes, the most that is read here");
    }
    data.append(buffer, size_t(n));
  }
}

absl::Status WriteAll(int fd, std::string_view data, std::string_view path_for_message) {
  HIERAD_FAILPOINT("fs.write");
  while (!data.empty()) {
    const ssize_t n = ::write(fd, data.data(), data.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return ErrnoStatus(errno, "cannot write", path_for_message);
    data.remove_prefix(size_t(n));
  }
  return absl::OkStatus();
}

namespace {

absl::Status SyncFolderAt(int at, const char* name, const std::string& path) {
  HIERAD_FAILPOINT("fs.sync_folder");
  UniqueFd fd(::openat(at, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd) return ErrnoStatus(errno, "cannot open folder", path);
  if (::fsync(fd.get()) != 0) return ErrnoStatus(errno, "cannot sync folder", path);
  return absl::OkStatus();
}

std::string NameOf(const std::string& path) { return path.substr(path.rfind('/') + 1); }

// A new file beside `name`, which is the beginning of its name.
UniqueFd MakeTemporary(int folder, const std::string& name, std::string* temporary) {
  std::random_device random;
  for (int tries = 0; tries < 100; ++tries) {
    char end[16];
    std::snprintf(end, sizeof end, ".tmp-%06x", random() & 0xFFFFFF);
    *temporary = name + end;
    UniqueFd fd(::openat(folder, temporary->c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
    if (fd || errno != EEXIST) return fd;
  }
  return UniqueFd();
}

}  // namespace

absl::Status SyncFolder(const std::string& path) { return SyncFolderAt(AT_FDCWD, path.c_str(), path); }

absl::Status WriteFileAtomic(const std::string& path, std::string_view data, int mode) {
  const UniqueFd folder(::open(FolderOf(path).c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  if (!folder) return ErrnoStatus(errno, "cannot create", path);
  return WriteFileAtomicIn(folder.get(), NameOf(path), data, mode, path);
}

absl::Status WriteFileAtomicIn(int folder, const std::string& name, std::string_view data, int mode, const std::string& path) {
  std::string temporary;
  const UniqueFd fd = MakeTemporary(folder, name, &temporary);
  if (!fd) return ErrnoStatus(errno, "cannot create", path);
  const auto finish = [&]() -> absl::Status {
    if (::fchmod(fd.get(), mode_t(mode)) != 0) return ErrnoStatus(errno, "cannot set the mode of", JoinPath(FolderOf(path), temporary));
    RETURN_IF_ERROR(WriteAll(fd.get(), data, path));
    HIERAD_FAILPOINT("fs.sync_file");
    if (::fsync(fd.get()) != 0) return ErrnoStatus(errno, "cannot sync", path);
    if (::renameat(folder, temporary.c_str(), folder, name.c_str()) != 0) return ErrnoStatus(errno, "cannot put in place", path);
    return absl::OkStatus();
  };
  if (absl::Status status = finish(); !status.ok()) {
    ::unlinkat(folder, temporary.c_str(), 0);
    return status;
  }
  return SyncFolderAt(folder, ".", FolderOf(path));
}

absl::StatusOr<UniqueFd> OpenRegularIn(int folder, const std::string& name, int flags, int mode, const std::string& path) {
  UniqueFd fd(::openat(folder, name.c_str(), flags | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, mode_t(mode)));
  struct stat info;
  if (fd && ::fstat(fd.get(), &info) != 0) return ErrnoStatus(errno, "cannot open", path);
  // A pipe without a reader, a socket, a link: errno says so in words that help nobody.
  if (fd ? !S_ISREG(info.st_mode) : errno == ELOOP || errno == ENXIO || errno == EISDIR) {
    return absl::FailedPreconditionError("\"" + Printable(path) + "\" is not a file but a link, pipe, folder or device; remove it");
  }
  if (!fd) return ErrnoStatus(errno, "cannot open", path);
  return fd;
}

absl::Status MakeFolders(const std::string& path, int mode) {
  if (path.empty()) return absl::InvalidArgumentError("cannot create a folder without a name");
  for (size_t end = path.find('/', 1);; end = path.find('/', end + 1)) {
    const std::string folder = path.substr(0, end);
    if (::mkdir(folder.c_str(), mode_t(mode)) != 0) {
      const int error = errno;
      struct stat info;
      // Not only EEXIST: a read-only or foreign parent says EROFS or EACCES for a folder that is already there.
      if (::stat(folder.c_str(), &info) != 0) return ErrnoStatus(error, "cannot create folder", folder);
      if (!S_ISDIR(info.st_mode)) return ErrnoStatus(ENOTDIR, "cannot create folder", folder);
    }
    if (end == std::string::npos) return absl::OkStatus();
  }
}

namespace {

struct FolderCloser {
  void operator()(DIR* folder) const { ::closedir(folder); }
};

// Each level holds a descriptor and a frame: as deep as whoever made the folders likes, it would end the process.
absl::Status RemoveBeneath(int parent, const char* name, const std::string& path, int depth = 0) {
  if (::unlinkat(parent, name, 0) == 0 || errno == ENOENT) return absl::OkStatus();
  const int error = errno;
  if (depth >= limits::kFolderDepth) {
    constexpr size_t kShown = 256;
    return absl::FailedPreconditionError("cannot remove \"" + Printable(path.substr(0, kShown)) + "...\": its folders are nested more than " +
                                         std::to_string(limits::kFolderDepth) + " deep; remove it by hand");
  }
  // O_NOFOLLOW: a folder swapped for a link between the two calls is not entered.
  const int fd = ::openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (fd < 0) return ErrnoStatus(error, "cannot remove", path);
  std::unique_ptr<DIR, FolderCloser> folder(::fdopendir(fd));
  if (!folder) {
    ::close(fd);
    return ErrnoStatus(errno, "cannot read folder", path);
  }
  while (const dirent* entry = ::readdir(folder.get())) {
    const std::string_view child = entry->d_name;
    if (child == "." || child == "..") continue;
    RETURN_IF_ERROR(RemoveBeneath(fd, entry->d_name, JoinPath(path, child), depth + 1));
  }
  if (::unlinkat(parent, name, AT_REMOVEDIR) != 0 && errno != ENOENT) {
    return ErrnoStatus(errno, "cannot remove folder", path);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status RemoveTreeIn(const UniqueFd& parent, const std::string& name) { return RemoveBeneath(parent.get(), name.c_str(), name); }

absl::Status RemoveTree(const std::string& path) { return RemoveBeneath(AT_FDCWD, path.c_str(), path); }

absl::StatusOr<std::vector<std::string>> ListFolder(const std::string& path) {
  UniqueFd fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd) return ErrnoStatus(errno, "cannot read folder", path);
  return ListDescriptor(std::move(fd), path);
}

absl::StatusOr<std::vector<std::string>> ListDescriptor(UniqueFd fd, const std::string& path) {
  std::unique_ptr<DIR, FolderCloser> folder(::fdopendir(fd.get()));
  if (!folder) return ErrnoStatus(errno, "cannot read folder", path);
  fd.release();   // the folder's now
  std::vector<std::string> names;
  errno = 0;
  while (const dirent* entry = ::readdir(folder.get())) {
    const std::string_view name = entry->d_name;
    if (name != "." && name != "..") names.emplace_back(name);
    errno = 0;
  }
  if (errno != 0) return ErrnoStatus(errno, "cannot read folder", path);
  std::sort(names.begin(), names.end());
  return names;
}

absl::StatusOr<int64_t> FreeBytes(const std::string& path) {
  if (const auto measured = FailpointValue("fs.free_bytes")) return *measured;
  struct statvfs info;
  if (::statvfs(path.c_str(), &info) != 0) return ErrnoStatus(errno, "cannot ask for the free space of", path);
  return int64_t(info.f_bavail) * int64_t(info.f_frsize);
}

bool Exists(const std::string& path) {
  struct stat info;
  return ::stat(path.c_str(), &info) == 0;
}

std::string JoinPath(std::string_view folder, std::string_view name) {
  if (folder.empty() || (!name.empty() && name.front() == '/')) return std::string(name);
  std::string path(folder);
  if (path.back() != '/') path += '/';
  path += name;
  return path;
}

std::string FolderOf(std::string_view path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string_view::npos) return ".";
  return std::string(path.substr(0, std::max<size_t>(slash, 1)));
}

}  // namespace hierad
