// Types of the plain CPU kernels. T is the compute type (double, float, or BFloat16 or Float16 with float arithmetic), S the real
// type of statistics, the residual stream and parameter gradients (double with T = double, else float).
// All kernels here take raw pointers and sizes, run on the calling thread, allocate only small buffers, and are written to
// be read: they are what the GPU's kernels are compared with, and what `step.mode: fused` runs on a CPU.
#pragma once

#include <bit>
#include <cstdint>

#include "base/half.h"

namespace hierad::reference {

// Round to nearest, ties to even; NaN stays NaN.
struct BFloat16 {
  uint16_t bits = 0;

  BFloat16() = default;
  explicit BFloat16(float value) {
    const uint32_t word = std::bit_cast<uint32_t>(value);
    if (value != value) {
      bits = uint16_t(word >> 16 | 0x40);
    } else {
      bits = uint16_t((word + 0x7FFF + (word >> 16 & 1)) >> 16);
    }
  }
  explicit BFloat16(double value) : BFloat16(float(value)) {}
  operator float() const { return std::bit_cast<float>(uint32_t{bits} << 16); }
};

// Round to nearest, ties to even; too large ones become infinite; NaN stays NaN.
struct Float16 {
  uint16_t bits = 0;

  Float16() = default;
  explicit Float16(float value) {
    const uint32_t word = std::bit_cast<uint32_t>(value), magnitude = word & 0x7FFFFFFF;
    const auto sign = uint16_t(word >> 16 & 0x8000);
    if (magnitude > 0x7F800000) {
      bits = uint16_t(sign | 0x7E00);
    } else if (magnitude >= 0x47800000) {   // 65536
      bits = uint16_t(sign | 0x7C00);
    } else if (magnitude < 0x38800000) {    // 2^-14, the least normal number: a sum with 1/2 rounds at its last place, 2^-24
      bits = uint16_t(sign | (std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - std::bit_cast<uint32_t>(0.5f)));
    } else {
      const uint32_t rounded = magnitude + 0xFFF + (magnitude >> 13 & 1) - (uint32_t{112} << 23);
      bits = uint16_t(sign | rounded >> 13);   // a carry out of the greatest number makes infinity
    }
  }
  explicit Float16(double value) : Float16(float(value)) {}
  operator float() const { return HalfToFloat(bits); }
};

inline constexpr double kNormEpsilon = 1e-6;

// Greater than the greatest so far, NaN being greatest, as torch's max.
template <typename S>
bool Exceeds(S value, S best) { return value > best || value != value; }

}  // namespace hierad::reference
