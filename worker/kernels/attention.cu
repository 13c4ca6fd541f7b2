// Attention on the tensor cores (bf16 products, fp32 sums and softmax). Short windows, Hiera's usual case, are held whole
// in shared memory: several windows a block, and a backward pass that keeps dK and dV in registers, writes dS once to
// shared memory and takes dQ from there, so nothing is computed twice and nothing is added atomically. Long ones stream
// tiles of keys (forward, dQ) or of queries (dK, dV).
#include <algorithm>
#include <cmath>

#include "worker/kernels/attention.h"
#include "worker/kernels/mma.cuh"

namespace hierad::kernels {
namespace {

constexpr float kLog2E = 1.4426950408889634f;
constexpr int kPad = 8;          // elements after each row in shared memory: rows fall on different banks
constexpr int kTile = 64;        // keys or queries of a streamed tile
constexpr int kSharedBytes = 224 << 10;

using bf16 = __nv_bfloat16;

// Addresses of one (b, w, h); heads fastest, as in memory.
struct Unit {
  int keys, queries, windows, heads, head_dim, b, w, h;
  __device__ Unit(const AttentionShape& s, int64_t unit)
      : keys(s.keys), queries(s.queries()), windows(s.windows), heads(s.heads), head_dim(s.head_dim), h(int(unit % s.heads)) {
    const int64_t rest = unit / s.heads;
    w = int(rest % s.windows);
    b = int(rest / s.windows);
  }
  __device__ int64_t Qkv(int t, int which) const {
    return ((((int64_t(b) * keys + t) * windows + w) * 3 + which) * heads + h) * head_dim;
  }
  __device__ int64_t Out(int t) const { return (((int64_t(b) * queries + t) * windows + w) * heads + h) * head_dim; }
  __device__ int64_t Lse(int t) const { return ((int64_t(b) * heads + h) * windows + w) * queries + t; }
};

__device__ inline uint4 Zero4() { return make_uint4(0, 0, 0, 0); }

// Starts copying rows [first, first + rows) of k (which 1) or v (2), or of an array laid out as o (which -1), into `to`
// [rows][DP + kPad]; zeros beyond the last row and head_dim.
template <int DP>
__device__ void CopyRows(const Unit& u, const bf16* from, int which, int first, int rows, bf16* to, int thread, int threads) {
  constexpr int kChunks = DP / 8;
  const int end = which < 0 ? u.queries : u.keys;
  for (int i = thread; i < rows * kChunks; i += threads) {
    const int row = i / kChunks, c = i % kChunks * 8, t = first + row;
    const bool valid = t < end && c < u.head_dim;
    CopyAsync(to + row * (DP + kPad) + c, valid ? from + (which < 0 ? u.Out(t) : u.Qkv(t, which)) + c : from, valid);
  }
}

// Rows [0, 16) of `tile` in shared memory, held by one warp, to rows [first, ...) of k, v or an array laid out as o.
template <int DP>
__device__ void StoreRows(const Unit& u, const bf16* tile, int which, int first, bf16* to) {
  constexpr int kChunks = DP / 8;
  const int end = which < 0 ? u.queries : u.keys;
  __syncwarp();
  for (int i = threadIdx.x & 31; i < 16 * kChunks; i += 32) {
    const int row = i / kChunks, c = i % kChunks * 8, t = first + row;
    if (t < end && c < u.head_dim) {
      *reinterpret_cast<uint4*>(to + (which < 0 ? u.Out(t) : u.Qkv(t, which)) + c) = *reinterpret_cast<const uint4*>(tile + row * (DP + kPad) + c);
    }
  }
}

// An accumulator of 16 rows x DP columns to shared memory as bf16, rows scaled.
template <int DP>
__device__ void StageTile(const float (&c)[DP / 8][4], float scale0, float scale1, bf16* tile) {
  const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
#pragma unroll
  for (int n = 0; n < DP / 8; ++n) {
    *reinterpret_cast<uint32_t*>(tile + g * (DP + kPad) + n * 8 + 2 * t) = Pack(c[n][0] * scale0, c[n][1] * scale0);
    *reinterpret_cast<uint32_t*>(tile + (g + 8) * (DP + kPad) + n * 8 + 2 * t) = Pack(c[n][2] * scale1, c[n][3] * scale1);
  }
}

// Queries, pooled. Forward: argmax is found and stored; backward: it is followed. Without pooling only starts the copies.
template <int DP, bool kFind>
__device__ void LoadQueries(const Unit& u, const bf16* qkv, uint8_t* argmax, int q_stride, int first, int rows, bf16* to,
                            int thread, int threads) {
  constexpr int kChunks = DP / 8;
  if (q_stride == 1) {   // the queries' count is the keys'
    CopyRows<DP>(u, qkv, 0, first, rows, to, thread, threads);
    return;
  }
  for (int i = thread; i < rows * kChunks; i += threads) {
    const int row = i / kChunks, c = i % kChunks * 8, t = first + row;
    bf16 best[8];
    *reinterpret_cast<uint4*>(best) = Zero4();
    if (t < u.queries && c < u.head_dim) {
      *reinterpret_cast<uint4*>(best) = *reinterpret_cast<const uint4*>(qkv + u.Qkv(t, 0) + c);
      uint8_t which[8] = {0, 0, 0, 0, 0, 0, 0, 0};
      uint2* stored = reinterpret_cast<uint2*>(argmax + u.Out(t) + c);
      if (!kFind) *reinterpret_cast<uint2*>(which) = *stored;
#pragma unroll 4
      for (int s = 1; s < q_stride; ++s) {
        bf16 v[8];
        *reinterpret_cast<uint4*>(v) = *reinterpret_cast<const uint4*>(qkv + u.Qkv(s * u.queries + t, 0) + c);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          if (kFind ? __bfloat162float(v[e]) > __bfloat162float(best[e]) : which[e] == s) {
            best[e] = v[e];
            if (kFind) which[e] = uint8_t(s);
          }
        }
      }
      if (kFind) *stored = *reinterpret_cast<const uint2*>(which);
    }
    *reinterpret_cast<uint4*>(to + row * (DP + kPad) + c) = *reinterpret_cast<const uint4*>(best);
  }
}

// Running softmax of 16 queries against tiles of keys.
template <int DP>
struct ForwardState {
  float o[DP / 8][4] = {};
  float peak[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};

