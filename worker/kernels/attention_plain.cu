// Attention for fp32, fp64 and head sizes the tensor cores do not take: one warp a query (forward, dQ) or a key (dK, dV),
// any lengths. For fidelity, not speed: scores are computed again wherever they are needed.
#include <cmath>

#include "worker/kernels/attention.h"
#include "worker/kernels/launch.cuh"

namespace hierad::kernels {
namespace {

constexpr int kWarps = 4;

template <typename S>
__device__ S WarpSum(S v) {
  for (int m = 16; m > 0; m >>= 1) v += __shfl_xor_sync(~0u, v, m);
  return v;
}

// Addresses of one (b, w, h).
struct Unit {
  AttentionShape s;
  int b, w, h;
  __device__ Unit(const AttentionShape& shape, int64_t unit)
      : s(shape), b(int(unit / (shape.heads * shape.windows))), w(int(unit / shape.heads % shape.windows)), h(int(unit % shape.heads)) {}
  // Element 0 of q (which 0), k (1) or v (2) of token t.
  __device__ int64_t Qkv(int t, int which) const {
    return (((int64_t(b) * s.keys + t) * s.windows + w) * 3 + which) * s.heads * s.head_dim + int64_t(h) * s.head_dim;
  }
  __device__ int64_t Out(int t) const {
    return ((int64_t(b) * s.queries() + t) * s.windows + w) * s.heads * s.head_dim + int64_t(h) * s.head_dim;
  }
  __device__ int64_t Lse(int t) const { return ((int64_t(b) * s.heads + h) * s.windows + w) * s.queries() + t; }
};

template <typename T, typename S>
__device__ S PooledQuery(const Unit& u, const T* qkv, const uint8_t* argmax, int t, int d) {
  const int from = u.s.q_stride > 1 ? argmax[u.Out(t) + d] * u.s.queries() + t : t;
  return S(qkv[u.Qkv(from, 0) + d]);
}

template <typename T, typename S>
__global__ void PoolArgmax(AttentionShape shape, const T* qkv, uint8_t* argmax) {
  const int64_t size = int64_t(shape.batch) * shape.queries() * shape.windows * shape.heads * shape.head_dim;
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < size; i += int64_t(gridDim.x) * blockDim.x) {
    const int width = shape.heads * shape.head_dim, column = int(i % width);
    const int64_t row = i / width;
    const int w = int(row % shape.windows), t = int(row / shape.windows % shape.queries()), b = int(row / shape.windows / shape.queries());
    S best = 0;
    int which = 0;
    for (int s = 0; s < shape.q_stride; ++s) {
      const int64_t token = (int64_t(b) * shape.keys + s * shape.queries() + t) * shape.windows + w;
      const S v = S(qkv[token * 3 * width + column]);
      if (s == 0 || v > best) best = v, which = s;
    }
    argmax[i] = uint8_t(which);
  }
}

// Dot product over D of a lane-strided query held in registers' place (shared memory) with row `row` of global memory.
template <typename T, typename S>
__device__ S Dot(const S* a, const T* row, int d) {
  S sum = 0;
  for (int i = threadIdx.x & 31; i < d; i += 32) sum += a[i] * S(row[i]);
  return WarpSum(sum);
}

template <typename T, typename S>
__global__ void Forward(AttentionShape shape, const T* qkv, T* o, S* lse, const uint8_t* argmax) {
  extern __shared__ double memory[];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, d = shape.head_dim, queries = shape.queries();
  S* q = reinterpret_cast<S*>(memory) + warp * 2 * d;
  S* acc = q + d;
  const int64_t job = blockIdx.x * int64_t(kWarps) + warp;
  if (job >= shape.units() * queries) return;
  const Unit u(shape, job / queries);
  const int t = int(job % queries);
  const S scale = S(1) / sqrt(S(d));
  for (int i = lane; i < d; i += 32) q[i] = PooledQuery<T, S>(u, qkv, argmax, t, i) * scale, acc[i] = 0;
  __syncwarp();
  S peak = -INFINITY, sum = 0;
  for (int k = 0; k < shape.keys; ++k) {
    const S score = Dot<T, S>(q, qkv + u.Qkv(k, 1), d);
    const S next = score > peak ? score : peak;
    const S shrink = exp(peak - next), p = exp(score - next);
    sum = sum * shrink + p;
    const T* v = qkv + u.Qkv(k, 2);
    for (int i = lane; i < d; i += 32) acc[i] = acc[i] * shrink + p * S(v[i]);
    peak = next;
  }
  for (int i = lane; i < d; i += 32) o[u.Out(t) + i] = T(acc[i] / sum);
  if (lane == 0) lse[u.Lse(t)] = peak + log(sum);
}

template <typename T, typename S>
__global__ void BackwardQuery(AttentionShape shape, const T* qkv, const T* o, const T* d_o, const S* lse, const uint8_t* argmax,
                              T* dqkv, S* delta) {
  extern __shared__ double memory[];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, d = shape.head_dim, queries = shape.queries();
  S* q = reinterpret_cast<S*>(memory) + warp * 3 * d;
  S* go = q + d;
  S* acc = go + d;
  const int64_t job = blockIdx.x * int64_t(kWarps) + warp;
  if (job >= shape.units() * queries) return;
  const Unit u(shape, job / queries);
  const int t = int(job % queries);
  const S scale = S(1) / sqrt(S(d));
  S dot = 0;
  for (int i = lane; i < d; i += 32) {
    q[i] = PooledQuery<T, S>(u, qkv, argmax, t, i) * scale;
    go[i] = S(d_o[u.Out(t) + i]);
    acc[i] = 0;
    dot += go[i] * S(o[u.Out(t) + i]);
  }
  dot = WarpSum(dot);
  __syncwarp();
  for (int k = 0; k < shape.keys; ++k) {
    const T* key = qkv + u.Qkv(k, 1);
    const S p = exp(Dot<T, S>(q, key, d) - lse[u.Lse(t)]);
    const S ds = p * (Dot<T, S>(go, qkv + u.Qkv(k, 2), d) - dot) * scale;
    for (int i = lane; i < d; i += 32) acc[i] += ds * S(key[i]);
  }
  for (int i = lane; i < d; i += 32) {
    for (int s = 0; s < shape.q_stride; ++s) {
      const bool taken = shape.q_stride == 1 || argmax[u.Out(t) + i] == s;
      dqkv[u.Qkv(s * queries + t, 0) + i] = taken ? T(acc[i]) : T(0.0f);
    }
  }
  if (lane == 0) delta[u.Lse(t)] = dot;
}

template <typename T, typename S>
__global__ void BackwardKey(AttentionShape shape, const T* qkv, const T* d_o, const S* lse, const uint8_t* argmax, T* dqkv,
                            const S* delta) {
  extern __shared__ double memory[];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, d = shape.head_dim, queries = shape.queries();
  S* k = reinterpret_cast<S*>(memory) + warp * 5 * d;
  S *v = k + d, *q = v + d, *dk = q + d, *dv = dk + d;
  const int64_t job = blockIdx.x * int64_t(kWarps) + warp;
  if (job >= shape.units() * shape.keys) return;
  const Unit u(shape, job / shape.keys);
  const int t = int(job % shape.keys);
  const S scale = S(1) / sqrt(S(d));
  for (int i = lane; i < d; i += 32) {
    k[i] = S(qkv[u.Qkv(t, 1) + i]), v[i] = S(qkv[u.Qkv(t, 2) + i]), dk[i] = 0, dv[i] = 0;
  }
  for (int j = 0; j < queries; ++j) {
    __syncwarp();
    S score = 0, dp = 0;
    for (int i = lane; i < d; i += 32) {
      q[i] = PooledQuery<T, S>(u, qkv, argmax, j, i) * scale;
      score += q[i] * k[i];
      dp += S(d_o[u.Out(j) + i]) * v[i];
    }
    const S p = exp(WarpSum(score) - lse[u.Lse(j)]);
    const S ds = p * (WarpSum(dp) - delta[u.Lse(j)]);
    for (int i = lane; i < d; i += 32) dv[i] += p * S(d_o[u.Out(j) + i]), dk[i] += ds * q[i];
  }
  for (int i = lane; i < d; i += 32) dqkv[u.Qkv(t, 1) + i] = T(dk[i]), dqkv[u.Qkv(t, 2) + i] = T(dv[i]);
}

}  // namespace

