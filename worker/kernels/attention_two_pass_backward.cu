// Attention backward in two passes, on the tensor cores: one for dK and dV, whose warps hold keys and go over queries, one for
// dQ, whose warps hold queries and go over keys. Both compute the scores, 7 products instead of 5, but no warp waits for
// another and 32 rows a warp halve the reads of shared memory, which narrow heads wait for. Whole: both passes in one block,
// over one window in shared memory. Streamed, for any length: a kernel each, the next tile under way while one is worked on.
#include <algorithm>

#include "worker/kernels/attention_backward.cuh"

namespace hierad::kernels::attention {
namespace {

__host__ __device__ constexpr int RowsOfTile(int dp) { return dp <= 32 ? 128 : dp <= 64 ? 64 : 32; }   // of a streamed tile
__host__ __device__ constexpr int KeyTiles(int dp) { return dp <= 48 ? 2 : 1; }         // tiles of 16 keys a warp
__host__ __device__ constexpr int QueryTiles(int dp) { return dp <= 96 ? 2 : 1; }       // tiles of 16 queries a warp
__host__ __device__ constexpr int Registers(int dp) { return dp <= 32 ? 128 : dp <= 96 ? 168 : 248; }

template <int DP>
constexpr bool kHoldKeys = DP <= 48;   // K stays in registers, V is read anew: both would leave too few

// dQ of kTiles x 16 queries against keys. kHold: Q and dO stay in registers.
template <typename T, int DP, int kTiles, bool kHold>
struct QueryRows {
  static constexpr int kStride = DP + kPad;
  float dq[kTiles][DP / 8][4] = {};
  float lse2[kTiles][2], delta[kTiles][2];
  uint32_t q_held[kHold ? kTiles : 1][kHold ? DP / 16 : 1][4], go_held[kHold ? kTiles : 1][kHold ? DP / 16 : 1][4];
  const T *q, *go;

  __device__ QueryRows(const T* queries, const T* d_o, const float* lse2_rows, const float* delta_rows) : q(queries), go(d_o) {
    const int g = (threadIdx.x & 31) >> 2;
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) lse2[m][r] = lse2_rows[m * 16 + g + r * 8], delta[m][r] = delta_rows[m * 16 + g + r * 8];
      if constexpr (kHold) {
#pragma unroll
        for (int kc = 0; kc < DP / 16; ++kc) {
          LoadA(q_held[m][kc], q + m * 16 * kStride + kc * 16, kStride);
          LoadA(go_held[m][kc], go + m * 16 * kStride + kc * 16, kStride);
        }
      }
    }
  }

  // k and v: `rows` rows (a multiple of 16), of which the first `valid` (1 or more) count.
  __device__ void Tile(const T* k, const T* v, int rows, int valid, float scale) {
    int n0 = 0;
    for (; n0 + 16 <= min(rows, valid); n0 += 16) Keys<false>(k + n0 * kStride, v + n0 * kStride, 16, scale);
    if (n0 < min(rows, valid)) Keys<true>(k + n0 * kStride, v + n0 * kStride, valid - n0, scale);
  }

  // 16 keys; with kMask only the first `valid` of them: the scores of the rest may be infinite.
  template <bool kMask>
  __device__ void Keys(const T* k, const T* v, int valid, float scale) {
    const int t = threadIdx.x & 3;
    float s[kTiles][2][4] = {}, dp[kTiles][2][4] = {};
#pragma unroll
    for (int kc = 0; kc < DP / 16; ++kc) {
      uint32_t b[4], c[4];
      LoadB(b, k + kc * 16, kStride);
      LoadB(c, v + kc * 16, kStride);
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        uint32_t a[4], d[4];
        if constexpr (kHold) {
#pragma unroll
          for (int i = 0; i < 4; ++i) a[i] = q_held[m][kc][i], d[i] = go_held[m][kc][i];
        } else {
          LoadA(a, q + m * 16 * kStride + kc * 16, kStride);
          LoadA(d, go + m * 16 * kStride + kc * 16, kStride);
        }
        Mma<T>(s[m][0], a, b[0], b[1]);
        Mma<T>(s[m][1], a, b[2], b[3]);
        Mma<T>(dp[m][0], d, c[0], c[1]);
        Mma<T>(dp[m][1], d, c[2], c[3]);
      }
    }
    uint32_t ds[kTiles][4];
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float p = FastExp2(fmaf(s[m][n][e], scale * kLog2E, -lse2[m][e >> 1]));
          dp[m][n][e] = p * (dp[m][n][e] - delta[m][e >> 1]);
          if (kMask && n * 8 + 2 * t + (e & 1) >= valid) dp[m][n][e] = 0;
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) ds[m][i] = PackPair<T>(dp[m][i >> 1][(i & 1) * 2], dp[m][i >> 1][(i & 1) * 2 + 1]);
    }
