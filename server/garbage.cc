#include "server/garbage.h"

#include <filesystem>
#include <system_error>

#include "base/fs.h"

namespace hierad {

bool GarbageOf(const v1::Job& job, bool whole_run, v1::Garbage* garbage) {
  if (job.run_folder().empty()) return false;
  const bool named_by_us = job.spec().output().folder().empty();
  const std::string path = whole_run && named_by_us ? job.run_folder() : JoinPath(job.run_folder(), "checkpoints");
  if (!Exists(path)) return false;
  garbage->set_job_id(job.id());
  garbage->set_path(path);
  garbage->set_bytes(FolderBytes(path));
  return true;
}

int64_t FolderBytes(const std::string& folder) {
  namespace fs = std::filesystem;
  int64_t bytes = 0;
  std::error_code error;
  for (fs::recursive_directory_iterator at(folder, fs::directory_options::skip_permission_denied, error), end; !error && at != end; at.increment(error)) {
    std::error_code none;
    if (at->is_symlink(none) || !at->is_regular_file(none)) continue;
    const auto size = at->file_size(none);
    if (!none) bytes += static_cast<int64_t>(size);
  }
  return bytes;
}

}  // namespace hierad
