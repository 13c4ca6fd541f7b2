// What the attention kernels share: addresses of one window's head in qkv and o, copies of its rows to shared memory, queries
// with the max-pool, and accumulators back to global memory. Included by attention_*.cu only.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "worker/kernels/attention.h"
#include "worker/kernels/card.h"
#include "worker/kernels/launch.cuh"
#include "worker/kernels/mma.cuh"

namespace hierad::kernels::attention {

constexpr float kLog2E = 1.4426950408889634f;
constexpr int kPad = 8;          // elements after each row in shared memory: rows fall on different banks
constexpr int kElementBytes = 2;   // of T, bf16 or half
// Shared memory that a block takes at most: 99 KiB on some cards, which streaming kernels keep within.
inline int SharedBytes() { return std::min(224 << 10, ThisCard().shared_bytes); }

// Addresses of one (b, w, h); heads fastest, as in memory. A row is a token's head_dim elements.
struct Unit {
  int keys, queries, head_dim, width, qkv_stride, out_stride;
  int64_t qkv, out, lse;   // of row 0
  __device__ Unit(const AttentionShape& s, int64_t unit)
      : keys(s.keys), queries(s.queries()), head_dim(s.head_dim), width(s.heads * s.head_dim), qkv_stride(3 * s.windows * width),
        out_stride(s.windows * width) {
    const unsigned at = unsigned(unit), rest = at / unsigned(s.heads);   // there are fewer than 2^31: one has a block of a launch at least
    const int h = int(at - rest * unsigned(s.heads)), w = int(rest % unsigned(s.windows));
    const int64_t b = rest / unsigned(s.windows);
    qkv = b * keys * qkv_stride + 3 * w * width + h * head_dim;
    out = b * queries * out_stride + w * width + h * head_dim;
    lse = ((b * s.heads + h) * s.windows + w) * queries;
  }
  __device__ int64_t Qkv(int t, int which) const { return qkv + which * width + int64_t(t) * qkv_stride; }
  __device__ int64_t Out(int t) const { return out + int64_t(t) * out_stride; }
  __device__ int64_t Lse(int t) const { return lse + t; }
};

// Four threads share a row and take its 16-byte pieces in turn: row and column cost little, and 64 bytes of a row are one access.
// Calls take(row, column) for rows [0, rows) and columns below DP.
template <int DP, typename Take>
__device__ void EachPieceOfRows(int rows, int thread, int threads, Take take) {
  const int c0 = (thread & 3) * 8;
  for (int row = thread >> 2; row < rows; row += threads >> 2) {
#pragma unroll
    for (int c = 0; c < DP; c += 32) {
      if (DP % 32 == 0 || c0 + c < DP) take(row, c0 + c);
    }
  }
}

// Starts copying rows [first, first + rows) of k (which 1) or v (2), or of an array laid out as o (which -1), into `to`
// [rows][DP + kPad]; zeros beyond the last row and head_dim.
template <int DP, typename T>
__device__ void CopyRows(const Unit& u, const T* from, int which, int first, int rows, T* to, int thread, int threads) {
  const int count = (which < 0 ? u.queries : u.keys) - first, stride = which < 0 ? u.out_stride : u.qkv_stride;
  const T* row0 = from + (which < 0 ? u.Out(first) : u.Qkv(first, which));
  EachPieceOfRows<DP>(rows, thread, threads, [&](int row, int column) {
    CopyAsync(to + row * (DP + kPad) + column, row0 + int64_t(row) * stride + column, row < count && column < u.head_dim);
  });
}

// Queries, pooled, zeros beyond the last and head_dim: put(row, column, eight of them). Forward: argmax is found and stored;
// backward: it is followed.
template <int DP, bool kFind, typename T, typename Put>
__device__ void PoolQueries(const Unit& u, const T* qkv, uint8_t* argmax, int q_stride, int first, int rows, int thread, int threads, Put put) {
  EachPieceOfRows<DP>(rows, thread, threads, [&](int row, int column) {
    const int t = first + row;
    uint4 best4 = make_uint4(0, 0, 0, 0);
    T* best = reinterpret_cast<T*>(&best4);
    if (t < u.queries && column < u.head_dim) {
      uint2 stored = make_uint2(0, 0);
      uint8_t* which = reinterpret_cast<uint8_t*>(&stored);
      if (!kFind) stored = __ldg(reinterpret_cast<const uint2*>(argmax + u.Out(t) + column));
      const T* from = qkv + u.Qkv(t, 0) + column;
      const int64_t step = int64_t(u.queries) * u.qkv_stride;
      for (int s0 = 0; s0 < q_stride; s0 += 4) {   // four reads under way at once
        uint4 v4[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) v4[i] = s0 + i < q_stride ? __ldg(reinterpret_cast<const uint4*>(from + (s0 + i) * step)) : best4;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const T* v = reinterpret_cast<const T*>(&v4[i]);
          const int s = s0 + i;
          if (s >= q_stride) break;
#pragma unroll
          for (int e = 0; e < 8; ++e) {
            if (kFind ? s == 0 || ToFloat(v[e]) > ToFloat(best[e]) : which[e] == s) {
              best[e] = v[e];
              if (kFind) which[e] = uint8_t(s);
            }
          }
        }
      }
      if (kFind) *reinterpret_cast<uint2*>(argmax + u.Out(t) + column) = stored;
    }
    put(row, column, best4);
  });
}

