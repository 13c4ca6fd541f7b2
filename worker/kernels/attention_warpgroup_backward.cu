// Attention backward by warpgroups, for long windows without pooling on sm_90, in two passes: one whose warpgroups hold 64 queries
// and go over keys (dQ, and the row sums), one whose warpgroups hold 64 keys and go over queries (dK and dV). Both compute the
// scores; no warpgroup waits for another but for the tiles that stream through.
#include "worker/kernels/attention_warpgroup_backward.cuh"

namespace hierad::kernels::attention {
namespace {

__host__ __device__ constexpr int RowsOfTile(int dp) { return dp <= 32 ? 128 : 64; }
__host__ __device__ constexpr int QueryRegisters(int dp) { return dp <= 32 ? 128 : dp <= 96 ? 168 : 248; }
__host__ __device__ constexpr int KeyRegisters(int dp) { return dp <= 32 ? 128 : 248; }
__host__ __device__ constexpr bool HoldKeys(int dp) { return dp <= 96; }   // K and V in registers, else in shared memory

// Sum over D of o * d_o of this warp's 16 queries, whose d_o is held as LoadFragments gave it: rows g and g + 8.
template <int DP, typename T>
__device__ void RowSums(float (&sum)[2], const uint32_t (&d_o)[DP / 16][4], const T* o, int stride, int count, int head_dim) {
  uint32_t other[DP / 16][4];
  LoadFragments<DP>(other, o, stride, count, head_dim);
  sum[0] = sum[1] = 0;
#pragma unroll
  for (int kc = 0; kc < DP / 16; ++kc) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 a = UnpackPair<T>(d_o[kc][i]), b = UnpackPair<T>(other[kc][i]);
      sum[i & 1] += a.x * b.x + a.y * b.y;
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
    sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
  }
}

template <typename T, int DP>
struct WarpgroupQueryRows {
  float dq[DP / 8][4] = {};
  float lse2[2], delta[2];
  uint32_t q[DP / 16][4], d_o[DP / 16][4];
  bool works;   // whether any of this warp's 16 queries is there

  // Keys from descriptors of their first row; `rows` a panel. With kMask only the first `valid` of them count: the scores of
  // the rest may be infinite. The last products are still under way behind it.
  template <int kKeys, bool kMask>
  __device__ void Keys(Descriptor k, Descriptor v, int rows, int valid, float scale2) {
    const int t = threadIdx.x & 3;
    float s[kKeys / 8][4], dp[kKeys / 8][4];
    BeginProducts();
#pragma unroll
    for (int kc = 0; kc < DP / 16; ++kc) GroupProduct<T, false>(s, q[kc], k + AtColumns(rows, kc), kc > 0);
    CommitProducts();
#pragma unroll
    for (int kc = 0; kc < DP / 16; ++kc) GroupProduct<T, false>(dp, d_o[kc], v + AtColumns(rows, kc), kc > 0);
    CommitProducts();
    WaitProducts<1>();
    Arrived(s), Arrived(dq);
    if (works) {
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[n][e] = FastExp2(fmaf(s[n][e], scale2, -lse2[e >> 1]));
      }
    }
    WaitProducts<0>();
    Arrived(dp);
    uint32_t ds[kKeys / 16][4];
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[n][e] *= dp[n][e] - delta[e >> 1];
        if (kMask && n * 8 + 2 * t + (e & 1) >= valid) s[n][e] = 0;
      }
    }
#pragma unroll
    for (int j = 0; j < kKeys / 16; ++j) PackRows<T>(ds[j], s, j);
    BeginProducts();
#pragma unroll
    for (int j = 0; j < kKeys / 16; ++j) GroupProduct<T, true>(dq, ds[j], k + AtRow(16 * j), true);
    CommitProducts();
  }
};

