// Files: whole reads with a limit, durable atomic writes, paths beneath a root.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/text.h"   // Printable, for paths in messages

namespace hierad {

// Owns a file descriptor.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(other.release()) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept;
  ~UniqueFd();
  int get() const { return fd_; }
  int release() { int fd = fd_; fd_ = -1; return fd; }
  void reset();
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

// `strerror` as a Status with the path: NotFound, PermissionDenied, ResourceExhausted (no space, quota), else Internal.
absl::Status ErrnoStatus(int error, std::string_view what, std::string_view path);

absl::StatusOr<std::string> ReadFile(const std::string& path, int64_t max_bytes);
// Writes `path` whole: temporary file beside it, fsync, rename, fsync of the folder.
absl::Status WriteFileAtomic(const std::string& path, std::string_view data, int mode = 0644);
absl::Status WriteAll(int fd, std::string_view data, std::string_view path_for_message);
absl::Status SyncFolder(const std::string& path);
absl::Status MakeFolders(const std::string& path, int mode = 0755);      // like mkdir -p
absl::Status RemoveTree(const std::string& path);                        // missing is fine; never follows links (but on the way to it)
absl::Status RemoveTreeIn(const UniqueFd& parent, const std::string& name);
absl::StatusOr<std::vector<std::string>> ListFolder(const std::string& path);   // names, sorted, without . and ..
absl::StatusOr<int64_t> FreeBytes(const std::string& path);
bool Exists(const std::string& path);
std::string JoinPath(std::string_view folder, std::string_view name);    // an absolute `name` stands alone
std::string FolderOf(std::string_view path);

}  // namespace hierad
