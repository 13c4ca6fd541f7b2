// The bytes of a data file, read where they lie. Any thread. Errors are REASON_DATA_ERROR and call the file `name`.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/fs.h"

namespace hierad {

// A file that was looked at before: it is opened again for one read where descriptors are not kept.
absl::StatusOr<UniqueFd> ReopenDataFile(const std::string& path, const std::string& name);
// All `size` bytes from `offset` on; a file that ends before them was cut while in use.
absl::Status ReadDataFile(int fd, int64_t offset, int64_t size, const std::string& name, void* out);

}  // namespace hierad
