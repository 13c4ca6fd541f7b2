// The directory of a zip archive, as .npz files are: names, places and sizes of its members; and their bytes.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace hierad {

// `size` bytes from `offset` on, or an error; never asked for bytes beyond the file.
using ReadAt = std::function<absl::Status(int64_t offset, int64_t size, void* out)>;

struct ZipMember {
  std::string name;
  bool deflated = false;       // else stored as it is
  int64_t stored_bytes = 0;    // in the file
  int64_t bytes = 0;           // when unpacked
  uint32_t crc = 0;            // of the unpacked bytes
  int64_t data_offset = 0;     // of the stored bytes in the file
};

// Every member; refuses, as DATA_ERROR naming `path`, archives that are cut, lie about sizes or offsets, span several files,
// are encrypted or compressed by other methods than deflate. `file_bytes`: of the whole file.
absl::StatusOr<std::vector<ZipMember>> ReadZipDirectory(const ReadAt& read, int64_t file_bytes, const std::string& path);

// A deflated member's bytes, checked against its size and checksum; at most limits::kUnpackedBytes.
absl::StatusOr<std::string> UnpackMember(const ReadAt& read, const ZipMember& member, const std::string& path);

}  // namespace hierad
