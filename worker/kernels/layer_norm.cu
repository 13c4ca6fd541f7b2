// Layer norm, a warp a row, and its backward pass with the affine gradients summed on the way.
#include "worker/kernels/device.cuh"
#include "worker/kernels/kernels.h"

namespace hierad::kernels {
namespace {

constexpr float kEpsilon = 1e-6f;
constexpr int kWarps = 8;

// kVectors: float4s of a row that a lane keeps in registers; 0: any width, the row is read again.
template <typename T, int kVectors>
__global__ void Forward(const float* x, const float* gamma, const float* beta, T* y, float* mean, float* rstd, int64_t rows, int cols) {
  const int lane = threadIdx.x & 31;
  const int64_t row = blockIdx.x * int64_t(kWarps) + (threadIdx.x >> 5);
  if (row >= rows) return;
  const float* in = x + row * cols;
  T* out = y + row * cols;
  if constexpr (kVectors > 0) {
    float4 v[kVectors];
    float sum = 0, squares = 0;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int c = (k * 32 + lane) * 4;
      v[k] = c < cols ? Load4(in + c) : make_float4(0, 0, 0, 0);
      sum += (v[k].x + v[k].y) + (v[k].z + v[k].w);
    }
    const float m = WarpSum(sum) / float(cols);
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if ((k * 32 + lane) * 4 >= cols) continue;
      v[k].x -= m, v[k].y -= m, v[k].z -= m, v[k].w -= m;
      squares += (v[k].x * v[k].x + v[k].y * v[k].y) + (v[k].z * v[k].z + v[k].w * v[k].w);
    }
    const float r = rsqrtf(WarpSum(squares) / float(cols) + kEpsilon);
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int c = (k * 32 + lane) * 4;
      if (c >= cols) continue;
      const float4 g = Load4(gamma + c), b = Load4(beta + c);
      Store4(out + c, make_float4(v[k].x * r * g.x + b.x, v[k].y * r * g.y + b.y, v[k].z * r * g.z + b.z, v[k].w * r * g.w + b.w));
    }
    if (lane == 0) mean[row] = m, rstd[row] = r;
  } else {
    float sum = 0, squares = 0;
    for (int c = lane; c < cols; c += 32) sum += in[c];
    const float m = WarpSum(sum) / float(cols);
    for (int c = lane; c < cols; c += 32) squares += (in[c] - m) * (in[c] - m);
    const float r = rsqrtf(WarpSum(squares) / float(cols) + kEpsilon);
    for (int c = lane; c < cols; c += 32) out[c] = FromFloat<T>((in[c] - m) * r * gamma[c] + beta[c]);
    if (lane == 0) mean[row] = m, rstd[row] = r;
  }
}

