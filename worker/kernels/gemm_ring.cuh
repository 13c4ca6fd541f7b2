// Products of rows with a matrix that a multiprocessor holds (k up to 512), whose epilogue is as long as they are, on cards of capability
// 9.0. A block keeps its 128 columns of the weights in shared memory, so that rows alone come through the second-level cache, whose rate is
// the bound of tiles that fetch both. Its warpgroups take tiles of 64 rows in turns: one multiplies while the others are in their
// epilogues. One warp copies boxes of the rows into a ring of stages, another one the part of h that an epilogue needs; results leave by
// boxes too.
#pragma once

#include <algorithm>

#include "worker/kernels/boxes.cuh"
#include "worker/kernels/gelu.cuh"

namespace hierad::kernels::ring {

constexpr int kRows = 64, kColumns = 128, kGroupThreads = 128;
constexpr int kSliceBytes = 2 * kBoxBytes;      // 64 k of the weights
constexpr int kResultBytes = 2 * kBoxBytes;     // of a tile
constexpr int kMostDepth = 8;                   // boxes of k

// How the shared memory is shared out for up to kDepth boxes of k. A warpgroup has room for half of a tile's results, and for all of h.
template <int kDepth, int kGroups, bool kBackward>
struct Layout {
  static constexpr int kGroupBytes = (kBackward ? 3 : 2) * kBoxBytes;
  static constexpr int kStages = ((224 << 10) - kDepth * kSliceBytes - kGroups * kGroupBytes) / kBoxBytes, kThreads = kGroups * kGroupThreads + 64;
  static constexpr int kStagesAt = kDepth * kSliceBytes, kResultsAt = kStagesAt + kStages * kBoxBytes;
  static constexpr int kBiasAt = kResultsAt + kGroups * kGroupBytes, kBarriersAt = kBiasAt + kColumns * int(sizeof(float));
  static constexpr int kBytes = kBarriersAt + 8 * (1 + 2 * kStages + 3 * kGroups);
  static_assert(kBytes <= 227 << 10 && kStages * kBoxBytes >= kGroups * 4 * kColumns * int(sizeof(float)));
};

// h = a w^T + bias and g = gelu(h); or dh = (a w) gelu'(h), g = gelu(h), and sums of dh over rows.
enum class Epilogue { kGelu, kGeluBackward };

struct Arguments {
  int m, n, k;
  const float* bias;   // [n]
  float* parts;        // [num_parts, n]
  int num_parts;
};

// Of four values a lane, the sum over the eight lanes of the same lane % 4: the value of index 2 (lane / 4 % 2) + (lane / 8 % 2).
__device__ inline float SumOverRows(const float (&v)[4]) {
  const bool fourth = threadIdx.x & 4, eighth = threadIdx.x & 8;
  float a = (fourth ? v[2] : v[0]) + __shfl_xor_sync(~0u, fourth ? v[0] : v[2], 4);
  const float b = (fourth ? v[3] : v[1]) + __shfl_xor_sync(~0u, fourth ? v[1] : v[3], 4);
  a = (eighth ? b : a) + __shfl_xor_sync(~0u, eighth ? a : b, 8);
  return a + __shfl_xor_sync(~0u, a, 16);
}

template <typename T, Epilogue kEpilogue, int kDepth, int kGroups>
__global__ __launch_bounds__(Layout<kDepth, kGroups, kEpilogue == Epilogue::kGeluBackward>::kThreads, 1) void Product(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap w_map,
                                                                       const __grid_constant__ CUtensorMap h_map, const __grid_constant__ CUtensorMap dh_map,
                                                                       const __grid_constant__ CUtensorMap g_map, Arguments p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr bool kBackward = kEpilogue == Epilogue::kGeluBackward, kAcross = kBackward;   // w is [k, n] then
  using L = Layout<kDepth, kGroups, kBackward>;
  constexpr int kStages = L::kStages;
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32_t base = uint32_t(__cvta_generic_to_shared(shared)), weights_there = base + L::kBarriersAt, full = weights_there + 8, empty = full + 8 * kStages;
  const uint32_t h_there = empty + 8 * kStages, h_free = h_there + 8 * kGroups, multiplied = h_free + 8 * kGroups;
  float* const bias = reinterpret_cast<float*>(shared + L::kBiasAt);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int slices = (p.n + kColumns - 1) / kColumns, column = int(blockIdx.x) % slices * kColumns, share = int(blockIdx.x) / slices, shares = int(gridDim.x) / slices;
  const int tiles = (p.m + kRows - 1) / kRows, depth = (p.k + kBoxSide - 1) / kBoxSide;
  if (threadIdx.x == 0) {
    InitBarrier(weights_there, 1);
    for (int s = 0; s < kStages; ++s) InitBarrier(full + 8 * s, 1), InitBarrier(empty + 8 * s, 4);
    for (int g = 0; g < kGroups; ++g) InitBarrier(h_there + 8 * g, 1), InitBarrier(h_free + 8 * g, 1), InitBarrier(multiplied + 8 * g, 4);
    BarriersForCopies();
  }
  if (!kBackward && threadIdx.x < kColumns) bias[threadIdx.x] = column + int(threadIdx.x) < p.n ? p.bias[column + threadIdx.x] : 0.0f;
  __syncthreads();

  if (warp == 4 * kGroups) {   // operands
    if (lane != 0) return;
    ArriveExpecting(weights_there, depth * kSliceBytes);
    for (int i = 0; i < 2 * depth; ++i) {
      const int k = (i >> 1) * kBoxSide, n = column + (i & 1) * kBoxSide;
      LoadBox(base + i * kBoxBytes, &w_map, kAcross ? n : k, kAcross ? k : n, 0, weights_there);
    }
    int stage = 0;
    uint32_t parity = 0;
    for (int tile = share; tile < tiles; tile += shares) {
      for (int i = 0; i < depth; ++i) {
        Wait(empty + 8 * stage, parity ^ 1);
        ArriveExpecting(full + 8 * stage, kBoxBytes);
        LoadBox(base + L::kStagesAt + stage * kBoxBytes, &a_map, i * kBoxSide, tile * kRows, 0, full + 8 * stage);
        if (++stage == kStages) stage = 0, parity ^= 1;
      }
    }
    return;
  }
  if (warp > 4 * kGroups) {   // h
    if (lane != 0 || !kBackward) return;
    int group = 0;
    uint32_t parity = 0;
    for (int tile = share; tile < tiles; tile += shares) {
      const uint32_t to = base + L::kResultsAt + group * L::kGroupBytes, there = h_there + 8 * group;
      Wait(h_free + 8 * group, parity ^ 1);
      ArriveExpecting(there, kResultBytes);
#pragma unroll
      for (int box = 0; box < 2; ++box) LoadBox(to + box * kBoxBytes, &h_map, column + box * kBoxSide, tile * kRows, 0, there);
      if (++group == kGroups) group = 0, parity ^= 1;
    }
    return;
  }

  const int group = warp >> 2, row_of_warp = (warp & 3) * 16, before_group = group == 0 ? kGroups - 1 : group - 1;
  const bool leads = (threadIdx.x & (kGroupThreads - 1)) == 0;
  const uint32_t first = base + L::kResultsAt + group * L::kGroupBytes, second = first + L::kGroupBytes - kBoxBytes;
  auto meet = [&] { asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "n"(kGroupThreads) : "memory"); };
  float sums[kBackward ? 8 : 1] = {};
  uint32_t parity = 0;   // of this group's turns
  int copy = group * depth;
  Wait(weights_there, 0);
  for (int tile = share + group * shares; tile < tiles; tile += kGroups * shares, parity ^= 1, copy += (kGroups - 1) * depth) {
    float acc[16][4];
    uint32_t before = 0;   // barrier of the stage whose products are under way
    // In turns: a stage's barrier tells one phase from the next, not from the one after it.
    if (group > 0) Wait(multiplied + 8 * before_group, parity);
    else if (tile != share) Wait(multiplied + 8 * before_group, parity ^ 1);
    for (int i = 0; i < depth; ++i, ++copy) {
      const int stage = copy % kStages;
      Wait(full + 8 * stage, (copy / kStages) & 1);
      const uint64_t rows = DescriptorOf(base + L::kStagesAt + stage * kBoxBytes, false), weights = DescriptorOf(base + i * kSliceBytes, kAcross);
      BeginBoxes();
#pragma unroll
      for (int k = 0; k < kBoxSide / 16; ++k) MultiplyBoxes<T, kAcross>(acc, rows + StepOfK(k, false), weights + StepOfK(k, kAcross), i > 0 || k > 0);
      CommitBoxes();
      WaitForBoxes<1>();
      if (i > 0 && lane == 0) Arrive(before);
      before = empty + 8 * stage;
    }
    if (lane == 0) Arrive(multiplied + 8 * group);
    WaitForBoxes<0>();
#pragma unroll
    for (int j = 0; j < 16; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(acc[j][e])::"memory");
    }
    if (lane == 0) Arrive(before);

