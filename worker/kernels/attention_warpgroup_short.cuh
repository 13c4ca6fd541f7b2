// Short windows of wide heads, one warpgroup each, on sm_90. A window lies whole in shared memory, several a multiprocessor, so that one loads
// while others multiply. Queries are the rows of all products: tiles of 64, of which warps that have none take part idly.
// Included by attention_warpgroup_short_*.cu.
#pragma once

#include "worker/kernels/attention_softmax.cuh"
#include "worker/kernels/attention_warpgroup.cuh"

namespace hierad::kernels::attention {

// kKeys, kQueries: rows held, multiples of 16; kQueries is less only with pooling. Elements of T. Products read tiles of 64 rows (of P:
// 64 columns) past an array's end, never past the last array's: what they make of it is not stored.
template <int DP, int kKeys, int kQueries>
struct ShortWindow {
  static constexpr bool kPooled = kQueries < kKeys;
  static constexpr int kQueryTiles = (kQueries + kGroupRows - 1) / kGroupRows, kKeyTiles = (kKeys + kGroupRows - 1) / kGroupRows;
  static constexpr int kQueryArray = kQueries * PanelColumns(DP), kKeyArray = kKeys * PanelColumns(DP);
  static constexpr int kWeights = kQueries * PanelColumns(kKeys);   // P or dS
  static constexpr int kValues = kKeyArray > kWeights ? kKeyArray : kWeights;   // v, later dS
  static constexpr int kForwardBytes = (kQueryArray + 2 * kKeyArray) * kElementBytes;
  static constexpr int kBackwardBytes = (kWeights + 2 * kQueryArray + kValues + kKeyArray) * kElementBytes;
};

// 16 x 16 of this warp, as A's registers, to panels; `at` from WeightAddress.
template <typename T>
__device__ inline void StoreWeights(uint32_t at, int rows, int sixteen, const uint32_t (&a)[4]) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  const uint32_t to = (at + (sixteen >> 1) * rows * kPanel * kElementBytes) ^ (sixteen & 1) * 32;
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]) : "memory");
#endif
}
// Where this lane's row of 16 from row `first` on begins.
__device__ inline uint32_t WeightAddress(const void* panels, int first) {
  const int lane = threadIdx.x & 31, i = lane >> 3, r = lane & 7;
  return SharedAddress(panels) + (first + (i & 1) * 8 + r) * kPanel * kElementBytes + ((i >> 1) ^ (r >> 1 & 3)) * 16;
}

// Scores of 64 queries from row 64 `tile` on, or dP of d_o and v.
template <int DP, int kKeys, int kQueries, typename T>
__device__ void RowProducts(float (&c)[kKeys / 8][4], Descriptor rows, Descriptor keys, int tile) {
#pragma unroll
  for (int kc = 0; kc < DP / 16; ++kc) {
    GroupProduct<T, false>(c, rows + AtRow(kGroupRows * tile) + AtColumns(kQueries, kc), keys + AtColumns(kKeys, kc), kc > 0);
  }
  CommitProducts();
}

// Whether column (n, e) of a lane is a key; only the last 16 of kKeys may be none.
template <int kKeys>
__device__ bool IsKey(int n, int e, int keys) {
  return n < kKeys / 8 - 2 || n * 8 + 2 * (int(threadIdx.x) & 3) + (e & 1) < keys;
}

// Calls launch(ShortWindow<...>{}) with what takes a shape, or returns false.
template <typename Launch>
bool ForShortWindow(const AttentionShape& s, Launch launch) {
  const auto with_rows = [&]<int DP>() {
    const int key_rows = (s.keys + 15) / 16 * 16, query_rows = (s.queries() + 15) / 16 * 16;
    if (key_rows == 64 && s.q_stride == 1) return launch(ShortWindow<DP, 64, 64>{}), true;
    if (key_rows == 64 && query_rows == 16) return launch(ShortWindow<DP, 64, 16>{}), true;
    if (key_rows == 80 && s.q_stride == 1) return launch(ShortWindow<DP, 80, 80>{}), true;
    if (key_rows == 80 && query_rows == 32) return launch(ShortWindow<DP, 80, 32>{}), true;
    return false;
  };
  switch ((s.head_dim + 15) / 16 * 16) {
    case 64: return with_rows.template operator()<64>();
    case 80: return with_rows.template operator()<80>();
    case 96: return with_rows.template operator()<96>();
    default: return false;
  }
}

}  // namespace hierad::kernels::attention
