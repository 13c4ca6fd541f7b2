// Types of the plain CPU kernels. T is the compute type (double, float, or BFloat16 with float arithmetic), S the real
// type of statistics, the residual stream and parameter gradients (double with T = double, else float).
// All kernels here take raw pointers and sizes, run on the calling thread, allocate only small buffers, and are written to
// be read: they are what the GPU's kernels are compared with, and what `step.mode: fused` runs on a CPU.
#pragma once

#include <bit>
#include <cstdint>

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

inline constexpr double kNormEpsilon = 1e-6;

// Greater than the greatest so far, NaN being greatest, as torch's max.
template <typename S>
bool Exceeds(S value, S best) { return value > best || value != value; }

}  // namespace hierad::reference
