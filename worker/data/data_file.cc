#include "worker/data/data_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/job_paths.h"
#include "base/status.h"

namespace hierad {

absl::StatusOr<UniqueFd> ReopenDataFile(const std::string& path, const std::string& name) {
  auto fd = OpenJobPath(path, O_RDONLY);
  if (!fd.ok()) return ErrorOf(v1::REASON_DATA_ERROR, absl::StrCat(name, ": ", fd.status().message()));
  return fd;
}

absl::Status ReadDataFile(int fd, int64_t offset, int64_t size, const std::string& name, void* out) {
  auto* bytes = static_cast<uint8_t*>(out);
  while (size > 0) {
    const ssize_t got = pread(fd, bytes, size, offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return ErrorOf(v1::REASON_DATA_ERROR, absl::StrCat("cannot read ", name, " at byte ", offset, ": ", std::strerror(errno)));
    if (got == 0) return ErrorOf(v1::REASON_DATA_ERROR, absl::StrCat(name, " ends at byte ", offset, ", ", size, " more were expected: it was cut while in use"));
    bytes += got;
    offset += got;
    size -= got;
  }
  return absl::OkStatus();
}

}  // namespace hierad
