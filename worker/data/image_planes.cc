// Resize of a JPEG's planes: each alone, the columns first, then the rows, both as sums of whole lines of bytes, between which the
// plane is transposed. Colour is converted last, of as many pixels as are asked for.
#include <algorithm>
#include <cstring>
#include <vector>

#include "worker/data/image_pixels.h"
#include "worker/data/image_taps.h"
#include "worker/data/wide.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace hierad {
namespace {

constexpr int kBits = 14;   // of the weights, which overshoot 1 and must fit 16 bits with their sign

// out[i] = the weighted sum of `taps` lines that lie `stride` apart, i from `begin`.
void SumLines(const uint8_t* lines, int64_t stride, const int16_t* weights, int taps, int begin, int size, uint8_t* out) {
  for (int i = begin; i < size; ++i) {
    int32_t sum = 1 << (kBits - 1);
    for (int k = 0; k < taps; ++k) sum += weights[k] * lines[k * stride + i];
    out[i] = static_cast<uint8_t>(std::clamp(sum >> kBits, 0, 255));
  }
}

#if defined(__x86_64__)
// The same, exactly: 16 sums at a time, two lines a multiplication. weights[taps] is 0.
__attribute__((target("avx2"))) void SumLinesAvx2(const uint8_t* lines, int64_t stride, const int16_t* weights, int taps, int size, uint8_t* out) {
  int i = 0;
  for (; i + 16 <= size; i += 16) {
    __m256i low = _mm256_set1_epi32(1 << (kBits - 1)), high = low;
    for (int k = 0; k < taps; k += 2) {
      const uint8_t* line = lines + k * stride + i;
      const __m256i a = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(line)));
      const __m256i b = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(k + 1 < taps ? line + stride : line)));
      int32_t pair;
      std::memcpy(&pair, weights + k, sizeof pair);
      const __m256i w = _mm256_set1_epi32(pair);
      low = _mm256_add_epi32(low, _mm256_madd_epi16(_mm256_unpacklo_epi16(a, b), w));
      high = _mm256_add_epi32(high, _mm256_madd_epi16(_mm256_unpackhi_epi16(a, b), w));
    }
    const __m256i words = _mm256_packs_epi32(_mm256_srai_epi32(low, kBits), _mm256_srai_epi32(high, kBits));
    const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packus_epi16(words, words), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), _mm256_castsi256_si128(bytes));
  }
  SumLines(lines, stride, weights, taps, i, size, out);
}
#endif

bool HasAvx2() {
#if defined(__x86_64__)
  static const bool has = __builtin_cpu_supports("avx2");
  return has;
#else
  return false;
#endif
}

// Lines of `size` bytes, `stride` apart, to one line an output.
void ResizeLines(const uint8_t* lines, int64_t stride, int size, const Taps& taps, uint8_t* out) {
  std::vector<int16_t> weights(taps.width + 1);
  for (size_t o = 0; o < taps.first.size(); ++o, out += size) {
    const int count = taps.count[o];
    for (int k = 0; k < count; ++k) weights[k] = static_cast<int16_t>(taps.weights_of(static_cast<int>(o))[k]);
    weights[count] = 0;
    const uint8_t* from = lines + taps.first[o] * stride;
#if defined(__x86_64__)
    if (HasAvx2()) {
      SumLinesAvx2(from, stride, weights.data(), count, size, out);
      continue;
    }
#endif
    SumLines(from, stride, weights.data(), count, 0, size, out);
  }
}

using Sixteen = uint8_t __attribute__((vector_size(16)));

