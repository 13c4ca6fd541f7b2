// Patch embedding: rows of the convolution for kept tokens only, and the position embedding.
#include "worker/kernels/columns.cuh"
#include "worker/kernels/device.cuh"
#include "worker/kernels/kernels.h"

namespace hierad::kernels {
namespace {

constexpr size_t kUnitBytes = 48 << 10;   // of shared memory, what every card has without asking

// A thread writes the taps of one row along the last axis: (row, channel, taps of the axes before).
template <typename T>
__global__ void Gather(PatchShape s, const float* x, const uint8_t* keep_mask, const int32_t* keep_idx, const int32_t* unroll_order,
                       T* rows) {
  const int outer_taps = s.kernel[0] * s.kernel[1], outer = s.channels * outer_taps, tokens = s.unit_tokens * s.kept;
  const int64_t sample = int64_t(s.input[0]) * s.input[1] * s.input[2], jobs = int64_t(s.batch) * tokens * outer;
  HIERAD_GRID_LOOP(i, jobs) {
    const int o = int(i % outer);
    const int64_t row = i / outer;
    const int b = int(row / tokens), n = int(row % tokens), t = n / s.kept, j = n % s.kept;
    const int unit = keep_idx == nullptr ? j : keep_idx[b * s.kept + j];
    const int place = unroll_order[t * s.mask_units + unit];
    const int p2 = place % s.tokens[2], p1 = place / s.tokens[2] % s.tokens[1], p0 = place / s.tokens[2] / s.tokens[1];
    const int c = o / outer_taps, k1 = o % s.kernel[1], k0 = o % outer_taps / s.kernel[1];
    const int i0 = p0 * s.stride[0] - s.padding[0] + k0, i1 = p1 * s.stride[1] - s.padding[1] + k1;
    const int first = p2 * s.stride[2] - s.padding[2];
    T* to = rows + i * s.kernel[2];
    const bool inside = i0 >= 0 && i0 < s.input[0] && i1 >= 0 && i1 < s.input[1];
    const float* from = x + (int64_t(b) * s.channels + c) * sample + (int64_t(i0) * s.input[1] + i1) * s.input[2];
    const uint8_t* mask = keep_mask == nullptr || !inside
                              ? nullptr
                              : keep_mask + int64_t(b) * s.mask_units +
                                    (i0 / s.unit_samples[0] * s.units[1] + i1 / s.unit_samples[1]) * s.units[2];
    for (int k = 0; k < s.kernel[2]; ++k) {
      const int i2 = first + k;
      bool reads = inside && i2 >= 0 && i2 < s.input[2];
      if (reads && mask != nullptr) reads = mask[i2 / s.unit_samples[2]] != 0;
      to[k] = FromFloat<T>(reads ? from[i2] : 0.0f);
    }
  }
}

// What a block of GatherUnit holds in shared memory: the samples that the tokens of one mask unit read, and tables.
struct UnitRegion {
  int extent[3], row, tokens;   // samples an axis; values of a row; tokens of the unit
  int planes() const { return extent[0] * extent[1]; }
  size_t Bytes(int channels, size_t value) const {
    return (size_t(channels) * planes() * extent[2] * value + 15) / 16 * 16 + sizeof(int) * (size_t(row) + tokens + 2 * planes() + extent[2]);
  }
};

// A block the rows of one kept unit of one sample: the samples are read once, whole lines at a time, and the rows, which
// overlap by kernel - stride, are written from shared memory, kWidth values at a time.
template <typename T, int kWidth>
__global__ void __launch_bounds__(256) GatherUnit(PatchShape s, UnitRegion r, const float* x, const uint8_t* keep_mask, const int32_t* keep_idx,
                                                  const int32_t* unroll_order, T* rows) {
  extern __shared__ __align__(16) unsigned char memory[];
  const int planes = r.extent[0] * r.extent[1], plane_size = planes * r.extent[2];
  T* region = reinterpret_cast<T*>(memory);   // [channels, extent...]
  int* offset = reinterpret_cast<int*>(memory + (size_t(s.channels) * plane_size * sizeof(T) + 15) / 16 * 16);   // of each value of a row
  int* origin = offset + r.row;               // of each token
  int* line = origin + r.tokens;              // of each line of a channel: its place in x, -1 outside
  int* line_units = line + planes;            // and the first mask unit in its row of units
  int* column_unit = line_units + planes;     // of each place in a line: its unit's column, -1 outside
  const int j = blockIdx.x % s.kept, b = blockIdx.x / s.kept, thread = threadIdx.y * 32 + threadIdx.x;
  const int unit = keep_idx == nullptr ? j : keep_idx[b * s.kept + j];
  const int start0 = unit / s.units[2] / s.units[1] * s.unit_samples[0] - s.padding[0];
  const int start1 = unit / s.units[2] % s.units[1] * s.unit_samples[1] - s.padding[1];
  const int start2 = unit % s.units[2] * s.unit_samples[2] - s.padding[2];
  for (int e = thread; e < r.row; e += 256) {
    const int k2 = e % s.kernel[2], k1 = e / s.kernel[2] % s.kernel[1], k0 = e / s.kernel[2] / s.kernel[1] % s.kernel[0];
    offset[e] = ((e / s.kernel[2] / s.kernel[1] / s.kernel[0] * r.extent[0] + k0) * r.extent[1] + k1) * r.extent[2] + k2;
  }
  for (int t = thread; t < r.tokens; t += 256) {
    const int place = unroll_order[t * s.mask_units + unit];
    const int i2 = place % s.tokens[2] * s.stride[2] - s.padding[2] - start2, i1 = place / s.tokens[2] % s.tokens[1] * s.stride[1] - s.padding[1] - start1;
    const int i0 = place / s.tokens[2] / s.tokens[1] * s.stride[0] - s.padding[0] - start0;
    origin[t] = (i0 * r.extent[1] + i1) * r.extent[2] + i2;
  }
  for (int p = thread; p < planes; p += 256) {
    const int i0 = start0 + p / r.extent[1], i1 = start1 + p % r.extent[1];
    const bool inside = i0 >= 0 && i0 < s.input[0] && i1 >= 0 && i1 < s.input[1];
    line[p] = inside ? (i0 * s.input[1] + i1) * s.input[2] : -1;
    line_units[p] = inside ? (i0 / s.unit_samples[0] * s.units[1] + i1 / s.unit_samples[1]) * s.units[2] : 0;
  }
  for (int i = thread; i < r.extent[2]; i += 256) {
    const int i2 = start2 + i;
    column_unit[i] = i2 >= 0 && i2 < s.input[2] ? i2 / s.unit_samples[2] : -1;
  }
  __syncthreads();
  const int64_t sample = int64_t(s.input[0]) * s.input[1] * s.input[2];
  const uint8_t* mask = keep_mask == nullptr ? nullptr : keep_mask + int64_t(b) * s.mask_units;
  for (int p = threadIdx.y; p < planes; p += 8) {
    const int from = line[p], units = line_units[p];
    for (int i = threadIdx.x; i < r.extent[2]; i += 32) {
      const int column = column_unit[i];
      const bool reads = from >= 0 && column >= 0 && (mask == nullptr || mask[units + column] != 0);
      const float* in = x + int64_t(b) * s.channels * sample + from + start2 + i;
      T* to = region + p * r.extent[2] + i;
#pragma unroll 4
      for (int c = 0; c < s.channels; ++c) to[c * plane_size] = FromFloat<T>(reads ? in[c * sample] : 0.0f);
    }
  }
  __syncthreads();
  const int vectors = r.row / kWidth;
  for (int i = thread; i < r.tokens * vectors; i += 256) {
    const int t = i / vectors, v = i % vectors;
    const T* from = region + origin[t];
    struct alignas(kWidth * sizeof(T)) { T value[kWidth]; } out;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) out.value[k] = from[offset[v * kWidth + k]];
    *reinterpret_cast<decltype(out)*>(rows + ((int64_t(b) * r.tokens + t) * s.kept + j) * r.row + v * kWidth) = out;
  }
}

// A warp a row, kWidth values a lane.
template <typename T, int kWidth>
__global__ void __launch_bounds__(256) Add(PositionShape s, const T* y, const float* position, const float* temporal, const int32_t* keep_idx,
                                           const int32_t* unroll_order, float* x) {
  const int row = int(blockIdx.x * 8 + threadIdx.y), b = row / s.tokens, n = row - b * s.tokens, t = n / s.kept, j = n - t * s.kept;
  if (b >= s.batch) return;
  const int unit = keep_idx == nullptr ? j : keep_idx[b * s.kept + j], token = unroll_order[t * s.mask_units + unit];
  const int64_t at = int64_t(row) * s.dim;
  const float* const place = position + int64_t(token % s.spatial) * s.dim;
  const float* const time = temporal == nullptr ? nullptr : temporal + int64_t(token / s.spatial) * s.dim;
  for (int c = threadIdx.x * kWidth; c < s.dim; c += 32 * kWidth) {
    float v[kWidth], p[kWidth];
    LoadN<kWidth>(y + at + c, v);
    LoadN<kWidth>(place + c, p);
    if (time != nullptr) {
      float q[kWidth];
      LoadN<kWidth>(time + c, q);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) p[k] += q[k];
    }
#pragma unroll
    for (int k = 0; k < kWidth; ++k) v[k] += p[k];
    StoreN<kWidth>(x + at + c, v);
  }
}

