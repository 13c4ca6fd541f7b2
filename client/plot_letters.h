// The letters of a plot's scale and title, five columns wide, as bitmaps: no font is needed where a curve is drawn.
#pragma once

#include <array>
#include <cstdint>

namespace hierad {

inline constexpr int kLetterColumns = 5, kLetterRows = 9, kLetterBase = 7;   // rows above the base line

using Letter = std::array<uint8_t, kLetterRows>;   // rows from the top, the leftmost column in bit 4

// Small letters, digits, and what numbers and titles need beside them; of any other character a box.
const Letter& LetterOf(char character);

}  // namespace hierad
