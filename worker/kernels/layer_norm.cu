// Layer norm, a warp a row, with the residual before it on request; and its backward pass, which makes on the way the parts
// of the affine gradients, the copy in T of the residual stream's gradient, and the parts of that one's sum.
#include "worker/kernels/device.cuh"
#include "worker/kernels/drop_path.cuh"
#include "worker/kernels/kernels.h"

namespace hierad::kernels {
namespace {

constexpr float kEpsilon = 1e-6f;
constexpr int kWarps = 8;
constexpr int kMostCols = 2048;   // beyond it, and for widths that are no multiple of 4, a row is read more than once

bool FitsRegisters(int cols) { return cols % 4 == 0 && cols <= kMostCols; }
int BackwardBytes(int cols) { return kWarps * 3 * cols * int(sizeof(float)); }   // of shared memory

// The residual that makes x: x = base + factor y, written to out.
template <typename T>
struct Branch {
  const StepScalars* scalars;
  const int64_t* visit_ids;
  DropPath drop;
  const float* base;
  const T* y;
  float* out;
  int64_t tokens;   // rows of a sample
};

// kVectors: float4s of a row that a lane keeps in registers.
template <typename T, int kVectors, bool kBranch>
__global__ void __launch_bounds__(kWarps * 32) Forward(Branch<T> branch, const float* x, const float* gamma, const float* beta, T* y,
                                                       float* mean, float* rstd, int64_t rows, int cols) {
  const int lane = threadIdx.x & 31;
  const int64_t row = blockIdx.x * int64_t(kWarps) + (threadIdx.x >> 5), at = row * cols;
  if (row >= rows) return;
  float4 v[kVectors];
  float sum = 0, squares = 0;
  float factor = 1;
  if constexpr (kBranch) factor = BranchFactor(branch.scalars, branch.visit_ids, row / branch.tokens, branch.drop);
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int c = (k * 32 + lane) * 4;
    v[k] = make_float4(0, 0, 0, 0);
    if (c >= cols) continue;
    if constexpr (kBranch) {
      v[k] = Load4(branch.base + at + c);
      const float4 add = Load4(branch.y + at + c);
      if (factor != 0) v[k] = make_float4(v[k].x + factor * add.x, v[k].y + factor * add.y, v[k].z + factor * add.z, v[k].w + factor * add.w);
      Store4(branch.out + at + c, v[k]);
    } else {
      v[k] = Load4(x + at + c);
    }
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
    Store4(y + at + c, make_float4(v[k].x * r * g.x + b.x, v[k].y * r * g.y + b.y, v[k].z * r * g.z + b.z, v[k].w * r * g.w + b.w));
  }
  if (lane == 0) mean[row] = m, rstd[row] = r;
}

template <typename T>
__global__ void ForwardAny(const float* x, const float* gamma, const float* beta, T* y, float* mean, float* rstd, int64_t rows, int cols) {
  const int lane = threadIdx.x & 31;
  const int64_t row = blockIdx.x * int64_t(kWarps) + (threadIdx.x >> 5);
  if (row >= rows) return;
  const float* in = x + row * cols;
  float sum = 0, squares = 0;
  for (int c = lane; c < cols; c += 32) sum += in[c];
  const float m = WarpSum(sum) / float(cols);
  for (int c = lane; c < cols; c += 32) squares += (in[c] - m) * (in[c] - m);
  const float r = rsqrtf(WarpSum(squares) / float(cols) + kEpsilon);
  for (int c = lane; c < cols; c += 32) y[row * cols + c] = FromFloat<T>((in[c] - m) * r * gamma[c] + beta[c]);
  if (lane == 0) mean[row] = m, rstd[row] = r;
}

// What the nearest value in T leaves of v.
template <typename T>
__device__ inline float Left(float v) { return v - ToFloat(FromFloat<T>(v)); }

__device__ inline void Add4(float4& a, float4 b) { a.x += b.x, a.y += b.y, a.z += b.z, a.w += b.w; }

// Four values of dx_in, as they are stored until all of a row's reads are under way.
template <typename T, bool kPair>
struct Before {
  float4 v;
  __device__ void Load(const LayerNormGradient<T>& a, int64_t at) {
    if (a.dx_in != nullptr) v = Load4(a.dx_in + at);
  }
  __device__ float4 Value() const { return v; }
};
template <typename T>
struct Before<T, true> {
  Four<T> narrow, low;
  __device__ void Load(const LayerNormGradient<T>& a, int64_t at) { narrow = LoadFour(a.dx_in_narrow + at), low = LoadFour(a.dx_in_low + at); }
  __device__ float4 Value() const {
    float4 sum = Widen<T>(narrow);
    Add4(sum, Widen<T>(low));
    return sum;
  }
};

// Block p takes the rows of part p, its warps in turn; a lane keeps the sums of its columns. Of narrow rows a warp has several
// under way at once: one alone does not keep the memory busy.
template <typename T, int kVectors, bool kPair>
__global__ void __launch_bounds__(kWarps * 32, kVectors <= 4 ? 2 : 1) Backward(LayerNormGradient<T> a) {
  constexpr int kRows = kVectors == 1 ? 4 : kVectors == 2 ? 2 : 1;
  extern __shared__ float sums[];   // [warps][3][cols]
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, cols = a.cols;
  const int64_t chunk = (a.rows + gridDim.x - 1) / gridDim.x, first = blockIdx.x * chunk, end = min(first + chunk, a.rows);
  float4 dgamma[kVectors], dbeta[kVectors], total[kVectors];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) dgamma[k] = dbeta[k] = total[k] = make_float4(0, 0, 0, 0);
  for (int64_t row0 = first + warp; row0 < end; row0 += kWarps * kRows) {
    float4 d[kRows][kVectors], n[kRows][kVectors];
    Before<T, kPair> before[kRows][kVectors];
    float m[kRows], r[kRows];
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      const int64_t row = row0 + j * kWarps;
      const bool there = row < end;
      m[j] = there ? a.mean[row] : 0, r[j] = there ? a.rstd[row] : 0;
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {   // all loads before the first use
        const int c = (k * 32 + lane) * 4;
        d[j][k] = n[j][k] = make_float4(0, 0, 0, 0);
        before[j][k] = {};
        if (c >= cols || !there) continue;
        d[j][k] = Load4(a.dy + row * cols + c);
        n[j][k] = Load4(a.x + row * cols + c);
        before[j][k].Load(a, row * cols + c);
      }
    }
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      const int64_t row = row0 + j * kWarps;
      if (row >= end) break;
      float sum = 0, dot = 0;
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        const int c = (k * 32 + lane) * 4;
        if (c >= cols) continue;
        n[j][k] = make_float4((n[j][k].x - m[j]) * r[j], (n[j][k].y - m[j]) * r[j], (n[j][k].z - m[j]) * r[j], (n[j][k].w - m[j]) * r[j]);
        Add4(dgamma[k], make_float4(d[j][k].x * n[j][k].x, d[j][k].y * n[j][k].y, d[j][k].z * n[j][k].z, d[j][k].w * n[j][k].w));
        Add4(dbeta[k], d[j][k]);
        const float4 g = Load4(a.gamma + c);
        d[j][k] = make_float4(d[j][k].x * g.x, d[j][k].y * g.y, d[j][k].z * g.z, d[j][k].w * g.w);
        sum += (d[j][k].x + d[j][k].y) + (d[j][k].z + d[j][k].w);
        dot += (d[j][k].x * n[j][k].x + d[j][k].y * n[j][k].y) + (d[j][k].z * n[j][k].z + d[j][k].w * n[j][k].w);
      }
      sum = WarpSum(sum) / float(cols);
      dot = WarpSum(dot) / float(cols);
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        const int c = (k * 32 + lane) * 4;
        if (c >= cols) continue;
        float4 out = make_float4((d[j][k].x - sum - n[j][k].x * dot) * r[j], (d[j][k].y - sum - n[j][k].y * dot) * r[j], (d[j][k].z - sum - n[j][k].z * dot) * r[j],
                                 (d[j][k].w - sum - n[j][k].w * dot) * r[j]);
        Add4(out, before[j][k].Value());
        if (a.dx_out != nullptr) Store4(a.dx_out + row * cols + c, out);
        if (a.dx_narrow != nullptr) Store4(a.dx_narrow + row * cols + c, out);
        if (a.dx_low != nullptr) Store4(a.dx_low + row * cols + c, make_float4(Left<T>(out.x), Left<T>(out.y), Left<T>(out.z), Left<T>(out.w)));
        Add4(total[k], out);
      }
    }
  }
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int c = (k * 32 + lane) * 4;
    if (c >= cols) continue;
    Store4(sums + (warp * 3 + 0) * cols + c, dgamma[k]);
    Store4(sums + (warp * 3 + 1) * cols + c, dbeta[k]);
    Store4(sums + (warp * 3 + 2) * cols + c, total[k]);
  }
  __syncthreads();
  float* const parts[3] = {a.dgamma_parts, a.dbeta_parts, a.dx_parts};
