// hierad's state folder: a local disk, writable, and one hierad's at a time.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/fs.h"

namespace hierad {

// Made if missing (mode 0700). Refused, in one sentence: not a folder, not writable, a network or FUSE file system
// (SQLite's WAL needs shared memory and locks that work).
absl::Status PrepareStateFolder(const std::string& path);

// The words for a file system of statfs's magic number where no store may lie; nullptr: fine.
const char* RefusedFileSystem(long magic);

// Holds `path` (made if missing) by flock as long as the descriptor lives; refused when another process has it, with
// `who` naming what that is. The file holds the owner's pid.
absl::StatusOr<UniqueFd> LockFile(const std::string& path, const std::string& who);

// Whether some process holds it now.
bool IsLocked(const std::string& path);
// The pid in a lock file, 0 if there is none.
int LockOwner(const std::string& path);

}  // namespace hierad
