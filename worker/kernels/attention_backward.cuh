// dK and dV of some keys, held in one warp's registers, against queries in shared memory. Included by the backward kernels.
#pragma once

#include "worker/kernels/attention_device.cuh"

namespace hierad::kernels::attention {

// kTiles x 16 keys. kHoldK, kHoldV: K, V stay in registers too.
template <typename T, int DP, int kTiles, bool kHoldK, bool kHoldV>
struct KeyRows {
  static constexpr int kStride = DP + kPad;
  float dk[kTiles][DP / 8][4] = {}, dv[kTiles][DP / 8][4] = {};
  uint32_t k_held[kHoldK ? kTiles : 1][kHoldK ? DP / 16 : 1][4], v_held[kHoldV ? kTiles : 1][kHoldV ? DP / 16 : 1][4];
  const T *k, *v;
  int valid;   // keys that count; the scores of the rest may be infinite, and are kept from dQ

  __device__ KeyRows(const T* keys, const T* values, int valid_keys) : k(keys), v(values), valid(valid_keys) {
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int kc = 0; kc < DP / 16; ++kc) {
        if constexpr (kHoldK) LoadA(k_held[m][kc], k + m * 16 * kStride + kc * 16, kStride);
        if constexpr (kHoldV) LoadA(v_held[m][kc], v + m * 16 * kStride + kc * 16, kStride);
      }
    }
  }

  // q, d_o: kGroups x 16 queries. `lse` is in units of log2 if kLog2, and natural otherwise. ds_KQ (stride `ds_stride`)
  // receives dS^T without the factor `scale` if kWrite; so does dk, until it is stored.
  template <int kGroups, bool kWrite, bool kLog2>
  __device__ void Queries(const T* q, const T* d_o, const float* lse, const float* delta, float scale, T* ds_KQ, int ds_stride) {
    float s[kTiles][2 * kGroups][4] = {}, dp[kTiles][2 * kGroups][4] = {};
    Product<kGroups, false>(s, q);
    Product<kGroups, true>(dp, d_o);
    const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
#pragma unroll
    for (int n = 0; n < 2 * kGroups; ++n) {
      float2 l = *reinterpret_cast<const float2*>(lse + n * 8 + 2 * t);
      const float2 dl = *reinterpret_cast<const float2*>(delta + n * 8 + 2 * t);
      if (!kLog2) l.x *= kLog2E, l.y *= kLog2E;
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          s[m][n][e] = FastExp2(fmaf(s[m][n][e], scale * kLog2E, -(e & 1 ? l.y : l.x)));
          dp[m][n][e] = s[m][n][e] * (dp[m][n][e] - (e & 1 ? dl.y : dl.x));
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      uint32_t p_KQ[kTiles][4], ds[kTiles][4];
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int n = 2 * j + (i >> 1), e = (i & 1) * 2;
          p_KQ[m][i] = PackPair<T>(s[m][n][e], s[m][n][e + 1]);
          ds[m][i] = PackPair<T>(dp[m][n][e], dp[m][n][e + 1]);
          if (kWrite) {
            const int row = m * 16 + g + (i & 1) * 8;
            *reinterpret_cast<uint32_t*>(ds_KQ + row * ds_stride + n * 8 + 2 * t) = row < valid ? ds[m][i] : 0;
          }
        }
      }
#pragma unroll
      for (int n = 0; n < DP / 16; ++n) {
        uint32_t b[4], c[4];
        LoadBTransposed(b, d_o + j * 16 * kStride + n * 16, kStride);
        LoadBTransposed(c, q + j * 16 * kStride + n * 16, kStride);
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          Mma<T>(dv[m][2 * n], p_KQ[m], b[0], b[1]);
          Mma<T>(dv[m][2 * n + 1], p_KQ[m], b[2], b[3]);
          Mma<T>(dk[m][2 * n], ds[m], c[0], c[1]);
          Mma<T>(dk[m][2 * n + 1], ds[m], c[2], c[3]);
        }
      }
    }
  }

  // c = K q^T, or V d_o^T if kValues.
  template <int kGroups, bool kValues>
  __device__ void Product(float (&c)[kTiles][2 * kGroups][4], const T* queries) {
#pragma unroll
    for (int kc = 0; kc < DP / 16; ++kc) {
      uint32_t a[kTiles][4];
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        if constexpr (kValues ? kHoldV : kHoldK) {
#pragma unroll
          for (int i = 0; i < 4; ++i) a[m][i] = kValues ? v_held[kHoldV ? m : 0][kHoldV ? kc : 0][i] : k_held[kHoldK ? m : 0][kHoldK ? kc : 0][i];
        } else {
          LoadA(a[m], (kValues ? v : k) + m * 16 * kStride + kc * 16, kStride);
        }
      }
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
        uint32_t b[4];
        LoadB(b, queries + j * 16 * kStride + kc * 16, kStride);
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          Mma<T>(c[m][2 * j], a[m], b[0], b[1]);
          Mma<T>(c[m][2 * j + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  __device__ void Store(const Unit& u, int first, float scale, T* dqkv) {
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      StoreRows<DP>(u, dk[m], scale, scale, 1, first + m * 16, dqkv);
      StoreRows<DP>(u, dv[m], 1.0f, 1.0f, 2, first + m * 16, dqkv);
    }
  }
};

}  // namespace hierad::kernels::attention