// dQ, and delta for the kernel below. A block owns warpgroups x 64 queries; keys stream through.
template <int DP, typename T>
__global__ void __maxnreg__(QueryRegisters(DP)) WarpgroupQueries(AttentionShape shape, int groups, BackwardArgs<T> args) {
  extern __shared__ __align__(1024) unsigned char panels[];
  constexpr int kKeys = RowsOfTile(DP), kStep = 32;
  const int thread = threadIdx.x, threads = blockDim.x, own = thread / kGroupThreads * kGroupRows, rows = threads / kGroupThreads * kGroupRows;
  const Unit u(shape, blockIdx.x / groups);
  const int first = int(blockIdx.x % groups) * rows + own;
  const float scale = rsqrtf(float(shape.head_dim));
  T* buffers = reinterpret_cast<T*>(panels);   // [2][k, v][kKeys]
  const auto fetch = [&](int tile) {
    T* k = buffers + (tile & 1) * 2 * kKeys * DP;
    CopyKeyPanels<DP>(u, args.qkv, tile * kKeys, kKeys, k, thread, threads);
    CommitCopies();
  };
  fetch(0);
  WarpgroupQueryRows<T, DP> state;
  const int row0 = first + thread % kGroupThreads / 32 * 16, count = u.queries - row0;
  state.works = count > 0;
  LoadFragments<DP>(state.q, args.qkv + u.Qkv(row0, 0), u.qkv_stride, count, u.head_dim);
  LoadFragments<DP>(state.d_o, args.d_o + u.Out(row0), u.out_stride, count, u.head_dim);
  RowSums<DP>(state.delta, state.d_o, args.o + u.Out(row0), u.out_stride, count, u.head_dim);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = ((thread & 31) >> 2) + r * 8;
    state.lse2[r] = row < count ? __ldg(args.lse + u.Lse(row0 + row)) * kLog2E : INFINITY;
    if ((thread & 3) == 0 && row < count) args.delta[u.Lse(row0 + row)] = state.delta[r];
  }
  for (int tile = 0; tile * kKeys < u.keys; ++tile) {
    WaitCopies<0>();
    CopiesForWarpgroups();
    __syncthreads();   // this tile is there, and nobody reads the other buffer any more
    if ((tile + 1) * kKeys < u.keys) fetch(tile + 1);
    if (first >= u.queries) continue;
    const T* buffer = buffers + (tile & 1) * 2 * kKeys * DP;
    const Descriptor k(buffer, kKeys), v(buffer + kKeys * DP, kKeys);
    const int valid = min(kKeys, u.keys - tile * kKeys);
    int n = 0;
    for (; n + kStep <= valid; n += kStep) state.template Keys<kStep, false>(k + AtRow(n), v + AtRow(n), kKeys, kStep, scale * kLog2E);
    for (; n < valid; n += 16) state.template Keys<16, true>(k + AtRow(n), v + AtRow(n), kKeys, valid - n, scale * kLog2E);
    WaitProducts<0>();
    Arrived(state.dq);
  }
  if (state.works) StoreRows<DP>(u, state.dq, scale, scale, 0, row0, args.dqkv);
}