#pragma unroll
    for (int n = 0; n < DP / 16; ++n) {
      uint32_t b[4];
      LoadBTransposed(b, k + n * 16, kStride);
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        Mma<T>(dq[m][2 * n], ds[m], b[0], b[1]);
        Mma<T>(dq[m][2 * n + 1], ds[m], b[2], b[3]);
      }
    }
  }

  __device__ void Store(const Unit& u, const AttentionShape& shape, const BackwardArgs<T>& args, int first, float scale) {
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      EachPiece<DP, T>(dq[m], scale, scale, [&](int row, int column, uint4 piece) {
        StoreQueryPiece(u, shape.q_stride, args.argmax, first + m * 16 + row, column, piece, args.dqkv);
      });
    }
  }
};

// Rows of a unit that lie whole in shared memory.
template <int DP>
__host__ __device__ int WholeKeys(const AttentionShape& s) { return (s.keys + KeyTiles(DP) * 16 - 1) / (KeyTiles(DP) * 16) * (KeyTiles(DP) * 16); }
template <int DP>
__host__ __device__ int WholeQueries(const AttentionShape& s) {
  return (s.queries() + QueryTiles(DP) * 16 - 1) / (QueryTiles(DP) * 16) * (QueryTiles(DP) * 16);
}
template <int DP>
int WholeBytes(const AttentionShape& s) {
  return 2 * (WholeKeys<DP>(s) + WholeQueries<DP>(s)) * (DP + kPad) * kElementBytes + 2 * WholeQueries<DP>(s) * int(sizeof(float));
}

// blockDim = (32 * warps of a unit, units of a block).
template <int DP, bool kHoldV, typename T>
__global__ void __maxnreg__(kHoldV && DP <= 32 ? 168 : Registers(DP)) WholeBackward(AttentionShape shape, int unit_bytes, BackwardArgs<T> args) {
  extern __shared__ uint4 memory[];
  constexpr int kStride = DP + kPad, kKeyTiles = KeyTiles(DP), kQueryTiles = QueryTiles(DP);
  const int thread = threadIdx.x, threads = blockDim.x, warp = thread >> 5, warps = threads >> 5;
  const int key_rows = WholeKeys<DP>(shape), query_rows = WholeQueries<DP>(shape);
  const int64_t unit = blockIdx.x * int64_t(blockDim.y) + threadIdx.y;
  const bool there = unit < shape.units();
  const Unit u(shape, there ? unit : 0);
  T* k = reinterpret_cast<T*>(reinterpret_cast<char*>(memory) + threadIdx.y * unit_bytes);
  T* v = k + key_rows * kStride;
  T* q = v + key_rows * kStride;
  T* go = q + query_rows * kStride;
  float* lse2 = reinterpret_cast<float*>(go + query_rows * kStride);
  float* delta = lse2 + query_rows;
  const float scale = rsqrtf(float(shape.head_dim));
  if (there) {
    CopyRows<DP>(u, args.qkv, 1, 0, key_rows, k, thread, threads);
    CopyRows<DP>(u, args.qkv, 2, 0, key_rows, v, thread, threads);
    CopyRows<DP>(u, args.d_o, -1, 0, query_rows, go, thread, threads);
    LoadQueries<DP, false>(u, args.qkv, const_cast<uint8_t*>(args.argmax), shape.q_stride, 0, query_rows, q, thread, threads);
    CommitCopies();
    LoadRowSums<DP>(u, args.o, args.d_o, args.lse, 0, query_rows, lse2, delta, thread, threads);
  }
  WaitCopies<0>();
  __syncthreads();
  if (!there) return;
  // Keys and queries are dealt to the warps as one row of cards.
  const int key_items = key_rows / (kKeyTiles * 16), items = key_items + query_rows / (kQueryTiles * 16);
  int item = warp;
  for (; item < key_items; item += warps) {
    const int row = item * kKeyTiles * 16;
    KeyRows<T, DP, kKeyTiles, kHoldKeys<DP>, kHoldV> keys(k + row * kStride, v + row * kStride, shape.keys - row);
    for (int j = 0; j < u.queries; j += 16) {
      keys.template Queries<1, false, true>(q + j * kStride, go + j * kStride, lse2 + j, delta + j, scale, nullptr, 0);
    }
    keys.Store(u, row, scale, args.dqkv);
  }
  for (; item < items; item += warps) {
    const int row = (item - key_items) * kQueryTiles * 16;
    QueryRows<T, DP, kQueryTiles, DP <= 48> queries(q + row * kStride, go + row * kStride, lse2 + row, delta + row);
    queries.Tile(k, v, key_rows, shape.keys, scale);
    queries.Store(u, shape, args, row, scale);
  }
}

