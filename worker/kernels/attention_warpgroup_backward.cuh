// dK and dV of 64 keys, held by a warpgroup, against queries in shared memory. Included by the backward kernels of warpgroups.
#pragma once

#include "worker/kernels/attention_softmax.cuh"
#include "worker/kernels/attention_warpgroup.cuh"

namespace hierad::kernels::attention {

// kHold: K and V in registers; else `k` and `v` are descriptors of the warpgroup's rows, in panels of `key_rows` rows.
template <typename T, int DP, bool kHold>
struct WarpgroupKeyRows {
  float dk[DP / 8][4] = {}, dv[DP / 8][4] = {};
  uint32_t k_held[kHold ? DP / 16 : 1][4], v_held[kHold ? DP / 16 : 1][4];
  Descriptor k{0}, v{0};
  int key_rows = 0;
  bool works;   // whether any of this warp's 16 keys is there

  // kQueries queries from descriptors of their first row; `rows` a panel. dk receives dK without the factor of the scores, until it is
  // stored. The last products are still under way behind it. With kWrite lse is in units of log2, else natural, and dS^T goes to a panel of
  // keys, `ds_at` the address there of this lane's words: row g of this warp, column 2 t, swizzled.
  template <int kQueries, bool kWrite>
  __device__ void Queries(Descriptor q, Descriptor d_o, int rows, const float* lse, const float* delta, float scale2, uint32_t ds_at) {
    const int t = threadIdx.x & 3;
    float s[kQueries / 8][4], dp[kQueries / 8][4];
    BeginProducts();
#pragma unroll
    for (int kc = 0; kc < DP / 16; ++kc) {
      if constexpr (kHold) GroupProduct<T, false>(s, k_held[kc], q + AtColumns(rows, kc), kc > 0);
      else GroupProduct<T, false>(s, k + AtColumns(key_rows, kc), q + AtColumns(rows, kc), kc > 0);
    }
    CommitProducts();
#pragma unroll
    for (int kc = 0; kc < DP / 16; ++kc) {
      if constexpr (kHold) GroupProduct<T, false>(dp, v_held[kc], d_o + AtColumns(rows, kc), kc > 0);
      else GroupProduct<T, false>(dp, v + AtColumns(key_rows, kc), d_o + AtColumns(rows, kc), kc > 0);
    }
    CommitProducts();
    WaitProducts<1>();
    Arrived(s), Arrived(dk), Arrived(dv);
    if (works) {
#pragma unroll
      for (int n = 0; n < kQueries / 8; ++n) {
        const float2 l = *reinterpret_cast<const float2*>(lse + n * 8 + 2 * t);
#pragma unroll
        for (int e = 0; e < 4; ++e) s[n][e] = FastExp2(fmaf(s[n][e], scale2, kWrite ? -(e & 1 ? l.y : l.x) : -kLog2E * (e & 1 ? l.y : l.x)));
      }
    }
    WaitProducts<0>();
    Arrived(dp);
    uint32_t p[kQueries / 16][4], ds[kQueries / 16][4];
#pragma unroll
    for (int j = 0; j < kQueries / 16; ++j) PackRows<T>(p[j], s, j);
    if (works) {
#pragma unroll
      for (int n = 0; n < kQueries / 8; ++n) {
        const float2 d = *reinterpret_cast<const float2*>(delta + n * 8 + 2 * t);
#pragma unroll
        for (int e = 0; e < 4; ++e) s[n][e] *= dp[n][e] - (e & 1 ? d.y : d.x);
      }
    }
#pragma unroll
    for (int j = 0; j < kQueries / 16; ++j) {
      PackRows<T>(ds[j], s, j);
      if constexpr (kWrite) {
        if (!works) continue;
#pragma unroll
        for (int i = 0; i < 4; ++i) {   // eight rows further: 512 bytes
          const uint32_t at = (ds_at ^ (2 * j + (i >> 1)) * 16) + (i & 1) * 512;
          asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(ds[j][i]) : "memory");
        }
      }
    }
    BeginProducts();
#pragma unroll
    for (int j = 0; j < kQueries / 16; ++j) {
      GroupProduct<T, true>(dv, p[j], d_o + AtRow(16 * j), true);
      GroupProduct<T, true>(dk, ds[j], q + AtRow(16 * j), true);
    }
    CommitProducts();
  }
};

}  // namespace hierad::kernels::attention
