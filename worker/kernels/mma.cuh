// Warp-level matrix products of a 16-bit T, m16n8k16 (sm_80 and later), and the loads that feed them from shared memory.
// Fragments, with g = lane / 4 and t = lane % 4: A a0 (g, 2t) a1 (g + 8, 2t) a2 (g, 2t + 8) a3 (g + 8, 2t + 8);
// B b0 (k 2t, n g) b1 (k 2t + 8, n g); C c0 c1 (g, 2t), c2 c3 (g + 8, 2t).
#pragma once

#include <cstdint>
#include <type_traits>

#include "worker/kernels/device.cuh"

namespace hierad::kernels {

__device__ inline uint32_t SharedAddress(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

template <typename T>
__device__ inline void Mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, half>) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

__device__ inline void LoadMatrix(uint32_t (&r)[4], const void* p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(SharedAddress(p)));
}
__device__ inline void LoadMatrixTransposed(uint32_t (&r)[4], const void* p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(SharedAddress(p)));
}

// `tile` points at element (row0, column0) of a row-major array of `stride` elements a row.
// A[16 x 16] stored [m][k].
template <typename T>
__device__ inline void LoadA(uint32_t (&a)[4], const T* tile, int stride) {
  const int lane = threadIdx.x & 31, i = lane >> 3, r = lane & 7;
  LoadMatrix(a, tile + ((i & 1) * 8 + r) * stride + (i >> 1) * 8);
}
// A[16 x 16] stored [k][m].
template <typename T>
__device__ inline void LoadATransposed(uint32_t (&a)[4], const T* tile, int stride) {
  const int lane = threadIdx.x & 31, i = lane >> 3, r = lane & 7;
  LoadMatrixTransposed(a, tile + ((i >> 1) * 8 + r) * stride + (i & 1) * 8);
}
// B[16 k x 16 n] stored [n][k]: r[0], r[1] the fragment of n 0-7, r[2], r[3] of n 8-15.
template <typename T>
__device__ inline void LoadB(uint32_t (&b)[4], const T* tile, int stride) {
  const int lane = threadIdx.x & 31, i = lane >> 3, r = lane & 7;
  LoadMatrix(b, tile + ((i >> 1) * 8 + r) * stride + (i & 1) * 8);
}
// B[16 k x 16 n] stored [k][n].
template <typename T>
__device__ inline void LoadBTransposed(uint32_t (&b)[4], const T* tile, int stride) {
  const int lane = threadIdx.x & 31, i = lane >> 3, r = lane & 7;
  LoadMatrixTransposed(b, tile + ((i & 1) * 8 + r) * stride + (i >> 1) * 8);
}

// 16 bytes from global to shared memory without passing registers; zeros where `valid` is false (nothing is read).
__device__ inline void CopyAsync(void* shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(SharedAddress(shared)), "l"(global), "r"(valid ? 16 : 0));
}
// The same for 4 bytes.
__device__ inline void CopyWordAsync(void* shared, const void* global, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(SharedAddress(shared)), "l"(global), "r"(valid ? 4 : 0));
}
__device__ inline void CommitCopies() { asm volatile("cp.async.commit_group;"); }
// Waits until at most `kPending` of the newest groups are still under way.
template <int kPending>
__device__ inline void WaitCopies() { asm volatile("cp.async.wait_group %0;" ::"n"(kPending)); }

// 2^x, one instruction: relative error 2^-22, denormal results are 0.
__device__ inline float FastExp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace hierad::kernels
