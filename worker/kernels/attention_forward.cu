// Attention forward on the tensor cores (products of bf16 or fp16, fp32 sums and softmax), one pass with a running softmax. A warp holds
// 16 or 32 queries: whoever reads keys from shared memory for 32 queries reads half as often, and these reads, not the
// products, are what narrow heads wait for. Short windows lie whole in shared memory, several a block; long ones stream
// through two buffers, the next tile of keys under way while one is worked on.
#include <algorithm>

#include "worker/kernels/attention_softmax.cuh"

namespace hierad::kernels::attention {
namespace {

__host__ __device__ constexpr int KeysOfTile(int dp) { return dp <= 48 ? 128 : dp <= 64 ? 64 : 32; }
__host__ __device__ constexpr int QueryTiles(int dp) { return dp <= 96 ? 2 : 1; }   // tiles of 16 queries a warp of the streaming kernel holds
__host__ __device__ constexpr int StreamedRegisters(int dp) { return dp <= 32 ? 128 : dp <= 96 ? 168 : 200; }

// Running softmax of kTiles x 16 queries against tiles of keys. kHold: the queries stay in registers.
template <typename T, int DP, int kTiles, bool kHold>
struct ForwardRows {
  static constexpr int kStride = DP + kPad;
  RunningSoftmax<T, DP> state[kTiles];
  uint32_t held[kHold ? kTiles : 1][kHold ? DP / 16 : 1][4];
  const T* q;

  __device__ explicit ForwardRows(const T* queries) : q(queries) {
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      if constexpr (kHold) {
#pragma unroll
        for (int kc = 0; kc < DP / 16; ++kc) LoadA(held[m][kc], q + m * 16 * kStride + kc * 16, kStride);
      }
    }
  }

  // k and v: `rows` rows (a multiple of 16), of which the first `valid` (1 or more) count.
  __device__ void Tile(const T* k, const T* v, int rows, int valid, float scale) {
    // Keys a step: registers decide how many blocks share a multiprocessor.
    constexpr int kStep = DP <= 96 ? 32 : 16;
    int n0 = 0;
    for (; n0 + kStep <= min(rows, valid); n0 += kStep) Keys<kStep / 16, false>(k + n0 * kStride, v + n0 * kStride, kStep, scale);
    for (; n0 < min(rows, valid); n0 += 16) Keys<1, true>(k + n0 * kStride, v + n0 * kStride, valid - n0, scale);
  }

