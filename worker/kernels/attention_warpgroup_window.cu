// Attention by warpgroups for windows that lie whole in shared memory twice, heads of up to 32, on sm_90: a block goes over windows,
// the next one on its way while one is worked on. Forward: a warpgroup holds 64 queries. Backward in one pass: a warpgroup holds 64
// keys (dK and dV), dS is written once to shared memory, and dQ taken from there: nothing is computed twice.
#include "worker/kernels/attention_warpgroup_backward.cuh"
#include "worker/kernels/attention_warpgroup_forward.cuh"

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
__global__ void __maxnreg__(128) WarpgroupWindowForward(AttentionShape shape, ForwardArgs<T> args) {
  BeginKernel();
  extern __shared__ __align__(1024) unsigned char panels[];
  constexpr int kStepKeys = 64;
  const int thread = threadIdx.x, threads = blockDim.x, row0 = thread / 32 * 16, rows = Rows(shape), array = rows * kDim;
  T* buffers = reinterpret_cast<T*>(panels);   // [2][k, v, q][rows][32]
  const float scale = rsqrtf(float(shape.head_dim)) * kLog2E;
  const auto fetch = [&](int64_t unit, int which) {
    const Unit u(shape, unit);
    T* to = buffers + which * 3 * array;
    CopyPanels<kDim>(u, args.qkv, 1, 0, rows, to, thread, threads);
    CopyPanels<kDim>(u, args.qkv, 2, 0, rows, to + array, thread, threads);
    CopyPanels<kDim>(u, args.qkv, 0, 0, rows, to + 2 * array, thread, threads);
    CommitCopies();
  };
  const int64_t units = shape.units();
  fetch(blockIdx.x, 0);
  int which = 0;
  for (int64_t unit = blockIdx.x; unit < units; unit += gridDim.x, which ^= 1) {
    const Unit u(shape, unit);
    const T* buffer = buffers + which * 3 * array;
    WaitCopies<0>();
    CopiesForWarpgroups();
    __syncthreads();   // this window is there, and nobody reads the other buffer any more
    if (unit + gridDim.x < units) fetch(unit + gridDim.x, which ^ 1);
    WarpgroupForwardRows<T, kDim> state;
    state.works = row0 < rows;
    const int lane = thread & 31;
#pragma unroll
    for (int kc = 0; kc < kDim / 16; ++kc) {
      const int row = (state.works ? row0 : 0) + (lane >> 3 & 1) * 8 + (lane & 7);
      LoadMatrix(state.q[kc], buffer + 2 * array + PanelOffset(rows, row, kc * 16 + (lane >> 4) * 8));
    }
    const uint64_t k = Descriptor(buffer, rows), v = Descriptor(buffer + array, rows);
    int n = 0;
    for (; n + kStepKeys <= u.keys; n += kStepKeys) state.template Keys<kStepKeys, false>(k + AtRow(n), v + AtRow(n), rows, kStepKeys, scale);
    for (; n < u.keys; n += 16) state.template Keys<16, true>(k + AtRow(n), v + AtRow(n), rows, u.keys - n, scale);
    WaitProducts<0>();
    Arrived(state.state.o);
    if (state.works) state.state.Store(u, row0, args.o, args.lse);
  }
}

// Column sums of a warp's 16 rows, of which `valid` count.
__device__ void StoreRowsSums(const float (&c)[kDim / 8][4], float scale, int valid, float* to) {
  const int g = (threadIdx.x & 31) >> 2;
  float v[kDim / 4];
#pragma unroll
  for (int i = 0; i < kDim / 4; ++i) v[i] = ((g < valid ? c[i / 2][i % 2] : 0) + (g + 8 < valid ? c[i / 2][2 + i % 2] : 0)) * scale;
  StoreColumnSums<kDim>(v, to);
}

