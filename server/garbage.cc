#include "server/garbage.h"

#include <fcntl.h>

#include <filesystem>
#include <string>
#include <system_error>

#include "base/fs_beneath.h"
#include "base/limits.h"

namespace hierad {

bool GarbageOf(const v1::Job& job, bool whole_run, const std::optional<Account>& account, v1::Garbage* garbage) {
  if (job.run_folder().empty()) return false;
  const FilesAs rights(account);
  garbage->set_job_id(job.id());
  const std::string path = whole_run && !FolderIsGiven(job) ? job.run_folder() : JoinPath(job.run_folder(), "checkpoints");
  garbage->set_path(path);
  if (!rights.status().ok()) {
    garbage->set_problem(std::string(rights.status().message()));
    return true;
  }
  const auto folder = OpenWithoutLinks(path, O_RDONLY | O_DIRECTORY);
  if (absl::IsNotFound(folder.status())) return false;
  if (folder.ok()) {
    garbage->set_bytes(FolderBytes(*folder));
  } else {
    garbage->set_problem(std::string(folder.status().message()));
  }
  return true;
}

void RemoveGarbage(const std::optional<Account>& account, v1::Garbage* garbage) {
  const FilesAs rights(account);
  const auto parent = rights.status().ok() ? OpenWithoutLinks(FolderOf(garbage->path()), O_PATH | O_DIRECTORY)
                                           : absl::StatusOr<UniqueFd>(rights.status());
  absl::Status removed = parent.ok() ? RemoveTreeIn(*parent, garbage->path().substr(garbage->path().rfind('/') + 1)) : parent.status();
  if (absl::IsNotFound(removed)) removed = absl::OkStatus();   // with another job's folder around it
  garbage->set_removed(removed.ok());
  garbage->set_problem(removed.ok() ? "" : std::string(removed.message()));
}

int64_t FolderBytes(const UniqueFd& folder) {
  namespace fs = std::filesystem;
  int64_t bytes = 0;
  std::error_code error;
  for (fs::recursive_directory_iterator at("/proc/self/fd/" + std::to_string(folder.get()), fs::directory_options::skip_permission_denied, error), end; !error && at != end; at.increment(error)) {
    if (at.depth() >= limits::kFolderDepth) at.disable_recursion_pending();
    std::error_code none;
    if (at->is_symlink(none) || !at->is_regular_file(none)) continue;
    const auto size = at->file_size(none);
    if (!none) bytes += static_cast<int64_t>(size);
  }
  return bytes;
}

}  // namespace hierad