// in [rows, columns] to out [columns, rows].
void Transpose(const uint8_t* in, int rows, int columns, uint8_t* out) {
  const int whole_rows = rows / 16 * 16, whole_columns = columns / 16 * 16;
  for (int y = 0; y < whole_rows; y += 16)
    for (int x = 0; x < whole_columns; x += 16) {
      Sixteen a[16], b[16];
      for (int i = 0; i < 16; ++i) std::memcpy(&a[i], in + int64_t{y + i} * columns + x, 16);
      // Four times the first half is woven with the second, byte by byte: byte (i, j) comes to (j, i).
      for (int turn = 0; turn < 4; ++turn) {
        for (int i = 0; i < 8; ++i) {
          b[2 * i] = __builtin_shufflevector(a[i], a[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
          b[2 * i + 1] = __builtin_shufflevector(a[i], a[i + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        }
        std::memcpy(a, b, sizeof a);
      }
      for (int i = 0; i < 16; ++i) std::memcpy(out + int64_t{x + i} * rows + y, &a[i], 16);
    }
  for (int y = 0; y < rows; ++y)
    for (int x = y < whole_rows ? whole_columns : 0; x < columns; ++x) out[int64_t{x} * rows + y] = in[int64_t{y} * columns + x];
}

// How a plane of height x width is resized: its columns from `left` on.
struct PlaneTaps {
  PlaneTaps(int height, int plane_width, const Box& box, int out_height, int out_width)
      : width(plane_width), down(TapsFor(height, box.top, box.height, out_height, kBits)), across(TapsFor(width, box.left, box.width, out_width, kBits)),
        left(across.begin()), columns(across.end() - left) {
    for (int& first : across.first) first -= left;
  }
  void Resize(const uint8_t* plane, uint8_t* out) const {
    const int out_height = static_cast<int>(down.first.size()), out_width = static_cast<int>(across.first.size());
    std::vector<uint8_t> shorter(int64_t{out_height} * columns), turned(shorter.size()), narrower(int64_t{out_width} * out_height);
    ResizeLines(plane + left, width, columns, down, shorter.data());
    Transpose(shorter.data(), out_height, columns, turned.data());
    ResizeLines(turned.data(), out_height, out_height, across, narrower.data());
    Transpose(narrower.data(), out_width, out_height, out);
  }

  const int width;
  const Taps down;
  Taps across;
  const int left, columns;
};

uint8_t Byte(int value) { return static_cast<uint8_t>(value < 0 ? 0 : value > 255 ? 255 : value); }

// JFIF's YCbCr to RGB, in place, in 16-bit fixed point.
HIERAD_WIDE
void ToRgb(int64_t pixels, uint8_t* __restrict y_r, uint8_t* __restrict cb_g, uint8_t* __restrict cr_b) {
  for (int64_t i = 0; i < pixels; ++i) {
    const int y = (y_r[i] << 16) + (1 << 15), cb = cb_g[i] - 128, cr = cr_b[i] - 128;
    y_r[i] = Byte((y + 91881 * cr) >> 16);
    cb_g[i] = Byte((y - 22554 * cb - 46802 * cr) >> 16);
    cr_b[i] = Byte((y + 116130 * cb) >> 16);
  }
}

// In [height, width, channels] to [out_height, out_width] of one channel, nothing rounded before the end.
void ResizeDeep(const Pixels& image, int channel, const Taps& down, const Taps& across, int bits, uint16_t* out) {
  const int out_height = static_cast<int>(down.first.size()), out_width = static_cast<int>(across.first.size()), top = down.begin();
  const float unit = 1.0f / static_cast<float>(1 << bits);
  std::vector<float> rows(int64_t{down.end() - top} * out_width);
  for (int y = top; y < down.end(); ++y) {
    const uint16_t* in = image.deep_HWC.data() + int64_t{y} * image.width * image.channels + channel;
    for (int x = 0; x < out_width; ++x) {
      float sum = 0;
      for (int k = 0; k < across.count[x]; ++k) sum += static_cast<float>(across.weights_of(x)[k]) * unit * in[int64_t{across.first[x] + k} * image.channels];
      rows[int64_t{y - top} * out_width + x] = sum;
    }
  }
  std::vector<float> sums(out_width);
  for (int y = 0; y < out_height; ++y) {
    std::fill(sums.begin(), sums.end(), 0.5f);
    for (int k = 0; k < down.count[y]; ++k) {
      const float weight = static_cast<float>(down.weights_of(y)[k]) * unit;
      const float* row = rows.data() + int64_t{down.first[y] + k - top} * out_width;
      for (int x = 0; x < out_width; ++x) sums[x] += weight * row[x];
    }
    for (int x = 0; x < out_width; ++x) out[int64_t{y} * out_width + x] = static_cast<uint16_t>(std::clamp(sums[x], 0.0f, 65535.0f));
  }
}

}  // namespace

void ResizePlanes(const Pixels& image, const Box& box, int out_height, int out_width, uint16_t* out_CHW) {
  const int64_t plane = int64_t{out_height} * out_width;
  if (image.deep_HWC.empty()) {
    std::vector<uint8_t> eight(plane * image.channels);
    ResizePlanes(image, box, out_height, out_width, eight.data());
    for (size_t i = 0; i < eight.size(); ++i) out_CHW[i] = static_cast<uint16_t>(257 * eight[i]);
    return;
  }
  constexpr int kDeepBits = 22;
  const Taps down = TapsFor(image.height, box.top, box.height, out_height, kDeepBits), across = TapsFor(image.width, box.left, box.width, out_width, kDeepBits);
  for (int c = 0; c < image.channels; ++c) ResizeDeep(image, c, down, across, kDeepBits, out_CHW + c * plane);
}

void ResizePlanes(const Pixels& image, const Box& box, int out_height, int out_width, uint8_t* out_CHW) {
  const int64_t plane = int64_t{out_height} * out_width;
  if (!image.chroma.empty()) {
    PlaneTaps(image.height, image.width, box, out_height, out_width).Resize(image.values_HWC.data(), out_CHW);
    const auto taps_of = [&](const Plane& p) { return PlaneTaps(p.height, p.width, p.box, out_height, out_width); };
    const Plane &cb = image.chroma[0], &cr = image.chroma[1];
    const PlaneTaps taps = taps_of(cb);   // the two are alike but in odd files
    taps.Resize(cb.values_HW.data(), out_CHW + plane);
    if (cb.height == cr.height && cb.width == cr.width && cb.box == cr.box) taps.Resize(cr.values_HW.data(), out_CHW + 2 * plane);
    else taps_of(cr).Resize(cr.values_HW.data(), out_CHW + 2 * plane);
    return ToRgb(plane, out_CHW, out_CHW + plane, out_CHW + 2 * plane);
  }
  std::vector<uint8_t> interleaved(plane * image.channels);
  ResizeBox(image, box, out_height, out_width, interleaved.data());
  for (int c = 0; c < image.channels; ++c)
    for (int64_t i = 0; i < plane; ++i) out_CHW[c * plane + i] = interleaved[i * image.channels + c];
}

}  // namespace hierad