  // q: 16 rows, k and v: `rows` rows (a multiple of 16) from key `first` on, of which those at `keys` and beyond count not.
  __device__ void Tile(const bf16* q, const bf16* k, const bf16* v, int first, int rows, int keys, float scale) {
    constexpr int kStride = DP + kPad;
    constexpr int kStep = DP <= 48 ? 32 : 64;   // keys a step: registers decide how many blocks share a multiprocessor
    int n0 = 0;
    for (; n0 + kStep <= rows && first + n0 + kStep <= keys; n0 += kStep) {
      Keys<kStep / 16, false>(q, k + n0 * kStride, v + n0 * kStride, kStep, scale);
    }
    for (; n0 < rows; n0 += 16) Keys<1, true>(q, k + n0 * kStride, v + n0 * kStride, keys - first - n0, scale);
  }

  // kPairs x 16 keys; with kMask only the first `valid` of them.
  template <int kPairs, bool kMask>
  __device__ void Keys(const bf16* q, const bf16* k, const bf16* v, int valid, float scale) {
    constexpr int kStride = DP + kPad;
    const int t = threadIdx.x & 3;
    float s[2 * kPairs][4] = {};
#pragma unroll
    for (int kc = 0; kc < DP / 16; ++kc) {
      uint32_t a[4];
      LoadA(a, q + kc * 16, kStride);
#pragma unroll
      for (int p = 0; p < kPairs; ++p) {
        uint32_t b[4];
        LoadB(b, k + p * 16 * kStride + kc * 16, kStride);
        Mma(s[2 * p], a, b[0], b[1]);
        Mma(s[2 * p + 1], a, b[2], b[3]);
      }
    }
    // The peak is kept in units of log2, of scaled scores.
    float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int n = 0; n < 2 * kPairs; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (kMask && n * 8 + 2 * t + (e & 1) >= valid) s[n][e] = -INFINITY;
        top[e >> 1] = fmaxf(top[e >> 1], s[n][e]);
      }
    }
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
#pragma unroll
    for (int n = 0; n < 2 * kPairs; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[n][e] = FastExp2(fmaf(s[n][e], scale, -peak[e >> 1]));
        sum[e >> 1] += s[n][e];
      }
    }
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
      const uint32_t a[4] = {Pack(s[2 * p][0], s[2 * p][1]), Pack(s[2 * p][2], s[2 * p][3]),
                             Pack(s[2 * p + 1][0], s[2 * p + 1][1]), Pack(s[2 * p + 1][2], s[2 * p + 1][3])};
#pragma unroll
      for (int n = 0; n < DP / 16; ++n) {
        uint32_t b[4];
        LoadBTransposed(b, v + p * 16 * kStride + n * 16, kStride);
        Mma(o[2 * n], a, b[0], b[1]);
        Mma(o[2 * n + 1], a, b[2], b[3]);
      }
    }
  }

  // `tile`: 16 rows of shared memory that only this warp uses now (its queries').
  __device__ void Store(const Unit& u, int first, bf16* tile, bf16* out, float* lse) {
    const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
      sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
      const int row = first + g + r * 8;
      if (t == 0 && row < u.queries) lse[u.Lse(row)] = (peak[r] + log2f(sum[r])) / kLog2E;
    }
    __syncwarp();
    StageTile<DP>(o, 1.0f / sum[0], 1.0f / sum[1], tile);
    StoreRows<DP>(u, tile, -1, first, out);
  }
};

