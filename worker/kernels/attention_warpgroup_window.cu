// Attention backward in one pass by warpgroups, for windows that lie whole in shared memory twice, heads of up to 32, on sm_90: a
// block goes over windows, the next one on its way while one is worked on. Each warpgroup holds 64 keys (dK and dV), dS is written
// once to shared memory, and dQ taken from there: nothing is computed twice.
#include "worker/kernels/attention_warpgroup_backward.cuh"

namespace hierad::kernels::attention {
namespace {

constexpr int kDim = 32, kStep = 32;   // queries a step: a panel of dS
enum Array { kKeys, kValues, kQueries, kOutGradients, kOut, kArrays };

__host__ __device__ constexpr int Rows(const AttentionShape& s) { return (s.keys + 15) / 16 * 16; }
__host__ __device__ constexpr int Panels(int rows) { return (rows + kStep - 1) / kStep; }
__host__ __device__ constexpr int WindowBytes(int rows) {
  return (Panels(rows) + 2 * kArrays) * rows * kDim * kElementBytes + 3 * rows * int(sizeof(float));
}

template <typename T>
__global__ void __maxnreg__(128) WarpgroupWindow(AttentionShape shape, BackwardArgs<T> args) {
  extern __shared__ __align__(1024) unsigned char panels[];
  const int thread = threadIdx.x, threads = blockDim.x, warp = thread >> 5;
  const int rows = Rows(shape), row0 = warp * 16, array = rows * kDim;
  T* ds = reinterpret_cast<T*>(panels);            // [panels][rows][32 queries]; first, since the last warpgroup reads behind the last panel
  T* buffers = ds + Panels(rows) * array;           // [2][Array][rows][32]
  float* lse = reinterpret_cast<float*>(buffers + 2 * kArrays * array);   // [2][rows]
  float* delta = lse + 2 * rows;
  const float scale = rsqrtf(float(shape.head_dim));
  const int piece = (thread & 3) * 8;   // four threads share a row
  const auto fetch = [&](int unit, int which) {
    const Unit u(shape, unit);
    T* to = buffers + which * kArrays * array;
    const T *qkv = args.qkv + u.qkv + piece, *o = args.o + u.out + piece, *d_o = args.d_o + u.out + piece;
    for (int row = thread >> 2; row < rows; row += threads >> 2) {
      const bool there = row < u.keys && piece < u.head_dim;
      T* at = to + PanelOffset(rows, row, piece);
      const int64_t in = there ? int64_t(row) * u.qkv_stride : 0, out = there ? int64_t(row) * u.out_stride : 0;
      CopyAsync(at + kQueries * array, qkv + in, there);
      CopyAsync(at + kKeys * array, qkv + in + u.width, there);
      CopyAsync(at + kValues * array, qkv + in + 2 * u.width, there);
      CopyAsync(at + kOutGradients * array, d_o + out, there);
      CopyAsync(at + kOut * array, o + out, there);
    }
    for (int t = thread; t < rows; t += threads) CopyWordAsync(lse + which * rows + t, args.lse + u.Lse(t < u.queries ? t : 0), t < u.queries);
    CommitCopies();
  };
  const int units = int(shape.units());
  fetch(int(blockIdx.x), 0);
  int which = 0;
  for (int unit = int(blockIdx.x); unit < units; unit += int(gridDim.x), which ^= 1) {
    const Unit u(shape, unit);
    T* buffer = buffers + which * kArrays * array;
    WaitCopies<0>();
    CopiesForWarpgroups();
    __syncthreads();   // this window is there, and nobody reads the other buffer or dS any more
    if (unit + int(gridDim.x) < units) fetch(unit + int(gridDim.x), which ^ 1);
    for (int row = thread >> 2; row < rows; row += threads >> 2) {   // sum over D of o * d_o; a warp has eight rows: all of it is here or none
      const int at = PanelOffset(rows, row, piece);
      const uint4 x4 = *reinterpret_cast<const uint4*>(buffer + kOut * array + at), y4 = *reinterpret_cast<const uint4*>(buffer + kOutGradients * array + at);
      const unsigned *x = &x4.x, *y = &y4.x;
      float sum = 0;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float2 a = UnpackPair<T>(x[e]), b = UnpackPair<T>(y[e]);
        sum += a.x * b.x + a.y * b.y;
      }
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      if ((thread & 3) == 0) delta[row] = sum, lse[which * rows + row] *= kLog2E;
    }
    __syncthreads();
    WarpgroupKeyRows<T, kDim, false> state;
    state.works = row0 < rows, state.key_rows = rows;
    state.k = Descriptor(buffer + kKeys * array, rows) + AtRow(thread / kGroupThreads * kGroupRows);
    state.v = Descriptor(buffer + kValues * array, rows) + AtRow(thread / kGroupThreads * kGroupRows);
    const Descriptor q(buffer + kQueries * array, rows), d_o(buffer + kOutGradients * array, rows);
    const float *lse2 = lse + which * rows;
    const int g = (thread & 31) >> 2;
    uint32_t ds_at = SharedAddress(ds + (row0 + g) * kDim) + (g >> 1 & 3) * 16 + (thread & 3) * 4;
    int n = 0;
#pragma unroll 1
    for (; n + kStep <= rows; n += kStep, ds_at += array * kElementBytes) {
      state.template Queries<kStep, true>(q + AtRow(n), d_o + AtRow(n), rows, lse2 + n, delta + n, scale * kLog2E, ds_at);
    }
    if (n < rows) state.template Queries<16, true>(q + AtRow(n), d_o + AtRow(n), rows, lse2 + n, delta + n, scale * kLog2E, ds_at);
    WaitProducts<0>();
    Arrived(state.dk), Arrived(state.dv);
    if (state.works) {
      if (row0 + 16 > u.keys) {   // keys beyond the last, whose scores may be infinite
        __syncwarp();
        const int beyond = row0 + 16 - u.keys;
        for (int i = thread & 31; i < Panels(rows) * beyond * 4; i += 32) {
          reinterpret_cast<uint4*>(ds + i / (beyond * 4) * array + u.keys * kDim)[i % (beyond * 4)] = make_uint4(0, 0, 0, 0);
        }
      }
      StoreRows<kDim>(u, state.dk, scale, scale, 1, row0, args.dqkv);
      StoreRows<kDim>(u, state.dv, 1.0f, 1.0f, 2, row0, args.dqkv);
    }
    CopiesForWarpgroups();
    __syncthreads();   // dS is there
    // dQ of 64 queries a warpgroup: two panels of dS.
    float dq[kDim / 8][4] = {};
    const Descriptor a(ds + thread / kGroupThreads * 2 * array, rows), b(buffer + kKeys * array, rows);
    Arrived(dq);
    BeginProducts();
#pragma unroll 1
    for (int k = 0; k < rows; k += 16) GroupProduct<T, true, true>(dq, a + AtRow(k), b + AtRow(k), true);
    CommitProducts();
    WaitProducts<0>();
    Arrived(dq);
    if (state.works) StoreRows<kDim>(u, dq, scale, scale, 0, row0, args.dqkv);
  }
}

}  // namespace

