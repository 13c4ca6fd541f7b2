// The one way to files that a job names (data, labels, weights), for all who read them. In a rank whose hierad has allowed_roots
// they are opened beneath one of these at the moment of opening (openat2, RESOLVE_BENEATH), from descriptors of the roots that are
// held since its start: a link or folder that was exchanged since the submission leads nowhere else. Elsewhere (tools, tests, no
// roots) these are plain open, stat and so on.
#pragma once

#include <sys/stat.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/fs.h"

namespace hierad {

// For the whole process and for good: once, before the first path is opened and while there is one thread. Roots that are not there
// allow nothing; none at all: everything is allowed. FailedPrecondition: none of them can be opened.
absl::Status ConfineJobPaths(const std::vector<std::string>& roots);

// PermissionDenied: it leads out of the roots. `flags`: O_RDONLY, O_DIRECTORY, O_PATH.
absl::StatusOr<UniqueFd> OpenJobPath(const std::string& path, int flags);
absl::StatusOr<std::string> ReadJobFile(const std::string& path, int64_t max_bytes);
absl::StatusOr<std::vector<std::string>> ListJobFolder(const std::string& path);
absl::Status StatJobPath(const std::string& path, struct stat* info);   // follows links, as far as they stay
bool JobPathExists(const std::string& path);

}  // namespace hierad
