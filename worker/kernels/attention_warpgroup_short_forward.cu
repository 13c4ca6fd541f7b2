// Attention forward of short windows by a warpgroup: all keys at once, so the softmax needs no running peak, and its weights go on to V
// without leaving the registers.
#include "worker/kernels/attention_warpgroup_short.cuh"

namespace hierad::kernels::attention {
namespace {

template <int DP, int kKeys, int kQueries, typename T>
__global__ void __maxnreg__(kKeys == 64 ? 96 : 128) WarpgroupShortForward(AttentionShape shape, ForwardArgs<T> args) {
  using Window = ShortWindow<DP, kKeys, kQueries>;
  constexpr bool kOverlap = DP <= 80;   // where registers allow
  extern __shared__ __align__(1024) unsigned char panels[];
  T* q = reinterpret_cast<T*>(panels);
  T* v = q + Window::kQueryArray;
  T* k = v + Window::kKeyArray;
  const int thread = threadIdx.x, row0 = thread / 32 * 16, g = (thread & 31) >> 2;
  const Unit u(shape, blockIdx.x);
  const float scale = rsqrtf(float(shape.head_dim)) * kLog2E;
  if (!Window::kPooled) CopyPanels<DP>(u, args.qkv, 0, 0, kQueries, q, thread, kGroupThreads);
  CopyPanels<DP>(u, args.qkv, 1, 0, kKeys, k, thread, kGroupThreads);
  CommitCopies();
  CopyPanels<DP>(u, args.qkv, 2, 0, kKeys, v, thread, kGroupThreads);
  CommitCopies();
  if (Window::kPooled) {
    PoolQueries<DP, true>(u, args.qkv, args.argmax, shape.q_stride, 0, kQueries, thread, kGroupThreads,
                          [&](int row, int column, uint4 piece) { *reinterpret_cast<uint4*>(q + PanelOffset(kQueries, row, column)) = piece; });
  }
  const Descriptor at_q(q, kQueries), at_v(v, kKeys), at_k(k, kKeys);
  float s_QK[Window::kQueryTiles][kKeys / 8][4];   // registers of their own for every tile: what a product adds to is alive till then
  WaitCopies<1>();
  CopiesForWarpgroups();
  __syncthreads();   // q and k are there
  BeginProducts();
  RowProducts<DP, kKeys, kQueries, T>(s_QK[0], at_q, at_k, 0);
  WaitCopies<0>();
  CopiesForWarpgroups();
  __syncthreads();
#pragma unroll
  for (int m = 0; m < Window::kQueryTiles; ++m) {
    const int first = m * kGroupRows + row0;
    const bool works = first < kQueries;
    float(&s)[kKeys / 8][4] = s_QK[m], o[DP / 8][4], sum[2] = {1, 1};
    uint32_t p[kKeys / 16][4];
    WaitProducts<0>();
    Arrived(s);
    if (works) {
      float peak[2] = {-INFINITY, -INFINITY};   // of scores; there is one key at least
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (!IsKey<kKeys>(n, e, u.keys)) s[n][e] = -INFINITY;
          peak[e >> 1] = fmaxf(peak[e >> 1], s[n][e]);
        }
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        peak[r] = fmaxf(peak[r], __shfl_xor_sync(~0u, peak[r], 1));
        peak[r] = fmaxf(peak[r], __shfl_xor_sync(~0u, peak[r], 2)) * scale;
        sum[r] = 0;
      }
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[n][e] = FastExp2(fmaf(s[n][e], scale, -peak[e >> 1])), sum[e >> 1] += s[n][e];
      }
#pragma unroll
      for (int j = 0; j < kKeys / 16; ++j) PackRows<T>(p[j], s, j);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
        sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
        const int row = first + g + r * 8;
        if ((thread & 3) == 0 && row < u.queries) args.lse[u.Lse(row)] = (peak[r] + log2f(sum[r])) / kLog2E;
      }
    }
    BeginProducts();
#pragma unroll
    for (int j = 0; j < kKeys / 16; ++j) GroupProduct<T, true>(o, p[j], at_v + AtRow(16 * j), j > 0);
    CommitProducts();
    const bool more = m + 1 < Window::kQueryTiles;
    if (kOverlap && more) RowProducts<DP, kKeys, kQueries, T>(s_QK[m + 1], at_q, at_k, m + 1);
    if (kOverlap && more) WaitProducts<1>();
    else WaitProducts<0>();
    Arrived(o);
    if (works) StoreRows<DP>(u, o, 1.0f / sum[0], 1.0f / sum[1], -1, first, args.o);
    if (!kOverlap && more) {
      BeginProducts();
      RowProducts<DP, kKeys, kQueries, T>(s_QK[m + 1], at_q, at_k, m + 1);
    }
  }
}

}  // namespace

template <typename T>
cudaError_t LaunchWarpgroupShortForward(const AttentionShape& s, const ForwardArgs<T>& args, cudaStream_t stream) {
  cudaError_t error = cudaErrorInvalidValue;
  ForShortWindow(s, [&]<int DP, int kKeys, int kQueries>(ShortWindow<DP, kKeys, kQueries> window) {
    constexpr int kBytes = window.kForwardBytes;
    const auto kernel = WarpgroupShortForward<DP, kKeys, kQueries, T>;
    if (error = AllowShared(kernel, kBytes); error != cudaSuccess) return;
    Launch(kernel, unsigned(s.units()), kGroupThreads, kBytes, stream, s, args);
    error = cudaGetLastError();
  });
  return error;
}
template cudaError_t LaunchWarpgroupShortForward<bf16>(const AttentionShape&, const ForwardArgs<bf16>&, cudaStream_t);
template cudaError_t LaunchWarpgroupShortForward<half>(const AttentionShape&, const ForwardArgs<half>&, cudaStream_t);

}  // namespace hierad::kernels::attention