// blockDim = (32 * warps of a unit, units of a block). Short: all keys in one tile; each warp takes query tiles in turn.
// Long: a warp has one query tile (grid.y over groups of them) and keys stream through in tiles of `tile`.
template <int DP>
__global__ void __launch_bounds__(256, DP <= 48 ? 3 : DP <= 96 ? 2 : 1) Forward(AttentionShape shape, int tile, int q_rows, const bf16* qkv, bf16* o, float* lse, uint8_t* argmax) {
  extern __shared__ uint4 memory[];
  constexpr int kStride = DP + kPad;
  const int thread = threadIdx.x, threads = blockDim.x, warp = thread >> 5, warps = threads >> 5;
  const int64_t unit = blockIdx.x * int64_t(blockDim.y) + threadIdx.y;
  const bool there = unit < shape.units();
  const Unit u(shape, there ? unit : 0);
  bf16* k = reinterpret_cast<bf16*>(memory) + threadIdx.y * (2 * tile + q_rows) * kStride;
  bf16* v = k + tile * kStride;
  bf16* q = v + tile * kStride;
  const int first_query = blockIdx.y * q_rows;
  const float scale = rsqrtf(float(shape.head_dim)) * kLog2E;
  const bool one_tile = shape.keys <= tile;
  if (there) LoadQueries<DP, true>(u, qkv, argmax, shape.q_stride, first_query, q_rows, q, thread, threads);
  if (one_tile) {
    if (there) CopyRows<DP>(u, qkv, 1, 0, tile, k, thread, threads), CopyRows<DP>(u, qkv, 2, 0, tile, v, thread, threads);
    CommitCopies();
    WaitCopies<0>();
    __syncthreads();
    if (!there) return;
    for (int row = warp * 16; row < q_rows; row += warps * 16) {
      ForwardState<DP> state;
      state.Tile(q + row * kStride, k, v, 0, tile, shape.keys, scale);
      state.Store(u, first_query + row, q + row * kStride, o, lse);
    }
    return;
  }
  ForwardState<DP> state;
  for (int first = 0; first < shape.keys; first += tile) {
    __syncthreads();
    if (there) CopyRows<DP>(u, qkv, 1, first, tile, k, thread, threads), CopyRows<DP>(u, qkv, 2, first, tile, v, thread, threads);
    CommitCopies();
    WaitCopies<0>();
    __syncthreads();
    if (there) state.Tile(q + warp * 16 * kStride, k, v, first, tile, shape.keys, scale);
  }
  if (there) state.Store(u, first_query + warp * 16, q + warp * 16 * kStride, o, lse);
}

// sum over D of o * d_o of `rows` queries (0 beyond the last), two threads a row; lse in units of log2, +inf beyond the
// last: such probabilities vanish. Reads global memory only, so it runs while copies are under way.
__device__ inline void LoadRowSums(const Unit& u, const bf16* o, const bf16* d_o, const float* lse, int first, int rows, float* lse2,
                                   float* delta, int thread, int threads) {
  for (int i = thread; i < 2 * rows; i += threads) {   // threads is even: both halves of a row are neighbours
    const int row = i >> 1, t = first + row;
    float sum = 0;
    if (t < u.queries) {
      const bf16 *a = o + u.Out(t), *b = d_o + u.Out(t);
#pragma unroll 4
      for (int c = (i & 1) * 8; c < u.head_dim; c += 16) {
        const uint4 x = *reinterpret_cast<const uint4*>(a + c), y = *reinterpret_cast<const uint4*>(b + c);
        const __nv_bfloat162 *p = reinterpret_cast<const __nv_bfloat162*>(&x), *q = reinterpret_cast<const __nv_bfloat162*>(&y);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float2 f = __bfloat1622float2(p[e]), h = __bfloat1622float2(q[e]);
          sum += f.x * h.x + f.y * h.y;
        }
      }
    }
    // Rows come in sixteens: a pair is whole or absent, but its warp may not be.
    sum += __shfl_xor_sync(__activemask(), sum, 1);
    if ((i & 1) == 0) {
      lse2[row] = t < u.queries ? lse[u.Lse(t)] * kLog2E : INFINITY;
      delta[row] = sum;
    }
  }
}

// dK and dV of 16 keys, and dS^T against 16 queries.
template <int DP, bool kHold>   // kHold: the keys themselves stay in registers too
struct KeyTile {
  float dk[DP / 8][4] = {}, dv[DP / 8][4] = {};
  uint32_t k_held[kHold ? DP / 16 : 1][4], v_held[kHold ? DP / 16 : 1][4];

