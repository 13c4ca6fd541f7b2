// Attention forward of whole windows with narrow heads, one warpgroup each, on sm_90: exponentials are the bound here, so several
// warpgroups share a multiprocessor, and in each the scores of the next keys are multiplied while the weights of the last are made.
#include "worker/kernels/attention_softmax.cuh"
#include "worker/kernels/attention_warpgroup.cuh"

namespace hierad::kernels::attention {
namespace {

constexpr int kDim = 32, kStep = 64;   // keys a step; the last step takes what is left, 16, 32 or 64

// Rows held are a template's, so that steps are unrolled and addresses known: those of Base's decoder, whole and with half the tokens a side.
template <int kKeys>
struct WindowSteps {
  static constexpr int kSteps = (kKeys + kStep - 1) / kStep, kLast = kKeys - kStep * (kSteps - 1);
  static constexpr int kBytes = 3 * kKeys * kDim * kElementBytes;
};

// Scores of 64 queries and 8 kTiles keys, under way behind it.
template <typename T, int kTiles>
__device__ void Scores(float (&s)[kTiles][4], Descriptor q, Descriptor k, int rows) {
#pragma unroll
  for (int kc = 0; kc < kDim / 16; ++kc) GroupProduct<T, false>(s, q + AtColumns(rows, kc), k + AtColumns(rows, kc), kc > 0);
  CommitProducts();
}

// Their weights to o, under way behind it too.
template <typename T, int kTiles>
__device__ void Weigh(RunningSoftmax<T, kDim>& state, float (&s)[kTiles][4], Descriptor v, bool works, float scale) {
  if (works) state.template Weights<kTiles / 2, false>(s, 8 * kTiles, scale);
  uint32_t p[kTiles / 2][4];
#pragma unroll
  for (int j = 0; j < kTiles / 2; ++j) PackRows<T>(p[j], s, j);
  BeginProducts();
#pragma unroll
  for (int j = 0; j < kTiles / 2; ++j) GroupProduct<T, true>(state.o, p[j], v + AtRow(16 * j), true);
  CommitProducts();
}

template <int kKeys, typename T>
__global__ void __maxnreg__(128) WarpgroupWindowForward(AttentionShape shape, ForwardArgs<T> args) {
  using Window = WindowSteps<kKeys>;
  extern __shared__ __align__(1024) unsigned char panels[];
  T* q = reinterpret_cast<T*>(panels);   // a tile of 64 queries may reach past the last one
  T* k = q + kKeys * kDim;
  T* v = k + kKeys * kDim;
  const int thread = threadIdx.x, warp = thread / 32, t = thread & 3;
  const Unit u(shape, blockIdx.x);
  const float scale = rsqrtf(float(shape.head_dim)) * kLog2E;
  CopyPanels<kDim>(u, args.qkv, 0, 0, kKeys, q, thread, kGroupThreads);
  CopyKeyPanels<kDim>(u, args.qkv, 0, kKeys, k, thread, kGroupThreads);
  CommitCopies();
  WaitCopies<0>();
  CopiesForWarpgroups();
  __syncthreads();
  const Descriptor at_k(k, kKeys), at_v(v, kKeys);
  const int slabs = (u.queries + 15) / 16;   // of 16 queries, a warp's
#pragma unroll 1
  for (int slab = 0; slab < slabs; slab += 4) {
    // The last few slabs go to other warps in every window: each warp has a part of the multiprocessor, and its exponentials, to itself.
    const int there = min(4, slabs - slab), idle = slab > 0 ? int(blockIdx.x % unsigned(5 - there)) : 0;   // warps before the first that works
    const int row0 = (slab - idle + warp) * 16;
    const bool works = warp >= idle && warp < idle + there;
    const Descriptor at_q = Descriptor(q, kKeys) + AtRow((slab - idle) * 16);
    RunningSoftmax<T, kDim> state;
    float s[Window::kSteps][kStep / 8][4], last[Window::kLast / 8][4];   // registers of their own: what a product adds to is alive till then
    BeginProducts();
    if (Window::kSteps > 1) Scores<T>(s[0], at_q, at_k, kKeys);
    else Scores<T>(last, at_q, at_k, kKeys);
#pragma unroll
    for (int step = 0; step < Window::kSteps; ++step) {
      const bool more = step + 1 < Window::kSteps;
      if (more) {
        const Descriptor next = at_k + AtRow((step + 1) * kStep);
        if (step + 2 < Window::kSteps) Scores<T>(s[step + 1], at_q, next, kKeys);
        else Scores<T>(last, at_q, next, kKeys);
        WaitProducts<1>();   // but for these all are done
        Arrived(s[step]), Arrived(state.o);
        Weigh<T>(state, s[step], at_v + AtRow(step * kStep), works, scale);
      } else {
        WaitProducts<0>();
        Arrived(last), Arrived(state.o);
#pragma unroll
        for (int n = Window::kLast / 8 - 2; n < Window::kLast / 8; ++n) {   // only among the last 16 some are no keys
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            if (step * kStep + n * 8 + 2 * t + (e & 1) >= u.keys) last[n][e] = -INFINITY;
          }
        }
        Weigh<T>(state, last, at_v + AtRow(step * kStep), works, scale);
      }
    }
    WaitProducts<0>();
    Arrived(state.o);
    if (works) state.Store(u, row0, args.o, args.lse);
  }
}

template <typename Launch>
bool ForWindow(const AttentionShape& s, Launch launch) {
  if (s.q_stride != 1 || s.head_dim > kDim) return false;
  switch ((s.keys + 15) / 16 * 16) {
    case 64: return launch(WindowSteps<64>{}), true;
    case 208: return launch(WindowSteps<208>{}), true;
    default: return false;
  }
}

}  // namespace

bool WarpgroupWindowForwardFits(const AttentionShape& s) {
  return ForWindow(s, [](auto) {});
}

template <typename T>
cudaError_t LaunchWarpgroupWindowForward(const AttentionShape& s, const ForwardArgs<T>& args, cudaStream_t stream) {
  cudaError_t error = cudaErrorInvalidValue;
  ForWindow(s, [&]<int kKeys>(WindowSteps<kKeys>) {
    const auto kernel = WarpgroupWindowForward<kKeys, T>;
    if (error = AllowShared(kernel, WindowSteps<kKeys>::kBytes); error != cudaSuccess) return;
    Launch(kernel, unsigned(s.units()), kGroupThreads, WindowSteps<kKeys>::kBytes, stream, s, args);
    error = cudaGetLastError();
  });
  return error;
}
template cudaError_t LaunchWarpgroupWindowForward<bf16>(const AttentionShape&, const ForwardArgs<bf16>&, cudaStream_t);
template cudaError_t LaunchWarpgroupWindowForward<half>(const AttentionShape&, const ForwardArgs<half>&, cudaStream_t);

}  // namespace hierad::kernels::attention
