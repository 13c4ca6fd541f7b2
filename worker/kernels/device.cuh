// What the elementwise and row kernels share: conversions, four values at a time, sums over a warp and a block in a fixed
// order, launch sizes. T: bf16, half or float (the compute type); statistics, residual stream and parameter gradients are float.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "worker/kernels/card.h"
#include "worker/kernels/launch.cuh"

namespace hierad::kernels {

using bf16 = __nv_bfloat16;

__device__ inline float ToFloat(float v) { return v; }
__device__ inline float ToFloat(bf16 v) { return __bfloat162float(v); }
__device__ inline float ToFloat(half v) { return __half2float(v); }
template <typename T> __device__ inline T FromFloat(float v);
template <> __device__ inline float FromFloat<float>(float v) { return v; }
template <> __device__ inline bf16 FromFloat<bf16>(float v) { return __float2bfloat16(v); }
template <> __device__ inline half FromFloat<half>(float v) { return __float2half_rn(v); }

// Two neighbours of a 16-bit T in a word.
template <typename T> __device__ inline float2 UnpackPair(unsigned word);
template <> __device__ inline float2 UnpackPair<bf16>(unsigned word) { return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&word)); }
template <> __device__ inline float2 UnpackPair<half>(unsigned word) { return __half22float2(*reinterpret_cast<const __half2*>(&word)); }
template <typename T> __device__ inline unsigned PackPair(float low, float high);
template <> __device__ inline unsigned PackPair<bf16>(float low, float high) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const unsigned*>(&v);
}
template <> __device__ inline unsigned PackPair<half>(float low, float high) {
  const __half2 v = __floats2half2_rn(low, high);
  return *reinterpret_cast<const unsigned*>(&v);
}

// Four neighbours as they are stored.
template <typename T>
using Four = std::conditional_t<sizeof(T) == 2, uint2, float4>;
template <typename T>
__device__ inline float4 Widen(Four<T> v) {
  if constexpr (sizeof(T) == 2) {
    const float2 a = UnpackPair<T>(v.x), b = UnpackPair<T>(v.y);
    return make_float4(a.x, a.y, b.x, b.y);
  } else {
    return v;
  }
}
template <typename T>
__device__ inline Four<T> LoadFour(const T* p) { return *reinterpret_cast<const Four<T>*>(p); }
__device__ inline float4 Load4(const float* p) { return *reinterpret_cast<const float4*>(p); }
template <typename T>
__device__ inline float4 Load4(const T* p) {
  return Widen<T>(LoadFour(p));
}
__device__ inline void Store4(float* p, float4 v) { *reinterpret_cast<float4*>(p) = v; }
template <typename T>
__device__ inline void Store4(T* p, float4 v) {
  static_assert(sizeof(T) == 2);
  *reinterpret_cast<uint2*>(p) = make_uint2(PackPair<T>(v.x, v.y), PackPair<T>(v.z, v.w));
}

template <typename V>
__device__ inline V WarpSum(V v) {
#pragma unroll
  for (int m = 16; m > 0; m >>= 1) v += __shfl_xor_sync(~0u, v, m);
  return v;
}

// Sum over the block, the same on every thread. `shared`: 32 values; may be used again at once.
template <typename V>
__device__ inline V BlockSum(V v, V* shared) {
  v = WarpSum(v);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = v;
  __syncthreads();
  V total = 0;
  for (unsigned w = 0; w < (blockDim.x + 31) / 32; ++w) total += shared[w];
  return total;
}

// Blocks for a loop with a stride of the whole grid.
inline unsigned Blocks(int64_t items, int per_block) {
  return unsigned(std::max<int64_t>(1, std::min<int64_t>((items + per_block - 1) / per_block, ThisCard().sm_count * 32)));
}

#define HIERAD_GRID_LOOP(i, n) \
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < (n); i += int64_t(gridDim.x) * blockDim.x)

}  // namespace hierad::kernels