  __device__ void Hold(const bf16* k, const bf16* v) {
    if constexpr (kHold) {
#pragma unroll
      for (int kc = 0; kc < DP / 16; ++kc) LoadA(k_held[kc], k + kc * 16, DP + kPad), LoadA(v_held[kc], v + kc * 16, DP + kPad);
    }
  }

  // k, v: the 16 keys (already held, if they are); q, d_o: 16 queries with their lse2 and delta. ds_KQ (stride `ds_stride`)
  // receives dS^T without the factor `scale`, unless null; so does dk, until it is stored.
  __device__ void Queries(const bf16* k, const bf16* v, const bf16* q, const bf16* d_o, const float* lse2, const float* delta,
                          float scale, bf16* ds_KQ, int ds_stride) {
    constexpr int kStride = DP + kPad;
    const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
    float s[2][4] = {}, dp[2][4] = {};
#pragma unroll
    for (int kc = 0; kc < DP / 16; ++kc) {
      uint32_t a[4], b[4];
      LoadB(b, q + kc * 16, kStride);
      if constexpr (!kHold) LoadA(a, k + kc * 16, kStride);
      Mma(s[0], kHold ? k_held[kHold ? kc : 0] : a, b[0], b[1]);
      Mma(s[1], kHold ? k_held[kHold ? kc : 0] : a, b[2], b[3]);
      LoadB(b, d_o + kc * 16, kStride);
      if constexpr (!kHold) LoadA(a, v + kc * 16, kStride);
      Mma(dp[0], kHold ? v_held[kHold ? kc : 0] : a, b[0], b[1]);
      Mma(dp[1], kHold ? v_held[kHold ? kc : 0] : a, b[2], b[3]);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float2 l = *reinterpret_cast<const float2*>(lse2 + n * 8 + 2 * t);
      const float2 dl = *reinterpret_cast<const float2*>(delta + n * 8 + 2 * t);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[n][e] = FastExp2(fmaf(s[n][e], scale * kLog2E, -(e & 1 ? l.y : l.x)));
        dp[n][e] = s[n][e] * (dp[n][e] - (e & 1 ? dl.y : dl.x));
      }
    }
    const uint32_t p_KQ[4] = {Pack(s[0][0], s[0][1]), Pack(s[0][2], s[0][3]), Pack(s[1][0], s[1][1]), Pack(s[1][2], s[1][3])};
    const uint32_t ds[4] = {Pack(dp[0][0], dp[0][1]), Pack(dp[0][2], dp[0][3]), Pack(dp[1][0], dp[1][1]), Pack(dp[1][2], dp[1][3])};
    if (ds_KQ != nullptr) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        *reinterpret_cast<uint32_t*>(ds_KQ + (g + (i & 1) * 8) * ds_stride + (i >> 1) * 8 + 2 * t) = ds[i];
      }
    }
#pragma unroll
    for (int n = 0; n < DP / 16; ++n) {
      uint32_t b[4];
      LoadBTransposed(b, d_o + n * 16, kStride);
      Mma(dv[2 * n], p_KQ, b[0], b[1]);
      Mma(dv[2 * n + 1], p_KQ, b[2], b[3]);
      LoadBTransposed(b, q + n * 16, kStride);
      Mma(dk[2 * n], ds, b[0], b[1]);
      Mma(dk[2 * n + 1], ds, b[2], b[3]);
    }
  }

  // k, v: the tile's own rows of shared memory, no longer needed.
  __device__ void Store(const Unit& u, int first, float scale, bf16* k, bf16* v, bf16* dqkv) {
    StageTile<DP>(dk, scale, scale, k);
    StageTile<DP>(dv, 1.0f, 1.0f, v);
    StoreRows<DP>(u, k, 1, first, dqkv);
    StoreRows<DP>(u, v, 2, first, dqkv);
  }
};