// Queries as they are multiplied; without pooling only starts the copies.
template <int DP, bool kFind, typename T>
__device__ void LoadQueries(const Unit& u, const T* qkv, uint8_t* argmax, int q_stride, int first, int rows, T* to,
                            int thread, int threads) {
  if (q_stride == 1) {   // the queries' count is the keys'
    CopyRows<DP>(u, qkv, 0, first, rows, to, thread, threads);
    return;
  }
  PoolQueries<DP, kFind>(u, qkv, argmax, q_stride, first, rows, thread, threads, [&](int row, int column, uint4 piece) {
    *reinterpret_cast<uint4*>(to + row * (DP + kPad) + column) = piece;
  });
}

// sum over D of o * d_o of `rows` queries (a multiple of 8; 0 beyond the last); lse in units of log2, +inf beyond the last:
// such probabilities vanish. Reads global memory only, so it runs while copies are under way.
template <int DP, typename T>
__device__ void LoadRowSums(const Unit& u, const T* o, const T* d_o, const float* lse, int first, int rows, float* lse2,
                            float* delta, int thread, int threads) {
  const int c0 = (thread & 3) * 8;
  for (int row = thread >> 2; row < rows; row += threads >> 2) {   // a warp has eight rows: all of it is here or none
    const int t = first + row;
    const bool there = t < u.queries;
    uint4 x[(DP + 31) / 32], y[(DP + 31) / 32];
#pragma unroll
    for (int i = 0; i < (DP + 31) / 32; ++i) {
      x[i] = y[i] = make_uint4(0, 0, 0, 0);
      if (there && c0 + i * 32 < u.head_dim) {
        x[i] = __ldg(reinterpret_cast<const uint4*>(o + u.Out(t) + c0 + i * 32));
        y[i] = __ldg(reinterpret_cast<const uint4*>(d_o + u.Out(t) + c0 + i * 32));
      }
    }
    const float l = there ? __ldg(lse + u.Lse(t)) * kLog2E : INFINITY;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < (DP + 31) / 32; ++i) {
      const unsigned *p = reinterpret_cast<const unsigned*>(&x[i]), *q = reinterpret_cast<const unsigned*>(&y[i]);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float2 f = UnpackPair<T>(p[e]), h = UnpackPair<T>(q[e]);
        sum += f.x * h.x + f.y * h.y;
      }
    }
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if ((thread & 3) == 0) lse2[row] = l, delta[row] = sum;
  }
}

// Gives each lane whole 16-byte pieces of an accumulator of 16 rows x DP columns, in T, rows scaled:
// put(row, column, piece), without shared memory. Four lanes that hold a row transpose its pieces among them.
template <int DP, typename T, typename Put>
__device__ void EachPiece(const float (&c)[DP / 8][4], float scale0, float scale1, Put put) {
  const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
#pragma unroll
  for (int n = 0; n < DP / 8; n += 4) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float scale = half ? scale1 : scale0;
      uint32_t r[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int from = n + j < DP / 8 ? n + j : 0;   // beyond the last: anything
        r[j] = PackPair<T>(c[from][2 * half] * scale, c[from][2 * half + 1] * scale);
      }
      const bool odd = t & 1, high = t & 2;
      const uint32_t a = __shfl_xor_sync(~0u, odd ? r[0] : r[1], 1), b = __shfl_xor_sync(~0u, odd ? r[2] : r[3], 1);
      const uint32_t q[4] = {odd ? a : r[0], odd ? r[1] : a, odd ? b : r[2], odd ? r[3] : b};
      const uint32_t d = __shfl_xor_sync(~0u, high ? q[0] : q[2], 2), e = __shfl_xor_sync(~0u, high ? q[1] : q[3], 2);
      const uint4 piece = high ? make_uint4(d, e, q[2], q[3]) : make_uint4(q[0], q[1], d, e);
      if (n + t < DP / 8) put(g + 8 * half, (n + t) * 8, piece);
    }
  }
}

// An accumulator to rows [first, first + 16) of k, v or an array laid out as o.
template <int DP, typename T>
__device__ void StoreRows(const Unit& u, const float (&c)[DP / 8][4], float scale0, float scale1, int which, int first, T* to) {
  EachPiece<DP, T>(c, scale0, scale1, [&](int row, int column, uint4 piece) {
    const int t = first + row;
    if (t < (which < 0 ? u.queries : u.keys) && column < u.head_dim) {
      *reinterpret_cast<uint4*>(to + (which < 0 ? u.Out(t) : u.Qkv(t, which)) + column) = piece;
    }
  });
}