#pragma unroll
  for (int which = 0; which < 3; ++which) {
    if (parts[which] == nullptr) continue;
    for (int c = threadIdx.x * 4; c < cols; c += blockDim.x * 4) {
      float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
      for (int w = 0; w < kWarps; ++w) Add4(sum, Load4(sums + (w * 3 + which) * cols + c));
      Store4(parts[which] + blockIdx.x * int64_t(cols) + c, sum);
    }
  }
}

// Any width: dx by rows, then the sums by columns.
template <typename T>
__global__ void BackwardRows(LayerNormGradient<T> a) {
  const int lane = threadIdx.x & 31, cols = a.cols;
  const int64_t row = blockIdx.x * int64_t(kWarps) + (threadIdx.x >> 5);
  if (row >= a.rows) return;
  const float m = a.mean[row], r = a.rstd[row];
  float sum = 0, dot = 0;
  for (int c = lane; c < cols; c += 32) {
    const float d = ToFloat(a.dy[row * cols + c]) * a.gamma[c];
    sum += d, dot += d * (a.x[row * cols + c] - m) * r;
  }
  sum = WarpSum(sum) / float(cols), dot = WarpSum(dot) / float(cols);
  for (int c = lane; c < cols; c += 32) {
    const int64_t i = row * cols + c;
    float out = (ToFloat(a.dy[i]) * a.gamma[c] - sum - (a.x[i] - m) * r * dot) * r;
    if (a.dx_in != nullptr) out += a.dx_in[i];
    else if (a.dx_in_narrow != nullptr) out += ToFloat(a.dx_in_narrow[i]) + ToFloat(a.dx_in_low[i]);
    if (a.dx_out != nullptr) a.dx_out[i] = out;
    if (a.dx_narrow != nullptr) a.dx_narrow[i] = FromFloat<T>(out);
    if (a.dx_low != nullptr) a.dx_low[i] = FromFloat<T>(Left<T>(out));
  }
}

