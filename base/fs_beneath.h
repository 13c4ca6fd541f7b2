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

// Opens `path`, absolute, as it is written: PermissionDenied where any part of it is a link. For what this process may do and the
// owner of a folder on the way may not.
absl::StatusOr<UniqueFd> OpenWithoutLinks(const std::string& path, int flags);

// Roots that stay what they are: each is opened once, and paths are resolved from its descriptor, whatever takes its name later.
class HeldRoots {
 public:
  // Those that are there; FailedPrecondition: none is.
  static absl::StatusOr<HeldRoots> Open(const std::vector<std::string>& roots);
  // As OpenBeneath, of the root that `path` (absolute, without "..") is lexically beneath.
  absl::StatusOr<UniqueFd> Open(const std::string& path, int flags) const;

 private:
  struct Root {
    std::string path;
    UniqueFd folder;
  };
  std::vector<Root> roots_;
  std::string all_;   // for messages
};

// Opens the folder `path` (absolute; O_PATH) beneath the first of the roots that it is lexically in, and makes of it what is missing, each
// part in the descriptor of the one before: whatever is renamed meanwhile, nothing is made elsewhere. Errors as OpenBeneath's.
absl::StatusOr<UniqueFd> MakeFoldersBeneath(const std::vector<std::string>& roots, const std::string& path);

// OK when `path` (absolute; its end need not exist yet) stays beneath one of the roots.
absl::Status CheckBeneath(const std::vector<std::string>& roots, const std::string& path);

}  // namespace hierad
