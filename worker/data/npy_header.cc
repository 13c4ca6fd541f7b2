#include <algorithm>
#include <charconv>
#include <optional>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/limits.h"
#include "base/status.h"
#include "worker/data/npy_file.h"

namespace hierad {
namespace {

constexpr char kAccepted[] = "accepted: |b1, |u1, |i1, i2, i4, f2, f4, f8 in either byte order (labels: i8 too)";

absl::Status Damaged(const std::string& path, const std::string& problem) {
  return ErrorOf(v1::REASON_DATA_ERROR, absl::StrCat(path, ": ", problem));
}

// The dictionary of an .npy header: three known keys, strings, booleans and tuples of numbers.
class HeaderParser {
 public:
  HeaderParser(std::string_view text, const std::string& path) : text_(text), path_(path) {}

  absl::Status Parse() {
    if (!Take('{')) return Bad("'{' expected");
    while (!Take('}')) {
      std::string key;
      if (!String(&key)) return Bad("a key in quotes expected");
      if (!Take(':')) return Bad("':' expected");
      RETURN_IF_ERROR(Value(key));
      if (!Take(',') && Peek() != '}') return Bad("',' or '}' expected");
    }
    Skip();
    if (at_ != text_.size()) return Bad("text after the dictionary");
    if (!descr) return Bad("no 'descr'");
    if (!fortran) return Bad("no 'fortran_order'");
    if (!shape) return Bad("no 'shape'");
    return absl::OkStatus();
  }

  std::optional<std::string> descr;
  std::optional<bool> fortran;
  std::optional<std::vector<int64_t>> shape;

 private:
  absl::Status Bad(const std::string& problem) const {
    return Damaged(path_, absl::StrCat("damaged npy header at its byte ", at_, ": ", problem, " in '", Printable(text_, 120), "'"));
  }
  void Skip() {
    while (at_ < text_.size() && (absl::ascii_isspace(text_[at_]) || text_[at_] == '\0')) ++at_;
  }
  char Peek() {
    Skip();
    return at_ < text_.size() ? text_[at_] : '\0';
  }
  bool Take(char c) {
    if (Peek() != c) return false;
    ++at_;
    return true;
  }
  bool Word(std::string_view word) {
    Skip();
    if (text_.substr(at_, word.size()) != word) return false;
    at_ += word.size();
    return true;
  }
  bool String(std::string* out) {
    const char quote = Peek();
    if (quote != '\'' && quote != '"') return false;
    const size_t end = text_.find(quote, at_ + 1);
    if (end == std::string_view::npos) return false;
    *out = std::string(text_.substr(at_ + 1, end - at_ - 1));
    at_ = end + 1;
    return true;
  }

  absl::Status Value(const std::string& key) {
    if (key == "descr" && !descr) {
      std::string text;
      if (Peek() == '[') return Damaged(path_, absl::StrCat("npy of structured type ", Printable(text_.substr(at_, 100)), "...; ", kAccepted));
      if (!String(&text)) return Bad("a type in quotes expected");
      descr = text;
    } else if (key == "fortran_order" && !fortran) {
      if (Word("True")) fortran = true;
      else if (Word("False")) fortran = false;
      else return Bad("True or False expected");
    } else if (key == "shape" && !shape) {
      return Shape();
    } else {
      return Bad(absl::StrCat("key '", Printable(key, 40), "' is unknown or doubled"));
    }
    return absl::OkStatus();
  }

  absl::Status Shape() {
    shape.emplace();
    if (!Take('(')) return Bad("'(' expected");
    while (!Take(')')) {
      Skip();
      int64_t axis = 0;
      const char* begin = text_.data() + at_;
      const auto [end, error] = std::from_chars(begin, text_.data() + text_.size(), axis);
      if (error == std::errc::result_out_of_range) return Bad("an axis beyond 64 bits");
      if (error != std::errc() || axis < 0) return Bad("a size of 0 or more expected");
      at_ += end - begin;
      if (at_ < text_.size() && text_[at_] == 'L') ++at_;   // Python 2's long
      shape->push_back(axis);
      if (shape->size() > 32) return Bad("more than 32 axes");
      if (!Take(',') && Peek() != ')') return Bad("',' or ')' expected");
    }
    return absl::OkStatus();
  }

