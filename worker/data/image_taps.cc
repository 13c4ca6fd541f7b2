#include "worker/data/image_taps.h"

#include <algorithm>
#include <cmath>

namespace hierad {
namespace {

double Cubic(double x) {   // Keys' kernel, a = -0.5
  x = std::abs(x);
  if (x < 1) return (1.5 * x - 2.5) * x * x + 1;
  if (x < 2) return ((-0.5 * x + 2.5) * x - 4) * x + 2;
  return 0;
}

int32_t Rounded(double value) { return static_cast<int32_t>(value + (value < 0 ? -0.5 : 0.5)); }

}  // namespace

Taps TapsFor(int in, double begin, double size, int out, int bits) {
  const double scale = size / out, filter = std::max(1.0, scale), support = 2 * filter, one = 1 << bits;
  const int least = std::clamp(static_cast<int>(std::floor(begin)), 0, in - 1), most = std::clamp(static_cast<int>(std::ceil(begin + size)), least + 1, in);
  Taps taps;
  taps.width = static_cast<int>(std::ceil(support)) * 2 + 1;
  taps.first.resize(out);
  taps.count.resize(out);
  taps.weights.resize(static_cast<size_t>(out) * taps.width, 0);
  std::vector<double> weights(taps.width);
  for (int o = 0; o < out; ++o) {
    const double center = begin + (o + 0.5) * scale;
    const int first = std::clamp(static_cast<int>(std::floor(center - support + 0.5)), least, most - 1);
    const int last = std::clamp(static_cast<int>(std::floor(center + support + 0.5)), first + 1, std::min(most, first + taps.width));
    double sum = 0;
    for (int i = first; i < last; ++i) sum += weights[i - first] = Cubic((i - center + 0.5) / filter);
    taps.first[o] = first;
    taps.count[o] = last - first;
    for (int i = 0; i < last - first; ++i) taps.weights[size_t(o) * taps.width + i] = Rounded(weights[i] / (sum == 0 ? 1 : sum) * one);
  }
  return taps;
}

}  // namespace hierad
