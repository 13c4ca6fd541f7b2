#include <algorithm>
#include <cmath>

#include "worker/data/image_pixels.h"

namespace hierad {
namespace {

double Cubic(double x) {   // Keys' kernel, a = -0.5
  x = std::abs(x);
  if (x < 1) return (1.5 * x - 2.5) * x * x + 1;
  if (x < 2) return ((-0.5 * x + 2.5) * x - 4) * x + 2;
  return 0;
}

// For each output position: first input position and the weights from there on, which sum to 1.
struct Taps {
  std::vector<int> first, count;
  std::vector<float> weights;   // [out, width]
  int width = 0;
};

Taps TapsFor(int in, int out) {
  const double scale = double(in) / out, filter = std::max(1.0, scale), support = 2 * filter;
  Taps taps;
  taps.width = static_cast<int>(std::ceil(support)) * 2 + 1;
  taps.first.resize(out);
  taps.count.resize(out);
  taps.weights.resize(static_cast<size_t>(out) * taps.width, 0);
  std::vector<double> weights(taps.width);
  for (int o = 0; o < out; ++o) {
    const double center = (o + 0.5) * scale;
    const int first = std::max(0, static_cast<int>(center - support + 0.5));
    const int last = std::min(in, static_cast<int>(center + support + 0.5));
    double sum = 0;
    for (int i = first; i < last; ++i) sum += weights[i - first] = Cubic((i - center + 0.5) / filter);
    taps.first[o] = first;
    taps.count[o] = last - first;
    for (int i = 0; i < last - first; ++i) taps.weights[size_t(o) * taps.width + i] = static_cast<float>(weights[i] / sum);
  }
  return taps;
}

// One row of pixels to out_width pixels.
template <int kChannels>
void ResizeRow(const uint8_t* in, const Taps& taps, int out_width, float* out) {
  for (int x = 0; x < out_width; ++x) {
    const float* weights = taps.weights.data() + size_t(x) * taps.width;
    const uint8_t* pixel = in + taps.first[x] * kChannels;
    float sum[kChannels] = {};
    for (int i = 0; i < taps.count[x]; ++i, pixel += kChannels)
      for (int c = 0; c < kChannels; ++c) sum[c] += weights[i] * pixel[c];
    for (int c = 0; c < kChannels; ++c) out[x * kChannels + c] = sum[c];
  }
}

}  // namespace

void ResizeRegion(const Pixels& image, const Region& region, int out_height, int out_width, float* out_CHW) {
  const int channels = image.channels;
  const Taps across = TapsFor(region.width, out_width), down = TapsFor(region.height, out_height);
  const size_t row_size = static_cast<size_t>(out_width) * channels;
  std::vector<float> rows(region.height * row_size), line(row_size);
  for (int y = 0; y < region.height; ++y) {
    const uint8_t* in = image.values_HWC.data() + (size_t(region.top + y) * image.width + region.left) * channels;
    if (channels == 1) ResizeRow<1>(in, across, out_width, rows.data() + y * row_size);
    else ResizeRow<3>(in, across, out_width, rows.data() + y * row_size);
  }
  const size_t plane = static_cast<size_t>(out_height) * out_width;
  for (int y = 0; y < out_height; ++y) {
    std::fill(line.begin(), line.end(), 0.0f);
    for (int i = 0; i < down.count[y]; ++i) {
      const float weight = down.weights[size_t(y) * down.width + i];
      const float* row = rows.data() + (down.first[y] + i) * row_size;
      for (size_t x = 0; x < row_size; ++x) line[x] += weight * row[x];
    }
    for (int x = 0; x < out_width; ++x)
      for (int c = 0; c < channels; ++c) out_CHW[c * plane + size_t(y) * out_width + x] = std::clamp(line[x * channels + c], 0.0f, 255.0f);
  }
}

}  // namespace hierad
