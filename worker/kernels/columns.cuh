// For kernels that sum columns while they pass over rows: blocks of 32 x 8 threads, each thread kWidth neighbouring columns
// of every eighth row of its block's part.
#pragma once

#include <type_traits>

#include "worker/kernels/device.cuh"

namespace hierad::kernels {

template <int kWidth, typename T>
__device__ inline void LoadN(const T* p, float* v) {
  if constexpr (kWidth == 1) {
    v[0] = ToFloat(p[0]);
  } else if constexpr (kWidth == 8 && sizeof(T) == 2) {
    const uint4 words = *reinterpret_cast<const uint4*>(p);
    const unsigned w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float2 pair = UnpackPair<T>(w[k]);
      v[2 * k] = pair.x, v[2 * k + 1] = pair.y;
    }
  } else {
#pragma unroll
    for (int k = 0; k < kWidth; k += 4) {
      const float4 four = Load4(p + k);
      v[k] = four.x, v[k + 1] = four.y, v[k + 2] = four.z, v[k + 3] = four.w;
    }
  }
}

template <int kWidth, typename T>
__device__ inline void StoreN(T* p, const float* v) {
  if constexpr (kWidth == 1) {
    p[0] = FromFloat<T>(v[0]);
  } else if constexpr (kWidth == 8 && sizeof(T) == 2) {
    *reinterpret_cast<uint4*>(p) = make_uint4(PackPair<T>(v[0], v[1]), PackPair<T>(v[2], v[3]), PackPair<T>(v[4], v[5]), PackPair<T>(v[6], v[7]));
  } else {
#pragma unroll
    for (int k = 0; k < kWidth; k += 4) Store4(p + k, make_float4(v[k], v[k + 1], v[k + 2], v[k + 3]));
  }
}

// The block's sums over its eight rows of threads, to parts[blockIdx.y, columns of the block].
template <int kWidth>
__device__ inline void StoreColumnSums(const float* sum, float (*shared)[32 * kWidth], float* parts, int cols) {
#pragma unroll
  for (int k = 0; k < kWidth; ++k) shared[threadIdx.y][threadIdx.x * kWidth + k] = sum[k];
  __syncthreads();
  for (int i = threadIdx.y * 32 + threadIdx.x; i < 32 * kWidth; i += 256) {
    const int column = blockIdx.x * 32 * kWidth + i;
    if (column >= cols) continue;
    float total = 0;
#pragma unroll
    for (int r = 0; r < 8; ++r) total += shared[r][i];
    parts[blockIdx.y * int64_t(cols) + column] = total;
  }
}

template <int kWidth>
dim3 ColumnGrid(int cols, int num_parts) { return dim3(unsigned((cols + 32 * kWidth - 1) / (32 * kWidth)), unsigned(num_parts)); }

// launch(width) with the widest access that leaves few threads without columns.
template <typename Launch>
void WithColumnWidth(int cols, const Launch& launch) {
  if (cols % 8 == 0 && (cols % 256 == 0 || cols > 1024)) launch(std::integral_constant<int, 8>{});
  else if (cols % 4 == 0) launch(std::integral_constant<int, 4>{});
  else launch(std::integral_constant<int, 1>{});
}

}  // namespace hierad::kernels