// dQ of 16 queries and `columns` columns from c0 on, staged by one warp in `tile` [16][stride]: to every position the pool
// looked at, zero where it did not choose.
__device__ inline void StoreQueryGradient(const Unit& u, int q_stride, const uint8_t* argmax, int first, int c0, int columns, const bf16* tile,
                                          int stride, bf16* dqkv) {
  const int chunks = columns / 8;
  __syncwarp();
  for (int i = threadIdx.x & 31; i < 16 * chunks; i += 32) {
    const int row = i / chunks, c = c0 + i % chunks * 8, t = first + row;
    if (t >= u.queries || c >= u.head_dim) continue;
    const uint4 value = *reinterpret_cast<const uint4*>(tile + row * stride + i % chunks * 8);
    if (q_stride == 1) {
      *reinterpret_cast<uint4*>(dqkv + u.Qkv(t, 0) + c) = value;
      continue;
    }
    const uint2 stored = *reinterpret_cast<const uint2*>(argmax + u.Out(t) + c);
    const uint8_t* which = reinterpret_cast<const uint8_t*>(&stored);
    const bf16* v = reinterpret_cast<const bf16*>(&value);
    for (int s = 0; s < q_stride; ++s) {
      uint4 out;
      bf16* e = reinterpret_cast<bf16*>(&out);
#pragma unroll
      for (int j = 0; j < 8; ++j) e[j] = which[j] == s ? v[j] : __float2bfloat16(0.0f);
      *reinterpret_cast<uint4*>(dqkv + u.Qkv(s * u.queries + t, 0) + c) = out;
    }
  }
}

// Short windows: everything of a unit in shared memory. blockDim = (32 * warps, units of a block); warp w owns the key
// tiles w, w + warps, ... (at most kTiles). Queries pass in chunks of `chunk`.
template <int DP, int kTiles>
__global__ void __maxnreg__(kTiles == 2 ? 128 : DP <= 96 ? 168 : 240) BackwardShort(AttentionShape shape, int chunk, const bf16* qkv, const bf16* o, const bf16* d_o, const float* lse,
                              const uint8_t* argmax, bf16* dqkv) {
  extern __shared__ uint4 memory[];
  constexpr int kStride = DP + kPad;
  const int thread = threadIdx.x, threads = blockDim.x, warp = thread >> 5, warps = threads >> 5;
  const int key_rows = (shape.keys + 15) / 16 * 16, query_rows = (shape.queries() + 15) / 16 * 16, ds_stride = chunk + kPad;
  const int64_t unit = blockIdx.x * int64_t(blockDim.y) + threadIdx.y;
  const bool there = unit < shape.units();
  const Unit u(shape, there ? unit : 0);
  const int elements = 2 * (key_rows + query_rows) * kStride + key_rows * ds_stride + 4 * query_rows;   // row sums: 2 floats each
  bf16* k = reinterpret_cast<bf16*>(memory) + threadIdx.y * elements;
  bf16* v = k + key_rows * kStride;
  bf16* q = v + key_rows * kStride;
  bf16* go = q + query_rows * kStride;
  bf16* ds = go + query_rows * kStride;
  float* lse2 = reinterpret_cast<float*>(ds + key_rows * ds_stride);
  float* delta = lse2 + query_rows;
  const float scale = rsqrtf(float(shape.head_dim));
  if (there) {
    CopyRows<DP>(u, qkv, 1, 0, key_rows, k, thread, threads);
    CopyRows<DP>(u, qkv, 2, 0, key_rows, v, thread, threads);
    CopyRows<DP>(u, d_o, -1, 0, query_rows, go, thread, threads);
    LoadQueries<DP, false>(u, qkv, const_cast<uint8_t*>(argmax), shape.q_stride, 0, query_rows, q, thread, threads);
    CommitCopies();
    LoadRowSums(u, o, d_o, lse, 0, query_rows, lse2, delta, thread, threads);
  }
  WaitCopies<0>();
  __syncthreads();
  KeyTile<DP, kTiles == 1 && DP <= 48> tiles[kTiles];
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    const int row = (warp + i * warps) * 16;
    if (there && row < key_rows) tiles[i].Hold(k + row * kStride, v + row * kStride);
  }
  for (int q0 = 0; q0 < query_rows; q0 += chunk) {
    const int rows = min(chunk, query_rows - q0);
    if (there) {
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        const int row = (warp + i * warps) * 16;
        if (row >= key_rows) break;
        for (int j = 0; j < rows; j += 16) {
          tiles[i].Queries(k + row * kStride, v + row * kStride, q + (q0 + j) * kStride, go + (q0 + j) * kStride, lse2 + q0 + j,
                           delta + q0 + j, scale, ds + row * ds_stride + j, ds_stride);
        }
      }
    }
    __syncthreads();
    if (there) {   // dQ = dS K: tasks of 16 queries x 16 columns, staged in the place of their queries, which are done with
      constexpr int kColumns = DP / 16;
      const int g = (thread & 31) >> 2, t = thread & 3;
      for (int task = warp; task < rows / 16 * kColumns; task += warps) {
        const int m = task / kColumns * 16, n = task % kColumns * 16;
        float c[2][4] = {};
#pragma unroll 4
        for (int kr = 0; kr < key_rows; kr += 16) {
          uint32_t a[4], b[4];
          LoadATransposed(a, ds + kr * ds_stride + m, ds_stride);
          LoadBTransposed(b, k + kr * kStride + n, kStride);
          Mma(c[0], a, b[0], b[1]);
          Mma(c[1], a, b[2], b[3]);
        }
        bf16* tile = q + (q0 + m) * kStride + n;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          *reinterpret_cast<uint32_t*>(tile + (g + (i & 1) * 8) * kStride + (i >> 1) * 8 + 2 * t) =
              Pack(c[i >> 1][(i & 1) * 2] * scale, c[i >> 1][(i & 1) * 2 + 1] * scale);
        }
        StoreQueryGradient(u, shape.q_stride, argmax, q0 + m, n, 16, tile, kStride, dqkv);
      }
    }
    __syncthreads();
  }
  if (!there) return;
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    const int row = (warp + i * warps) * 16;
    if (row < key_rows) tiles[i].Store(u, row, scale, k + row * kStride, v + row * kStride, dqkv);
  }
}

