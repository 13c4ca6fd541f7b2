// Attention forward by warpgroups, for long windows without pooling on sm_90: a warpgroup holds 64 queries in registers, keys stream
// through two buffers. The weights of one warpgroup are made while the tensor cores work for another.
#include "worker/kernels/attention_warpgroup_forward.cuh"

namespace hierad::kernels::attention {
namespace {

__host__ __device__ constexpr int KeysOfTile(int dp) { return dp <= 32 ? 128 : 64; }
__host__ __device__ constexpr int Registers(int dp) { return dp <= 32 ? 128 : dp <= 96 ? 168 : 208; }

// A block owns warpgroups x 64 queries of a unit (its blocks are neighbours: the keys come from the L2 cache).
template <int DP, typename T>
__global__ void __maxnreg__(Registers(DP)) WarpgroupForward(AttentionShape shape, int groups, ForwardArgs<T> args) {
  extern __shared__ __align__(1024) unsigned char panels[];
  constexpr int kKeys = KeysOfTile(DP), kStep = 64;
  const int thread = threadIdx.x, threads = blockDim.x, own = thread / kGroupThreads * kGroupRows, rows = threads / kGroupThreads * kGroupRows;
  const Unit u(shape, blockIdx.x / groups);
  const int first = int(blockIdx.x % groups) * rows + own;
  const float scale = rsqrtf(float(shape.head_dim)) * kLog2E;
  T* buffers = reinterpret_cast<T*>(panels);   // [2][k, v][kKeys]
  const auto fetch = [&](int tile) {
    T* k = buffers + (tile & 1) * 2 * kKeys * DP;
    CopyKeyPanels<DP>(u, args.qkv, tile * kKeys, kKeys, k, thread, threads);
    CommitCopies();
  };
  fetch(0);
  WarpgroupForwardRows<T, DP> state;
  const int row0 = first + thread % kGroupThreads / 32 * 16;
  LoadFragments<DP>(state.q, args.qkv + u.Qkv(row0, 0), u.qkv_stride, u.queries - row0, u.head_dim);
  state.works = row0 < u.queries;
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
    for (; n + kStep <= valid; n += kStep) state.template Keys<kStep, false>(k + AtRow(n), v + AtRow(n), kKeys, kStep, scale);
    for (; n < valid; n += 16) state.template Keys<16, true>(k + AtRow(n), v + AtRow(n), kKeys, valid - n, scale);
    WaitProducts<0>();
    Arrived(state.state.o);
  }
  if (state.works) state.state.Store(u, row0, args.o, args.lse);
}

}  // namespace

template <int DP, typename T>
cudaError_t LaunchWarpgroupForward(const AttentionShape& s, const ForwardArgs<T>& args, cudaStream_t stream) {
  constexpr int kBytes = 4 * KeysOfTile(DP) * DP * kElementBytes;
  const int warpgroups = WarpgroupsFor(s.queries(), Registers(DP), 3), rows = warpgroups * kGroupRows, groups = RoundUp(s.queries(), rows) / rows;
  if (cudaError_t e = AllowShared(WarpgroupForward<DP, T>, kBytes); e != cudaSuccess) return e;
  Launch(WarpgroupForward<DP, T>, unsigned(s.units() * groups), kGroupThreads * warpgroups, kBytes, stream, s, groups, args);
  return cudaGetLastError();
}

#define HIERAD_WARPGROUP_FORWARD(DP)                                                                                    \
  template cudaError_t LaunchWarpgroupForward<DP, bf16>(const AttentionShape&, const ForwardArgs<bf16>&, cudaStream_t); \
  template cudaError_t LaunchWarpgroupForward<DP, half>(const AttentionShape&, const ForwardArgs<half>&, cudaStream_t);
HIERAD_EACH_PANEL_WIDTH(HIERAD_WARPGROUP_FORWARD)
#undef HIERAD_WARPGROUP_FORWARD

}  // namespace hierad::kernels::attention
