// Matrix products of a warpgroup (wgmma, sm_90a alone): four warps multiply 64 rows at once, operands read from shared memory
// by the tensor cores themselves, at the full rate that mma.sync does not reach. On other cards the functions are empty, and
// nothing that calls them is launched.
//
// Arrays in shared memory are panels of 32 columns, [rows][32] each one behind the other, whose 16-byte pieces are swizzled over
// 64 bytes; so one descriptor serves an array as it is ([m or n][k]) and transposed ([k][n]).
#pragma once

#include "worker/kernels/attention_device.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900 && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "Cards of capability 9.0 need the code of 90a."
#endif

namespace hierad::kernels::attention {

constexpr int kPanel = 32;   // columns
constexpr int kGroupRows = 64, kGroupThreads = 128;   // of a warpgroup

// Panels hold head dims in multiples of 32.
__host__ __device__ constexpr int PanelColumns(int head_dim) { return (head_dim + kPanel - 1) / kPanel * kPanel; }

// Element of a 16-byte piece; `column` is a multiple of 8, `rows` the rows of a panel (a multiple of 8).
__device__ inline int PanelOffset(int rows, int row, int column) {
  return (column / kPanel * rows + row) * kPanel + ((((column >> 3) & 3) ^ ((row >> 1) & 3)) << 3);
}

// CopyRows into panels.
template <int DP, typename T>
__device__ void CopyPanels(const Unit& u, const T* from, int which, int first, int rows, T* to, int thread, int threads) {
  const int count = (which < 0 ? u.queries : u.keys) - first, stride = which < 0 ? u.out_stride : u.qkv_stride;
  const T* row0 = from + (which < 0 ? u.Out(first) : u.Qkv(first, which));
  EachPieceOfRows<DP>(rows, thread, threads, [&](int row, int column) {
    const bool there = row < count && column < u.head_dim;
    CopyAsync(to + PanelOffset(rows, row, column), there ? row0 + int64_t(row) * stride + column : from, there);
  });
}

// K and V at once: `v` lies behind `k`, in panels too.
template <int DP, typename T>
__device__ void CopyKeyPanels(const Unit& u, const T* qkv, int first, int rows, T* k, int thread, int threads) {
  const int count = u.keys - first;
  const T* row0 = qkv + u.Qkv(first, 1);
  EachPieceOfRows<DP>(rows, thread, threads, [&](int row, int column) {
    const bool there = row < count && column < u.head_dim;
    const T* from = there ? row0 + int64_t(row) * u.qkv_stride + column : qkv;
    T* to = k + PanelOffset(rows, row, column);
    CopyAsync(to, from, there);
    CopyAsync(to + rows * DP, from + u.width, there);
  });
}

// What a wgmma needs of an array: start, panels' distance, and 512 bytes from eight rows to the next eight. Offsets of rows
// (a multiple of 8) and of 16 columns are added to it.
struct Descriptor {
  uint32_t start;
  template <typename T>
  __device__ Descriptor(const T* panels, int rows)
      : start((SharedAddress(panels) & 0x3FFFF) >> 4 | uint32_t(rows * kPanel * kElementBytes >> 4) << 16) {}
  __device__ explicit Descriptor(uint32_t from) : start(from) {}
  __device__ Descriptor operator+(uint32_t by) const { return Descriptor(start + by); }
  __device__ uint64_t word() const { return uint64_t(start) | uint64_t(512 >> 4 | 2u << 30) << 32; }
};
__device__ inline uint32_t AtRow(int row) { return uint32_t(row * kPanel * kElementBytes >> 4); }
__device__ inline uint32_t AtColumns(int rows, int sixteen) { return uint32_t(((sixteen >> 1) * rows * kPanel * kElementBytes >> 4) + (sixteen & 1) * 2); }

// The A operand of this warp's 16 rows in registers, straight from global memory, `row0` its first; zeros beyond `count` rows
// and head_dim.
template <int DP, typename T>
__device__ void LoadFragments(uint32_t (&a)[DP / 16][4], const T* row0, int stride, int count, int head_dim) {
  const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
#pragma unroll
  for (int kc = 0; kc < DP / 16; ++kc) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = g + (i & 1) * 8, column = kc * 16 + (i >> 1) * 8 + 2 * t;
      a[kc][i] = row < count && column < head_dim ? __ldg(reinterpret_cast<const unsigned*>(row0 + int64_t(row) * stride + column)) : 0;
    }
  }
}

// Shared memory that other threads' copies wrote is seen by wgmma behind this and a barrier.
__device__ inline void CopiesForWarpgroups() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
__device__ inline void BeginProducts() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
__device__ inline void CommitProducts() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
// Waits until at most `kPending` of the newest groups are under way.
template <int kPending>
__device__ inline void WaitProducts() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#endif
}
// Behind a wait: the compiler must not take earlier what the products wrote.
template <int kCount>
__device__ inline void Arrived(float (&c)[kCount][4]) {
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(c[j][e])::"memory");
  }
}