// Long windows, dK and dV: a block owns kTile keys (4 warps of 16), queries stream through.
template <int DP>
__global__ void BackwardKeys(AttentionShape shape, const bf16* qkv, const bf16* o, const bf16* d_o, const float* lse,
                             const uint8_t* argmax, bf16* dqkv) {
  extern __shared__ uint4 memory[];
  constexpr int kStride = DP + kPad;
  const int thread = threadIdx.x, threads = blockDim.x, warp = thread >> 5;
  const Unit u(shape, blockIdx.x);
  bf16* k = reinterpret_cast<bf16*>(memory);
  bf16 *v = k + kTile * kStride, *q = v + kTile * kStride, *go = q + kTile * kStride;
  float* lse2 = reinterpret_cast<float*>(go + kTile * kStride);
  float* delta = lse2 + kTile;
  const int first = blockIdx.y * kTile;
  const float scale = rsqrtf(float(shape.head_dim));
  CopyRows<DP>(u, qkv, 1, first, kTile, k, thread, threads);
  CopyRows<DP>(u, qkv, 2, first, kTile, v, thread, threads);
  KeyTile<DP, DP <= 48> tile;
  for (int q0 = 0; q0 < u.queries; q0 += kTile) {
    __syncthreads();
    LoadQueries<DP, false>(u, qkv, const_cast<uint8_t*>(argmax), shape.q_stride, q0, kTile, q, thread, threads);
    CopyRows<DP>(u, d_o, -1, q0, kTile, go, thread, threads);
    CommitCopies();
    LoadRowSums(u, o, d_o, lse, q0, kTile, lse2, delta, thread, threads);
    WaitCopies<0>();
    __syncthreads();
    if (q0 == 0) tile.Hold(k + warp * 16 * kStride, v + warp * 16 * kStride);
    for (int j = 0; j < kTile; j += 16) {
      tile.Queries(k + warp * 16 * kStride, v + warp * 16 * kStride, q + j * kStride, go + j * kStride, lse2 + j, delta + j, scale, nullptr, 0);
    }
  }
  __syncthreads();
  tile.Store(u, first + warp * 16, scale, k + warp * 16 * kStride, v + warp * 16 * kStride, dqkv);
}