    if constexpr (kBackward) Wait(h_there + 8 * group, parity);   // what was stored from there is gone
#pragma unroll
    for (int j = 0; j < 16; j += 2) {   // 16 columns
      if (j % 8 == 0 && (!kBackward || j > 0)) {   // room for the next half
        if (leads) WaitForReadsOfStores();
        meet();
      }
      const uint32_t place = PieceOf(row_of_warp, kBackward ? j : j % 8);
      uint32_t h[4], c[4], g[4];
      float four[4] = {};
      float2 added[2] = {};
      if constexpr (kBackward) LoadMatrices(h, first + place);
      else added[0] = *reinterpret_cast<const float2*>(bias + 8 * j + 2 * (lane & 3)), added[1] = *reinterpret_cast<const float2*>(bias + 8 * j + 8 + 2 * (lane & 3));
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float low = acc[j + (w >> 1)][2 * (w & 1)], high = acc[j + (w >> 1)][2 * (w & 1) + 1];
        float value[2];
        if constexpr (kBackward) {
          const float2 x = UnpackPair<T>(h[w]);
          float slope[2];
          GeluBoth<T>(x.x, &value[0], &slope[0]);
          GeluBoth<T>(x.y, &value[1], &slope[1]);
          const float d[2] = {low * slope[0], high * slope[1]};
          four[w & 2] += d[0], four[(w & 2) + 1] += d[1];
          c[w] = PackPair<T>(d[0], d[1]);
        } else {
          c[w] = PackPair<T>(low + added[w >> 1].x, high + added[w >> 1].y);
          const float2 x = UnpackPair<T>(c[w]);   // as it is stored
          value[0] = FastGelu(x.x), value[1] = FastGelu(x.y);
        }
        g[w] = PackPair<T>(value[0], value[1]);
      }
      StoreMatrices(first + place, c);
      StoreMatrices(second + PieceOf(row_of_warp, j % 8), g);
      if constexpr (kBackward) sums[j / 2] += SumOverRows(four);
      if (j % 8 < 6) continue;
      WritesForCopies();
      meet();
      if (!leads) continue;
      const int box = j / 8;
      StoreBox(kBackward ? &dh_map : &h_map, first + (kBackward ? box * kBoxBytes : 0), column + box * kBoxSide, tile * kRows, 0);
      StoreBox(&g_map, second, column + box * kBoxSide, tile * kRows, 0);
      CommitStores();
      if constexpr (kBackward) {
        if (box == 1) WaitForReadsOfStores(), Arrive(h_free + 8 * group);
      }
    }
  }
  if constexpr (kBackward) {
    auto all_meet = [] { asm volatile("bar.sync %0, %1;" ::"n"(1 + kGroups), "n"(kGroups * kGroupThreads) : "memory"); };
    float* const of_warps = reinterpret_cast<float*>(shared + L::kStagesAt);
    all_meet();   // no stage is in use any more
    const int at = 8 * (lane >> 2 & 1) + 2 * (lane & 3) + (lane >> 3 & 1);
    if (lane < 16) {
#pragma unroll
      for (int j = 0; j < 8; ++j) of_warps[warp * kColumns + 16 * j + at] = sums[j];
    }
    all_meet();
    if (threadIdx.x < kColumns && column + int(threadIdx.x) < p.n) {
      float sum = 0;
      for (int w = 0; w < 4 * kGroups; ++w) sum += of_warps[w * kColumns + threadIdx.x];
      for (int part = share; part < p.num_parts; part += shares) {   // one part a block; the others are empty
        p.parts[int64_t(part) * p.n + column + threadIdx.x] = part == share ? sum : 0.0f;
      }
    }
  }
  if (leads) WaitForStores();