// dQ, and delta for the kernel below. A block owns warps x QueryTiles x 16 queries; keys stream through.
template <int DP, typename T>
__global__ void __maxnreg__(Registers(DP)) StreamedQueries(AttentionShape shape, int groups, BackwardArgs<T> args) {
  extern __shared__ uint4 memory[];
  constexpr int kStride = DP + kPad, kTiles = QueryTiles(DP), kKeys = RowsOfTile(DP);
  const int thread = threadIdx.x, threads = blockDim.x, own = thread / 32 * kTiles * 16, rows = threads / 32 * kTiles * 16;
  const Unit u(shape, blockIdx.x / groups);
  const int first = int(blockIdx.x % groups) * rows;
  T* q = reinterpret_cast<T*>(memory);
  T* go = q + rows * kStride;
  T* buffers = go + rows * kStride;   // [2][k, v][kKeys]
  float* lse2 = reinterpret_cast<float*>(buffers + 4 * kKeys * kStride);
  float* delta = lse2 + rows;
  const float scale = rsqrtf(float(shape.head_dim));
  const auto fetch = [&](int tile) {
    T* k = buffers + (tile & 1) * 2 * kKeys * kStride;
    CopyRows<DP>(u, args.qkv, 1, tile * kKeys, kKeys, k, thread, threads);
    CopyRows<DP>(u, args.qkv, 2, tile * kKeys, kKeys, k + kKeys * kStride, thread, threads);
    CommitCopies();
  };
  LoadQueries<DP, false>(u, args.qkv, const_cast<uint8_t*>(args.argmax), shape.q_stride, first, rows, q, thread, threads);
  CopyRows<DP>(u, args.d_o, -1, first, rows, go, thread, threads);
  fetch(0);
  LoadRowSums<DP>(u, args.o, args.d_o, args.lse, first, rows, lse2, delta, thread, threads);
  WaitCopies<0>();
  __syncthreads();
  for (int i = thread; i < rows && first + i < u.queries; i += threads) args.delta[u.Lse(first + i)] = delta[i];
  QueryRows<T, DP, kTiles, DP <= 48> state(q + own * kStride, go + own * kStride, lse2 + own, delta + own);
  const bool idle = first + own >= u.queries;
  for (int tile = 0; tile * kKeys < u.keys; ++tile) {
    if (tile > 0) {
      WaitCopies<0>();
      __syncthreads();   // this tile is there, and nobody reads the other buffer any more
    }
    if ((tile + 1) * kKeys < u.keys) fetch(tile + 1);
    const T* k = buffers + (tile & 1) * 2 * kKeys * kStride;
    if (!idle) state.Tile(k, k + kKeys * kStride, kKeys, u.keys - tile * kKeys, scale);
  }
  if (!idle) state.Store(u, shape, args, first + own, scale);
}