// Block p of kReduceParts takes rows p * chunk ...; its warps take them in turn; a lane keeps its columns' sums.
template <typename T, int kVectors>
__global__ void __launch_bounds__(512) Backward(const T* dy, const float* x, const float* mean, const float* rstd, const float* gamma,
                                                const float* dx_in, float* dx_out, float* scratch, int64_t rows, int cols) {
  extern __shared__ float sums[];   // [warps][2][cols]
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  const int64_t chunk = (rows + kReduceParts - 1) / kReduceParts, first = blockIdx.x * chunk, end = min(first + chunk, rows);
  float4 dgamma[kVectors], dbeta[kVectors], g[kVectors];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int c = (k * 32 + lane) * 4;
    dgamma[k] = dbeta[k] = make_float4(0, 0, 0, 0);
    g[k] = c < cols ? Load4(gamma + c) : make_float4(0, 0, 0, 0);
  }
  for (int64_t row = first + warp; row < end; row += warps) {
    const float m = mean[row], r = rstd[row];
    float4 d[kVectors], n[kVectors];
    float sum = 0, dot = 0;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int c = (k * 32 + lane) * 4;
      d[k] = n[k] = make_float4(0, 0, 0, 0);
      if (c >= cols) continue;
      d[k] = Load4(dy + row * cols + c);
      n[k] = Load4(x + row * cols + c);
      n[k] = make_float4((n[k].x - m) * r, (n[k].y - m) * r, (n[k].z - m) * r, (n[k].w - m) * r);
      dgamma[k].x += d[k].x * n[k].x, dgamma[k].y += d[k].y * n[k].y, dgamma[k].z += d[k].z * n[k].z, dgamma[k].w += d[k].w * n[k].w;
      dbeta[k].x += d[k].x, dbeta[k].y += d[k].y, dbeta[k].z += d[k].z, dbeta[k].w += d[k].w;
      d[k] = make_float4(d[k].x * g[k].x, d[k].y * g[k].y, d[k].z * g[k].z, d[k].w * g[k].w);
      sum += (d[k].x + d[k].y) + (d[k].z + d[k].w);
      dot += (d[k].x * n[k].x + d[k].y * n[k].y) + (d[k].z * n[k].z + d[k].w * n[k].w);
    }
    sum = WarpSum(sum) / float(cols);
    dot = WarpSum(dot) / float(cols);
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int c = (k * 32 + lane) * 4;
      if (c >= cols) continue;
      float4 out = make_float4((d[k].x - sum - n[k].x * dot) * r, (d[k].y - sum - n[k].y * dot) * r, (d[k].z - sum - n[k].z * dot) * r,
                               (d[k].w - sum - n[k].w * dot) * r);
      if (dx_in != nullptr) {
        const float4 before = Load4(dx_in + row * cols + c);
        out = make_float4(out.x + before.x, out.y + before.y, out.z + before.z, out.w + before.w);
      }
      Store4(dx_out + row * cols + c, out);
    }
  }
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int c = (k * 32 + lane) * 4;
    if (c >= cols) continue;
    Store4(sums + (warp * 2 + 0) * cols + c, dgamma[k]);
    Store4(sums + (warp * 2 + 1) * cols + c, dbeta[k]);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 2 * cols; i += blockDim.x) {
    float total = 0;
    for (int w = 0; w < warps; ++w) total += sums[w * 2 * cols + i];
    scratch[(i < cols ? blockIdx.x : kReduceParts + blockIdx.x) * int64_t(cols) + i % cols] = total;
  }
}

// Any width: dx by a warp a row, then the affine gradients column by column.
template <typename T>
__global__ void BackwardInput(const T* dy, const float* x, const float* mean, const float* rstd, const float* gamma, const float* dx_in,
                              float* dx_out, int64_t rows, int cols) {
  const int lane = threadIdx.x & 31;
  const int64_t row = blockIdx.x * int64_t(kWarps) + (threadIdx.x >> 5);
  if (row >= rows) return;
  const float m = mean[row], r = rstd[row];
  float sum = 0, dot = 0;
  for (int c = lane; c < cols; c += 32) {
    const float d = ToFloat(dy[row * cols + c]) * gamma[c];
    sum += d, dot += d * (x[row * cols + c] - m) * r;
  }
  sum = WarpSum(sum) / float(cols), dot = WarpSum(dot) / float(cols);
  for (int c = lane; c < cols; c += 32) {
    const int64_t i = row * cols + c;
    const float out = (ToFloat(dy[i]) * gamma[c] - sum - (x[i] - m) * r * dot) * r;
    dx_out[i] = dx_in == nullptr ? out : dx_in[i] + out;
  }
}

template <typename T>
__global__ void BackwardAffine(const T* dy, const float* x, const float* mean, const float* rstd, float* scratch, int64_t rows, int cols) {
  const int64_t chunk = (rows + kReduceParts - 1) / kReduceParts, first = blockIdx.y * chunk, end = min(first + chunk, rows);
  const int c = blockIdx.x * blockDim.x + threadIdx.x;
  if (c >= cols) return;
  float dgamma = 0, dbeta = 0;
  for (int64_t row = first; row < end; ++row) {
    const float d = ToFloat(dy[row * cols + c]);
    dgamma += d * (x[row * cols + c] - mean[row]) * rstd[row];
    dbeta += d;
  }
  scratch[blockIdx.y * int64_t(cols) + c] = dgamma;
  scratch[(kReduceParts + blockIdx.y) * int64_t(cols) + c] = dbeta;
}