template <typename T, typename S>
cudaError_t PlainAttentionForward(const AttentionShape& s, const T* qkv, T* o, S* lse, uint8_t* argmax, cudaStream_t stream) {
  if (s.q_stride > 1) Launch(PoolArgmax<T, S>, 2048, 256, 0, stream, s, qkv, argmax);
  const int64_t jobs = s.units() * s.queries();
  Launch(Forward<T, S>, unsigned((jobs + kWarps - 1) / kWarps), kWarps * 32, kWarps * 2 * s.head_dim * sizeof(S), stream, s, qkv, o, lse, argmax);
  return cudaGetLastError();
}

template <typename T, typename S>
cudaError_t PlainAttentionBackward(const AttentionShape& s, const T* qkv, const T* o, const T* d_o, const S* lse,
                                   const uint8_t* argmax, T* dqkv, S* scratch, cudaStream_t stream) {
  const int64_t queries = s.units() * s.queries(), keys = s.units() * s.keys;
  Launch(BackwardQuery<T, S>, unsigned((queries + kWarps - 1) / kWarps), kWarps * 32, kWarps * 3 * s.head_dim * sizeof(S), stream, s, qkv, o, d_o, lse, argmax,
         dqkv, scratch);
  Launch(BackwardKey<T, S>, unsigned((keys + kWarps - 1) / kWarps), kWarps * 32, kWarps * 5 * s.head_dim * sizeof(S), stream, s, qkv, d_o, lse, argmax, dqkv,
         scratch);
  return cudaGetLastError();
}

