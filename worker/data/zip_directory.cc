#include "worker/data/zip_directory.h"

#include <zlib.h>

#include <algorithm>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "base/limits.h"
#include "base/status.h"
#include "base/text.h"

namespace hierad {
namespace {

constexpr int64_t kEndBytes = 22, kLocatorBytes = 20, kEnd64Bytes = 56, kEntryBytes = 46, kLocalBytes = 30;
constexpr int64_t kCommentBytes = 65535;

absl::Status Damaged(const std::string& path, const std::string& problem) {
  return ErrorOf(v1::REASON_DATA_ERROR, absl::StrCat(Printable(path), ": ", problem));
}

// Little-endian numbers of a piece of the archive.
class Bytes {
 public:
  explicit Bytes(std::string_view data) : data_(data) {}
  uint64_t At(size_t offset, int bytes) const {
    uint64_t value = 0;
    for (int i = 0; i < bytes; ++i) value |= uint64_t{static_cast<uint8_t>(data_[offset + i])} << (8 * i);
    return value;
  }

 private:
  const std::string_view data_;
};

struct Directory {
  int64_t offset = 0, bytes = 0, entries = 0;
};

class ZipReader {
 public:
  ZipReader(const ReadAt& read, int64_t file_bytes, const std::string& path) : read_(read), file_bytes_(file_bytes), path_(path) {}

  absl::StatusOr<std::vector<ZipMember>> Members() {
    ASSIGN_OR_RETURN(const Directory directory, Find());
    std::string text(directory.bytes, '\0');
    RETURN_IF_ERROR(read_(directory.offset, directory.bytes, text.data()));
    std::vector<ZipMember> members;
    int64_t at = 0, stored = 0;
    for (int64_t i = 0; i < directory.entries; ++i) {
      ASSIGN_OR_RETURN(const int64_t size, Entry(std::string_view(text).substr(at), i, &members));
      at += size;
      // Entries that share their bytes would unpack without bound.
      stored += members.back().stored_bytes;
      if (stored > file_bytes_) return Damaged(path_, absl::StrCat("zip members up to ", i, " claim ", stored, " bytes of a file of ", file_bytes_, ": they overlap"));
    }
    return members;
  }

 private:
  absl::StatusOr<Directory> Find() {
    const int64_t tail = std::min(file_bytes_, kEndBytes + kCommentBytes + kLocatorBytes);
    std::string text(tail, '\0');
    RETURN_IF_ERROR(read_(file_bytes_ - tail, tail, text.data()));
    const Bytes bytes(text);
    int64_t end = tail - kEndBytes;
    while (end >= 0 && bytes.At(end, 4) != 0x06054b50) --end;
    if (end < 0) return Damaged(path_, "no zip directory at its end: not a zip file, or cut short");
    Directory directory;
    const uint64_t disk = bytes.At(end + 4, 2);
    directory.entries = static_cast<int64_t>(bytes.At(end + 10, 2));
    directory.bytes = static_cast<int64_t>(bytes.At(end + 12, 4));
    directory.offset = static_cast<int64_t>(bytes.At(end + 16, 4));
    if (end >= kLocatorBytes && bytes.At(end - kLocatorBytes, 4) == 0x07064b50) {
      RETURN_IF_ERROR(Find64(bytes.At(end - kLocatorBytes + 8, 8), &directory));
    } else if (disk != 0) {
      return Damaged(path_, "is one part of a zip archive of several files");
    }
    if (directory.entries > limits::kZipMembers) return Damaged(path_, absl::StrCat("zip of ", directory.entries, " members; at most ", limits::kZipMembers, " are read"));
    if (directory.bytes < 0 || directory.offset < 0 || directory.bytes > file_bytes_ || directory.offset > file_bytes_ - directory.bytes || directory.bytes > limits::kZipDirectoryBytes)
      return Damaged(path_, absl::StrCat("zip directory of ", directory.bytes, " bytes at byte ", directory.offset, " of a file of ", file_bytes_));
    return directory;
  }