  // kPairs x 16 keys; with kMask only the first `valid` of them.
  template <int kPairs, bool kMask>
  __device__ void Keys(const T* k, const T* v, int valid, float scale) {
    float s[kTiles][2 * kPairs][4] = {};
#pragma unroll
    for (int kc = 0; kc < DP / 16; ++kc) {
      uint32_t a[kTiles][4];
      if constexpr (!kHold) {
#pragma unroll
        for (int m = 0; m < kTiles; ++m) LoadA(a[m], q + m * 16 * kStride + kc * 16, kStride);
      }
#pragma unroll
      for (int p = 0; p < kPairs; ++p) {
        uint32_t b[4];
        LoadB(b, k + p * 16 * kStride + kc * 16, kStride);
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          const uint32_t(&row)[4] = kHold ? held[kHold ? m : 0][kHold ? kc : 0] : a[m];
          Mma<T>(s[m][2 * p], row, b[0], b[1]);
          Mma<T>(s[m][2 * p + 1], row, b[2], b[3]);
        }
      }
    }
#pragma unroll
    for (int m = 0; m < kTiles; ++m) state[m].template Weights<kPairs, kMask>(s[m], valid, scale);
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
      uint32_t a[kTiles][4];
#pragma unroll
      for (int m = 0; m < kTiles; ++m) PackRows<T>(a[m], s[m], p);
#pragma unroll
      for (int n = 0; n < DP / 16; ++n) {
        uint32_t b[4];
        LoadBTransposed(b, v + p * 16 * kStride + n * 16, kStride);
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          Mma<T>(state[m].o[2 * n], a[m], b[0], b[1]);
          Mma<T>(state[m].o[2 * n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  __device__ void Store(const Unit& u, int first, T* out, float* lse) {
#pragma unroll
    for (int m = 0; m < kTiles; ++m) state[m].Store(u, first + m * 16, out, lse);
  }
};

// blockDim = (32 * warps of a unit, units of a block): all keys of a unit at once; each warp takes query tiles in turn.
template <int DP, typename T>
__global__ void __maxnreg__(DP <= 48 ? 80 : DP <= 96 ? 96 : 168) ShortForward(AttentionShape shape, ForwardArgs<T> args) {
  extern __shared__ uint4 memory[];
  constexpr int kStride = DP + kPad;
  const int thread = threadIdx.x, threads = blockDim.x, warp = thread >> 5, warps = threads >> 5;
  const int key_rows = (shape.keys + 15) / 16 * 16, query_rows = (shape.queries() + 15) / 16 * 16;
  const int64_t unit = blockIdx.x * int64_t(blockDim.y) + threadIdx.y;
  const bool there = unit < shape.units();
  const Unit u(shape, there ? unit : 0);
  T* k = reinterpret_cast<T*>(memory) + threadIdx.y * (2 * key_rows + query_rows) * kStride;
  T* v = k + key_rows * kStride;
  T* q = v + key_rows * kStride;
  if (there) {
    LoadQueries<DP, true>(u, args.qkv, args.argmax, shape.q_stride, 0, query_rows, q, thread, threads);
    CopyRows<DP>(u, args.qkv, 1, 0, key_rows, k, thread, threads);
    CopyRows<DP>(u, args.qkv, 2, 0, key_rows, v, thread, threads);
  }
  CommitCopies();
  WaitCopies<0>();
  __syncthreads();
  if (!there) return;
  const float scale = rsqrtf(float(shape.head_dim)) * kLog2E;
  for (int row = warp * 16; row < query_rows; row += warps * 16) {
    ForwardRows<T, DP, 1, false> rows(q + row * kStride);
    rows.Tile(k, v, key_rows, shape.keys, scale);
    rows.Store(u, row, args.o, args.lse);
  }
}

// A block owns warps x QueryTiles x 16 queries of a unit (its blocks are neighbours: the keys come from the L2 cache).
template <int DP, typename T>
__global__ void __maxnreg__(StreamedRegisters(DP)) StreamedForward(AttentionShape shape, int groups, ForwardArgs<T> args) {
  extern __shared__ uint4 memory[];
  constexpr int kStride = DP + kPad, kTiles = QueryTiles(DP), kKeys = KeysOfTile(DP);
  const int thread = threadIdx.x, threads = blockDim.x, own = thread / 32 * kTiles * 16, rows = threads / 32 * kTiles * 16;
  const Unit u(shape, blockIdx.x / groups);
  const int first = int(blockIdx.x % groups) * rows;
  T* q = reinterpret_cast<T*>(memory);
  T* buffers = q + rows * kStride;   // [2][k, v][kKeys]
  const float scale = rsqrtf(float(shape.head_dim)) * kLog2E;
  const auto fetch = [&](int tile) {
    T* k = buffers + (tile & 1) * 2 * kKeys * kStride;
    CopyRows<DP>(u, args.qkv, 1, tile * kKeys, kKeys, k, thread, threads);
    CopyRows<DP>(u, args.qkv, 2, tile * kKeys, kKeys, k + kKeys * kStride, thread, threads);
    CommitCopies();
  };
  LoadQueries<DP, true>(u, args.qkv, args.argmax, shape.q_stride, first, rows, q, thread, threads);
  fetch(0);
  WaitCopies<0>();
  __syncthreads();
  ForwardRows<T, DP, kTiles, DP <= 64> state(q + own * kStride);
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
  if (!idle) state.Store(u, first + own, args.o, args.lse);
}

template <int DP>
int ShortBytes(const AttentionShape& s) {
  return (2 * RoundUp(s.keys, 16) + RoundUp(s.queries(), 16)) * (DP + kPad) * kElementBytes;
}

template <int DP, typename T>
cudaError_t LaunchShort(const AttentionShape& s, const ForwardArgs<T>& args, cudaStream_t stream) {
  const int tiles = RoundUp(s.queries(), 16) / 16;
  // Where few queries look at many keys, more warps than have queries copy.
  const int copying = std::min(4, RoundUp(s.keys, 16) / 16);
  const int warps = tiles <= 8 ? std::max(tiles, copying) : std::min(8, (tiles + 1) / 2);
  const int units = std::max(1, std::min(4 / warps, (48 << 10) / ShortBytes<DP>(s))), bytes = units * ShortBytes<DP>(s);
  if (cudaError_t e = AllowShared(ShortForward<DP, T>, bytes); e != cudaSuccess) return e;
  const dim3 grid(unsigned((s.units() + units - 1) / units)), block(unsigned(32 * warps), unsigned(units));
  Launch(ShortForward<DP, T>, grid, block, bytes, stream, s, args);
  return cudaGetLastError();
}

template <int DP, typename T>
cudaError_t LaunchStreamed(const AttentionShape& s, const ForwardArgs<T>& args, cudaStream_t stream) {
  constexpr int kRows = QueryTiles(DP) * 16, kRowBytes = (DP + kPad) * kElementBytes, kFixedBytes = 4 * KeysOfTile(DP) * kRowBytes;
  const int warps = WarpsFor(s.queries(), kRows, StreamedRegisters(DP), kFixedBytes, kRowBytes), groups = RoundUp(s.queries(), warps * kRows) / (warps * kRows);
  const int bytes = kFixedBytes + warps * kRows * kRowBytes;
  if (cudaError_t e = AllowShared(StreamedForward<DP, T>, bytes); e != cudaSuccess) return e;
  Launch(StreamedForward<DP, T>, unsigned(s.units() * groups), 32 * warps, bytes, stream, s, groups, args);
  return cudaGetLastError();
}

}  // namespace

template <int DP, typename T>
cudaError_t LaunchForward(const AttentionShape& s, const ForwardArgs<T>& args, cudaStream_t stream) {
  const bool is_short = s.path == 0 ? s.keys <= (DP <= 48 ? 256 : 112) : s.path == 1;
  return is_short && ShortBytes<DP>(s) <= SharedBytes() ? LaunchShort<DP, T>(s, args, stream) : LaunchStreamed<DP, T>(s, args, stream);
}

#define HIERAD_FORWARD(DP)                                                                                  \
  template cudaError_t LaunchForward<DP, bf16>(const AttentionShape&, const ForwardArgs<bf16>&, cudaStream_t); \
  template cudaError_t LaunchForward<DP, half>(const AttentionShape&, const ForwardArgs<half>&, cudaStream_t);
HIERAD_EACH_HEAD_DIM(HIERAD_FORWARD)
#undef HIERAD_FORWARD

}  // namespace hierad::kernels::attention