template <typename T>
__global__ void BackwardColumns(LayerNormGradient<T> a) {
  const int64_t chunk = (a.rows + gridDim.y - 1) / gridDim.y, first = blockIdx.y * chunk, end = min(first + chunk, a.rows);
  const int c = blockIdx.x * blockDim.x + threadIdx.x, cols = a.cols;
  if (c >= cols) return;
  float dgamma = 0, dbeta = 0, total = 0;
  for (int64_t row = first; row < end; ++row) {
    const float d = ToFloat(a.dy[row * cols + c]);
    dgamma += d * (a.x[row * cols + c] - a.mean[row]) * a.rstd[row];
    dbeta += d;
    const int64_t i = row * cols + c;
    total += a.dx_out != nullptr ? a.dx_out[i] : ToFloat(a.dx_narrow[i]) + ToFloat(a.dx_low[i]);
  }
  const int64_t at = blockIdx.y * int64_t(cols) + c;
  a.dgamma_parts[at] = dgamma;
  a.dbeta_parts[at] = dbeta;
  if (a.dx_parts != nullptr) a.dx_parts[at] = total;
}

template <typename T, int kVectors>
cudaError_t LaunchBackward(const LayerNormGradient<T>& a, cudaStream_t stream) {
  const int bytes = BackwardBytes(a.cols);
  auto kernel = Backward<T, kVectors, false>;
  if constexpr (sizeof(T) == 2) {
    if (a.dx_in_narrow != nullptr) kernel = Backward<T, kVectors, true>;
  }
  if (bytes > 48 << 10) {
    if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes); e != cudaSuccess) return e;
  }
  Launch(kernel, unsigned(a.num_parts), kWarps * 32, bytes, stream, a);
  return cudaGetLastError();
}

