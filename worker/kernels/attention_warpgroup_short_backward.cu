// Attention backward of short windows by a warpgroup: nothing is computed twice, o is not read. A lane has a query's scores in its row, so
// the sum over D of o * d_o, which is the sum over keys of P * dP, costs it two shuffles. dS is dQ's left operand from registers; P and dS go
// once through shared memory to be dV's and dK's, transposed.
#include "worker/kernels/attention_warpgroup_short.cuh"

namespace hierad::kernels::attention {
namespace {

__host__ __device__ constexpr int Registers(int queries) { return queries == 80 ? 168 : 128; }

template <int DP, int kKeys, int kQueries, typename T>
__global__ void __maxnreg__(Registers(kQueries)) WarpgroupShortBackward(AttentionShape shape, BackwardArgs<T> args) {
  using Window = ShortWindow<DP, kKeys, kQueries>;
  constexpr bool kOverlap = DP <= 80, kTailOverlaps = DP <= 80 || kQueries != 64;   // where registers allow
  extern __shared__ __align__(1024) unsigned char panels[];
  T* p = reinterpret_cast<T*>(panels);   // [queries][keys]
  T* q = p + Window::kWeights;
  T* d_o = q + Window::kQueryArray;
  T* v = d_o + Window::kQueryArray;
  T* k = v + Window::kValues;
  T* ds = v;                             // [queries][keys], when v is read no more
  T* pooled = ds + Window::kWeights;     // [queries][DP], then too: dQ of pooled queries
  const int thread = threadIdx.x, row0 = thread / 32 * 16, g = (thread & 31) >> 2;
  const Unit u(shape, blockIdx.x);
  const float scale = rsqrtf(float(shape.head_dim));
  if (!Window::kPooled) CopyPanels<DP>(u, args.qkv, 0, 0, kQueries, q, thread, kGroupThreads);
  CopyPanels<DP>(u, args.qkv, 1, 0, kKeys, k, thread, kGroupThreads);
  CommitCopies();
  CopyPanels<DP>(u, args.d_o, -1, 0, kQueries, d_o, thread, kGroupThreads);
  CopyPanels<DP>(u, args.qkv, 2, 0, kKeys, v, thread, kGroupThreads);
  CommitCopies();
  float lse2[Window::kQueryTiles][2];   // +inf beyond the last query: such probabilities vanish
#pragma unroll
  for (int m = 0; m < Window::kQueryTiles; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = m * kGroupRows + row0 + g + r * 8;
      lse2[m][r] = row < u.queries ? __ldg(args.lse + u.Lse(row)) * kLog2E : INFINITY;
    }
  }
  if (Window::kPooled) {
    PoolQueries<DP, false>(u, args.qkv, const_cast<uint8_t*>(args.argmax), shape.q_stride, 0, kQueries, thread, kGroupThreads,
                           [&](int row, int column, uint4 piece) { *reinterpret_cast<uint4*>(q + PanelOffset(kQueries, row, column)) = piece; });
  }
  const Descriptor at_p(p, kQueries), at_q(q, kQueries), at_d_o(d_o, kQueries), at_v(v, kKeys), at_k(k, kKeys), at_ds(ds, kQueries);
  // Sums have registers of their own for every tile: what a product adds to is alive till then, even if it adds to nothing.
  float s_QK[Window::kQueryTiles][kKeys / 8][4], dp_QK[Window::kQueryTiles][kKeys / 8][4], dq_QD[Window::kQueryTiles][DP / 8][4];
  uint32_t ds_QK[Window::kQueryTiles][kKeys / 16][4];
  WaitCopies<1>();
  CopiesForWarpgroups();
  __syncthreads();   // q and k are there
  BeginProducts();
  RowProducts<DP, kKeys, kQueries, T>(s_QK[0], at_q, at_k, 0);
  WaitCopies<0>();
  CopiesForWarpgroups();
  __syncthreads();
  BeginProducts();
  RowProducts<DP, kKeys, kQueries, T>(dp_QK[0], at_d_o, at_v, 0);
#pragma unroll
  for (int m = 0; m < Window::kQueryTiles; ++m) {
    const int first = m * kGroupRows + row0;
    const bool works = first < kQueries;
    float(&s)[kKeys / 8][4] = s_QK[m], (&dp)[kKeys / 8][4] = dp_QK[m], (&dq)[DP / 8][4] = dq_QD[m];
    WaitProducts<1>();
    Arrived(s);
    if (works) {
      const uint32_t at = WeightAddress(p, first);
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          s[n][e] = FastExp2(fmaf(s[n][e], scale * kLog2E, -lse2[m][e >> 1]));
          if (!IsKey<kKeys>(n, e, u.keys)) s[n][e] = 0;
        }
      }
#pragma unroll
      for (int j = 0; j < kKeys / 16; ++j) {
        PackRows<T>(ds_QK[m][j], s, j);
        StoreWeights<T>(at, kQueries, j, ds_QK[m][j]);
      }
    }
    WaitProducts<0>();
    Arrived(dp);
    if (works) {
      float delta[2] = {};
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) dp[n][e] *= s[n][e], delta[e >> 1] += dp[n][e];
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        delta[r] += __shfl_xor_sync(~0u, delta[r], 1);
        delta[r] += __shfl_xor_sync(~0u, delta[r], 2);
      }
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) dp[n][e] = fmaf(s[n][e], -delta[e >> 1], dp[n][e]);
      }