#define HIERAD_PLAIN(T, S)                                                                                            \
  template cudaError_t PlainAttentionForward<T, S>(const AttentionShape&, const T*, T*, S*, uint8_t*, cudaStream_t); \
  template cudaError_t PlainAttentionBackward<T, S>(const AttentionShape&, const T*, const T*, const T*, const S*,   \
                                                    const uint8_t*, T*, S*, cudaStream_t);
HIERAD_PLAIN(float, float)
HIERAD_PLAIN(double, double)
HIERAD_PLAIN(__nv_bfloat16, float)
HIERAD_PLAIN(__half, float)
#undef HIERAD_PLAIN

cudaError_t AttentionForward(const AttentionShape& s, const float* qkv, float* o, float* lse, uint8_t* argmax, cudaStream_t stream) {
  return PlainAttentionForward(s, qkv, o, lse, argmax, stream);
}
cudaError_t AttentionForward(const AttentionShape& s, const double* qkv, double* o, double* lse, uint8_t* argmax, cudaStream_t stream) {
  return PlainAttentionForward(s, qkv, o, lse, argmax, stream);
}
cudaError_t AttentionBackward(const AttentionShape& s, const float* qkv, const float* o, const float* d_o, const float* lse,
                              const uint8_t* argmax, float* dqkv, float* scratch, cudaStream_t stream) {
  return PlainAttentionBackward(s, qkv, o, d_o, lse, argmax, dqkv, scratch, stream);
}
cudaError_t AttentionBackward(const AttentionShape& s, const double* qkv, const double* o, const double* d_o, const double* lse,
                              const uint8_t* argmax, double* dqkv, double* scratch, cudaStream_t stream) {
  return PlainAttentionBackward(s, qkv, o, d_o, lse, argmax, dqkv, scratch, stream);
}

}  // namespace hierad::kernels