  absl::Status Find64(uint64_t at, Directory* directory) {
    if (file_bytes_ < kEnd64Bytes || at > static_cast<uint64_t>(file_bytes_ - kEnd64Bytes)) return Damaged(path_, absl::StrCat("zip64 directory at byte ", at, " of a file of ", file_bytes_));
    std::string text(kEnd64Bytes, '\0');
    RETURN_IF_ERROR(read_(static_cast<int64_t>(at), kEnd64Bytes, text.data()));
    const Bytes bytes(text);
    if (bytes.At(0, 4) != 0x06064b50) return Damaged(path_, absl::StrCat("no zip64 directory at byte ", at));
    directory->entries = static_cast<int64_t>(bytes.At(32, 8));
    directory->bytes = static_cast<int64_t>(bytes.At(40, 8));
    directory->offset = static_cast<int64_t>(bytes.At(48, 8));
    if (directory->entries < 0) return Damaged(path_, "zip64 directory with a negative count");
    return absl::OkStatus();
  }

  // One entry at the start of `text`; its length.
  absl::StatusOr<int64_t> Entry(std::string_view text, int64_t index, std::vector<ZipMember>* members) {
    const Bytes bytes(text);
    const auto problem = [&](const std::string& what) { return Damaged(path_, absl::StrCat("zip member ", index, ": ", what)); };
    if (static_cast<int64_t>(text.size()) < kEntryBytes || bytes.At(0, 4) != 0x02014b50) return problem("its entry is cut or damaged");
    const int64_t name_bytes = bytes.At(28, 2), extra_bytes = bytes.At(30, 2), size = kEntryBytes + name_bytes + extra_bytes + static_cast<int64_t>(bytes.At(32, 2));
    if (static_cast<int64_t>(text.size()) < size) return problem("its entry is cut");
    ZipMember member;
    member.name = std::string(text.substr(kEntryBytes, name_bytes));
    const uint64_t flags = bytes.At(8, 2), method = bytes.At(10, 2);
    member.crc = static_cast<uint32_t>(bytes.At(16, 4));
    uint64_t stored = bytes.At(20, 4), unpacked = bytes.At(24, 4), local = bytes.At(42, 4);
    Extra64(text.substr(kEntryBytes + name_bytes, extra_bytes), &unpacked, &stored, &local);
    if (flags & 1) return problem("is encrypted");
    if (method != 0 && method != 8) return problem(absl::StrCat("is compressed by method ", method, "; stored and deflated ones are read"));
    member.deflated = method == 8;
    if (stored > static_cast<uint64_t>(file_bytes_) || local > static_cast<uint64_t>(file_bytes_) || unpacked > uint64_t{1} << 62 || (!member.deflated && stored != unpacked))
      return problem(absl::StrCat("claims ", stored, " bytes at byte ", local, ", ", unpacked, " unpacked, in a file of ", file_bytes_));
    member.stored_bytes = static_cast<int64_t>(stored);
    member.bytes = static_cast<int64_t>(unpacked);
    RETURN_IF_ERROR(Locate(static_cast<int64_t>(local), index, &member));
    members->push_back(std::move(member));
    return size;
  }

  // Sizes beyond 32 bits stand in an extra field, in this order, only those that the entry itself leaves open.
  static void Extra64(std::string_view extra, uint64_t* unpacked, uint64_t* stored, uint64_t* local) {
    while (extra.size() >= 4) {
      const Bytes bytes(extra);
      const size_t size = std::min<size_t>(bytes.At(2, 2), extra.size() - 4);
      if (bytes.At(0, 2) == 1) {
        size_t at = 4;
        for (uint64_t* value : {unpacked, stored, local}) {
          if (*value != 0xFFFFFFFF || at + 8 > 4 + size) continue;
          *value = bytes.At(at, 8);
          at += 8;
        }
        return;
      }
      extra.remove_prefix(4 + size);
    }
  }