// Long windows, dQ: a block owns kTile queries, keys stream through.
template <int DP>
__global__ void BackwardQueries(AttentionShape shape, const bf16* qkv, const bf16* o, const bf16* d_o, const float* lse,
                                const uint8_t* argmax, bf16* dqkv) {
  extern __shared__ uint4 memory[];
  constexpr int kStride = DP + kPad;
  const int thread = threadIdx.x, threads = blockDim.x, warp = thread >> 5;
  const int g = (thread & 31) >> 2;
  const Unit u(shape, blockIdx.x);
  bf16* k = reinterpret_cast<bf16*>(memory);
  bf16 *v = k + kTile * kStride, *q = v + kTile * kStride, *go = q + kTile * kStride;
  float* lse2 = reinterpret_cast<float*>(go + kTile * kStride);
  float* delta = lse2 + kTile;
  const int first = blockIdx.y * kTile;
  const float scale = rsqrtf(float(shape.head_dim));
  LoadQueries<DP, false>(u, qkv, const_cast<uint8_t*>(argmax), shape.q_stride, first, kTile, q, thread, threads);
  CopyRows<DP>(u, d_o, -1, first, kTile, go, thread, threads);
  LoadRowSums(u, o, d_o, lse, first, kTile, lse2, delta, thread, threads);
  float dq[DP / 8][4] = {};
  for (int k0 = 0; k0 < u.keys; k0 += kTile) {
    __syncthreads();
    CopyRows<DP>(u, qkv, 1, k0, kTile, k, thread, threads);
    CopyRows<DP>(u, qkv, 2, k0, kTile, v, thread, threads);
    CommitCopies();
    WaitCopies<0>();
    __syncthreads();
    for (int j = 0; j < kTile; j += 16) {
      float s[2][4] = {}, dp[2][4] = {};
#pragma unroll
      for (int kc = 0; kc < DP / 16; ++kc) {
        uint32_t a[4], b[4];
        LoadA(a, q + warp * 16 * kStride + kc * 16, kStride);
        LoadB(b, k + j * kStride + kc * 16, kStride);
        Mma(s[0], a, b[0], b[1]);
        Mma(s[1], a, b[2], b[3]);
        LoadA(a, go + warp * 16 * kStride + kc * 16, kStride);
        LoadB(b, v + j * kStride + kc * 16, kStride);
        Mma(dp[0], a, b[0], b[1]);
        Mma(dp[1], a, b[2], b[3]);
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int row = warp * 16 + g + (e >> 1) * 8;
          // A key beyond the last has k = 0: its dS meets k and adds nothing.
          s[n][e] = FastExp2(fmaf(s[n][e], scale * kLog2E, -lse2[row]));
          dp[n][e] = s[n][e] * (dp[n][e] - delta[row]);
        }
      }
      const uint32_t ds[4] = {Pack(dp[0][0], dp[0][1]), Pack(dp[0][2], dp[0][3]), Pack(dp[1][0], dp[1][1]), Pack(dp[1][2], dp[1][3])};
#pragma unroll
      for (int n = 0; n < DP / 16; ++n) {
        uint32_t b[4];
        LoadBTransposed(b, k + j * kStride + n * 16, kStride);
        Mma(dq[2 * n], ds, b[0], b[1]);
        Mma(dq[2 * n + 1], ds, b[2], b[3]);
      }
    }
  }
  bf16* tile = q + warp * 16 * kStride;   // read by this warp alone
  __syncwarp();
  StageTile<DP>(dq, scale, scale, tile);
  StoreQueryGradient(u, shape.q_stride, argmax, first + warp * 16, 0, DP, tile, kStride, dqkv);
}

int RoundUp(int value, int unit) { return (value + unit - 1) / unit * unit; }

template <typename Kernel>
cudaError_t AllowShared(Kernel kernel, int bytes) {
  return bytes <= 48 << 10 ? cudaSuccess : cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

template <int DP>
cudaError_t LaunchForward(const AttentionShape& s, const bf16* qkv, bf16* o, float* lse, uint8_t* argmax, cudaStream_t stream) {
  const int row_bytes = (DP + kPad) * int(sizeof(bf16));
  const int query_rows = RoundUp(s.queries(), 16), key_rows = RoundUp(s.keys, 16);
  int tile = key_rows, q_rows = query_rows, warps = std::min(query_rows / 16, 8), units = 1, groups = 1;
  if (query_rows / 16 > 8) warps = (query_rows / 16 + 1) / 2 <= 8 ? (query_rows / 16 + 1) / 2 : 8;
  const bool is_short = (2 * key_rows + query_rows) * row_bytes <= 100 << 10;
  if (is_short) {
    units = std::max(1, std::min(4 / warps, (48 << 10) / ((2 * key_rows + query_rows) * row_bytes)));
  } else {
    warps = 4, tile = kTile, q_rows = kTile;
    groups = (query_rows + q_rows - 1) / q_rows;
  }
  const int bytes = units * (2 * tile + q_rows) * row_bytes;
  const dim3 grid(unsigned((s.units() + units - 1) / units), unsigned(groups)), block(unsigned(32 * warps), unsigned(units));
  if (cudaError_t e = AllowShared(Forward<DP>, bytes); e != cudaSuccess) return e;
  Forward<DP><<<grid, block, bytes, stream>>>(s, tile, q_rows, qkv, o, lse, argmax);
  return cudaGetLastError();
}

template <int DP, int kTiles>
cudaError_t LaunchBackwardShort(const AttentionShape& s, int warps, int units, int chunk, int bytes, const bf16* qkv, const bf16* o,
                                const bf16* d_o, const float* lse, const uint8_t* argmax, bf16* dqkv, cudaStream_t stream) {
  if (cudaError_t e = AllowShared(BackwardShort<DP, kTiles>, bytes); e != cudaSuccess) return e;
  const dim3 grid(unsigned((s.units() + units - 1) / units)), block(unsigned(32 * warps), unsigned(units));
  BackwardShort<DP, kTiles><<<grid, block, bytes, stream>>>(s, chunk, qkv, o, d_o, lse, argmax, dqkv);
  return cudaGetLastError();
}

template <int DP>
cudaError_t LaunchBackward(const AttentionShape& s, const bf16* qkv, const bf16* o, const bf16* d_o, const float* lse,
                           const uint8_t* argmax, bf16* dqkv, cudaStream_t stream) {
  const int key_rows = RoundUp(s.keys, 16), query_rows = RoundUp(s.queries(), 16), key_tiles = key_rows / 16;
  const int chunk = std::min(query_rows, s.chunk > 0 ? s.chunk : kTile);
  const int unit_bytes = (2 * (key_rows + query_rows) * (DP + kPad) + key_rows * (chunk + kPad) + 4 * query_rows) * int(sizeof(bf16));
  // Registers hold dK and dV: one tile of 16 keys a warp, two where head_dim is small.
  const int tiles = DP <= 48 && key_tiles > 8 ? 2 : 1, warps = tiles == 2 && key_tiles <= 16 ? 8 : key_tiles;
  if (warps <= 8 && unit_bytes <= kSharedBytes) {
    const int units = std::max(1, std::min(4 / warps, (56 << 10) / unit_bytes));
    if constexpr (DP <= 48) {
      if (tiles == 2) return LaunchBackwardShort<DP, 2>(s, warps, units, chunk, units * unit_bytes, qkv, o, d_o, lse, argmax, dqkv, stream);
    }
    return LaunchBackwardShort<DP, 1>(s, warps, units, chunk, units * unit_bytes, qkv, o, d_o, lse, argmax, dqkv, stream);
  }
  const int bytes = 4 * kTile * (DP + kPad) * int(sizeof(bf16)) + 2 * kTile * int(sizeof(float));
  if (cudaError_t e = AllowShared(BackwardKeys<DP>, bytes); e != cudaSuccess) return e;
  if (cudaError_t e = AllowShared(BackwardQueries<DP>, bytes); e != cudaSuccess) return e;
  BackwardKeys<DP><<<dim3(unsigned(s.units()), unsigned((s.keys + kTile - 1) / kTile)), 128, bytes, stream>>>(s, qkv, o, d_o, lse, argmax, dqkv);
  BackwardQueries<DP><<<dim3(unsigned(s.units()), unsigned((s.queries() + kTile - 1) / kTile)), 128, bytes, stream>>>(s, qkv, o, d_o, lse, argmax, dqkv);
  return cudaGetLastError();
}

}  // namespace