// A block a token place; samples in order. `to`: [num_tokens, D].
__global__ void SumSamples(PositionShape s, const float* dx, const uint8_t* keep_mask, const int32_t* unroll_order, float* to,
                           bool accumulate) {
  extern __shared__ int place[];   // of the unit among the kept ones of each sample, -1: removed
  const int n = blockIdx.x, unit = n % s.mask_units, t = n / s.mask_units;
  for (int b = threadIdx.x; b < s.batch; b += blockDim.x) {
    int j = unit;
    if (keep_mask != nullptr) {
      const uint8_t* mask = keep_mask + int64_t(b) * s.mask_units;
      j = 0;
      for (int u = 0; u < unit; ++u) j += mask[u];
      if (!mask[unit]) j = -1;
    }
    place[b] = j;
  }
  __syncthreads();
  const int64_t out = int64_t(unroll_order[n]) * s.dim;
  for (int c = threadIdx.x; c < s.dim; c += blockDim.x) {
    float sum = accumulate ? to[out + c] : 0.0f;
#pragma unroll 8
    for (int b = 0; b < s.batch; ++b) {   // without a branch: several reads under way
      const int j = place[b];
      sum += j >= 0 ? dx[(int64_t(b) * s.tokens + t * s.kept + j) * s.dim + c] : 0.0f;
    }
    to[out + c] = sum;
  }
}

