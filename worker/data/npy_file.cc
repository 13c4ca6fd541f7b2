#include "worker/data/npy_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/half.h"
#include "base/job_paths.h"
#include "base/status.h"
#include "worker/data/data_file.h"
#include "worker/data/zip_directory.h"

namespace hierad {
namespace {

constexpr int64_t kFirstBytes = 4096;   // holds nearly every header whole

template <typename Word>
Word Load(const uint8_t* bytes, bool swap) {
  Word word;
  std::memcpy(&word, bytes, sizeof word);
  if constexpr (sizeof(Word) == 2) return swap ? __builtin_bswap16(word) : word;
  if constexpr (sizeof(Word) == 4) return swap ? __builtin_bswap32(word) : word;
  if constexpr (sizeof(Word) == 8) return swap ? __builtin_bswap64(word) : word;
  return word;
}

// `count` elements, `stride` bytes apart. Neighbours have a loop of their own, which the compiler makes wide.
template <int kBytes, typename Out, typename Convert>
void ConvertRun(const uint8_t* bytes, int64_t stride, int64_t count, Out* out, Convert convert) {
  if (stride == kBytes) {
    for (int64_t i = 0; i < count; ++i) out[i] = convert(bytes + i * kBytes);
  } else {
    for (int64_t i = 0; i < count; ++i) out[i] = convert(bytes + i * stride);
  }
}

// Of the types that Out holds all values of, all to float.
template <typename Out>
void ConvertElements(const NpyHeader& header, const uint8_t* bytes, int64_t stride, int64_t count, Out* out) {
  const bool swap = header.swap;
  switch (header.type) {
    case NpyType::kBool: return ConvertRun<1>(bytes, stride, count, out, [](const uint8_t* p) { return Out(*p ? 1 : 0); });
    case NpyType::kU8: return ConvertRun<1>(bytes, stride, count, out, [](const uint8_t* p) { return Out(*p); });
    case NpyType::kI8: return ConvertRun<1>(bytes, stride, count, out, [](const uint8_t* p) { return Out(int8_t(*p)); });
    case NpyType::kI16: return ConvertRun<2>(bytes, stride, count, out, [swap](const uint8_t* p) { return Out(int16_t(Load<uint16_t>(p, swap))); });
    case NpyType::kI32: return ConvertRun<4>(bytes, stride, count, out, [swap](const uint8_t* p) { return Out(int32_t(Load<uint32_t>(p, swap))); });
    case NpyType::kI64: return ConvertRun<8>(bytes, stride, count, out, [swap](const uint8_t* p) { return Out(int64_t(Load<uint64_t>(p, swap))); });
    case NpyType::kF16: return ConvertRun<2>(bytes, stride, count, out, [swap](const uint8_t* p) { return Out(HalfToFloat(Load<uint16_t>(p, swap))); });
    case NpyType::kF32: return ConvertRun<4>(bytes, stride, count, out, [swap](const uint8_t* p) { return Out(std::bit_cast<float>(Load<uint32_t>(p, swap))); });
    case NpyType::kF64: return ConvertRun<8>(bytes, stride, count, out, [swap](const uint8_t* p) { return Out(std::bit_cast<double>(Load<uint64_t>(p, swap))); });
  }
}

// To a row's type.
void ConvertElements(const NpyHeader& header, const uint8_t* bytes, int64_t stride, int64_t count, DType type, void* out) {
  if (type == DType::kU8) return ConvertElements(header, bytes, stride, count, static_cast<uint8_t*>(out));
  if (type == DType::kI16) return ConvertElements(header, bytes, stride, count, static_cast<int16_t*>(out));
  if (type == DType::kF32) return ConvertElements(header, bytes, stride, count, static_cast<float*>(out));
  const bool swap = header.swap;   // half precision comes from itself alone: its bits
  ConvertRun<2>(bytes, stride, count, static_cast<uint16_t*>(out), [swap](const uint8_t* p) { return Load<uint16_t>(p, swap); });
}

}  // namespace

NpyFile::NpyFile(NpyFile&& other) noexcept
    : path_(std::move(other.path_)), name_(std::move(other.name_)), header_(std::move(other.header_)), fd_(std::move(other.fd_)),
      start_(other.start_), memory_(std::move(other.memory_)), mapping_(std::exchange(other.mapping_, nullptr)), mapping_bytes_(other.mapping_bytes_) {}

NpyFile::~NpyFile() {
  if (mapping_) munmap(const_cast<uint8_t*>(mapping_), mapping_bytes_);
}

absl::Status NpyFile::OpenDescriptor(const std::string& path, int64_t* bytes) {
  path_ = path;
  name_ = Printable(path);
  ASSIGN_OR_RETURN(UniqueFd fd, OpenJobPath(path, O_RDONLY));
  fd_ = std::make_shared<UniqueFd>(std::move(fd));
  struct stat status;
  if (fstat(fd_->get(), &status) != 0) return ErrnoStatus(errno, "cannot stat", path);
  if (!S_ISREG(status.st_mode)) return ErrorOf(v1::REASON_DATA_ERROR, absl::StrCat(Printable(path), " is not a regular file"));
  *bytes = status.st_size;
  return absl::OkStatus();
}

absl::Status NpyFile::Parse(int64_t bytes) {
  std::string begin(std::min<int64_t>(bytes, kFirstBytes), '\0');
  RETURN_IF_ERROR(ReadBytes(0, begin.size(), begin.data()));
  if (const int64_t whole = std::min(bytes, NpyHeaderEnd(begin)); whole > int64_t(begin.size())) {
    begin.resize(whole);
    RETURN_IF_ERROR(ReadBytes(0, begin.size(), begin.data()));
  }
  ASSIGN_OR_RETURN(header_, ParseNpyHeader(begin, bytes, name_));
  if (!header_.fortran || header_.elements == 0 || !memory_.empty()) return absl::OkStatus();
  mapping_bytes_ = start_ + bytes;
  void* mapping = mmap(nullptr, mapping_bytes_, PROT_READ, MAP_SHARED, fd_->get(), 0);
  if (mapping == MAP_FAILED) return ErrnoStatus(errno, "cannot map (Fortran order; C order needs no mapping)", path_);
  mapping_ = static_cast<const uint8_t*>(mapping);
  return absl::OkStatus();
}

absl::StatusOr<NpyFile> NpyFile::Open(const std::string& path, bool keep_open) {
  NpyFile file;
  int64_t bytes = 0;
  RETURN_IF_ERROR(file.OpenDescriptor(path, &bytes));
  RETURN_IF_ERROR(file.Parse(bytes));
  if (!keep_open) file.fd_.reset();
  return file;
}

absl::StatusOr<std::vector<std::pair<std::string, NpyFile>>> NpyFile::OpenNpz(const std::string& path) {
  NpyFile whole;
  int64_t bytes = 0;
  RETURN_IF_ERROR(whole.OpenDescriptor(path, &bytes));
  const ReadAt read = [&whole](int64_t offset, int64_t size, void* out) { return whole.ReadBytes(offset, size, out); };
  ASSIGN_OR_RETURN(const std::vector<ZipMember> members, ReadZipDirectory(read, bytes, path));
  std::vector<std::pair<std::string, NpyFile>> arrays;
  for (const ZipMember& member : members) {
    if (!absl::EndsWith(member.name, ".npy")) continue;
    const std::string array = member.name.substr(0, member.name.size() - 4);
    NpyFile file;
    file.path_ = path;
    file.name_ = absl::StrCat(whole.name_, ", array ", Printable(array, 100));
    if (member.deflated) {
      ASSIGN_OR_RETURN(file.memory_, UnpackMember(read, member, path));
    } else {
      file.fd_ = whole.fd_;
      file.start_ = member.data_offset;
    }
    RETURN_IF_ERROR(file.Parse(member.bytes));
    arrays.emplace_back(array, std::move(file));
  }
  return arrays;
}

absl::Status NpyFile::ReadBytes(int64_t offset, int64_t size, void* out) const {
  if (!memory_.empty()) {
    if (offset < 0 || size > static_cast<int64_t>(memory_.size()) - offset) return absl::InternalError(absl::StrCat(name_, ": ", size, " bytes at ", offset, " of ", memory_.size()));
    std::memcpy(out, memory_.data() + offset, size);
    return absl::OkStatus();
  }
  if (fd_) return ReadDataFile(fd_->get(), offset + start_, size, name_, out);
  ASSIGN_OR_RETURN(const UniqueFd opened, ReopenDataFile(path_, name_));
  return ReadDataFile(opened.get(), offset + start_, size, name_, out);
}

DType NpyFile::row_type() const {
  switch (header_.type) {
    case NpyType::kBool:
    case NpyType::kU8: return DType::kU8;
    case NpyType::kI8:
    case NpyType::kI16: return DType::kI16;
    case NpyType::kF16: return DType::kF16;
    default: return DType::kF32;
  }
}

absl::Status NpyFile::ReadRun(int64_t element, int64_t count, DType type, void* out) const {
  const int64_t bytes = count * header_.item_bytes, offset = header_.data_offset + element * header_.item_bytes;
  const bool as_it_is = !header_.swap && (type == DType::kF32 ? header_.type == NpyType::kF32 : type == DType::kF16 ? header_.type == NpyType::kF16
                                          : type == DType::kI16 ? header_.type == NpyType::kI16 : header_.type == NpyType::kU8);
  if (as_it_is) return ReadBytes(offset, bytes, out);
  const std::unique_ptr<uint8_t[]> raw(new uint8_t[bytes]);   // a vector would be cleared first
  RETURN_IF_ERROR(ReadBytes(offset, bytes, raw.get()));
  ConvertElements(header_, raw.get(), header_.item_bytes, count, type, out);
  return absl::OkStatus();
}

absl::Status NpyFile::ReadRow(int64_t index, int64_t channels, int64_t first, int64_t count, DType type, void* out) const {
  const int64_t row = row_elements(), piece = row / channels, size = SizeOf(type);
  auto* const to = static_cast<uint8_t*>(out);
  if (header_.fortran) {
    if (count == piece) return GatherRow(index, type, to);
    const std::unique_ptr<uint8_t[]> whole(new uint8_t[row * size]);
    RETURN_IF_ERROR(GatherRow(index, type, whole.get()));
    for (int64_t c = 0; c < channels; ++c) std::memcpy(to + c * count * size, whole.get() + (c * piece + first) * size, count * size);
    return absl::OkStatus();
  }
  if (count == piece) return ReadRun(index * row, row, type, to);
  for (int64_t c = 0; c < channels; ++c) RETURN_IF_ERROR(ReadRun(index * row + c * piece + first, count, type, to + c * count * size));
  return absl::OkStatus();
}

// A mapped file that was cut is a SIGBUS at its lost pages: its size is looked at before each row. A cut within the
// microseconds of a row still ends the process; the next attempt then names the file when it opens it.
// Element (index, i1, .., ik) lies at index + rows * (i1 + shape1 * (i2 + ..)); the innermost axis is one strided run.
absl::Status NpyFile::GatherRow(int64_t index, DType type, uint8_t* out) const {
  if (mapping_) {
    struct stat status;
    const absl::Status known = !fd_ ? StatJobPath(path_, &status) : fstat(fd_->get(), &status) == 0 ? absl::OkStatus() : ErrnoStatus(errno, "cannot stat", path_);
    if (!known.ok()) return ErrorOf(v1::REASON_DATA_ERROR, std::string(known.message()));
    if (status.st_size < mapping_bytes_)
      return ErrorOf(v1::REASON_DATA_ERROR, absl::StrCat(name_, " ends at byte ", status.st_size, ", ", mapping_bytes_ - status.st_size, " more were expected: it was cut while in use"));
  }
  const int64_t rows = header_.shape[0], row = row_elements();
  const uint8_t* data = (memory_.empty() ? mapping_ + start_ : reinterpret_cast<const uint8_t*>(memory_.data())) + header_.data_offset;
  const int axes = static_cast<int>(header_.shape.size());
  const int64_t inner = axes > 1 ? header_.shape.back() : 1;
  const int64_t inner_stride = axes > 1 ? header_.elements / inner : 0;
  std::vector<int64_t> at(axes, 0);
  for (int64_t done = 0; done < row; done += inner) {
    int64_t element = index, stride = rows;
    for (int a = 1; a + 1 < axes; ++a) {
      element += at[a] * stride;
      stride *= header_.shape[a];
    }
    ConvertElements(header_, data + element * header_.item_bytes, inner_stride * header_.item_bytes, inner, type, out + done * SizeOf(type));
    for (int a = axes - 2; a >= 1; --a) {
      if (++at[a] < header_.shape[a]) break;
      at[a] = 0;
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<int64_t>> NpyFile::ReadIntegers() const {
  const NpyType type = header_.type;
  if (type == NpyType::kF16 || type == NpyType::kF32 || type == NpyType::kF64)
    return ErrorOf(v1::REASON_DATA_ERROR, absl::StrCat(name_, ": labels of type '", header_.descr, "'; whole numbers are needed (|u1, |i1, i2, i4, i8)"));
  std::vector<uint8_t> raw(header_.elements * header_.item_bytes);
  RETURN_IF_ERROR(ReadBytes(header_.data_offset, raw.size(), raw.data()));
  std::vector<int64_t> values(header_.elements);
  for (int64_t i = 0; i < header_.elements; ++i) {
    const uint8_t* p = raw.data() + i * header_.item_bytes;
    if (type == NpyType::kI64) values[i] = static_cast<int64_t>(Load<uint64_t>(p, header_.swap));
    else if (type == NpyType::kI32) values[i] = static_cast<int32_t>(Load<uint32_t>(p, header_.swap));
    else if (type == NpyType::kI16) values[i] = static_cast<int16_t>(Load<uint16_t>(p, header_.swap));
    else if (type == NpyType::kI8) values[i] = static_cast<int8_t>(*p);
    else values[i] = *p;
  }
  return values;
}

}  // namespace hierad