template <typename T, int kVectors>
cudaError_t LaunchBackward(const T* dy, const float* x, const float* mean, const float* rstd, const float* gamma, const float* dx_in,
                           float* dx_out, float* scratch, int64_t rows, int cols, cudaStream_t stream) {
  const int threads = kVectors <= 4 ? 512 : 256, bytes = threads / 32 * 2 * cols * int(sizeof(float));
  auto kernel = Backward<T, kVectors>;
  if (bytes > 48 << 10) {
    if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes); e != cudaSuccess) return e;
  }
  kernel<<<unsigned(kReduceParts), threads, bytes, stream>>>(dy, x, mean, rstd, gamma, dx_in, dx_out, scratch, rows, cols);
  return cudaGetLastError();
}

}  // namespace

template <typename T>
cudaError_t LayerNorm(const float* x, const float* gamma, const float* beta, T* y, float* mean, float* rstd, int64_t rows, int cols,
                      cudaStream_t stream) {
  const unsigned blocks = unsigned((rows + kWarps - 1) / kWarps);
  auto launch = [&](auto kernel) { kernel<<<blocks, kWarps * 32, 0, stream>>>(x, gamma, beta, y, mean, rstd, rows, cols); };
  if (cols % 4 != 0 || cols > 2048) launch(Forward<T, 0>);
  else if (cols <= 128) launch(Forward<T, 1>);
  else if (cols <= 256) launch(Forward<T, 2>);
  else if (cols <= 512) launch(Forward<T, 4>);
  else if (cols <= 1024) launch(Forward<T, 8>);
  else launch(Forward<T, 16>);
  return cudaGetLastError();
}

template <typename T>
cudaError_t LayerNormBackward(const T* dy, const float* x, const float* mean, const float* rstd, const float* gamma, const float* dx_in,
                              float* dx_out, float* dgamma, float* dbeta, float* scratch, int64_t rows, int cols, bool accumulate,
                              cudaStream_t stream) {
  cudaError_t e = cudaSuccess;
  if (cols % 4 != 0 || cols > 2048) {
    BackwardAffine<T><<<dim3(unsigned((cols + 127) / 128), unsigned(kReduceParts)), 128, 0, stream>>>(dy, x, mean, rstd, scratch, rows, cols);
    BackwardInput<T><<<unsigned((rows + kWarps - 1) / kWarps), kWarps * 32, 0, stream>>>(dy, x, mean, rstd, gamma, dx_in, dx_out, rows, cols);
    e = cudaGetLastError();
  } else if (cols <= 128) {
    e = LaunchBackward<T, 1>(dy, x, mean, rstd, gamma, dx_in, dx_out, scratch, rows, cols, stream);
  } else if (cols <= 256) {
    e = LaunchBackward<T, 2>(dy, x, mean, rstd, gamma, dx_in, dx_out, scratch, rows, cols, stream);
  } else if (cols <= 512) {
    e = LaunchBackward<T, 4>(dy, x, mean, rstd, gamma, dx_in, dx_out, scratch, rows, cols, stream);
  } else if (cols <= 1024) {
    e = LaunchBackward<T, 8>(dy, x, mean, rstd, gamma, dx_in, dx_out, scratch, rows, cols, stream);
  } else {
    e = LaunchBackward<T, 16>(dy, x, mean, rstd, gamma, dx_in, dx_out, scratch, rows, cols, stream);
  }
  if (e != cudaSuccess) return e;
  if (e = SumParts(scratch, dgamma, cols, accumulate, stream); e != cudaSuccess) return e;
  return SumParts(scratch + kReduceParts * cols, dbeta, cols, accumulate, stream);
}

#define HIERAD_INSTANTIATE(T)                                                                                                       \
  template cudaError_t LayerNorm<T>(const float*, const float*, const float*, T*, float*, float*, int64_t, int, cudaStream_t);      \
  template cudaError_t LayerNormBackward<T>(const T*, const float*, const float*, const float*, const float*, const float*, float*, \
                                            float*, float*, float*, int64_t, int, bool, cudaStream_t);
HIERAD_INSTANTIATE(bf16)
HIERAD_INSTANTIATE(float)
#undef HIERAD_INSTANTIATE

}  // namespace hierad::kernels
