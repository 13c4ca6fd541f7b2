// What base/fs.h does with a path, of a descriptor that is open already; the path is for messages.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "base/fs.h"

namespace hierad {

absl::StatusOr<std::string> ReadDescriptor(int fd, const std::string& path, int64_t max_bytes);   // from where it stands to its end
absl::StatusOr<std::vector<std::string>> ListDescriptor(UniqueFd folder, const std::string& path);   // names, sorted, without . and ..
absl::Status WriteFileAtomicIn(int folder, const std::string& name, std::string_view data, int mode, const std::string& path);
// A file in a folder where somebody else may put things (AT_FDCWD: `name` is its path): no link is followed, no pipe waited for.
// `flags` as of open(2). FailedPrecondition: what has that name is no file.
absl::StatusOr<UniqueFd> OpenRegularIn(int folder, const std::string& name, int flags, int mode, const std::string& path);

}  // namespace hierad