// Eight columns of a query's gradient: to every position that the pool looked at, zero where it did not choose.
template <typename T>
__device__ void StoreQueryPiece(const Unit& u, int q_stride, const uint8_t* argmax, int t, int column, uint4 piece, T* dqkv) {
  if (t >= u.queries || column >= u.head_dim) return;
  if (q_stride == 1) {
    *reinterpret_cast<uint4*>(dqkv + u.Qkv(t, 0) + column) = piece;
    return;
  }
  const uint2 stored = __ldg(reinterpret_cast<const uint2*>(argmax + u.Out(t) + column));
  const uint8_t* which = reinterpret_cast<const uint8_t*>(&stored);
  const T* v = reinterpret_cast<const T*>(&piece);
  for (int s = 0; s < q_stride; ++s) {
    uint4 out;
    T* e = reinterpret_cast<T*>(&out);
#pragma unroll
    for (int j = 0; j < 8; ++j) e[j] = which[j] == s ? v[j] : FromFloat<T>(0.0f);
    *reinterpret_cast<uint4*>(dqkv + u.Qkv(s * u.queries + t, 0) + column) = out;
  }
}

inline int RoundUp(int value, int unit) { return (value + unit - 1) / unit * unit; }

template <typename Kernel>
cudaError_t AllowShared(Kernel kernel, int bytes) {
  return bytes <= 48 << 10 ? cudaSuccess : cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

// Warps that a multiprocessor holds at `registers` a thread: each of its four parts has 16 K of them (sm_80 to sm_100), given
// out to warps in pieces of 256.
constexpr int WarpsHeld(int registers) { return 4 * (16384 / ((registers * 32 + 255) / 256 * 256)); }

// Warps a block that streams `rows` rows, `rows_a_warp` each: the number with which the most warps work at a time, given
// what a multiprocessor holds and what lies beyond the last row. Their shared memory fits: `fixed_bytes`, and `row_bytes` a row.
inline int WarpsFor(int rows, int rows_a_warp, int registers, int fixed_bytes, int row_bytes) {
  const int held = WarpsHeld(registers);
  int best = 4;
  double best_working = 0;
  for (int warps = 4; warps <= 8 && (warps == 4 || fixed_bytes + warps * rows_a_warp * row_bytes <= SharedBytes()); ++warps) {
    const double working = double(held / warps * warps) * rows / RoundUp(rows, warps * rows_a_warp);
    if (working > best_working) best = warps, best_working = working;
  }
  return best;
}

// The arguments of the launches.
template <typename T>
struct ForwardArgs {
  const T* qkv;
  T* o;
  float* lse;
  uint8_t* argmax;
};
template <typename T>
struct BackwardArgs {
  const T *qkv, *o, *d_o;
  const float* lse;
  const uint8_t* argmax;
  T* dqkv;
  float* delta;   // sum over D of o * d_o, lse's size
};

// Each for head_dim up to DP, a multiple of 16 up to 128; instantiated in the file of its name.
template <int DP, typename T>
cudaError_t LaunchForward(const AttentionShape& shape, const ForwardArgs<T>& args, cudaStream_t stream);
// Short windows, whole in shared memory, every product once.
template <int DP>
bool ShortBackwardFits(const AttentionShape& shape);
template <int DP, typename T>
cudaError_t LaunchShortBackward(const AttentionShape& shape, const BackwardArgs<T>& args, cudaStream_t stream);
// Any length, in two passes (dK and dV; dQ) that compute the scores each.
template <int DP>
bool WholeBackwardFits(const AttentionShape& shape);
template <int DP, typename T>
cudaError_t LaunchTwoPassBackward(const AttentionShape& shape, bool whole, const BackwardArgs<T>& args, cudaStream_t stream);
// By warpgroups, sm_90 alone, without pooling; DP a multiple of 32 up to 128.
template <int DP, typename T>
cudaError_t LaunchWarpgroupForward(const AttentionShape& shape, const ForwardArgs<T>& args, cudaStream_t stream);
template <int DP, typename T>
cudaError_t LaunchWarpgroupBackward(const AttentionShape& shape, const BackwardArgs<T>& args, cudaStream_t stream);

// Backward in one pass, for windows that fit whole.
bool WarpgroupWindowFits(const AttentionShape& shape);
template <typename T>
cudaError_t LaunchWarpgroupWindow(const AttentionShape& shape, const BackwardArgs<T>& args, cudaStream_t stream);

// Windows of 49 to 80 keys, pooled too, with heads of 56 to 96, one warpgroup each.
bool WarpgroupShortFits(const AttentionShape& shape);
template <typename T>
cudaError_t LaunchWarpgroupShortForward(const AttentionShape& shape, const ForwardArgs<T>& args, cudaStream_t stream);
template <typename T>
cudaError_t LaunchWarpgroupShortBackward(const AttentionShape& shape, const BackwardArgs<T>& args, cudaStream_t stream);

#define HIERAD_EACH_PANEL_WIDTH(X) X(32) X(64) X(96) X(128)
#define HIERAD_EACH_HEAD_DIM(X) X(16) X(32) X(48) X(64) X(80) X(96) X(112) X(128)

}  // namespace hierad::kernels::attention
