#include "base/text.h"

#include <algorithm>

namespace hierad {
namespace {

constexpr uint32_t kBadRune = 0xFFFFFFFF;

bool IsShown(uint32_t c) {
  if (c == kBadRune || c < 0x20 || (c >= 0x7F && c < 0xA0)) return false;
  if (c == 0xAD || c == 0x61C || c == 0xFEFF) return false;      // soft hyphen, Arabic letter mark, byte order mark
  if (c >= 0x200B && c <= 0x200F) return false;                  // zero width, direction marks
  if (c >= 0x2028 && c <= 0x202E) return false;                  // line separators, direction overrides
  if (c >= 0x2060 && c <= 0x206F) return false;                  // invisible operators, direction isolates
  return c < 0xE0000;                                            // tags and private planes
}

std::string Escape(std::string_view text, size_t max_bytes, bool quotes) {
  static constexpr char kHex[] = "0123456789abcdef";
  std::string out;
  while (!text.empty()) {
    const Rune rune = FirstRune(text);
    std::string piece;
    if (IsShown(rune.code)) {
      if (quotes && (rune.code == '"' || rune.code == '\\')) piece = '\\';
      piece += text.substr(0, rune.bytes);
    } else {
      for (const char byte : text.substr(0, rune.bytes)) {
        piece += "\\x";
        piece += kHex[uint8_t(byte) >> 4];
        piece += kHex[uint8_t(byte) & 15];
      }
    }
    if (out.size() + piece.size() > max_bytes) return out + "...";
    out += piece;
    text.remove_prefix(rune.bytes);
  }
  return out;
}

}  // namespace

Rune FirstRune(std::string_view text) {
  const auto byte = [&](size_t i) { return i < text.size() ? uint8_t(text[i]) : uint8_t{0}; };
  const uint8_t lead = byte(0);
  if (lead < 0x80) return {lead, 1};
  const size_t bytes = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
  if (lead < 0xC2 || lead > 0xF4) return {kBadRune, 1};
  uint32_t code = lead & (0x7F >> bytes);
  for (size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return {kBadRune, 1};
    code = code << 6 | (byte(i) & 0x3F);
  }
  static constexpr uint32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
  if (code < kLeast[bytes] || code > 0x10FFFF || (code >= 0xD800 && code < 0xE000)) return {kBadRune, 1};
  return {code, bytes};
}

bool IsUtf8(std::string_view text) {
  while (!text.empty()) {
    const Rune rune = FirstRune(text);
    if (rune.code == kBadRune) return false;
    text.remove_prefix(rune.bytes);
  }
  return true;
}

std::string Printable(std::string_view text, size_t max_bytes) { return Escape(text, max_bytes, true); }

std::string PrintableSentence(std::string_view text, size_t max_bytes) { return Escape(text, max_bytes, false); }

int EditDistance(std::string_view a, std::string_view b) {
  // Rows i - 2, i - 1 and i of the table over prefixes; a swap of neighbours looks two rows back.
  std::vector<int> before(b.size() + 1), last(b.size() + 1), row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = int(j);
  for (size_t i = 1; i <= a.size(); ++i) {
    before.swap(last);
    last.swap(row);
    row[0] = int(i);
    for (size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) row[j] = std::min(row[j], before[j - 2] + 1);
    }
  }
  return row[b.size()];
}

std::vector<std::string> Split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  while (true) {
    const size_t end = text.find(separator);
    parts.emplace_back(text.substr(0, end));
    if (end == std::string_view::npos) return parts;
    text.remove_prefix(end + 1);
  }
}

}  // namespace hierad
