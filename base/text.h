// Text from outside, made safe to show; UTF-8; the nearest word.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace hierad {

// The code point that begins `text`, and how many bytes it takes; {0xFFFFFFFF, 1} where the bytes are not UTF-8
// (overlong forms and surrogates included). `text` is not empty.
struct Rune {
  uint32_t code;
  size_t bytes;
};
Rune FirstRune(std::string_view text);

bool IsUtf8(std::string_view text);

// Bytes that are not printable UTF-8 (control, bidirectional and zero-width characters are not) as \xNN, double quotes
// and backslashes escaped: for a quoted piece of a message. Longer than `max_bytes`: cut, "..." at the end.
std::string Printable(std::string_view text, size_t max_bytes = 512);

// The same for a whole sentence or a column of a table: quotes and backslashes stay.
std::string PrintableSentence(std::string_view text, size_t max_bytes = 4096);

// Changes of one letter (insert, delete, replace, swap of neighbours) that lead from a to b.
int EditDistance(std::string_view a, std::string_view b);

std::vector<std::string> Split(std::string_view text, char separator);

}  // namespace hierad