// out[o, c] (+)= sum over i of full[o * outer_step + i * inner_step, c].
__global__ void SumAxis(const float* full, float* out, int count, int inner, int outer_step, int inner_step, int dim, bool accumulate) {
  HIERAD_GRID_LOOP(i, int64_t(count) * dim) {
    const int64_t o = i / dim, c = i % dim;
    float sum = accumulate ? out[i] : 0.0f;
    for (int k = 0; k < inner; ++k) sum += full[(o * outer_step + int64_t(k) * inner_step) * dim + c];
    out[i] = sum;
  }
}

}  // namespace

template <typename T>
cudaError_t PatchGather(const PatchShape& s, const float* x, const uint8_t* keep_mask, const int32_t* keep_idx,
                        const int32_t* unroll_order, T* rows, cudaStream_t stream) {
  UnitRegion r{{}, s.channels * s.kernel[0] * s.kernel[1] * s.kernel[2], s.unit_tokens};
  for (int d = 0; d < 3; ++d) r.extent[d] = s.unit_samples[d] - s.stride[d] + s.kernel[d];
  const size_t bytes = r.Bytes(s.channels, sizeof(T));
  if (bytes <= kUnitBytes) {
    constexpr int kWide = 16 / sizeof(T);
    const auto kernel = r.row % kWide == 0 ? GatherUnit<T, kWide> : GatherUnit<T, 1>;
    Launch(kernel, unsigned(s.batch * s.kept), dim3(32, 8), bytes, stream, s, r, x, keep_mask, keep_idx, unroll_order, rows);
    return cudaGetLastError();
  }
  const int64_t jobs = int64_t(s.batch) * s.unit_tokens * s.kept * s.channels * s.kernel[0] * s.kernel[1];
  Launch(Gather<T>, Blocks(jobs, 256), 256, 0, stream, s, x, keep_mask, keep_idx, unroll_order, rows);
  return cudaGetLastError();
}

template <typename T>
cudaError_t AddPosition(const PositionShape& s, const T* y, const float* position, const float* temporal, const int32_t* keep_idx,
                        const int32_t* unroll_order, float* x, cudaStream_t stream) {
  const unsigned blocks = unsigned((int64_t(s.batch) * s.tokens + 7) / 8);
  Launch(s.dim % 4 == 0 ? Add<T, 4> : Add<T, 1>, blocks, dim3(32, 8), 0, stream, s, y, position, temporal, keep_idx, unroll_order, x);
  return cudaGetLastError();
}

cudaError_t AddPositionBackward(const PositionShape& s, const float* dx, const uint8_t* keep_mask, const int32_t* unroll_order,
                                float* dposition, float* dtemporal, float* scratch, bool accumulate, cudaStream_t stream) {
  const int threads = std::min(256, (s.dim + 31) / 32 * 32);
  const int bytes = (s.batch + 3) / 4 * 4 * int(sizeof(int));   // the compiler reads places four at a time
  if (bytes > 48 << 10) {
    if (cudaError_t e = cudaFuncSetAttribute(SumSamples, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes); e != cudaSuccess) return e;
  }
  float* full = dtemporal == nullptr ? dposition : scratch;
  Launch(SumSamples, unsigned(s.num_tokens), threads, bytes, stream, s, dx, keep_mask, unroll_order, full, dtemporal == nullptr && accumulate);
  if (dtemporal != nullptr) {
    const int frames = s.num_tokens / s.spatial;
    Launch(SumAxis, Blocks(int64_t(s.spatial) * s.dim, 256), 256, 0, stream, full, dposition, s.spatial, frames, 1, s.spatial, s.dim, accumulate);
    Launch(SumAxis, Blocks(int64_t(frames) * s.dim, 256), 256, 0, stream, full, dtemporal, frames, s.spatial, s.spatial, 1, s.dim, accumulate);
  }
  return cudaGetLastError();
}

#define HIERAD_INSTANTIATE(T)                                                                                                       \
  template cudaError_t PatchGather<T>(const PatchShape&, const float*, const uint8_t*, const int32_t*, const int32_t*, T*, cudaStream_t); \
  template cudaError_t AddPosition<T>(const PositionShape&, const T*, const float*, const float*, const int32_t*, const int32_t*,   \
                                      float*, cudaStream_t);
HIERAD_INSTANTIATE(bf16)
HIERAD_INSTANTIATE(half)
HIERAD_INSTANTIATE(float)
#undef HIERAD_INSTANTIATE

}  // namespace hierad::kernels
