// The kernel of muon_products.h. A block's last warp copies boxes of 64 x 64 elements into a ring of stages (bulk tensor copies,
// rows of 128 bytes, their 16-byte pieces exchanged by row % 8); its warpgroup multiplies (wgmma) and stores by the same boxes. Blocks
// stay and go through their part of the schedule, two a multiprocessor: one stores while the other multiplies.
//
// The addend is taken from the stages that are multiplied anyway, before the first product: of the polynomial the two iterations
// whose columns are the tile's, of the last product the two whose rows are (MuonTile::first). So nothing is read twice.
#pragma once

#include "worker/kernels/boxes.cuh"
#include "worker/kernels/muon_products.h"

namespace hierad::kernels::muon {

static_assert(kMuonBox == kBoxSide);
constexpr int kGroupThreads = 128, kThreads = kGroupThreads + 32;
// Shared memory: stages of both operands, staging for half a tile of the result, barriers.
constexpr int kStages = 3, kStageBytes = 4 * kBoxBytes, kStaging = kStages * kStageBytes, kBarriers = kStaging + 2 * kBoxBytes, kBytes = kBarriers + 2 * kStages * 8;
static_assert(kMuonBlocks * (kBytes + 1024) <= 228 << 10);

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// The compiler takes nothing across this that products write or read.
__device__ inline void Settle(float (&c)[2][16][4]) {
#pragma unroll
  for (int i = 0; i < 128; ++i) asm volatile("" : "+f"(c[i >> 6][i >> 2 & 15][i & 3])::"memory");
}
// PieceOf for what is stored transposed: 16 rows from `row` on, two pieces from `piece` on.
__device__ inline uint32_t PieceAcross(int row, int piece) {
  const int lane = threadIdx.x & 31, r = row + (lane & 7) + (lane >> 4) * 8, p = piece + (lane >> 3 & 1);
  return uint32_t(r * 128 + ((p ^ (r & 7)) << 4));
}
#endif

// maps: of each group the left operand, the right one, the result.
template <typename T, MuonPhase kPhase>
__global__ __launch_bounds__(kThreads, kMuonBlocks) void Products(const CUtensorMap* maps, const MuonTile* tiles, const int* begins) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr bool kSymmetric = kPhase != MuonPhase::kTurn, kAcross = kPhase == MuonPhase::kTurn;
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32_t base = uint32_t(__cvta_generic_to_shared(shared)), full = base + kBarriers, empty = full + 8 * kStages;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, begin = begins[blockIdx.x], end = begins[blockIdx.x + 1];
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) InitBarrier(full + 8 * s, 1), InitBarrier(empty + 8 * s, kGroupThreads / 32);
    BarriersForCopies();
  }
  __syncthreads();
  int stage = 0;
  uint32_t parity = 0;
  auto next_stage = [&] {
    if (++stage == kStages) stage = 0, parity ^= 1;
  };

  if (warp == kGroupThreads / 32) {   // copies
    if (lane != 0) return;
    for (int t = begin; t < end; ++t) {
      const MuonTile tile = tiles[t];
      const CUtensorMap *const left = maps + 3 * tile.group, *const right = left + 1;
      const bool diagonal = kSymmetric && tile.row == tile.column;   // one operand is both
      for (int i = 0; i < tile.iterations; ++i, next_stage()) {
        const int block = tile.first + i, k = (block < tile.iterations ? block : block - tile.iterations) * kMuonDepth;
        const uint32_t a = base + stage * kStageBytes, b = a + 2 * kBoxBytes, there = full + 8 * stage;
        Wait(empty + 8 * stage, parity ^ 1);
        ArriveExpecting(there, diagonal ? 2 * kBoxBytes : kStageBytes);
#pragma unroll
        for (int h = 0; h < 2; ++h) LoadBox(a + h * kBoxBytes, left, k, tile.row + h * kBoxSide, tile.matrix, there);
        if (diagonal) continue;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int column = tile.column + h * kBoxSide;
          LoadBox(b + h * kBoxBytes, right, kAcross ? column : k, kAcross ? k : column, tile.matrix, there);
        }
      }
    }
    return;
  }

  const int row_of_warp = warp * 16;
  const bool leads = threadIdx.x == 0;
  const uint32_t staging = base + kStaging;
  auto meet = [] { asm volatile("bar.sync 1, %0;" ::"n"(kGroupThreads) : "memory"); };
  for (int t = begin; t < end; ++t) {
    const MuonTile tile = tiles[t];
    const bool diagonal = kSymmetric && tile.row == tile.column;
    float acc[2][16][4];   // halves of 64 rows; [j]: columns 8 j + 2 (lane % 4) and the next, rows lane / 4 and 8 more
    if constexpr (kPhase == MuonPhase::kGram) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int j = 0; j < 16; ++j) acc[h][j][0] = acc[h][j][1] = acc[h][j][2] = acc[h][j][3] = 0;
      }
    } else {
      constexpr float kFactor = float(kPhase == MuonPhase::kPolynomial ? kMuonB / kMuonC : kMuonA);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool inside = tile.first + i < tile.iterations, wraps = stage + i >= kStages;
        const int s = wraps ? stage + i - kStages : stage + i;
        if (inside) Wait(full + 8 * s, wraps ? parity ^ 1 : parity);
        const uint32_t boxes = base + s * kStageBytes + (kAcross ? 2 : 0) * kBoxBytes;
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          // Of the last product: row half i, columns 16 e on. Of the polynomial: columns 64 i + 16 (e % 4) on, row half e / 4.
          const int half_of_rows = kAcross ? i : e >> 2, j = kAcross ? 2 * e : 8 * i + 2 * (e & 3);
          uint32_t r[4];
          LoadMatrices(r, boxes + (kAcross ? PieceOf(row_of_warp, 2 * e) : PieceOf(half_of_rows * kBoxSide + row_of_warp, 2 * (e & 3))));
#pragma unroll
          for (int w = 0; w < 4; ++w) {
            const float2 two = UnpackPair<T>(inside ? r[w] : 0);
            acc[half_of_rows][j + (w >> 1)][2 * (w & 1)] = kFactor * two.x, acc[half_of_rows][j + (w >> 1)][2 * (w & 1) + 1] = kFactor * two.y;
          }
        }
      }
    }
    Settle(acc);
    uint32_t before = 0;   // barrier of the stage whose products are under way
    for (int i = 0; i < tile.iterations; ++i, next_stage()) {
      Wait(full + 8 * stage, parity);
      const uint32_t a = base + stage * kStageBytes, b = diagonal ? a : a + 2 * kBoxBytes;
      const uint64_t upper = DescriptorOf(a, false), lower = DescriptorOf(a + kBoxBytes, false), right = DescriptorOf(b, kAcross);
      BeginBoxes();
#pragma unroll
      for (int k = 0; k < kMuonDepth / 16; ++k) {
        const uint64_t r = right + StepOfK(k, kAcross);
        MultiplyBoxes<T, kAcross>(acc[0], upper + StepOfK(k, false), r, true);
        MultiplyBoxes<T, kAcross>(acc[1], lower + StepOfK(k, false), r, true);
      }
      CommitBoxes();
      WaitForBoxes<1>();
      if (i > 0 && lane == 0) Arrive(before);
      before = empty + 8 * stage;
    }
    WaitForBoxes<0>();
    Settle(acc);
    if (lane == 0) Arrive(before);

    constexpr float kScale = kPhase == MuonPhase::kPolynomial ? float(kMuonC) : 1.0f;
    const CUtensorMap* const out = maps + 3 * tile.group + 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = tile.row + h * kBoxSide;
#pragma unroll
      for (int across = 0; across < (kSymmetric ? 2 : 1); ++across) {
        if (across != 0 && diagonal) continue;
        if (leads) WaitForReadsOfStores();
        meet();
#pragma unroll
        for (int j = 0; j < 16; j += 2) {
          uint32_t r[4];
#pragma unroll
          for (int w = 0; w < 4; ++w) {
            const float(&c)[4] = acc[h][j + (w >> 1)];
            r[w] = PackPair<T>(kScale * c[2 * (w & 1)], kScale * c[2 * (w & 1) + 1]);
          }
          if (across == 0) StoreMatrices(staging + PieceOf(row_of_warp, j), r);
          else StoreMatrices<true>(staging + PieceAcross(8 * j, row_of_warp >> 3), r);
        }
        WritesForCopies();
        meet();
        if (!leads) continue;
#pragma unroll
        for (int box = 0; box < 2; ++box) {
          const int along = tile.column + box * kBoxSide;
          StoreBox(out, staging + box * kBoxBytes, across == 0 ? along : row, across == 0 ? row : along, tile.matrix);
        }
        CommitStores();
      }
    }
  }
  if (leads) WaitForStores();
#endif
}

}  // namespace hierad::kernels::muon
