// GELU in its exact (erf) form, the residual stream with drop path, pooling of the shortcut, conversion of type.
#include <type_traits>

#include "worker/kernels/columns.cuh"
#include "worker/kernels/device.cuh"
#include "worker/kernels/drop_path.cuh"
#include "worker/kernels/gelu.cuh"
#include "worker/kernels/kernels.h"

namespace hierad::kernels {
namespace {

// The approximation is good enough for what bf16 resolves, not for half.
template <typename T>
using GeluType = std::conditional_t<std::is_same_v<T, bf16>, bf16, float>;

template <typename T, int kWidth>
__global__ void GeluForward(const T* h, T* g, int64_t size) {
  HIERAD_GRID_LOOP(i, size / kWidth) {
    float v[kWidth];
    LoadN<kWidth>(h + i * kWidth, v);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      float derivative;
      GeluBoth<GeluType<T>>(v[k], &v[k], &derivative);
    }
    StoreN<kWidth>(g + i * kWidth, v);
  }
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(256) GeluBackwardParts(const T* h, const T* dg, T* dh, T* g, float* parts, int64_t rows, int cols) {
  __shared__ float sums[8][32 * kWidth];
  const int64_t chunk = (rows + gridDim.y - 1) / gridDim.y, first = blockIdx.y * chunk, end = min(first + chunk, rows);
  const int c = (blockIdx.x * 32 + threadIdx.x) * kWidth;
  float sum[kWidth] = {};
  if (c < cols) {
#pragma unroll 2
    for (int64_t row = first + threadIdx.y; row < end; row += 8) {
      float x[kWidth], d[kWidth];
      LoadN<kWidth>(h + row * cols + c, x);
      LoadN<kWidth>(dg + row * cols + c, d);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        float derivative;
        GeluBoth<GeluType<T>>(x[k], &x[k], &derivative);
        d[k] *= derivative;
        sum[k] += d[k];
      }
      StoreN<kWidth>(dh + row * cols + c, d);
      StoreN<kWidth>(g + row * cols + c, x);
    }
  }
  StoreColumnSums<kWidth>(sum, sums, parts, cols);
}

template <typename T, int kWidth>
__global__ void AddBranch(const StepScalars* s, const int64_t* visit_ids, DropPath drop, const float* base, const T* y, float* out,
                          int64_t batch, int64_t sample_size) {
  HIERAD_GRID_LOOP(i, batch * sample_size / kWidth) {
    const float f = BranchFactor(s, visit_ids, i * kWidth / sample_size, drop);
    if constexpr (kWidth == 4) {
      const float4 a = Load4(base + i * 4), v = Load4(y + i * 4);
      Store4(out + i * 4, f == 0 ? a : make_float4(a.x + f * v.x, a.y + f * v.y, a.z + f * v.z, a.w + f * v.w));
    } else {
      out[i] = f == 0 ? base[i] : base[i] + f * ToFloat(y[i]);
    }
  }
}

template <typename T, int kWidth>
__global__ void ScaleBranch(const StepScalars* s, const int64_t* visit_ids, DropPath drop, const float* dout, T* dy, int64_t batch,
                            int64_t sample_size) {
  HIERAD_GRID_LOOP(i, batch * sample_size / kWidth) {
    const float f = BranchFactor(s, visit_ids, i * kWidth / sample_size, drop);
    if constexpr (kWidth == 4) {
      const float4 v = Load4(dout + i * 4);
      Store4(dy + i * 4, f == 0 ? make_float4(0, 0, 0, 0) : make_float4(v.x * f, v.y * f, v.z * f, v.w * f));
    } else {
      dy[i] = FromFloat<T>(f == 0 ? 0.0f : f * dout[i]);
    }
  }
}

template <int kWidth>
struct alignas(kWidth) Places { uint8_t of[kWidth]; };

template <typename T, int kWidth>
__global__ void Pool(const T* y, float* base, uint8_t* argmax, int64_t batch, int64_t sample_out, int q_stride) {
  const int64_t vectors = sample_out / kWidth;
  HIERAD_GRID_LOOP(i, batch * vectors) {
    const int64_t b = i / vectors;
    const T* from = y + b * q_stride * sample_out + (i - b * vectors) * kWidth;
    float best[kWidth];
    Places<kWidth> which{};
    LoadN<kWidth>(from, best);
    for (int s = 1; s < q_stride; ++s) {
      float v[kWidth];
      LoadN<kWidth>(from + s * sample_out, v);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        if (v[k] > best[k] || v[k] != v[k]) best[k] = v[k], which.of[k] = uint8_t(s);
      }
    }
    StoreN<kWidth>(base + i * kWidth, best);
    *reinterpret_cast<Places<kWidth>*>(argmax + i * kWidth) = which;
  }
}

template <typename T, int kWidth>
__global__ void Unpool(const float* dbase, const uint8_t* argmax, T* dy, int64_t batch, int64_t sample_out, int q_stride) {
  const int64_t vectors = sample_out / kWidth;
  HIERAD_GRID_LOOP(i, batch * vectors) {
    const int64_t b = i / vectors;
    T* const to = dy + b * q_stride * sample_out + (i - b * vectors) * kWidth;
    const Places<kWidth> which = *reinterpret_cast<const Places<kWidth>*>(argmax + i * kWidth);
    float d[kWidth];
    LoadN<kWidth>(dbase + i * kWidth, d);
    for (int s = 0; s < q_stride; ++s) {
      float v[kWidth];
#pragma unroll
      for (int k = 0; k < kWidth; ++k) v[k] = which.of[k] == s ? d[k] : 0.0f;
      StoreN<kWidth>(to + s * sample_out, v);
    }
  }
}

