// The weights of a resize along one axis: bicubic (a = -0.5), the filter widened by the scale when shrinking, as Pillow has it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace hierad {

// For each output position: first input position, how many from there on, and their weights, which sum to 1 << bits but for rounding.
struct Taps {
  std::vector<int> first, count;
  std::vector<int32_t> weights;   // [out, width]
  int width = 0;

  const int32_t* weights_of(int out) const { return weights.data() + static_cast<size_t>(out) * width; }
  int begin() const { return first.front(); }
  int end() const { return first.back() + count.back(); }
};

// Outputs over [begin, begin + size) of an axis of `in` positions; nothing outside of it is read.
Taps TapsFor(int in, double begin, double size, int out, int bits);

}  // namespace hierad