#pragma unroll
      for (int j = 0; j < kKeys / 16; ++j) PackRows<T>(ds_QK[m][j], dp, j);
    }
    BeginProducts();
#pragma unroll
    for (int j = 0; j < kKeys / 16; ++j) GroupProduct<T, true>(dq, ds_QK[m][j], at_k + AtRow(16 * j), j > 0);
    CommitProducts();
    if (m + 1 < Window::kQueryTiles) {
      if (kOverlap) RowProducts<DP, kKeys, kQueries, T>(s_QK[m + 1], at_q, at_k, m + 1);
      WaitProducts<kOverlap ? 1 : 0>();
      Arrived(dq);
      StoreRows<DP>(u, dq, scale, scale, 0, first, args.dqkv);
      BeginProducts();
      if (!kOverlap) RowProducts<DP, kKeys, kQueries, T>(s_QK[m + 1], at_q, at_k, m + 1);
      RowProducts<DP, kKeys, kQueries, T>(dp_QK[m + 1], at_d_o, at_v, m + 1);
    }
  }
  __syncthreads();   // v is read no more
#pragma unroll
  for (int m = 0; m < Window::kQueryTiles; ++m) {
    const int first = m * kGroupRows + row0;
    if (first >= kQueries) continue;
    const uint32_t at = WeightAddress(ds, first);
#pragma unroll
    for (int j = 0; j < kKeys / 16; ++j) StoreWeights<T>(at, kQueries, j, ds_QK[m][j]);
  }
  constexpr int kLast = (Window::kQueryTiles - 1) * kGroupRows;
  float(&dq)[DP / 8][4] = dq_QD[Window::kQueryTiles - 1];
  if (Window::kPooled) {
    WaitProducts<0>();
    Arrived(dq);
    if (row0 < kQueries) {
      EachPiece<DP, T>(dq, scale, scale, [&](int row, int column, uint4 piece) {
        *reinterpret_cast<uint4*>(pooled + (row0 + row) * DP + column) = piece;
      });
    }
  }
  CopiesForWarpgroups();
  __syncthreads();   // P and dS are there
  float dv[Window::kKeyTiles][DP / 8][4], dk[Window::kKeyTiles][DP / 8][4];
  const auto key_products = [&](float(&c)[DP / 8][4], Descriptor weights, Descriptor rows, int tile) {
    BeginProducts();
#pragma unroll
    for (int j = 0; j < kQueries / 16; ++j) {
      GroupProduct<T, true, true>(c, weights + AtColumns(kQueries, 4 * tile) + AtRow(16 * j), rows + AtRow(16 * j), j > 0);
    }
    CommitProducts();
  };
  if (kTailOverlaps) key_products(dv[0], at_p, at_d_o, 0);
  if (Window::kPooled) {   // to every position that the pool looked at, zero where it did not choose
    EachPieceOfRows<DP>(u.keys, thread, kGroupThreads, [&](int row, int column) {
      if (column >= u.head_dim) return;
      const int s = row / u.queries, t = row - s * u.queries;
      const uint2 stored = __ldg(reinterpret_cast<const uint2*>(args.argmax + u.Out(t) + column));
      const uint8_t* which = reinterpret_cast<const uint8_t*>(&stored);
      uint4 piece = *reinterpret_cast<const uint4*>(pooled + t * DP + column);
      T* x = reinterpret_cast<T*>(&piece);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (which[e] != s) x[e] = FromFloat<T>(0.0f);
      }
      *reinterpret_cast<uint4*>(args.dqkv + u.Qkv(row, 0) + column) = piece;
    });
  } else {
    WaitProducts<kTailOverlaps ? 1 : 0>();
    Arrived(dq);
    if (kLast + row0 < kQueries) StoreRows<DP>(u, dq, scale, scale, 0, kLast + row0, args.dqkv);
  }
  if (kTailOverlaps) key_products(dk[0], at_ds, at_q, 0);
  else key_products(dv[0], at_p, at_d_o, 0);