// dK and dV. A block owns warps x KeyTiles x 16 keys; queries stream through.
template <int DP, typename T>
__global__ void __maxnreg__(Registers(DP)) StreamedKeys(AttentionShape shape, int groups, BackwardArgs<T> args) {
  extern __shared__ uint4 memory[];
  constexpr int kStride = DP + kPad, kTiles = KeyTiles(DP), kQueries = RowsOfTile(DP);
  constexpr int kGroups = DP <= 48 ? 1 : 2;   // groups of 16 queries a step: where K and V are read anew, they serve two
  const int thread = threadIdx.x, threads = blockDim.x, own = thread / 32 * kTiles * 16, rows = threads / 32 * kTiles * 16;
  const Unit u(shape, blockIdx.x / groups);
  const int first = int(blockIdx.x % groups) * rows;
  T* k = reinterpret_cast<T*>(memory);
  T* v = k + rows * kStride;
  T* buffers = v + rows * kStride;   // [2][q, d_o][kQueries]
  float* sums = reinterpret_cast<float*>(buffers + 4 * kQueries * kStride);   // [2][lse, delta][kQueries]
  const float scale = rsqrtf(float(shape.head_dim));
  const auto fetch = [&](int tile) {
    T* q = buffers + (tile & 1) * 2 * kQueries * kStride;
    LoadQueries<DP, false>(u, args.qkv, const_cast<uint8_t*>(args.argmax), shape.q_stride, tile * kQueries, kQueries, q, thread, threads);
    CopyRows<DP>(u, args.d_o, -1, tile * kQueries, kQueries, q + kQueries * kStride, thread, threads);
    for (int i = thread; i < 2 * kQueries; i += threads) {   // beyond the last query all is zero, and adds nothing
      const int t = tile * kQueries + i % kQueries;
      const float* from = i < kQueries ? args.lse : args.delta;
      CopyWordAsync(sums + (tile & 1) * 2 * kQueries + i, t < u.queries ? from + u.Lse(t) : from, t < u.queries);
    }
    CommitCopies();
  };
  CopyRows<DP>(u, args.qkv, 1, first, rows, k, thread, threads);
  CopyRows<DP>(u, args.qkv, 2, first, rows, v, thread, threads);
  fetch(0);
  WaitCopies<0>();
  __syncthreads();
  KeyRows<T, DP, kTiles, kHoldKeys<DP>, false> state(k + own * kStride, v + own * kStride, u.keys - first - own);
  const bool idle = first + own >= u.keys;
  for (int tile = 0; tile * kQueries < u.queries; ++tile) {
    if (tile > 0) {
      WaitCopies<0>();
      __syncthreads();   // this tile is there, and nobody reads the other buffer any more
    }
    if ((tile + 1) * kQueries < u.queries) fetch(tile + 1);
    if (idle) continue;
    const T* q = buffers + (tile & 1) * 2 * kQueries * kStride;
    const float* lse = sums + (tile & 1) * 2 * kQueries;
    const int valid = min(kQueries, u.queries - tile * kQueries);
    for (int j = 0; j < valid; j += kGroups * 16) {
      state.template Queries<kGroups, false, false>(q + j * kStride, q + (kQueries + j) * kStride, lse + j, lse + kQueries + j, scale, nullptr, 0);
    }
  }
  if (!idle) state.Store(u, first + own, scale, args.dqkv);
}

