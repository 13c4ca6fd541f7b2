// Fusion heads' rows, and the decoder's input: visible tokens and mask tokens in spatial order, with their position.
#include "worker/kernels/device.cuh"
#include "worker/kernels/kernels.h"

namespace hierad::kernels {
namespace {

// A block's row (b, j, f) of a fusion head, and where x has its tokens: that of tap p begins at start + order[p] * step.
struct FusionRow {
  const int32_t* order;
  int64_t row, start, step;
  __device__ FusionRow(const FusionShape& s, const int32_t* orders) : row(blockIdx.x), step(int64_t(s.kept) * s.dim) {
    const int f = blockIdx.x % s.finals, rest = blockIdx.x / s.finals, j = rest % s.kept, b = rest / s.kept;
    order = orders + f * s.taps;
    start = (int64_t(b) * s.finals * s.taps * s.kept + j) * s.dim;
  }
};

template <typename To>
__global__ void __launch_bounds__(256) Gather(FusionShape s, const float* x, const int32_t* order, To* rows) {
  const FusionRow r(s, order);
  const int size = s.dim * s.taps;
  To* const to = rows + r.row * size;
#pragma unroll 4
  for (int i = threadIdx.x; i < size; i += 256) {   // (c, p): what a tap's token has beside it is in the cache for the next
    const int c = i / s.taps, p = i - c * s.taps;
    to[i] = FromFloat<To>(x[r.start + r.order[p] * r.step + c]);
  }
}

template <typename From>
__global__ void __launch_bounds__(256) Scatter(FusionShape s, const From* drows, const int32_t* order, float* dx, bool accumulate) {
  const FusionRow r(s, order);
  const int size = s.dim * s.taps;
  const From* const from = drows + r.row * size;
#pragma unroll 4
  for (int i = threadIdx.x; i < size; i += 256) {   // (p, c): neighbours write neighbours
    const int p = i / s.dim, c = i - p * s.dim;
    float* const to = dx + r.start + r.order[p] * r.step + c;
    const float v = ToFloat(from[c * s.taps + p]);
    *to = accumulate ? *to + v : v;
  }
}

// Place of `unit` among the kept ones of a sample; -1: removed.
__device__ inline int KeptPlace(const uint8_t* mask, int unit) {
  if (!mask[unit]) return -1;
  int j = 0;
  for (int u = 0; u < unit; ++u) j += mask[u];
  return j;
}

// A block a mask unit of a sample.
template <typename T>
__global__ void Assemble(DecoderShape s, const T* y, const float* mask_token, const float* position, const uint8_t* keep_mask,
                         const int32_t* order, float* x) {
  const int unit = blockIdx.x % s.mask_units;
  const int64_t b = blockIdx.x / s.mask_units;
  const int j = KeptPlace(keep_mask + b * s.mask_units, unit);
  for (int i = threadIdx.x; i < s.finals * s.dim; i += blockDim.x) {
    const int f = i / s.dim, c = i % s.dim, token = order[unit * s.finals + f];
    const float v = j < 0 ? mask_token[c] : ToFloat(y[((b * s.kept + j) * s.finals + f) * s.dim + c]);
    x[(b * s.mask_units * s.finals + token) * s.dim + c] = v + position[int64_t(token) * s.dim + c];
  }
}

template <typename T>
__global__ void TakeVisible(DecoderShape s, const float* dx, const uint8_t* keep_mask, const int32_t* order, T* dy) {
  const int unit = blockIdx.x % s.mask_units;
  const int64_t b = blockIdx.x / s.mask_units;
  const int j = KeptPlace(keep_mask + b * s.mask_units, unit);
  if (j < 0) return;
  for (int i = threadIdx.x; i < s.finals * s.dim; i += blockDim.x) {
    const int f = i / s.dim, c = i % s.dim;
    dy[((b * s.kept + j) * s.finals + f) * s.dim + c] =
        FromFloat<T>(dx[(b * s.mask_units * s.finals + order[unit * s.finals + f]) * s.dim + c]);
  }
}

// A block a mask unit of a sample; a row is `words` of type W.
template <typename W>
__global__ void MoveMasked(MaskedShape s, int words, const W* x, const uint8_t* keep_mask, const int32_t* order, W* rows) {
  const int unit = blockIdx.x % s.mask_units;
  const int64_t b = blockIdx.x / s.mask_units;
  const uint8_t* mask = keep_mask + b * s.mask_units;
  if (mask[unit]) return;
  int place = 0;
  for (int u = 0; u < unit; ++u) place += mask[u] == 0;
  for (int i = threadIdx.x; i < s.finals * words; i += blockDim.x) {
    const int f = i / words, c = i % words;
    rows[((b * (s.mask_units - s.kept) + place) * s.finals + f) * words + c] = x[(b * s.mask_units * s.finals + order[unit * s.finals + f]) * words + c];
  }
}

template <typename W>
__global__ void ReturnMasked(MaskedShape s, int words, const W* rows, const uint8_t* keep_mask, const int32_t* order, W* x) {
  const int unit = blockIdx.x % s.mask_units;
  const int64_t b = blockIdx.x / s.mask_units;
  const uint8_t* mask = keep_mask + b * s.mask_units;
  const bool removed = mask[unit] == 0;
  int place = 0;
  if (removed) {
    for (int u = 0; u < unit; ++u) place += mask[u] == 0;
  }
  for (int i = threadIdx.x; i < s.finals * words; i += blockDim.x) {
    const int f = i / words, c = i % words;
    W value{};
    if (removed) value = rows[((b * (s.mask_units - s.kept) + place) * s.finals + f) * words + c];
    x[(b * s.mask_units * s.finals + order[unit * s.finals + f]) * words + c] = value;
  }
}

// launch(word) with the widest word that a row is a multiple of.
template <typename Launch>
cudaError_t WithWord(int row_bytes, const Launch& launch) {
  if (row_bytes % 16 == 0) launch(uint4{});
  else if (row_bytes % 4 == 0) launch(uint32_t{});
  else launch(uint16_t{});
  return cudaGetLastError();
}

// Samples in order.
__global__ void PositionGradient(const float* dx, float* dposition, int batch, int64_t size, bool accumulate) {
  HIERAD_GRID_LOOP(i, size) {
    float sum = accumulate ? dposition[i] : 0.0f;
    for (int b = 0; b < batch; ++b) sum += dx[b * size + i];
    dposition[i] = sum;
  }
}

// Part p of kReduceParts takes its share of (sample, unit) pairs, removed ones only.
__global__ void MaskTokenGradient(DecoderShape s, const float* dx, const uint8_t* keep_mask, const int32_t* order, float* scratch) {
  const int64_t pairs = int64_t(s.batch) * s.mask_units, chunk = (pairs + kReduceParts - 1) / kReduceParts;
  const int64_t first = blockIdx.y * chunk, end = min(first + chunk, pairs);
  const int c = blockIdx.x * blockDim.x + threadIdx.x;
  if (c >= s.dim) return;
  float sum = 0;
  for (int64_t i = first; i < end; ++i) {
    if (keep_mask[i]) continue;
    const int64_t b = i / s.mask_units, unit = i % s.mask_units;
    for (int f = 0; f < s.finals; ++f) sum += dx[(b * s.mask_units * s.finals + order[unit * s.finals + f]) * s.dim + c];
  }
  scratch[blockIdx.y * int64_t(s.dim) + c] = sum;
}

}  // namespace

template <typename To>
cudaError_t FusionGather(const FusionShape& s, const float* x, const int32_t* order, To* rows, cudaStream_t stream) {
  Launch(Gather<To>, unsigned(s.batch * s.kept * s.finals), 256, 0, stream, s, x, order, rows);
  return cudaGetLastError();
}

template <typename From>
cudaError_t FusionGatherBackward(const FusionShape& s, const From* drows, const int32_t* order, float* dx, bool accumulate,
                                 cudaStream_t stream) {
  Launch(Scatter<From>, unsigned(s.batch * s.kept * s.finals), 256, 0, stream, s, drows, order, dx, accumulate);
  return cudaGetLastError();
}

template <typename T>
cudaError_t DecoderAssemble(const DecoderShape& s, const T* y, const float* mask_token, const float* position, const uint8_t* keep_mask,
                            const int32_t* order, float* x, cudaStream_t stream) {
  Launch(Assemble<T>, unsigned(s.batch * s.mask_units), 256, 0, stream, s, y, mask_token, position, keep_mask, order, x);
  return cudaGetLastError();
}

template <typename T>
cudaError_t DecoderAssembleBackward(const DecoderShape& s, const float* dx, const uint8_t* keep_mask, const int32_t* order, T* dy,
                                    float* dmask_token, float* dposition, float* scratch, bool accumulate, cudaStream_t stream) {
  Launch(TakeVisible<T>, unsigned(s.batch * s.mask_units), 256, 0, stream, s, dx, keep_mask, order, dy);
  const int64_t size = int64_t(s.mask_units) * s.finals * s.dim;
  Launch(PositionGradient, Blocks(size, 128), 128, 0, stream, dx, dposition, s.batch, size, accumulate);
  Launch(MaskTokenGradient, dim3(unsigned((s.dim + 127) / 128), unsigned(kReduceParts)), 128, 0, stream, s, dx, keep_mask, order, scratch);
  if (cudaError_t e = cudaGetLastError(); e != cudaSuccess) return e;
  const PartsSum sum{scratch, dmask_token, s.dim, int(kReduceParts)};
  return SumParts(&sum, 1, accumulate, stream);
}

cudaError_t TakeMasked(const MaskedShape& s, const void* x, const uint8_t* keep_mask, const int32_t* order, void* rows, cudaStream_t stream) {
  return WithWord(s.row_bytes, [&](auto word) {
    using W = decltype(word);
    Launch(MoveMasked<W>, unsigned(s.batch * s.mask_units), 128, 0, stream, s, s.row_bytes / int(sizeof(W)), static_cast<const W*>(x), keep_mask, order,
                                                                        static_cast<W*>(rows));
  });
}

cudaError_t PutMasked(const MaskedShape& s, const void* rows, const uint8_t* keep_mask, const int32_t* order, void* x, cudaStream_t stream) {
  return WithWord(s.row_bytes, [&](auto word) {
    using W = decltype(word);
    Launch(ReturnMasked<W>, unsigned(s.batch * s.mask_units), 128, 0, stream, s, s.row_bytes / int(sizeof(W)), static_cast<const W*>(rows), keep_mask, order,
                                                                          static_cast<W*>(x));
  });
}

template cudaError_t FusionGather<bf16>(const FusionShape&, const float*, const int32_t*, bf16*, cudaStream_t);
template cudaError_t FusionGather<half>(const FusionShape&, const float*, const int32_t*, half*, cudaStream_t);
template cudaError_t FusionGather<float>(const FusionShape&, const float*, const int32_t*, float*, cudaStream_t);
template cudaError_t FusionGatherBackward<bf16>(const FusionShape&, const bf16*, const int32_t*, float*, bool, cudaStream_t);
template cudaError_t FusionGatherBackward<half>(const FusionShape&, const half*, const int32_t*, float*, bool, cudaStream_t);
template cudaError_t FusionGatherBackward<float>(const FusionShape&, const float*, const int32_t*, float*, bool, cudaStream_t);

#define HIERAD_INSTANTIATE(T)                                                                                                         \
  template cudaError_t DecoderAssemble<T>(const DecoderShape&, const T*, const float*, const float*, const uint8_t*, const int32_t*,  \
                                          float*, cudaStream_t);                                                                      \
  template cudaError_t DecoderAssembleBackward<T>(const DecoderShape&, const float*, const uint8_t*, const int32_t*, T*, float*,      \
                                                  float*, float*, bool, cudaStream_t);
HIERAD_INSTANTIATE(bf16)
HIERAD_INSTANTIATE(half)
HIERAD_INSTANTIATE(float)
#undef HIERAD_INSTANTIATE

}  // namespace hierad::kernels
