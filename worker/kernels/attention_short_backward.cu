// Attention backward for short windows, on the tensor cores: a window lies whole in shared memory, several a block. dK and dV
// stay in registers, dS is written once to shared memory and dQ taken from there: nothing is computed twice, nothing is added
// atomically.
#include <algorithm>

#include "worker/kernels/attention_backward.cuh"

namespace hierad::kernels::attention {
namespace {

__host__ __device__ constexpr int Columns(int dp) { return dp == 80 ? 80 : dp % 48 == 0 ? 48 : dp % 32 == 0 ? 32 : 16; }   // of a task of dQ

// dQ of 16 queries from row `m` on and Columns(DP) columns from `n` on: dS K over all keys.
template <int DP, typename T>
__device__ void QueryGradient(const Unit& u, const BackwardArgs<T>& args, int q_stride, const T* ds, int ds_stride, const T* k, int key_rows,
                              int first, int n, float scale) {
  constexpr int kStride = DP + kPad, kColumns = Columns(DP);
  float c[kColumns / 8][4] = {};
#pragma unroll 2
  for (int kr = 0; kr < key_rows; kr += 16) {
    uint32_t a[4];
    LoadATransposed(a, ds + kr * ds_stride, ds_stride);
#pragma unroll
    for (int i = 0; i < kColumns / 16; ++i) {
      uint32_t b[4];
      LoadBTransposed(b, k + kr * kStride + n + i * 16, kStride);
      Mma<T>(c[2 * i], a, b[0], b[1]);
      Mma<T>(c[2 * i + 1], a, b[2], b[3]);
    }
  }
  EachPiece<kColumns, T>(c, scale, scale, [&](int row, int column, uint4 piece) {
    StoreQueryPiece(u, q_stride, args.argmax, first + row, n + column, piece, args.dqkv);
  });
}

// blockDim = (32 * warps, units of a block); warp w owns key tile w. Queries pass in chunks of `chunk`.
template <int DP, typename T>
__global__ void __maxnreg__(DP <= 48 ? 128 : DP <= 96 ? 168 : 240) ShortBackward(AttentionShape shape, int chunk, BackwardArgs<T> args) {
  extern __shared__ uint4 memory[];
  constexpr int kStride = DP + kPad;
  constexpr int kGroups = DP <= 48 ? 1 : 2;   // groups of 16 queries a step: where K and V are read anew, they serve two
  const int thread = threadIdx.x, threads = blockDim.x, warp = thread >> 5, warps = threads >> 5;
  const int key_rows = (shape.keys + 15) / 16 * 16, query_rows = (shape.queries() + 15) / 16 * 16, ds_stride = chunk + kPad;
  const int64_t unit = blockIdx.x * int64_t(blockDim.y) + threadIdx.y;
  const bool there = unit < shape.units();
  const Unit u(shape, there ? unit : 0);
  const int elements = 2 * (key_rows + query_rows) * kStride + key_rows * ds_stride + 4 * query_rows;   // row sums: 2 floats each
  T* k = reinterpret_cast<T*>(memory) + threadIdx.y * elements;
  T* v = k + key_rows * kStride;
  T* q = v + key_rows * kStride;
  T* go = q + query_rows * kStride;
  T* ds = go + query_rows * kStride;
  float* lse2 = reinterpret_cast<float*>(ds + key_rows * ds_stride);
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
  const int row = warp * 16;
  KeyRows<T, DP, 1, DP <= 48, DP <= 48> keys(k + row * kStride, v + row * kStride, shape.keys - row);
  for (int q0 = 0; q0 < query_rows; q0 += chunk) {
    const int rows = min(chunk, query_rows - q0);
    if (there) {
      int j = 0;
      for (; j + kGroups * 16 <= rows; j += kGroups * 16) {
        keys.template Queries<kGroups, true, true>(q + (q0 + j) * kStride, go + (q0 + j) * kStride, lse2 + q0 + j, delta + q0 + j, scale,
                                                   ds + row * ds_stride + j, ds_stride);
      }
      if (kGroups > 1 && j < rows) {
        keys.template Queries<1, true, true>(q + (q0 + j) * kStride, go + (q0 + j) * kStride, lse2 + q0 + j, delta + q0 + j, scale,
                                             ds + row * ds_stride + j, ds_stride);
      }
    }
    __syncthreads();
    if (there) {
      constexpr int kTasks = DP / Columns(DP);
      for (int task = warp; task < rows / 16 * kTasks; task += warps) {
        const int m = task / kTasks * 16, n = task % kTasks * Columns(DP);
        QueryGradient<DP>(u, args, shape.q_stride, ds + m, ds_stride, k, key_rows, q0 + m, n, scale);
      }
    }
    if (q0 + chunk < query_rows) __syncthreads();
  }
  if (there) keys.Store(u, row, scale, args.dqkv);
}

struct ShortPlan {
  int warps, chunk, unit_bytes;
  template <int DP>
  static ShortPlan Of(const AttentionShape& s) {
    const int key_rows = RoundUp(s.keys, 16), query_rows = RoundUp(s.queries(), 16);
    // One chunk where that is little more: each costs two barriers.
    const int chunk = query_rows <= 128 ? query_rows : 64;
    return {key_rows / 16, chunk, (2 * (key_rows + query_rows) * (DP + kPad) + key_rows * (chunk + kPad) + 4 * query_rows) * kElementBytes};
  }
};

}  // namespace

template <int DP>
bool ShortBackwardFits(const AttentionShape& s) {
  const ShortPlan plan = ShortPlan::Of<DP>(s);
  return plan.warps <= 8 && plan.unit_bytes <= SharedBytes();
}

template <int DP, typename T>
cudaError_t LaunchShortBackward(const AttentionShape& s, const BackwardArgs<T>& args, cudaStream_t stream) {
  const ShortPlan plan = ShortPlan::Of<DP>(s);
  const int units = std::max(1, std::min(4 / plan.warps, (56 << 10) / plan.unit_bytes));
  const int bytes = units * plan.unit_bytes;
  if (cudaError_t e = AllowShared(ShortBackward<DP, T>, bytes); e != cudaSuccess) return e;
  const dim3 grid(unsigned((s.units() + units - 1) / units)), block(unsigned(32 * plan.warps), unsigned(units));
  Launch(ShortBackward<DP, T>, grid, block, bytes, stream, s, plan.chunk, args);
  return cudaGetLastError();
}

#define HIERAD_SHORT_BACKWARD(DP)                                                                                     \
  template bool ShortBackwardFits<DP>(const AttentionShape&);                                                         \
  template cudaError_t LaunchShortBackward<DP, bf16>(const AttentionShape&, const BackwardArgs<bf16>&, cudaStream_t); \
  template cudaError_t LaunchShortBackward<DP, half>(const AttentionShape&, const BackwardArgs<half>&, cudaStream_t);
HIERAD_EACH_HEAD_DIM(HIERAD_SHORT_BACKWARD)
#undef HIERAD_SHORT_BACKWARD

}  // namespace hierad::kernels::attention