template <typename From, typename To>
__global__ void Convert(const From* from, To* to, int64_t size) {
  HIERAD_GRID_LOOP(i, size / 4) Store4(to + i * 4, Load4(from + i * 4));
  if (blockIdx.x == 0 && threadIdx.x < size % 4) {
    const int64_t i = size / 4 * 4 + threadIdx.x;
    to[i] = FromFloat<To>(ToFloat(from[i]));
  }
}

}  // namespace

template <typename T>
cudaError_t Gelu(const T* h, T* g, int64_t size, cudaStream_t stream) {
  if (size % 8 == 0) Launch(GeluForward<T, 8>, Blocks(size, 2048), 256, 0, stream, h, g, size);
  else Launch(GeluForward<T, 1>, Blocks(size, 256), 256, 0, stream, h, g, size);
  return cudaGetLastError();
}

template <typename T>
cudaError_t GeluBackward(const T* h, const T* dg, T* dh, T* g, float* dh_parts, int64_t rows, int cols, int num_parts, cudaStream_t stream) {
  WithColumnWidth(cols, [&](auto width) {
    constexpr int kWidth = decltype(width)::value;
    Launch(GeluBackwardParts<T, kWidth>, ColumnGrid<kWidth>(cols, num_parts), dim3(32, 8), 0, stream, h, dg, dh, g, dh_parts, rows, cols);
  });
  return cudaGetLastError();
}

template <typename T>
cudaError_t Residual(const StepScalars* scalars, const int64_t* visit_ids, const DropPath& drop, const float* base, const T* y,
                     float* out, int64_t batch, int64_t sample_size, cudaStream_t stream) {
  const unsigned blocks = Blocks(batch * sample_size, 1024);
  if (sample_size % 4 == 0) Launch(AddBranch<T, 4>, blocks, 256, 0, stream, scalars, visit_ids, drop, base, y, out, batch, sample_size);
  else Launch(AddBranch<T, 1>, blocks, 256, 0, stream, scalars, visit_ids, drop, base, y, out, batch, sample_size);
  return cudaGetLastError();
}

template <typename T>
cudaError_t ResidualBackward(const StepScalars* scalars, const int64_t* visit_ids, const DropPath& drop, const float* dout, T* dy,
                             int64_t batch, int64_t sample_size, cudaStream_t stream) {
  const unsigned blocks = Blocks(batch * sample_size, 1024);
  if (sample_size % 4 == 0) Launch(ScaleBranch<T, 4>, blocks, 256, 0, stream, scalars, visit_ids, drop, dout, dy, batch, sample_size);
  else Launch(ScaleBranch<T, 1>, blocks, 256, 0, stream, scalars, visit_ids, drop, dout, dy, batch, sample_size);
  return cudaGetLastError();
}

template <typename T>
cudaError_t MaxPool(const T* y, float* base, uint8_t* argmax, int64_t batch, int64_t sample_out, int q_stride, cudaStream_t stream) {
  const bool wide = sample_out % 4 == 0;
  Launch(wide ? Pool<T, 4> : Pool<T, 1>, Blocks(batch * sample_out, wide ? 1024 : 256), 256, 0, stream, y, base, argmax, batch, sample_out, q_stride);
  return cudaGetLastError();
}

template <typename T>
cudaError_t MaxPoolBackward(const float* dbase, const uint8_t* argmax, T* dy, int64_t batch, int64_t sample_out, int q_stride,
                            cudaStream_t stream) {
  const bool wide = sample_out % 4 == 0;
  Launch(wide ? Unpool<T, 4> : Unpool<T, 1>, Blocks(batch * sample_out, wide ? 1024 : 256), 256, 0, stream, dbase, argmax, dy, batch, sample_out, q_stride);
  return cudaGetLastError();
}

template <typename From, typename To>
cudaError_t Cast(const From* from, To* to, int64_t size, cudaStream_t stream) {
  Launch(Convert<From, To>, Blocks(size, 1024), 256, 0, stream, from, to, size);
  return cudaGetLastError();
}
template cudaError_t Cast<float, bf16>(const float*, bf16*, int64_t, cudaStream_t);
template cudaError_t Cast<bf16, float>(const bf16*, float*, int64_t, cudaStream_t);
template cudaError_t Cast<float, half>(const float*, half*, int64_t, cudaStream_t);
template cudaError_t Cast<half, float>(const half*, float*, int64_t, cudaStream_t);
template cudaError_t Cast<float, float>(const float*, float*, int64_t, cudaStream_t);

#define HIERAD_INSTANTIATE(T)                                                                                                   \
  template cudaError_t Gelu<T>(const T*, T*, int64_t, cudaStream_t);                                                            \
  template cudaError_t GeluBackward<T>(const T*, const T*, T*, T*, float*, int64_t, int, int, cudaStream_t);                    \
  template cudaError_t Residual<T>(const StepScalars*, const int64_t*, const DropPath&, const float*, const T*, float*, int64_t, \
                                   int64_t, cudaStream_t);                                                                      \
  template cudaError_t ResidualBackward<T>(const StepScalars*, const int64_t*, const DropPath&, const float*, T*, int64_t,      \
                                           int64_t, cudaStream_t);                                                              \
  template cudaError_t MaxPool<T>(const T*, float*, uint8_t*, int64_t, int64_t, int, cudaStream_t);                             \
  template cudaError_t MaxPoolBackward<T>(const float*, const uint8_t*, T*, int64_t, int64_t, int, cudaStream_t);
HIERAD_INSTANTIATE(bf16)
HIERAD_INSTANTIATE(half)
HIERAD_INSTANTIATE(float)
#undef HIERAD_INSTANTIATE

}  // namespace hierad::kernels
