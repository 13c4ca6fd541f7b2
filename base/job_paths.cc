#include "base/job_paths.h"

#include <fcntl.h>

#include <cerrno>
#include <optional>
#include <utility>

#include "base/fs_beneath.h"
#include "base/fs_descriptor.h"
#include "base/status.h"

namespace hierad {
namespace {

// Set once while there is one thread, then read by all.
std::optional<HeldRoots>& Roots() {
  static std::optional<HeldRoots> roots;
  return roots;
}

}  // namespace

absl::Status ConfineJobPaths(const std::vector<std::string>& roots) {
  if (roots.empty()) return absl::OkStatus();
  ASSIGN_OR_RETURN(HeldRoots held, HeldRoots::Open(roots));
  Roots() = std::move(held);
  return absl::OkStatus();
}

absl::StatusOr<UniqueFd> OpenJobPath(const std::string& path, int flags) {
  if (Roots()) {
    auto fd = Roots()->Open(path, flags);
    return absl::IsPermissionDenied(fd.status()) ? Annotate(fd.status(), "hierad's setting allowed_roots") : std::move(fd);
  }
  UniqueFd fd(open(path.c_str(), flags | O_CLOEXEC));
  if (!fd) return ErrnoStatus(errno, "cannot open", path);
  return fd;
}

absl::StatusOr<std::string> ReadJobFile(const std::string& path, int64_t max_bytes) {
  ASSIGN_OR_RETURN(const UniqueFd fd, OpenJobPath(path, O_RDONLY));
  return ReadDescriptor(fd.get(), path, max_bytes);
}

absl::StatusOr<std::vector<std::string>> ListJobFolder(const std::string& path) {
  ASSIGN_OR_RETURN(UniqueFd fd, OpenJobPath(path, O_RDONLY | O_DIRECTORY));
  return ListDescriptor(std::move(fd), path);
}

absl::Status StatJobPath(const std::string& path, struct stat* info) {
  if (!Roots()) return stat(path.c_str(), info) == 0 ? absl::OkStatus() : ErrnoStatus(errno, "cannot find", path);
  ASSIGN_OR_RETURN(const UniqueFd fd, OpenJobPath(path, O_PATH));
  return fstat(fd.get(), info) == 0 ? absl::OkStatus() : ErrnoStatus(errno, "cannot find", path);
}

bool JobPathExists(const std::string& path) {
  struct stat info;
  return StatJobPath(path, &info).ok();
}

}  // namespace hierad