#define HIERAD_LIST8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define HIERAD_LIST16 HIERAD_LIST8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define HIERAD_LIST32 HIERAD_LIST16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define HIERAD_LIST40 HIERAD_LIST32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define HIERAD_LIST48 HIERAD_LIST40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define HIERAD_LIST64 HIERAD_LIST48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define HIERAD_SUMS1(j) "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3])
#define HIERAD_SUMS2(j) HIERAD_SUMS1(j), HIERAD_SUMS1(j + 1)
#define HIERAD_SUMS4(j) HIERAD_SUMS2(j), HIERAD_SUMS2(j + 2)
#define HIERAD_SUMS8(j) HIERAD_SUMS4(j), HIERAD_SUMS4(j + 4)
#define HIERAD_SUMS10(j) HIERAD_SUMS8(j), HIERAD_SUMS2(j + 8)
#define HIERAD_SUMS12(j) HIERAD_SUMS8(j), HIERAD_SUMS4(j + 8)
#define HIERAD_SUMS16(j) HIERAD_SUMS8(j), HIERAD_SUMS8(j + 8)
// A in registers; a, b, add and transposition are the operands behind the sums.
#define HIERAD_ROWS_PRODUCT(N, TYPE, LIST, A, B, ADD, TRANSPOSED, SUMS)                                                             \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, " ADD ", 0; wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" LIST \
               "}, {" A "}, " B ", p, 1, 1, " TRANSPOSED "; }"                                                                      \
               : SUMS                                                                                                               \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)), "n"(int(kTransposed)))
#define HIERAD_SHARED_PRODUCT(N, TYPE, LIST, A, B, ADD, TRANSPOSED_A, TRANSPOSED, SUMS)                                             \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, " ADD ", 0; wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" LIST \
               "}, " A ", " B ", p, 1, 1, " TRANSPOSED_A ", " TRANSPOSED "; }"                                                      \
               : SUMS                                                                                                               \
               : "l"(a), "l"(b), "r"(int(add)), "n"(int(kTransposedA)), "n"(int(kTransposed)))

template <typename T>
constexpr bool kIsHalf = std::is_same_v<T, half>;

// c[64 x N] (+)= a b, `a` this warp's rows of A; b [n][k], or with kTransposed [k][n].
template <typename T, bool kTransposed, int kTiles>
__device__ inline void GroupProduct(float (&c)[kTiles][4], const uint32_t (&a)[4], Descriptor from, bool add) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  const uint64_t b = from.word();
  if constexpr (kTiles == 2) {
    if constexpr (kIsHalf<T>) HIERAD_ROWS_PRODUCT("16", "f16", HIERAD_LIST8, "%8,%9,%10,%11", "%12", "%13", "%14", HIERAD_SUMS2(0));
    else HIERAD_ROWS_PRODUCT("16", "bf16", HIERAD_LIST8, "%8,%9,%10,%11", "%12", "%13", "%14", HIERAD_SUMS2(0));
  } else if constexpr (kTiles == 4) {
    if constexpr (kIsHalf<T>) HIERAD_ROWS_PRODUCT("32", "f16", HIERAD_LIST16, "%16,%17,%18,%19", "%20", "%21", "%22", HIERAD_SUMS4(0));
    else HIERAD_ROWS_PRODUCT("32", "bf16", HIERAD_LIST16, "%16,%17,%18,%19", "%20", "%21", "%22", HIERAD_SUMS4(0));
  } else if constexpr (kTiles == 8) {
    if constexpr (kIsHalf<T>) HIERAD_ROWS_PRODUCT("64", "f16", HIERAD_LIST32, "%32,%33,%34,%35", "%36", "%37", "%38", HIERAD_SUMS8(0));
    else HIERAD_ROWS_PRODUCT("64", "bf16", HIERAD_LIST32, "%32,%33,%34,%35", "%36", "%37", "%38", HIERAD_SUMS8(0));
  } else if constexpr (kTiles == 10) {
    if constexpr (kIsHalf<T>) HIERAD_ROWS_PRODUCT("80", "f16", HIERAD_LIST40, "%40,%41,%42,%43", "%44", "%45", "%46", HIERAD_SUMS10(0));
    else HIERAD_ROWS_PRODUCT("80", "bf16", HIERAD_LIST40, "%40,%41,%42,%43", "%44", "%45", "%46", HIERAD_SUMS10(0));
  } else if constexpr (kTiles == 12) {
    if constexpr (kIsHalf<T>) HIERAD_ROWS_PRODUCT("96", "f16", HIERAD_LIST48, "%48,%49,%50,%51", "%52", "%53", "%54", HIERAD_SUMS12(0));
    else HIERAD_ROWS_PRODUCT("96", "bf16", HIERAD_LIST48, "%48,%49,%50,%51", "%52", "%53", "%54", HIERAD_SUMS12(0));
  } else {
    static_assert(kTiles == 16);
    if constexpr (kIsHalf<T>) HIERAD_ROWS_PRODUCT("128", "f16", HIERAD_LIST64, "%64,%65,%66,%67", "%68", "%69", "%70", HIERAD_SUMS16(0));
    else HIERAD_ROWS_PRODUCT("128", "bf16", HIERAD_LIST64, "%64,%65,%66,%67", "%68", "%69", "%70", HIERAD_SUMS16(0));
  }