template <typename T>
__global__ void __maxnreg__(128) WarpgroupWindow(AttentionShape shape, BackwardArgs<T> args) {
  BeginKernel();
  extern __shared__ __align__(1024) unsigned char panels[];
  const int thread = threadIdx.x, threads = blockDim.x, warp = thread >> 5;
  const int rows = Rows(shape), row0 = warp * 16, array = rows * kDim;
  T* ds = reinterpret_cast<T*>(panels);            // [panels][rows][32 queries]; first, since the last warpgroup reads behind the last panel
  T* buffers = ds + Panels(rows) * array;           // [2][Array][rows][32]
  float* lse = reinterpret_cast<float*>(buffers + 2 * kArrays * array);   // [2][rows]
  float* delta = lse + 2 * rows;
  const float scale = rsqrtf(float(shape.head_dim));
  const auto fetch = [&](int64_t unit, int which) {
    const Unit u(shape, unit);
    T* to = buffers + which * kArrays * array;
    CopyPanels<kDim>(u, args.qkv, 1, 0, rows, to + kKeys * array, thread, threads);
    CopyPanels<kDim>(u, args.qkv, 2, 0, rows, to + kValues * array, thread, threads);
    CopyPanels<kDim>(u, args.qkv, 0, 0, rows, to + kQueries * array, thread, threads);
    CopyPanels<kDim>(u, args.d_o, -1, 0, rows, to + kOutGradients * array, thread, threads);
    CopyPanels<kDim>(u, args.o, -1, 0, rows, to + kOut * array, thread, threads);
    for (int t = thread; t < rows; t += threads) CopyWordAsync(lse + which * rows + t, args.lse + (t < u.queries ? u.Lse(t) : 0), t < u.queries);
    CommitCopies();
  };
  const int64_t units = shape.units();
  fetch(blockIdx.x, 0);
  int which = 0;
  for (int64_t unit = blockIdx.x; unit < units; unit += gridDim.x, which ^= 1) {
    const Unit u(shape, unit);
    T* buffer = buffers + which * kArrays * array;
    WaitCopies<0>();
    CopiesForWarpgroups();
    __syncthreads();   // this window is there, and nobody reads the other buffer or dS any more
    if (unit + gridDim.x < units) fetch(unit + gridDim.x, which ^ 1);
    for (int row = thread >> 2; row < rows; row += threads >> 2) {   // sum over D of o * d_o; a warp has eight rows: all of it is here or none
      const int at = PanelOffset(rows, row, (thread & 3) * 8);
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
      if ((thread & 3) == 0) delta[row] = sum;
    }
    __syncthreads();
    float* parts = args.sums == nullptr ? nullptr : reinterpret_cast<float*>(buffer + kOut * array);   // o is not needed any more
    const int tiles = rows / 16;
    WarpgroupKeyRows<T, kDim, false> state;
    state.works = row0 < rows, state.key_rows = rows;
    state.k = Descriptor(buffer + kKeys * array, rows) + AtRow(thread / kGroupThreads * kGroupRows);
    state.v = Descriptor(buffer + kValues * array, rows) + AtRow(thread / kGroupThreads * kGroupRows);
    const uint64_t q = Descriptor(buffer + kQueries * array, rows), d_o = Descriptor(buffer + kOutGradients * array, rows);
    T* ds_rows = ds + row0 * kDim;
    int n = 0;
    for (; n + kStep <= rows; n += kStep) {
      state.template Queries<kStep, true>(q + AtRow(n), d_o + AtRow(n), rows, lse + which * rows + n, delta + n, scale * kLog2E,
                                          ds_rows + n / kStep * array, u.keys - row0);
    }
    if (n < rows) {
      state.template Queries<16, true>(q + AtRow(n), d_o + AtRow(n), rows, lse + which * rows + n, delta + n, scale * kLog2E,
                                       ds_rows + n / kStep * array, u.keys - row0);
    }
    WaitProducts<0>();
    Arrived(state.dk), Arrived(state.dv);
    if (state.works) {
      StoreRows<kDim>(u, state.dk, scale, scale, 1, row0, args.dqkv);
      StoreRows<kDim>(u, state.dv, 1.0f, 1.0f, 2, row0, args.dqkv);
      if (parts != nullptr) {
        StoreRowsSums(state.dk, scale, u.keys - row0, parts + (tiles + 2 * warp) * kDim);
        StoreRowsSums(state.dv, 1.0f, u.keys - row0, parts + (tiles + 2 * warp + 1) * kDim);
      }
    }
    CopiesForWarpgroups();
    __syncthreads();   // dS is there
    // dQ of 64 queries a warpgroup: two panels of dS.
    float dq[kDim / 8][4] = {};
    const uint64_t a = Descriptor(ds + thread / kGroupThreads * 2 * array, rows), b = Descriptor(buffer + kKeys * array, rows);
    Arrived(dq);
    BeginProducts();
#pragma unroll 1
    for (int k = 0; k < rows; k += 16) GroupProduct<T, true, true>(dq, a + AtRow(k), b + AtRow(k), true);
    CommitProducts();
    WaitProducts<0>();
    Arrived(dq);
    if (state.works) {
      StoreRows<kDim>(u, dq, scale, scale, 0, row0, args.dqkv);
      if (parts != nullptr) StoreRowsSums(dq, scale, u.queries - row0, parts + warp * kDim);
    }
    if (parts != nullptr) {
      __syncthreads();
      AddColumnSums<kDim>(u, unit / shape.heads, int(unit % shape.heads), parts, tiles, tiles, args.sums, thread, threads);
    }
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
template <typename T>
cudaError_t LaunchWarpgroupWindowForward(const AttentionShape& s, const ForwardArgs<T>& args, cudaStream_t stream) {
  const int rows = Rows(s), bytes = 6 * rows * kDim * kElementBytes, warpgroups = RoundUp(rows, kGroupRows) / kGroupRows;
  if (cudaError_t e = AllowShared(WarpgroupWindowForward<T>, bytes); e != cudaSuccess) return e;
  Launch(WarpgroupWindowForward<T>, WindowBlocks(s, warpgroups, bytes), kGroupThreads * warpgroups, bytes, stream, s, args);
  return cudaGetLastError();
}
template cudaError_t LaunchWarpgroupWindowForward<bf16>(const AttentionShape&, const ForwardArgs<bf16>&, cudaStream_t);
template cudaError_t LaunchWarpgroupWindowForward<half>(const AttentionShape&, const ForwardArgs<half>&, cudaStream_t);
template cudaError_t LaunchWarpgroupWindow<bf16>(const AttentionShape&, const BackwardArgs<bf16>&, cudaStream_t);
template cudaError_t LaunchWarpgroupWindow<half>(const AttentionShape&, const BackwardArgs<half>&, cudaStream_t);

}  // namespace hierad::kernels::attention
