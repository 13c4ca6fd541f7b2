// What kernels of capability 9.0 have instead of loads and mma.sync: copies of whole boxes of a matrix between global and shared memory by
// one thread's order (bulk tensor copies), the barriers in shared memory that they report to, and products of a warpgroup (wgmma).
//
// A box is 64 x 64 values of two bytes: rows of 128 bytes whose 16-byte pieces are exchanged by row % 8. So wgmma reads it as it is
// ([m or n][k]) and across ([k][n]), and 8 x 8 matrices go between it and registers without a bank conflict.
#pragma once

#include <cuda.h>

#include <type_traits>

#include "worker/kernels/device.cuh"

namespace hierad::kernels {

constexpr int kBoxSide = 64, kBoxBytes = kBoxSide * kBoxSide * 2;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Barriers, by their address in shared memory. A phase is over when `count` have arrived and all expected bytes are there; parity is that
// of the phase waited for, 0 first.
__device__ inline void InitBarrier(uint32_t barrier, int count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory"); }
// Behind the inits, before a __syncthreads().
__device__ inline void BarriersForCopies() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ inline void Arrive(uint32_t barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory"); }
__device__ inline void ArriveExpecting(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ inline void Wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{ .reg .pred p;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra done;\n"
      "bra again;\n"
      "done: }" ::"r"(barrier), "r"(parity) : "memory");
}

// From column x, row y of matrix z; zeros where the matrix ends. A box counts with all its bytes.
__device__ inline void LoadBox(uint32_t to, const CUtensorMap* from, int x, int y, int z, uint32_t barrier) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to), "l"(from),
               "r"(x), "r"(y), "r"(z), "r"(barrier)
               : "memory");
}
// The part of a box that is inside the matrix.
__device__ inline void StoreBox(const CUtensorMap* to, uint32_t from, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(to), "r"(x), "r"(y), "r"(z), "r"(from) : "memory");
}
__device__ inline void CommitStores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until this thread's stores have read shared memory; until they are over.
__device__ inline void WaitForReadsOfStores() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ inline void WaitForStores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// What threads wrote to shared memory is seen by copies and wgmma behind this and a barrier.
__device__ inline void WritesForCopies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ inline void LoadMatrices(uint32_t (&r)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from) : "memory");
}
template <bool kTransposed = false>
__device__ inline void StoreMatrices(uint32_t to, const uint32_t (&r)[4]) {
  if constexpr (kTransposed) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
  } else {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
  }
}

// Boxes behind one another as wgmma sees them: rows of k values, or (across) k by rows of 64 values, the next 64 in the next box.
__device__ inline uint64_t DescriptorOf(uint32_t boxes, bool across) {
  return uint64_t((boxes & 0x3FFFF) >> 4) | uint64_t(across ? kBoxBytes >> 4 : 1) << 16 | uint64_t(1024 >> 4) << 32 | uint64_t(1) << 62;
}
// What is added for the step-th 16 of k.
__device__ inline uint64_t StepOfK(int step, bool across) { return across ? step * (16 * 128 >> 4) : step * 2; }

#define HIERAD_SUMS4(i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define HIERAD_SUMS16(i) HIERAD_SUMS4(i), HIERAD_SUMS4(i + 1), HIERAD_SUMS4(i + 2), HIERAD_SUMS4(i + 3)
#define HIERAD_WGMMA(TYPE)                                                                                                                          \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE                                   \
               " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"           \
               "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, " \
               "%64, %65, p, 1, 1, 0, %67; }"                                                                                                       \
               : HIERAD_SUMS16(0), HIERAD_SUMS16(4), HIERAD_SUMS16(8), HIERAD_SUMS16(12)                                                            \
               : "l"(a), "l"(b), "r"(int(add)), "n"(int(kAcross)))
// c[64 x 128] (+)= a[64 x 16] b, by descriptors; b [n][k], or kAcross [k][n]. c[j]: columns 8 j + 2 (lane % 4) and the next, of rows
// lane / 4 and 8 more of the warp's 16.
template <typename T, bool kAcross>
__device__ inline void MultiplyBoxes(float (&c)[16][4], uint64_t a, uint64_t b, bool add) {
  if constexpr (std::is_same_v<T, half>) HIERAD_WGMMA("f16");
  else HIERAD_WGMMA("bf16");
}
#undef HIERAD_WGMMA
#undef HIERAD_SUMS16
#undef HIERAD_SUMS4
__device__ inline void BeginBoxes() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void CommitBoxes() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ inline void WaitForBoxes() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory"); }

// Place of this lane's 8 x 8 matrix among four: 16 rows from `row` on, two 16-byte pieces from `piece` on; behind the eighth piece comes the
// next box. The four words are then those of MultiplyBoxes' c[j] and c[j + 1], j = piece: word 2 i + e of c[j + i], rows e.
__device__ inline uint32_t PieceOf(int row, int piece) {
  const int lane = threadIdx.x & 31, r = row + (lane & 15), p = piece + (lane >> 4);
  return uint32_t((p >> 3) * kBoxBytes + r * 128 + (((p & 7) ^ (r & 7)) << 4));
}
#endif

}  // namespace hierad::kernels