template <bool kBranch, typename T>
cudaError_t LaunchForward(const Branch<T>& branch, const float* x, const float* gamma, const float* beta, T* y, float* mean, float* rstd,
                          int64_t rows, int cols, cudaStream_t stream) {
  const unsigned blocks = unsigned((rows + kWarps - 1) / kWarps);
  auto launch = [&](auto kernel) { Launch(kernel, blocks, kWarps * 32, 0, stream, branch, x, gamma, beta, y, mean, rstd, rows, cols); };
  if (cols <= 128) launch(Forward<T, 1, kBranch>);
  else if (cols <= 256) launch(Forward<T, 2, kBranch>);
  else if (cols <= 384) launch(Forward<T, 3, kBranch>);
  else if (cols <= 512) launch(Forward<T, 4, kBranch>);
  else if (cols <= 768) launch(Forward<T, 6, kBranch>);
  else if (cols <= 1024) launch(Forward<T, 8, kBranch>);
  else launch(Forward<T, 16, kBranch>);
  return cudaGetLastError();
}


}  // namespace

template <typename T>
cudaError_t LayerNorm(const float* x, const float* gamma, const float* beta, T* y, float* mean, float* rstd, int64_t rows, int cols,
                      cudaStream_t stream) {
  if (FitsRegisters(cols)) return LaunchForward<false>(Branch<T>{}, x, gamma, beta, y, mean, rstd, rows, cols, stream);
  Launch(ForwardAny<T>, unsigned((rows + kWarps - 1) / kWarps), kWarps * 32, 0, stream, x, gamma, beta, y, mean, rstd, rows, cols);
  return cudaGetLastError();
}

template <typename T>
cudaError_t ResidualNorm(const StepScalars* scalars, const int64_t* visit_ids, const DropPath& drop, const float* base, const T* branch,
                         float* x, const float* gamma, const float* beta, T* y, float* mean, float* rstd, int64_t batch, int64_t tokens,
                         int cols, cudaStream_t stream) {
  if (FitsRegisters(cols)) {
    return LaunchForward<true>(Branch<T>{scalars, visit_ids, drop, base, branch, x, tokens}, x, gamma, beta, y, mean, rstd, batch * tokens,
                               cols, stream);
  }
  if (cudaError_t e = Residual(scalars, visit_ids, drop, base, branch, x, batch, tokens * cols, stream); e != cudaSuccess) return e;
  return LayerNorm(x, gamma, beta, y, mean, rstd, batch * tokens, cols, stream);
}

template <typename T>
cudaError_t LayerNormBackward(const LayerNormGradient<T>& a, cudaStream_t stream) {
  const int cols = a.cols;
  if (!FitsRegisters(cols) || BackwardBytes(cols) > ThisCard().shared_bytes) {
    Launch(BackwardRows<T>, unsigned((a.rows + kWarps - 1) / kWarps), kWarps * 32, 0, stream, a);
    Launch(BackwardColumns<T>, dim3(unsigned((cols + 127) / 128), unsigned(a.num_parts)), 128, 0, stream, a);
    return cudaGetLastError();
  }
  if (cols <= 128) return LaunchBackward<T, 1>(a, stream);
  if (cols <= 256) return LaunchBackward<T, 2>(a, stream);
  if (cols <= 384) return LaunchBackward<T, 3>(a, stream);
  if (cols <= 512) return LaunchBackward<T, 4>(a, stream);
  if (cols <= 768) return LaunchBackward<T, 6>(a, stream);
  if (cols <= 1024) return LaunchBackward<T, 8>(a, stream);
  return LaunchBackward<T, 16>(a, stream);
}

#define HIERAD_INSTANTIATE(T)                                                                                                         \
  template cudaError_t LayerNorm<T>(const float*, const float*, const float*, T*, float*, float*, int64_t, int, cudaStream_t);        \
  template cudaError_t ResidualNorm<T>(const StepScalars*, const int64_t*, const DropPath&, const float*, const T*, float*,           \
                                       const float*, const float*, T*, float*, float*, int64_t, int64_t, int, cudaStream_t);          \
  template cudaError_t LayerNormBackward<T>(const LayerNormGradient<T>&, cudaStream_t);
HIERAD_INSTANTIATE(bf16)
HIERAD_INSTANTIATE(half)
HIERAD_INSTANTIATE(float)
#undef HIERAD_INSTANTIATE

}  // namespace hierad::kernels