template <int DP, bool kHoldV, typename T>
cudaError_t LaunchWhole(const AttentionShape& s, int most_warps, const BackwardArgs<T>& args, cudaStream_t stream) {
  const int unit_bytes = WholeBytes<DP>(s), items = std::max(WholeKeys<DP>(s) / KeyTiles(DP), WholeQueries<DP>(s) / QueryTiles(DP)) / 16;
  const int warps = std::min(items, most_warps);
  const int units = std::max(1, std::min(4 / warps, (56 << 10) / unit_bytes));
  if (cudaError_t e = AllowShared(WholeBackward<DP, kHoldV, T>, units * unit_bytes); e != cudaSuccess) return e;
  const dim3 grid(unsigned((s.units() + units - 1) / units)), block(unsigned(32 * warps), unsigned(units));
  Launch(WholeBackward<DP, kHoldV, T>, grid, block, units * unit_bytes, stream, s, unit_bytes, args);
  return cudaGetLastError();
}

template <int DP, typename T>
cudaError_t LaunchStreamed(const AttentionShape& s, const BackwardArgs<T>& args, cudaStream_t stream) {
  constexpr int kRowBytes = (DP + kPad) * kElementBytes, kQueryRows = QueryTiles(DP) * 16, kKeyRows = KeyTiles(DP) * 16;
  constexpr int kTileBytes = 4 * RowsOfTile(DP) * kRowBytes, kSumBytes = 2 * int(sizeof(float));
  const int q_warps = WarpsFor(s.queries(), kQueryRows, Registers(DP), kTileBytes, 2 * kRowBytes + kSumBytes), q_rows = q_warps * kQueryRows, q_groups = RoundUp(s.queries(), q_rows) / q_rows;
  const int k_warps = WarpsFor(s.keys, kKeyRows, Registers(DP), kTileBytes + 2 * RowsOfTile(DP) * kSumBytes, 2 * kRowBytes), k_rows = k_warps * kKeyRows, k_groups = RoundUp(s.keys, k_rows) / k_rows;
  const int q_bytes = kTileBytes + q_rows * (2 * kRowBytes + kSumBytes);
  const int k_bytes = kTileBytes + 2 * RowsOfTile(DP) * kSumBytes + 2 * k_rows * kRowBytes;
  if (cudaError_t e = AllowShared(StreamedQueries<DP, T>, q_bytes); e != cudaSuccess) return e;
  if (cudaError_t e = AllowShared(StreamedKeys<DP, T>, k_bytes); e != cudaSuccess) return e;
  Launch(StreamedQueries<DP, T>, unsigned(s.units() * q_groups), 32 * q_warps, q_bytes, stream, s, q_groups, args);
  Launch(StreamedKeys<DP, T>, unsigned(s.units() * k_groups), 32 * k_warps, k_bytes, stream, s, k_groups, args);
  return cudaGetLastError();
}

}  // namespace

template <int DP>
bool WholeBackwardFits(const AttentionShape& s) {
  return WholeBytes<DP>(s) <= SharedBytes();
}

template <int DP, typename T>
cudaError_t LaunchTwoPassBackward(const AttentionShape& s, bool whole, const BackwardArgs<T>& args, cudaStream_t stream) {
  if (!whole) return LaunchStreamed<DP, T>(s, args, stream);
  if constexpr (DP <= 32) {   // three blocks of four warps with V in registers, where they fit, beat two of eight
    if (WholeBytes<DP>(s) <= 74 << 10) return LaunchWhole<DP, true, T>(s, 4, args, stream);
  }
  return LaunchWhole<DP, false, T>(s, 8, args, stream);
}

#define HIERAD_TWO_PASS_BACKWARD(DP)                                                                                          \
  template bool WholeBackwardFits<DP>(const AttentionShape&);                                                                 \
  template cudaError_t LaunchTwoPassBackward<DP, bf16>(const AttentionShape&, bool, const BackwardArgs<bf16>&, cudaStream_t); \
  template cudaError_t LaunchTwoPassBackward<DP, half>(const AttentionShape&, bool, const BackwardArgs<half>&, cudaStream_t);
HIERAD_EACH_HEAD_DIM(HIERAD_TWO_PASS_BACKWARD)
#undef HIERAD_TWO_PASS_BACKWARD

}  // namespace hierad::kernels::attention