#endif
}

// The same with A in shared memory, [m][k], or with kTransposedA [k][m].
template <typename T, bool kTransposed, bool kTransposedA = false, int kTiles>
__device__ inline void GroupProduct(float (&c)[kTiles][4], Descriptor rows, Descriptor from, bool add) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  const uint64_t a = rows.word(), b = from.word();
  if constexpr (kTiles == 2) {
    if constexpr (kIsHalf<T>) HIERAD_SHARED_PRODUCT("16", "f16", HIERAD_LIST8, "%8", "%9", "%10", "%11", "%12", HIERAD_SUMS2(0));
    else HIERAD_SHARED_PRODUCT("16", "bf16", HIERAD_LIST8, "%8", "%9", "%10", "%11", "%12", HIERAD_SUMS2(0));
  } else if constexpr (kTiles == 4) {
    if constexpr (kIsHalf<T>) HIERAD_SHARED_PRODUCT("32", "f16", HIERAD_LIST16, "%16", "%17", "%18", "%19", "%20", HIERAD_SUMS4(0));
    else HIERAD_SHARED_PRODUCT("32", "bf16", HIERAD_LIST16, "%16", "%17", "%18", "%19", "%20", HIERAD_SUMS4(0));
  } else if constexpr (kTiles == 8) {
    if constexpr (kIsHalf<T>) HIERAD_SHARED_PRODUCT("64", "f16", HIERAD_LIST32, "%32", "%33", "%34", "%35", "%36", HIERAD_SUMS8(0));
    else HIERAD_SHARED_PRODUCT("64", "bf16", HIERAD_LIST32, "%32", "%33", "%34", "%35", "%36", HIERAD_SUMS8(0));
  } else if constexpr (kTiles == 10) {
    if constexpr (kIsHalf<T>) HIERAD_SHARED_PRODUCT("80", "f16", HIERAD_LIST40, "%40", "%41", "%42", "%43", "%44", HIERAD_SUMS10(0));
    else HIERAD_SHARED_PRODUCT("80", "bf16", HIERAD_LIST40, "%40", "%41", "%42", "%43", "%44", HIERAD_SUMS10(0));
  } else {
    static_assert(kTiles == 12);
    if constexpr (kIsHalf<T>) HIERAD_SHARED_PRODUCT("96", "f16", HIERAD_LIST48, "%48", "%49", "%50", "%51", "%52", HIERAD_SUMS12(0));
    else HIERAD_SHARED_PRODUCT("96", "bf16", HIERAD_LIST48, "%48", "%49", "%50", "%51", "%52", HIERAD_SUMS12(0));
  }
#endif
}

#undef HIERAD_LIST8
#undef HIERAD_LIST16
#undef HIERAD_LIST32
#undef HIERAD_LIST40
#undef HIERAD_LIST48
#undef HIERAD_LIST64
#undef HIERAD_SUMS1
#undef HIERAD_SUMS2
#undef HIERAD_SUMS4
#undef HIERAD_SUMS8
#undef HIERAD_SUMS10
#undef HIERAD_SUMS12
#undef HIERAD_SUMS16
#undef HIERAD_ROWS_PRODUCT
#undef HIERAD_SHARED_PRODUCT

// Warpgroups a block, 1 to `most`: the number with which the most work at a time, given what a multiprocessor holds at `registers`
// a thread and what lies beyond the last row; of equals the larger, since each block reads the other side anew.
inline int WarpgroupsFor(int rows, int registers, int most) {
  const int held = WarpsHeld(registers) / 4, needed = (rows + kGroupRows - 1) / kGroupRows;
  int best = 1;
  double best_working = 0;
  for (int groups = 1; groups <= std::min(most, held); ++groups) {
    const double working = double(held / groups * groups) * needed / RoundUp(needed, groups);
    if (working >= best_working) best = groups, best_working = working;
  }
  return best;
}

}  // namespace hierad::kernels::attention
