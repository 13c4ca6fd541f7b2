#include "worker/checkpoint/safetensors.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <nlohmann/json.hpp>
#include <set>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/fs.h"
#include "base/half.h"
#include "base/limits.h"
#include "base/sha256.h"
#include "base/status.h"

static_assert(std::endian::native == std::endian::little, "the format is little-endian");

namespace hierad {
namespace {

using nlohmann::json;

constexpr size_t kPiece = 1 << 20;   // written, hashed or converted at a time

absl::Status Damaged(const std::string& path, const std::string& rule) {
  return ErrorOf(v1::REASON_DATA_ERROR, absl::StrCat("\"", Printable(path), "\" is no intact safetensors file: ", rule));
}

// Writes and hashes in one pass.
absl::Status Put(int fd, const std::string& path, const char* data, size_t size, Sha256* hash) {
  while (size > 0) {
    const size_t n = std::min(size, kPiece);
    hash->Update(data, n);
    RETURN_IF_ERROR(WriteAll(fd, {data, n}, path));
    data += n;
    size -= n;
  }
  return absl::OkStatus();
}

int64_t ElementsOf(const std::vector<int64_t>& shape) {
  int64_t n = 1;
  for (int64_t s : shape) n *= s;
  return n;
}

int64_t BytesOf(const std::string& dtype) {
  if (dtype == "F64") return 8;
  if (dtype == "F32") return 4;
  if (dtype == "F16" || dtype == "BF16") return 2;
  return 0;
}

void Convert(const std::string& dtype, const char* from, size_t elements, float* to) {
  for (size_t i = 0; i < elements; ++i) {
    if (dtype == "F64") {
      double value;
      std::memcpy(&value, from + 8 * i, 8);
      to[i] = float(value);
    } else {
      uint16_t value;
      std::memcpy(&value, from + 2 * i, 2);
      to[i] = dtype == "F16" ? HalfToFloat(value) : std::bit_cast<float>(uint32_t(value) << 16);
    }
  }
}

// Reads [at, at + size) of the file.
absl::Status GetAt(int fd, const std::string& path, int64_t at, char* to, int64_t size) {
  while (size > 0) {
    const ssize_t n = pread(fd, to, size_t(size), at);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return ErrnoStatus(errno, "cannot read", path);
    if (n == 0) return Damaged(path, absl::StrCat("it ends at byte ", at, " while being read"));
    to += n;
    at += n;
    size -= n;
  }
  return absl::OkStatus();
}

struct Entry {
  std::string name, dtype;
  std::vector<int64_t> shape;
  int64_t begin = 0, end = 0;
};

bool IsSize(const json& value) { return value.is_number_unsigned() && value.get<uint64_t>() <= uint64_t(INT64_MAX); }

absl::StatusOr<Entry> ParseEntry(const std::string& path, const std::string& name, const json& value) {
  const auto refuse = [&](const std::string& rule) { return Damaged(path, absl::StrCat("tensor \"", Printable(name), "\": ", rule)); };
  if (!value.is_object()) return refuse("its entry is not an object");
  for (const char* key : {"dtype", "shape", "data_offsets"}) {
    if (!value.contains(key)) return refuse(absl::StrCat("\"", key, "\" is missing"));
  }
  Entry entry;
  entry.name = name;
  if (!value["dtype"].is_string()) return refuse("dtype is not a string");
  entry.dtype = value["dtype"].get<std::string>();
  const int64_t item = BytesOf(entry.dtype);
  if (item == 0) return refuse(absl::StrCat("dtype ", Printable(entry.dtype), " is not read here; F32, F16, BF16 and F64 are"));
  const json& offsets = value["data_offsets"];
  if (!offsets.is_array() || offsets.size() != 2 || !IsSize(offsets[0]) || !IsSize(offsets[1])) {
    return refuse("data_offsets are not two sizes");
  }
  entry.begin = offsets[0].get<int64_t>();
  entry.end = offsets[1].get<int64_t>();
  if (entry.begin > entry.end) return refuse(absl::StrCat("it begins at ", entry.begin, " after its end ", entry.end));
  if (!value["shape"].is_array()) return refuse("shape is not a list");
  int64_t bytes = item;
  for (const json& axis : value["shape"]) {
    if (!IsSize(axis)) return refuse("shape holds something that is no size");
    entry.shape.push_back(axis.get<int64_t>());
    if (__builtin_mul_overflow(bytes, entry.shape.back(), &bytes)) return refuse("its size in bytes does not fit into 64 bits");
  }
  if (bytes != entry.end - entry.begin) {
    return refuse(absl::StrCat("shape [", absl::StrJoin(entry.shape, ", "), "] of ", entry.dtype, " needs ", bytes, " bytes, its offsets span ",
                               entry.end - entry.begin));
  }
  return entry;
}

// The header as JSON; a doubled key is an error (the parser alone would keep the last).
absl::StatusOr<json> ParseHeader(const std::string& path, const std::string& text) {
  if (text.empty() || text[0] != '{') return Damaged(path, "its header does not begin with '{'");
  std::vector<std::set<std::string>> keys;
  std::string doubled;
  const auto watch = [&](int, json::parse_event_t event, json& value) {
    if (event == json::parse_event_t::object_start) keys.emplace_back();
    if (event == json::parse_event_t::object_end) keys.pop_back();
    if (event == json::parse_event_t::key && !keys.back().insert(value.get<std::string>()).second && doubled.empty()) {
      doubled = value.get<std::string>();
    }
    return true;
  };
  json header;
  try {
    header = json::parse(text, watch);
  } catch (const json::exception&) {
    return Damaged(path, "its header is not JSON");
  }
  if (!doubled.empty()) return Damaged(path, absl::StrCat("key \"", Printable(doubled), "\" stands twice in its header"));
  if (!header.is_object()) return Damaged(path, "its header is not an object");
  return header;
}

absl::Status CheckLayout(const std::string& path, std::vector<Entry>* entries, int64_t data_bytes) {
  std::sort(entries->begin(), entries->end(),
            [](const Entry& a, const Entry& b) { return std::pair(a.begin, a.end) < std::pair(b.begin, b.end); });
  int64_t at = 0;
  for (const Entry& entry : *entries) {
    if (entry.begin != at) {
      return Damaged(path, absl::StrCat("tensor \"", Printable(entry.name), "\" begins at byte ", entry.begin, " of the data where ", at,
                                        " is due: ", entry.begin < at ? "tensors overlap" : "there is a hole"));
    }
    at = entry.end;
  }
  if (at != data_bytes) {
    return Damaged(path, absl::StrCat("its tensors take ", at, " bytes, the file holds ", data_bytes, " bytes of data",
                                      at > data_bytes ? " (cut short?)" : ""));
  }
  return absl::OkStatus();
}

absl::Status ReadTensor(int fd, const std::string& path, int64_t data_begin, const Entry& entry, Tensor* tensor) {
  tensor->shape = entry.shape;
  const size_t elements = size_t(ElementsOf(entry.shape));
  tensor->data.resize(elements);
  if (entry.dtype == "F32") {
    return GetAt(fd, path, data_begin + entry.begin, reinterpret_cast<char*>(tensor->data.data()), entry.end - entry.begin);
  }
  const size_t item = size_t(BytesOf(entry.dtype));
  std::vector<char> piece(std::min(elements, kPiece) * item);
  for (size_t done = 0; done < elements; done += kPiece) {
    const size_t n = std::min(elements - done, kPiece);
    RETURN_IF_ERROR(GetAt(fd, path, data_begin + entry.begin + int64_t(done * item), piece.data(), int64_t(n * item)));
    Convert(entry.dtype, piece.data(), n, tensor->data.data() + done);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::string> WriteSafetensors(const std::string& path, const std::vector<TensorView>& tensors,
                                             const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  int64_t at = 0;
  for (const TensorView& tensor : tensors) {
    const int64_t end = at + ElementsOf(tensor.shape) * int64_t(sizeof(float));
    if (header.contains(tensor.name)) return absl::InternalError(absl::StrCat("tensor \"", tensor.name, "\" would be written twice"));
    header[tensor.name] = {{"dtype", "F32"}, {"shape", tensor.shape}, {"data_offsets", {at, end}}};
    at = end;
  }
  std::string text = header.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  text.resize((text.size() + 7) / 8 * 8, ' ');
  UniqueFd fd(open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (!fd) return ErrnoStatus(errno, "cannot create", path);
  Sha256 hash;
  const uint64_t length = text.size();
  RETURN_IF_ERROR(Put(fd.get(), path, reinterpret_cast<const char*>(&length), sizeof length, &hash));
  RETURN_IF_ERROR(Put(fd.get(), path, text.data(), text.size(), &hash));
  for (const TensorView& tensor : tensors) {
    RETURN_IF_ERROR(Put(fd.get(), path, reinterpret_cast<const char*>(tensor.data),
                        size_t(ElementsOf(tensor.shape)) * sizeof(float), &hash));
  }
  if (fsync(fd.get()) != 0) return ErrnoStatus(errno, "cannot sync", path);
  if (const int raw = fd.release(); close(raw) != 0) return ErrnoStatus(errno, "cannot close", path);
  return hash.HexDigest();
}

absl::StatusOr<SafetensorsFile> ReadSafetensors(const std::string& path) {
  UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd) return ErrnoStatus(errno, "cannot open", path);
  return ReadSafetensors(fd, path);
}

absl::StatusOr<SafetensorsFile> ReadSafetensors(const UniqueFd& fd, const std::string& path) {
  struct stat info{};
  if (fstat(fd.get(), &info) != 0) return ErrnoStatus(errno, "cannot read", path);
  if (!S_ISREG(info.st_mode)) return Damaged(path, "it is not a regular file");
  if (info.st_size < 8) return Damaged(path, absl::StrCat("it has ", info.st_size, " bytes, the length of the header alone takes 8"));
  uint64_t length = 0;
  RETURN_IF_ERROR(GetAt(fd.get(), path, 0, reinterpret_cast<char*>(&length), 8));
  if (length > uint64_t(limits::kSafetensorsHeaderBytes)) {
    return Damaged(path, absl::StrCat("its header says ", length, " bytes, the most is ", limits::kSafetensorsHeaderBytes));
  }
  const int64_t data_begin = 8 + int64_t(length);
  if (data_begin > info.st_size) {
    return Damaged(path, absl::StrCat("its header says ", length, " bytes, after it the file has ", info.st_size - 8));
  }
  std::string text(size_t(length), '\0');
  RETURN_IF_ERROR(GetAt(fd.get(), path, 8, text.data(), int64_t(length)));
  ASSIGN_OR_RETURN(const json header, ParseHeader(path, text));

  SafetensorsFile file;
  std::vector<Entry> entries;
  for (const auto& [name, value] : header.items()) {
    if (name != "__metadata__") {
      ASSIGN_OR_RETURN(Entry entry, ParseEntry(path, name, value));
      entries.push_back(std::move(entry));
      continue;
    }
    if (!value.is_object()) return Damaged(path, "__metadata__ is not an object");
    for (const auto& [key, text_value] : value.items()) {
      if (!text_value.is_string()) return Damaged(path, absl::StrCat("__metadata__ \"", Printable(key), "\" is not a string"));
      file.metadata[key] = text_value.get<std::string>();
    }
  }
  RETURN_IF_ERROR(CheckLayout(path, &entries, info.st_size - data_begin));
  for (const Entry& entry : entries) RETURN_IF_ERROR(ReadTensor(fd.get(), path, data_begin, entry, &file.tensors[entry.name]));
  return file;
}

}  // namespace hierad
