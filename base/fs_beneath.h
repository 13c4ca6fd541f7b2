// Paths that somebody else chose, kept beneath a root: openat2 with RESOLVE_BENEATH, so that neither "..", nor a link, nor
// a rename at the wrong moment leads out.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/fs.h"

namespace hierad {

// Opens `path`, absolute and lexically beneath `root` or relative to it. PermissionDenied: it leads out. `flags` as of
// open(2). Links that stay beneath are followed; where the kernel has no openat2 (before 5.6), none is.
absl::StatusOr<UniqueFd> OpenBeneath(const std::string& root, const std::string& path, int flags, int mode = 0);

// OK when `path` (absolute; its end need not exist yet) stays beneath one of the roots.
absl::Status CheckBeneath(const std::vector<std::string>& roots, const std::string& path);

}  // namespace hierad
