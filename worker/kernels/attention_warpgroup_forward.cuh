// The running softmax of a warpgroup. Included by the forward kernels of warpgroups.
#pragma once

#include "worker/kernels/attention_softmax.cuh"
#include "worker/kernels/attention_warpgroup.cuh"

namespace hierad::kernels::attention {

// 64 queries of a warpgroup, in registers, against keys in shared memory.
template <typename T, int DP>
struct WarpgroupForwardRows {
  RunningSoftmax<T, DP> state;
  uint32_t q[DP / 16][4];
  bool works;   // whether any of this warp's 16 queries is there

  // Keys from descriptors of their first row; `rows` a panel. The last products are still under way behind it.
  template <int kKeys, bool kMask>
  __device__ void Keys(Descriptor k, Descriptor v, int rows, int valid, float scale) {
    float s[kKeys / 8][4];
    BeginProducts();
#pragma unroll
    for (int kc = 0; kc < DP / 16; ++kc) GroupProduct<T, false>(s, q[kc], k + AtColumns(rows, kc), kc > 0);
    CommitProducts();
    WaitProducts<0>();
    Arrived(s), Arrived(state.o);
    if (works) state.template Weights<kKeys / 16, kMask>(s, valid, scale);
    uint32_t p[kKeys / 16][4];
#pragma unroll
    for (int j = 0; j < kKeys / 16; ++j) PackRows<T>(p[j], s, j);
    BeginProducts();
#pragma unroll
    for (int j = 0; j < kKeys / 16; ++j) GroupProduct<T, true>(state.o, p[j], v + AtRow(16 * j), true);
    CommitProducts();
  }
};

}  // namespace hierad::kernels::attention
