// NumPy's .npy format, versions 1 to 3: a header in Python's literal syntax, then the elements. No pickle is ever read.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/fs.h"
#include "base/plan/step_values.h"

namespace hierad {

enum class NpyType { kBool, kU8, kI8, kI16, kI32, kI64, kF16, kF32, kF64 };

struct NpyHeader {
  NpyType type = NpyType::kF32;
  int64_t item_bytes = 4;
  bool swap = false;             // elements are in the other byte order
  bool fortran = false;          // first axis fastest
  std::vector<int64_t> shape;
  int64_t elements = 0;          // product of shape
  int64_t data_offset = 0;       // bytes
  std::string descr;             // as written: "<f4"
};

// Where the header that `begin` starts ends, by its own word; 0 where it says nothing.
int64_t NpyHeaderEnd(std::string_view begin);

// `file`: the file's beginning (its header at least), `file_bytes`: its whole size, `path`: for messages, printable.
// Refuses, as DATA_ERROR, what is not numbers (naming the type found and those accepted), sizes that overflow and files
// shorter than their shape.
absl::StatusOr<NpyHeader> ParseNpyHeader(std::string_view file, int64_t file_bytes, const std::string& path);

// An array in a file of its own, a member of an .npz, or memory. Elements in C order are read with pread, so that memory stays
// flat whatever the file's size and a file that shrinks is an error; one in Fortran order is mapped, since one sample lies
// all over it. Thread-safe.
class NpyFile {
 public:
  // `keep_open` false: each read opens the file anew (folders of many shards).
  static absl::StatusOr<NpyFile> Open(const std::string& path, bool keep_open = true);
  // Every array of an .npz, in its order: (name without .npy, array). Stored members are read in place, compressed ones
  // unpacked into memory.
  static absl::StatusOr<std::vector<std::pair<std::string, NpyFile>>> OpenNpz(const std::string& path);
  NpyFile(NpyFile&&) noexcept;
  ~NpyFile();

  const NpyHeader& header() const { return header_; }
  const std::string& name() const { return name_; }   // printable: "x.npz, array y"
  int64_t row_elements() const { return header_.elements / header_.shape[0]; }
  // The narrowest of kU8, kI16, kF16 and kF32 that holds this array's values; what fp32 rounds is rounded to it.
  DType row_type() const;
  // Of row `index` of the first axis, its other axes in row-major order, cut into `channels` pieces: the values [first, first +
  // count) of each piece, as `type`: row_type() or one that holds all its values.
  absl::Status ReadRow(int64_t index, int64_t channels, int64_t first, int64_t count, DType type, void* out) const;
  absl::Status ReadRow(int64_t index, float* out) const { return ReadRow(index, 1, 0, row_elements(), DType::kF32, out); }
  // The whole of an array of whole numbers; refuses other types.
  absl::StatusOr<std::vector<int64_t>> ReadIntegers() const;

 private:
  NpyFile() = default;
  absl::Status OpenDescriptor(const std::string& path, int64_t* bytes);
  absl::Status Parse(int64_t bytes);                  // of the array, from start_ on
  absl::Status ReadBytes(int64_t offset, int64_t size, void* out) const;
  absl::Status ReadRun(int64_t element, int64_t count, DType type, void* out) const;   // in C order
  absl::Status GatherRow(int64_t index, DType type, uint8_t* out) const;               // in Fortran order

  std::string path_, name_;
  NpyHeader header_;
  std::shared_ptr<UniqueFd> fd_;       // shared by the members of an .npz; null: opened at each read, or in memory
  int64_t start_ = 0;                  // of the array in the file
  std::string memory_;                 // an unpacked member
  const uint8_t* mapping_ = nullptr;   // Fortran order: the whole file
  int64_t mapping_bytes_ = 0;
};

}  // namespace hierad
