#include <algorithm>
#include <vector>

#include "worker/data/image_pixels.h"
#include "worker/data/image_taps.h"
#include "worker/data/wide.h"

namespace hierad {
namespace {

constexpr int kBits = 22;   // of the weights: with 8 of the values and one for overshoot, 31 hold a sum

uint8_t Rounded(int32_t sum) { return static_cast<uint8_t>(std::clamp(sum >> kBits, 0, 255)); }

using Four = int32_t __attribute__((vector_size(16)));

// One row of pixels, given as four numbers each, to out_width pixels of `channels`, at most 4.
HIERAD_WIDE
void ResizeRow(const Four* in, const Taps& taps, int out_width, int channels, uint8_t* out) {
  const Four half = {1 << (kBits - 1), 1 << (kBits - 1), 1 << (kBits - 1), 1 << (kBits - 1)};
  for (int x = 0; x < out_width; ++x) {
    const int32_t* weights = taps.weights_of(x);
    const Four* pixel = in + taps.first[x];
    Four sum = half;
    for (int i = 0; i < taps.count[x]; ++i) sum += pixel[i] * weights[i];
    for (int c = 0; c < channels; ++c) out[x * channels + c] = Rounded(sum[c]);
  }
}

// One row of any number of channels.
void ResizeRowOfMany(const uint8_t* in, const Taps& taps, int out_width, int channels, uint8_t* out) {
  for (int x = 0; x < out_width; ++x)
    for (int c = 0; c < channels; ++c) {
      int32_t sum = 1 << (kBits - 1);
      for (int i = 0; i < taps.count[x]; ++i) sum += taps.weights_of(x)[i] * in[(taps.first[x] + i) * channels + c];
      out[x * channels + c] = Rounded(sum);
    }
}

void Widen(const uint8_t* in, int width, int channels, Four* out) {
  if (channels == 3) {
    for (int x = 0; x < width; ++x, in += 3) out[x] = Four{in[0], in[1], in[2], 0};
  } else {
    for (int x = 0; x < width; ++x, in += channels) out[x] = Four{in[0], channels > 1 ? in[1] : 0, channels > 2 ? in[2] : 0, channels > 3 ? in[3] : 0};
  }
}

// sum[i] += weight * row[i].
HIERAD_WIDE
void AddRow(const uint8_t* row, int32_t weight, int64_t size, int32_t* sum) {
  for (int64_t i = 0; i < size; ++i) sum[i] += weight * row[i];
}

HIERAD_WIDE
void RoundRow(const int32_t* sum, int64_t size, uint8_t* out) {
  for (int64_t i = 0; i < size; ++i) {
    const int32_t value = sum[i] >> kBits;
    out[i] = static_cast<uint8_t>(value < 0 ? 0 : value > 255 ? 255 : value);
  }
}

}  // namespace

void ResizeBox(const Pixels& image, const Box& box, int out_height, int out_width, uint8_t* out_HWC) {
  const int channels = image.channels;
  if (!image.chroma.empty()) {
    const int64_t plane = int64_t{out_height} * out_width;
    std::vector<uint8_t> planes(3 * plane);
    ResizePlanes(image, box, out_height, out_width, planes.data());
    for (int64_t i = 0; i < plane; ++i)
      for (int c = 0; c < 3; ++c) out_HWC[i * 3 + c] = planes[c * plane + i];
    return;
  }
  const Taps across = TapsFor(image.width, box.left, box.width, out_width, kBits), down = TapsFor(image.height, box.top, box.height, out_height, kBits);
  const int64_t row_size = int64_t{out_width} * channels;
  const int top = down.begin(), bottom = down.end();
  std::vector<uint8_t> rows((bottom - top) * row_size);
  std::vector<Four> wide(channels <= 4 ? image.width : 0);
  for (int y = top; y < bottom; ++y) {
    const uint8_t* in = image.values_HWC.data() + size_t(y) * image.width * channels;
    uint8_t* out = rows.data() + (y - top) * row_size;
    if (channels > 4) {
      ResizeRowOfMany(in, across, out_width, channels, out);
      continue;
    }
    const int first = across.begin(), last = across.end();
    Widen(in + size_t(first) * channels, last - first, channels, wide.data() + first);
    ResizeRow(wide.data(), across, out_width, channels, out);
  }
  std::vector<int32_t> sums(row_size);
  for (int y = 0; y < out_height; ++y) {
    std::fill(sums.begin(), sums.end(), 1 << (kBits - 1));
    for (int i = 0; i < down.count[y]; ++i)
      AddRow(rows.data() + (down.first[y] + i - top) * row_size, down.weights_of(y)[i], row_size, sums.data());
    RoundRow(sums.data(), row_size, out_HWC + y * row_size);
  }
}

}  // namespace hierad