#pragma unroll
  for (int tile = 0; tile < Window::kKeyTiles; ++tile) {
    const int first = tile * kGroupRows + row0;
    WaitProducts<kTailOverlaps ? 1 : 0>();
    Arrived(dv[tile]);
    if (first < kKeys) StoreRows<DP>(u, dv[tile], 1.0f, 1.0f, 2, first, args.dqkv);
    if (!kTailOverlaps) key_products(dk[tile], at_ds, at_q, tile);
    if (tile + 1 < Window::kKeyTiles) {
      key_products(dv[tile + 1], at_p, at_d_o, tile + 1);
      WaitProducts<1>();
    } else {
      WaitProducts<0>();
    }
    Arrived(dk[tile]);
    if (first < kKeys) StoreRows<DP>(u, dk[tile], scale, scale, 1, first, args.dqkv);
    if (tile + 1 < Window::kKeyTiles) key_products(dk[tile + 1], at_ds, at_q, tile + 1);
  }
}

}  // namespace

bool WarpgroupShortFits(const AttentionShape& s) {
  return ForShortWindow(s, [](auto) {});
}

template <typename T>
cudaError_t LaunchWarpgroupShortBackward(const AttentionShape& s, const BackwardArgs<T>& args, cudaStream_t stream) {
  cudaError_t error = cudaErrorInvalidValue;
  ForShortWindow(s, [&]<int DP, int kKeys, int kQueries>(ShortWindow<DP, kKeys, kQueries> window) {
    constexpr int kBytes = window.kBackwardBytes;
    const auto kernel = WarpgroupShortBackward<DP, kKeys, kQueries, T>;
    if (error = AllowShared(kernel, kBytes); error != cudaSuccess) return;
    Launch(kernel, unsigned(s.units()), kGroupThreads, kBytes, stream, s, args);
    error = cudaGetLastError();
  });
  return error;
}
template cudaError_t LaunchWarpgroupShortBackward<bf16>(const AttentionShape&, const BackwardArgs<bf16>&, cudaStream_t);
template cudaError_t LaunchWarpgroupShortBackward<half>(const AttentionShape&, const BackwardArgs<half>&, cudaStream_t);

}  // namespace hierad::kernels::attention