  absl::Status Locate(int64_t local, int64_t index, ZipMember* member) {
    if (local > file_bytes_ - kLocalBytes) return Damaged(path_, absl::StrCat("zip member ", index, " at byte ", local, " lies beyond the file's ", file_bytes_));
    std::string text(kLocalBytes, '\0');
    RETURN_IF_ERROR(read_(local, kLocalBytes, text.data()));
    const Bytes bytes(text);
    if (bytes.At(0, 4) != 0x04034b50) return Damaged(path_, absl::StrCat("zip member ", index, ": nothing of it at byte ", local));
    member->data_offset = local + kLocalBytes + static_cast<int64_t>(bytes.At(26, 2) + bytes.At(28, 2));
    if (member->data_offset > file_bytes_ || member->stored_bytes > file_bytes_ - member->data_offset)
      return Damaged(path_, absl::StrCat("zip member ", index, " claims ", member->stored_bytes, " bytes at byte ", member->data_offset, " of a file of ", file_bytes_, ": cut short"));
    return absl::OkStatus();
  }

  const ReadAt& read_;
  const int64_t file_bytes_;
  const std::string& path_;
};

}  // namespace

absl::StatusOr<std::vector<ZipMember>> ReadZipDirectory(const ReadAt& read, int64_t file_bytes, const std::string& path) {
  if (file_bytes < kEndBytes) return Damaged(path, absl::StrCat("no zip file: ", file_bytes, " bytes"));
  return ZipReader(read, file_bytes, path).Members();
}

absl::StatusOr<std::string> UnpackMember(const ReadAt& read, const ZipMember& member, const std::string& path) {
  const std::string name = absl::StrCat(Printable(path), ", member ", Printable(member.name, 100));
  if (member.bytes > limits::kUnpackedBytes)
    return ErrorOf(v1::REASON_DATA_ERROR, absl::StrCat(name, " unpacks to ", member.bytes, " bytes; at most ", limits::kUnpackedBytes, " are held in memory: write it by numpy.savez, which does not compress, or as .npy"));
  if (member.bytes / 1100 > member.stored_bytes)   // deflate makes at most 1032 bytes of one
    return ErrorOf(v1::REASON_DATA_ERROR, absl::StrCat(name, " claims to unpack ", member.stored_bytes, " bytes to ", member.bytes, ", which deflate cannot"));
  z_stream stream{};
  if (inflateInit2(&stream, -MAX_WBITS) != Z_OK) return ErrorOf(v1::REASON_HOST_OOM, absl::StrCat("no memory to unpack ", name));
  struct End {
    z_stream* stream;
    ~End() { inflateEnd(stream); }
  } end{&stream};
  std::string out(member.bytes, '\0'), piece;
  int result = Z_OK;
  int64_t done = 0, left = member.stored_bytes, at = member.data_offset;
  while (left > 0 && result == Z_OK) {
    piece.resize(std::min<int64_t>(left, 1 << 20));
    RETURN_IF_ERROR(read(at, piece.size(), piece.data()));
    at += piece.size();
    left -= piece.size();
    stream.next_in = reinterpret_cast<Bytef*>(piece.data());
    stream.avail_in = static_cast<uInt>(piece.size());
    while (stream.avail_in > 0 && result == Z_OK) {
      const int64_t room = std::min<int64_t>(member.bytes - done, 1 << 30);
      stream.next_out = reinterpret_cast<Bytef*>(out.data() + done);
      stream.avail_out = static_cast<uInt>(room);
      result = inflate(&stream, Z_NO_FLUSH);
      done += room - stream.avail_out;
      if (room == 0 && result == Z_OK) result = Z_DATA_ERROR;   // more than was claimed
    }
  }
  if (result != Z_STREAM_END || done != member.bytes)
    return ErrorOf(v1::REASON_DATA_ERROR, absl::StrCat(name, " is damaged: it unpacks to ", done, " bytes of ", member.bytes));
  uLong crc = crc32(0, nullptr, 0);
  for (int64_t i = 0; i < done; i += 1 << 30) crc = crc32(crc, reinterpret_cast<const Bytef*>(out.data() + i), static_cast<uInt>(std::min<int64_t>(done - i, 1 << 30)));
  if (crc != member.crc) return ErrorOf(v1::REASON_DATA_ERROR, absl::StrCat(name, " is damaged: its checksum is wrong"));
  return out;
}

}  // namespace hierad
