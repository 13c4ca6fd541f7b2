// Half precision, as files and rows hold it.
#pragma once

#include <bit>
#include <cstdint>

namespace hierad {

// IEEE half precision to float, exactly; NaN keeps its bits.
inline float HalfToFloat(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 1023;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7F800000 | fraction << 13);
  if (exponent != 0) return std::bit_cast<float>(sign | (exponent + 112) << 23 | fraction << 13);
  const float magnitude = float(fraction) * (1.0f / 16777216.0f);
  return sign != 0 ? -magnitude : magnitude;
}

}  // namespace hierad
