// Running softmax of one warp's 16 queries: weights of keys and the sums that they weigh, both of which may be scaled up to the end.
#pragma once

#include "worker/kernels/attention_device.cuh"

namespace hierad::kernels::attention {

template <typename T, int DP>
struct RunningSoftmax {
  float o[DP / 8][4] = {};
  float peak[2] = {-INFINITY, -INFINITY}, sum[2] = {};   // the peak in units of log2, of scaled scores; scores may lie a little above it

  // Scores of kPairs x 16 keys to weights; with kMask only the first `valid` of them count.
  template <int kPairs, bool kMask>
  __device__ void Weights(float (&s)[2 * kPairs][4], int valid, float scale) {
    const int t = threadIdx.x & 3;
    float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int n = 0; n < 2 * kPairs; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (kMask && n * 8 + 2 * t + (e & 1) >= valid) s[n][e] = -INFINITY;
        top[e >> 1] = fmaxf(top[e >> 1], s[n][e]);
      }
    }
    // A weight may grow to 2^kSlack before the peak is raised: its relative precision is the same, and most steps pass
    // without a look at the other lanes and without touching o.
    constexpr float kSlack = 8;
    const bool raise = top[0] * scale > peak[0] + kSlack || top[1] * scale > peak[1] + kSlack;
    if (__any_sync(~0u, raise)) Raise(top, scale);
#pragma unroll
    for (int n = 0; n < 2 * kPairs; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[n][e] = FastExp2(fmaf(s[n][e], scale, -peak[e >> 1]));
        sum[e >> 1] += s[n][e];
      }
    }
  }

  __device__ void Raise(float (&top)[2], float scale) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 1));
      top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 2));
      const float next = fmaxf(peak[r], top[r] * scale);
      const float shrink = FastExp2(peak[r] - next);
      peak[r] = next;
      sum[r] *= shrink;
#pragma unroll
      for (int n = 0; n < DP / 8; ++n) o[n][2 * r] *= shrink, o[n][2 * r + 1] *= shrink;
    }
  }

  // To rows [first, first + 16) of o and lse.
  __device__ void Store(const Unit& u, int first, T* out, float* lse) {
    const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
      sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
      const int row = first + g + r * 8;
      if (t == 0 && row < u.queries) lse[u.Lse(row)] = (peak[r] + log2f(sum[r])) / kLog2E;
    }
    StoreRows<DP>(u, o, 1.0f / sum[0], 1.0f / sum[1], -1, first, out);
  }
};

// Weights as the A operand of keys [16 p, 16 p + 16).
template <typename T, int kTiles>
__device__ void PackRows(uint32_t (&a)[4], const float (&s)[kTiles][4], int p) {
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = PackPair<T>(s[2 * p + (i >> 1)][(i & 1) * 2], s[2 * p + (i >> 1)][(i & 1) * 2 + 1]);
}

}  // namespace hierad::kernels::attention