  const std::string_view text_;
  const std::string& path_;
  size_t at_ = 0;
};

absl::Status TypeOf(const std::string& descr, const std::string& path, NpyHeader* header) {
  struct Known { const char* name; NpyType type; int64_t bytes; };
  static constexpr Known kKnown[] = {{"b1", NpyType::kBool, 1}, {"u1", NpyType::kU8, 1},  {"i1", NpyType::kI8, 1},
                                     {"i2", NpyType::kI16, 2},  {"i4", NpyType::kI32, 4}, {"i8", NpyType::kI64, 8},
                                     {"f2", NpyType::kF16, 2},  {"f4", NpyType::kF32, 4}, {"f8", NpyType::kF64, 8}};
  std::string_view name = descr;
  char order = '=';
  if (!name.empty() && std::string_view("<>=|").find(name.front()) != std::string_view::npos) {
    order = name.front();
    name.remove_prefix(1);
  }
  for (const Known& known : kKnown) {
    if (name != known.name) continue;
    header->type = known.type;
    header->item_bytes = known.bytes;
    header->swap = order == '>' && known.bytes > 1;
    header->descr = descr;
    if (order == '|' && known.bytes > 1) break;
    return absl::OkStatus();
  }
  return Damaged(path, absl::StrCat("npy of type '", Printable(descr, 60), "'; ", kAccepted));
}

}  // namespace

int64_t NpyHeaderEnd(std::string_view begin) {
  if (begin.size() < 12 || begin.substr(0, 6) != std::string_view("\x93NUMPY", 6)) return 0;
  const auto byte = [&](int i) { return static_cast<int64_t>(static_cast<uint8_t>(begin[i])); };
  const int64_t end = byte(6) == 1 ? 10 + (byte(8) | byte(9) << 8) : 12 + (byte(8) | byte(9) << 8 | byte(10) << 16 | byte(11) << 24);
  return std::min(end, limits::kNpyHeaderBytes + 12);
}

absl::StatusOr<NpyHeader> ParseNpyHeader(std::string_view file, int64_t file_bytes, const std::string& path) {
  static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the elements' byte order is compared with a little-endian host");
  if (file.substr(0, 6) != std::string_view("\x93NUMPY", 6) || file.size() < 10)
    return Damaged(path, absl::StrCat("not an npy file (it begins with '", Printable(file.substr(0, 6)), "')"));
  const auto byte = [&](int i) { return static_cast<int64_t>(static_cast<uint8_t>(file[i])); };
  const int64_t major = byte(6);
  if (major < 1 || major > 3) return Damaged(path, absl::StrCat("npy version ", major, "; versions 1, 2 and 3 are read"));
  const int64_t begin = major == 1 ? 10 : 12;
  if (static_cast<int64_t>(file.size()) < begin) return Damaged(path, "cut inside the npy header");
  const int64_t size = major == 1 ? byte(8) | byte(9) << 8 : byte(8) | byte(9) << 8 | byte(10) << 16 | byte(11) << 24;
  if (size > limits::kNpyHeaderBytes) return Damaged(path, absl::StrCat("npy header of ", size, " bytes; at most ", limits::kNpyHeaderBytes, " are read"));
  if (begin + size > static_cast<int64_t>(file.size()))
    return Damaged(path, absl::StrCat("cut inside the npy header: ", size, " bytes announced, ", file.size() - begin, " there"));

  HeaderParser parser(file.substr(begin, size), path);
  RETURN_IF_ERROR(parser.Parse());
  NpyHeader header;
  RETURN_IF_ERROR(TypeOf(*parser.descr, path, &header));
  header.fortran = *parser.fortran;
  header.shape = *parser.shape;
  header.data_offset = begin + size;
  header.elements = 1;
  std::string shape_text;
  for (int64_t axis : header.shape) absl::StrAppend(&shape_text, shape_text.empty() ? "" : ", ", axis);
  int64_t bytes = 0;
  bool fits = true;
  for (int64_t axis : header.shape) fits = fits && !__builtin_mul_overflow(header.elements, axis, &header.elements);
  if (!fits || __builtin_mul_overflow(header.elements, header.item_bytes, &bytes) || __builtin_add_overflow(bytes, header.data_offset, &bytes))
    return Damaged(path, absl::StrCat("npy shape (", shape_text, ") of ", header.descr, " is more than 2^63 bytes"));
  if (bytes > file_bytes)
    return Damaged(path, absl::StrCat("npy shape (", shape_text, ") of ", header.descr, " needs a file of ", bytes, " bytes, it has ",
                                      file_bytes, ": cut short, fetch or write it again"));
  return header;
}

}  // namespace hierad