bool WarpgroupWindowFits(const AttentionShape& s) { return s.q_stride == 1 && s.head_dim <= kDim && WindowBytes(Rows(s)) <= SharedBytes(); }

// Blocks for all multiprocessors: as many as fit at 128 registers a thread.
static unsigned WindowBlocks(const AttentionShape& s, int warpgroups, int bytes) {
  const int held = std::max(1, std::min(4 / warpgroups, (227 << 10) / (bytes + 1024)));
  return unsigned(std::min<int64_t>(s.units(), ThisCard().sm_count * held));
}

template <typename T>
cudaError_t LaunchWarpgroupWindow(const AttentionShape& s, const BackwardArgs<T>& args, cudaStream_t stream) {
  const int bytes = WindowBytes(Rows(s)), warpgroups = RoundUp(Rows(s), kGroupRows) / kGroupRows;
  if (cudaError_t e = AllowShared(WarpgroupWindow<T>, bytes); e != cudaSuccess) return e;
  Launch(WarpgroupWindow<T>, WindowBlocks(s, warpgroups, bytes), kGroupThreads * warpgroups, bytes, stream, s, args);
  return cudaGetLastError();
}
template cudaError_t LaunchWarpgroupWindow<bf16>(const AttentionShape&, const BackwardArgs<bf16>&, cudaStream_t);
template cudaError_t LaunchWarpgroupWindow<half>(const AttentionShape&, const BackwardArgs<half>&, cudaStream_t);

}  // namespace hierad::kernels::attention
