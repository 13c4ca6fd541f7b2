// What base/fs.h does with a path, of a descriptor that is open already; the path is for messages.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/fs.h"

namespace hierad {

absl::StatusOr<std::string> ReadDescriptor(int fd, const std::string& path, int64_t max_bytes);   // from where it stands to its end
absl::StatusOr<std::vector<std::string>> ListDescriptor(UniqueFd folder, const std::string& path);   // names, sorted, without . and ..

}  // namespace hierad