// dK and dV. A block owns warpgroups x 64 keys; queries stream through.
template <int DP, typename T>
__global__ void __maxnreg__(KeyRegisters(DP)) WarpgroupKeys(AttentionShape shape, int groups, BackwardArgs<T> args) {
  extern __shared__ __align__(1024) unsigned char panels[];
  constexpr int kQueries = RowsOfTile(DP), kStep = 32;
  constexpr bool kHold = HoldKeys(DP);
  const int thread = threadIdx.x, threads = blockDim.x, own = thread / kGroupThreads * kGroupRows, rows = threads / kGroupThreads * kGroupRows;
  const Unit u(shape, blockIdx.x / groups);
  const int block_first = int(blockIdx.x % groups) * rows, first = block_first + own;
  T* buffers = reinterpret_cast<T*>(panels);                            // [2][q, d_o][kQueries]
  float* sums = reinterpret_cast<float*>(buffers + 4 * kQueries * DP);   // [2][lse, delta][kQueries]
  T* keys = reinterpret_cast<T*>(sums + 4 * kQueries);                   // [k, v][rows], unless they are held
  const float scale = rsqrtf(float(shape.head_dim));
  const auto fetch = [&](int tile) {
    T* q = buffers + (tile & 1) * 2 * kQueries * DP;
    CopyPanels<DP>(u, args.qkv, 0, tile * kQueries, kQueries, q, thread, threads);
    CopyPanels<DP>(u, args.d_o, -1, tile * kQueries, kQueries, q + kQueries * DP, thread, threads);
    for (int i = thread; i < 2 * kQueries; i += threads) {   // beyond the last query all is zero, and adds nothing
      const int t = tile * kQueries + i % kQueries;
      const float* from = i < kQueries ? args.lse : args.delta;
      CopyWordAsync(sums + (tile & 1) * 2 * kQueries + i, t < u.queries ? from + u.Lse(t) : from, t < u.queries);
    }
    CommitCopies();
  };
  WarpgroupKeyRows<T, DP, kHold> state;
  const int row0 = first + thread % kGroupThreads / 32 * 16, count = u.keys - row0;
  state.works = count > 0;
  if constexpr (!kHold) {
    CopyKeyPanels<DP>(u, args.qkv, block_first, rows, keys, thread, threads);
    state.k = Descriptor(keys, rows) + AtRow(own), state.v = Descriptor(keys + rows * DP, rows) + AtRow(own), state.key_rows = rows;
  }
  fetch(0);
  if constexpr (kHold) {
    LoadFragments<DP>(state.k_held, args.qkv + u.Qkv(row0, 1), u.qkv_stride, count, u.head_dim);
    LoadFragments<DP>(state.v_held, args.qkv + u.Qkv(row0, 2), u.qkv_stride, count, u.head_dim);
  }
  for (int tile = 0; tile * kQueries < u.queries; ++tile) {
    WaitCopies<0>();
    CopiesForWarpgroups();
    __syncthreads();   // this tile is there, and nobody reads the other buffer any more
    if ((tile + 1) * kQueries < u.queries) fetch(tile + 1);
    if (first >= u.keys) continue;
    const T* buffer = buffers + (tile & 1) * 2 * kQueries * DP;
    const Descriptor q(buffer, kQueries), d_o(buffer + kQueries * DP, kQueries);
    const float* lse = sums + (tile & 1) * 2 * kQueries;
    const int valid = min(kQueries, u.queries - tile * kQueries);
    int n = 0;
    for (; n + kStep <= valid; n += kStep) {
      state.template Queries<kStep, false>(q + AtRow(n), d_o + AtRow(n), kQueries, lse + n, lse + kQueries + n, scale * kLog2E, 0);
    }
    for (; n < valid; n += 16) state.template Queries<16, false>(q + AtRow(n), d_o + AtRow(n), kQueries, lse + n, lse + kQueries + n, scale * kLog2E, 0);
    WaitProducts<0>();
    Arrived(state.dk), Arrived(state.dv);
  }
  if (!state.works) return;
  StoreRows<DP>(u, state.dk, scale, scale, 1, row0, args.dqkv);
  StoreRows<DP>(u, state.dv, 1.0f, 1.0f, 2, row0, args.dqkv);
}

}  // namespace

template <int DP, typename T>
cudaError_t LaunchWarpgroupBackward(const AttentionShape& s, const BackwardArgs<T>& args, cudaStream_t stream) {
  constexpr int kTileBytes = 4 * RowsOfTile(DP) * DP * kElementBytes, kSumBytes = 4 * RowsOfTile(DP) * int(sizeof(float));
  const int q_warpgroups = WarpgroupsFor(s.queries(), QueryRegisters(DP), 3), q_rows = q_warpgroups * kGroupRows, q_groups = RoundUp(s.queries(), q_rows) / q_rows;
  const int k_warpgroups = WarpgroupsFor(s.keys, KeyRegisters(DP), 3), k_rows = k_warpgroups * kGroupRows, k_groups = RoundUp(s.keys, k_rows) / k_rows;
  const int k_bytes = kTileBytes + kSumBytes + (HoldKeys(DP) ? 0 : 2 * k_rows * DP * kElementBytes);
  if (cudaError_t e = AllowShared(WarpgroupQueries<DP, T>, kTileBytes); e != cudaSuccess) return e;
  if (cudaError_t e = AllowShared(WarpgroupKeys<DP, T>, k_bytes); e != cudaSuccess) return e;
  Launch(WarpgroupQueries<DP, T>, unsigned(s.units() * q_groups), kGroupThreads * q_warpgroups, kTileBytes, stream, s, q_groups, args);
  Launch(WarpgroupKeys<DP, T>, unsigned(s.units() * k_groups), kGroupThreads * k_warpgroups, k_bytes, stream, s, k_groups, args);
  return cudaGetLastError();
}

#define HIERAD_WARPGROUP_BACKWARD(DP)                                                                                     \
  template cudaError_t LaunchWarpgroupBackward<DP, bf16>(const AttentionShape&, const BackwardArgs<bf16>&, cudaStream_t); \
  template cudaError_t LaunchWarpgroupBackward<DP, half>(const AttentionShape&, const BackwardArgs<half>&, cudaStream_t);
HIERAD_EACH_PANEL_WIDTH(HIERAD_WARPGROUP_BACKWARD)
#undef HIERAD_WARPGROUP_BACKWARD

}  // namespace hierad::kernels::attention