bool HasTensorCoreAttention(const AttentionShape& s) { return s.head_dim % 8 == 0 && s.head_dim <= 128; }

cudaError_t AttentionForward(const AttentionShape& shape, const bf16* qkv, bf16* o, float* lse, uint8_t* argmax, cudaStream_t stream) {
  if (!HasTensorCoreAttention(shape)) return PlainAttentionForward(shape, qkv, o, lse, argmax, stream);
  switch ((shape.head_dim + 15) / 16) {
    case 1: return LaunchForward<16>(shape, qkv, o, lse, argmax, stream);
    case 2: return LaunchForward<32>(shape, qkv, o, lse, argmax, stream);
    case 3: return LaunchForward<48>(shape, qkv, o, lse, argmax, stream);
    case 4: return LaunchForward<64>(shape, qkv, o, lse, argmax, stream);
    case 5: return LaunchForward<80>(shape, qkv, o, lse, argmax, stream);
    case 6: return LaunchForward<96>(shape, qkv, o, lse, argmax, stream);
    case 7: return LaunchForward<112>(shape, qkv, o, lse, argmax, stream);
    default: return LaunchForward<128>(shape, qkv, o, lse, argmax, stream);
  }
}

cudaError_t AttentionBackward(const AttentionShape& shape, const bf16* qkv, const bf16* o, const bf16* d_o, const float* lse,
                              const uint8_t* argmax, bf16* dqkv, float* scratch, cudaStream_t stream) {
  if (!HasTensorCoreAttention(shape)) return PlainAttentionBackward(shape, qkv, o, d_o, lse, argmax, dqkv, scratch, stream);
  switch ((shape.head_dim + 15) / 16) {
    case 1: return LaunchBackward<16>(shape, qkv, o, d_o, lse, argmax, dqkv, stream);
    case 2: return LaunchBackward<32>(shape, qkv, o, d_o, lse, argmax, dqkv, stream);
    case 3: return LaunchBackward<48>(shape, qkv, o, d_o, lse, argmax, dqkv, stream);
    case 4: return LaunchBackward<64>(shape, qkv, o, d_o, lse, argmax, dqkv, stream);
    case 5: return LaunchBackward<80>(shape, qkv, o, d_o, lse, argmax, dqkv, stream);
    case 6: return LaunchBackward<96>(shape, qkv, o, d_o, lse, argmax, dqkv, stream);
    case 7: return LaunchBackward<112>(shape, qkv, o, d_o, lse, argmax, dqkv, stream);
    default: return LaunchBackward<128>(shape, qkv, o, d_o, lse, argmax, dqkv, stream);
  }
}

}  // namespace hierad::kernels