#endif
}

struct Maps {
  CUtensorMap a, w, h, dh, g;
};

template <typename T, Epilogue kEpilogue, int kDepth, int kGroups>
cudaError_t Run(const Maps& maps, const Arguments& p, int sm_count, cudaStream_t stream) {
  using L = Layout<kDepth, kGroups, kEpilogue == Epilogue::kGeluBackward>;
  const auto kernel = Product<T, kEpilogue, kDepth, kGroups>;
  if (const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, L::kBytes); e != cudaSuccess) return e;
  const int slices = (p.n + kColumns - 1) / kColumns, tiles = (p.m + kRows - 1) / kRows;
  // No more shares than parts, each of which is one's.
  const int shares = std::max(1, std::min(sm_count / slices, kEpilogue == Epilogue::kGeluBackward ? p.num_parts : tiles));
  kernel<<<unsigned(slices * shares), L::kThreads, L::kBytes, stream>>>(maps.a, maps.w, maps.h, maps.dh, maps.g, p);
  return cudaPeekAtLastError();
}

template <typename T, Epilogue kEpilogue>
cudaError_t Run(const Maps& maps, const Arguments& p, int sm_count, cudaStream_t stream) {
  const int depth = (p.k + kBoxSide - 1) / kBoxSide;
  if (depth <= 3) return Run<T, kEpilogue, 3, 3>(maps, p, sm_count, stream);
  if (depth <= 6) return Run<T, kEpilogue, 6, 3>(maps, p, sm_count, stream);
  return depth <= kMostDepth ? Run<T, kEpilogue, kMostDepth, 2>(maps, p, sm_count, stream) : cudaErrorNotSupported;
}

}  // namespace hierad::kernels::ring
