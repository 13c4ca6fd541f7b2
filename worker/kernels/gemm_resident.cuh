// Products of long, thin operands (m far above n and k), where bytes are the bound, on cards of capability 9.0.
// A block keeps its columns of the weights in shared memory and goes through rows; its warpgroups take tiles of 64 rows each on
// their own, so that one's products, another's arithmetic and both's memory go on at once, with no barrier between them. What
// a tile needs of A is on its way to registers while the tile before is in its epilogue.
//
// Nothing but the weights passes shared memory. The order of k within a product and of its columns is free, as long as both
// operands agree: k goes in such an order that a thread's part of A for 32 k is 16 bytes of one row, and columns in such an
// order that its part of 32 columns of the result is 16 bytes of one row. So A is read, and results are written, straight between
// registers and memory, 64 bytes of a row by each quad of threads.
#pragma once

#include <algorithm>
#include <type_traits>

#include "worker/kernels/device.cuh"

namespace hierad::kernels::resident {

constexpr int kRows = 64;

// c[m, n] = a[m, k] w[n, k]^T + bias[n], of element type T.
struct Arguments {
  int m, n;
  const void *a, *w, *bias;
  void* c;
};

__device__ inline uint4 Load16(const void* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
__device__ inline void Store16(void* p, const uint32_t (&v)[4]) { *reinterpret_cast<uint4*>(p) = make_uint4(v[0], v[1], v[2], v[3]); }

#define HIERAD_WGMMA_96(type) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %53, 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n96k16.f32." type "." type " {" \
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
               "}, {%48, %49, %50, %51}, %52, p, 1, 1, 0;\n}\n" \
               : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]), "+f"(acc[6]), "+f"(acc[7]), \
                 "+f"(acc[8]), "+f"(acc[9]), "+f"(acc[10]), "+f"(acc[11]), "+f"(acc[12]), "+f"(acc[13]), "+f"(acc[14]), "+f"(acc[15]), \
                 "+f"(acc[16]), "+f"(acc[17]), "+f"(acc[18]), "+f"(acc[19]), "+f"(acc[20]), "+f"(acc[21]), "+f"(acc[22]), "+f"(acc[23]), \
                 "+f"(acc[24]), "+f"(acc[25]), "+f"(acc[26]), "+f"(acc[27]), "+f"(acc[28]), "+f"(acc[29]), "+f"(acc[30]), "+f"(acc[31]), \
                 "+f"(acc[32]), "+f"(acc[33]), "+f"(acc[34]), "+f"(acc[35]), "+f"(acc[36]), "+f"(acc[37]), "+f"(acc[38]), "+f"(acc[39]), \
                 "+f"(acc[40]), "+f"(acc[41]), "+f"(acc[42]), "+f"(acc[43]), "+f"(acc[44]), "+f"(acc[45]), "+f"(acc[46]), "+f"(acc[47]) \
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(int(add)))
// acc[64 x 96] (+)= a[64 x 16] b[96 x 16]^T by a warpgroup, a in registers as of m16n8k16 (mma.cuh), b by its descriptor.
template <typename T>
__device__ inline void Multiply(float (&acc)[48], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b, bool add) {
  if constexpr (std::is_same_v<T, half>) HIERAD_WGMMA_96("f16");
  else HIERAD_WGMMA_96("bf16");
}
#undef HIERAD_WGMMA_96
__device__ inline void BeginProducts() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void EndProducts() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most kPending groups are under way.
template <int kPending>
__device__ inline void WaitForProducts() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory"); }

// The weights of kColumns columns in shared memory: blocks of 64 k, rows of 128 bytes whose 16-byte pieces are exchanged by row % 8.
template <int kColumns, int kK, int kWarps>
struct Weights {
  static constexpr int kBlockBytes = kColumns * 128, kBytes = (kK + 63) / 64 * kBlockBytes, kParts = kColumns / 32;

  // Where the k pair (16 step + 8 i + 2 q, + 1) of a column lies, in the products' order.
  __device__ static int At(int column, int step, int i, int q) {
    return (step >> 2) * kBlockBytes + column * 128 + ((((step & 3) * 2 + i) ^ (column & 7)) * 16) + q * 4;
  }
  // From w[n, kK], columns n0 and on.
  __device__ static void Take(const uint16_t* w, int n0, unsigned char* shared) {
    const int lane = threadIdx.x & 31, q = lane & 3, e = lane >> 2 & 1, quarter = lane >> 3;
    constexpr int kItems = kParts * (kK / 8), kAtOnce = 4;
    for (int item = threadIdx.x >> 5; item < kItems; item += kAtOnce * kWarps) {
      uint4 v[kAtOnce];
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        const int i = item + u * kWarps, j = i & 3, part = (i >> 2) % kParts, k32 = (i >> 2) / kParts;
        if (i < kItems) v[u] = Load16(w + int64_t(n0 + 32 * part + 8 * quarter + 2 * j + e) * kK + 32 * k32 + 8 * q);
      }
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        const int i = item + u * kWarps, j = i & 3, part = (i >> 2) % kParts, k32 = (i >> 2) / kParts;
        if (i >= kItems) break;
        const int column = 32 * part + 8 * j + 2 * quarter + e;
        const uint32_t words[4] = {v[u].x, v[u].y, v[u].z, v[u].w};
#pragma unroll
        for (int word = 0; word < 4; ++word) *reinterpret_cast<uint32_t*>(shared + At(column, 2 * k32 + (word >> 1), word & 1, q)) = words[word];
      }
    }
  }
};

// Warpgroups a block: as many as have registers for the accumulator and for A.
template <int kK>
constexpr int kGroupsFor = kK <= 96 ? 3 : 2;

template <typename T, int kColumns, int kK>
__global__ __launch_bounds__(kGroupsFor<kK> * 128, 1) void Product(Arguments p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kGroups = kGroupsFor<kK>, kThreads = kGroups * 128;
  using W = Weights<kColumns, kK, kThreads / 32>;
  constexpr int kChunk = kK % 64 == 0 ? 64 : 96, kChunks = kK / kChunk, kPieces = kChunk / 32;
  constexpr int kMost = 448 / kChunk, kRing = kChunks < kMost ? kChunks : kMost;   // chunks of A in registers
  static_assert(kK % kChunk == 0 && kColumns % 32 == 0);
  extern __shared__ __align__(1024) unsigned char shared[];
  float* const shared_bias = reinterpret_cast<float*>(shared + W::kBytes);
  const int slices = p.n / kColumns, n0 = int(blockIdx.x) % slices * kColumns, group = int(blockIdx.x) / slices, groups = int(gridDim.x) / slices;
  const int warpgroup = threadIdx.x >> 7, warp = threadIdx.x >> 5, lane = threadIdx.x & 31, q = lane & 3;
  W::Take(static_cast<const uint16_t*>(p.w), n0, shared);
  if (threadIdx.x < kColumns) shared_bias[threadIdx.x] = ToFloat(static_cast<const T*>(p.bias)[n0 + threadIdx.x]);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");   // wgmma reads what was written as usual
  __syncthreads();

  // Eight rows 1,024 bytes apart, exchanged in 128 bytes.
  const uint64_t weights = uint64_t((uint32_t(__cvta_generic_to_shared(shared)) & 0x3FFFF) >> 4) | uint64_t(1) << 16 | uint64_t(64) << 32 | uint64_t(1) << 62;
  const int tiles = (p.m + kRows - 1) / kRows, stride = groups * kGroups;
  const int row_in_tile = (warp & 3) * 16 + (lane >> 2);
  uint4 a[kRing][kPieces][2];
  auto load = [&](int tile, int chunk) {
    uint4 (&to)[kPieces][2] = a[chunk % kRing];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const T* const row = static_cast<const T*>(p.a) + int64_t(min(tile * kRows + row_in_tile + 8 * r, p.m - 1)) * kK + chunk * kChunk + 8 * q;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) to[i][r] = Load16(row + 32 * i);
    }
  };
  int tile = group * kGroups + warpgroup;
  auto load_first = [&](int tile) {
#pragma unroll
    for (int c = 0; c < kRing; ++c) load(tile, c);
  };
  if (tile < tiles) load_first(tile);
  for (; tile < tiles; tile += stride) {
    const int64_t first = int64_t(tile) * kRows + row_in_tile;
    const bool inside[2] = {first < p.m, first + 8 < p.m};
    const int64_t at[2] = {(inside[0] ? first : p.m - 1) * p.n + n0 + 8 * q, (inside[1] ? first + 8 : p.m - 1) * p.n + n0 + 8 * q};
    float acc[kColumns / 2];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      BeginProducts();
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const uint4 &upper = a[c % kRing][i][0], &lower = a[c % kRing][i][1];
        const int step = (c * kPieces + i) * 2;
        const uint64_t b = weights + (step >> 2) * (W::kBlockBytes >> 4) + (step & 3) * 2;
        Multiply<T>(acc, upper.x, lower.x, upper.y, lower.y, b, step > 0);
        Multiply<T>(acc, upper.z, lower.z, upper.w, lower.w, b + 2, true);
      }
      EndProducts();
      if (c > 0 && c + kRing - 1 < kChunks) {
        WaitForProducts<1>();   // the chunk before c is done: its registers are free
        load(tile, c + kRing - 1);
      }
    }
    WaitForProducts<0>();
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) asm volatile("" : "+f"(acc[i])::"memory");
    if (tile + stride < tiles) load_first(tile + stride);
#pragma unroll
    for (int part = 0; part < W::kParts; ++part) {   // of 32 columns; acc[4 (4 part + j) + 2 r + e]: row r, column 8 q + 2 j + e
      uint32_t c[2][4];
      float bias[8];
#pragma unroll
      for (int i = 0; i < 8; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(shared_bias + 32 * part + 8 * q + i);
        bias[i] = four.x, bias[i + 1] = four.y, bias[i + 2] = four.z, bias[i + 3] = four.w;
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float low = acc[4 * (4 * part + j) + 2 * r], high = acc[4 * (4 * part + j) + 2 * r + 1];
          c[r][j] = PackPair<T>(low + bias[2 * j], high + bias[2 * j + 1]);
        }
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (inside[r]) Store16(static_cast<T*>(p.c) + at[r] + 32 * part, c[r]);
      }
    }
  }
#endif
}

template <typename T, int kColumns, int kK>
cudaError_t Run(const Arguments& p, int sm_count, cudaStream_t stream) {
  constexpr int kGroups = kGroupsFor<kK>, kThreads = kGroups * 128;
  constexpr int kShared = Weights<kColumns, kK, kThreads / 32>::kBytes + kColumns * int(sizeof(float));
  static_assert(kShared <= 227 << 10);
  const auto kernel = Product<T, kColumns, kK>;
  if (const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared); e != cudaSuccess) return e;
  const int slices = p.n / kColumns, tiles = (p.m + kRows - 1) / kRows;
  const int groups = std::max(1, std::min(sm_count / slices, (tiles + kGroups - 1) / kGroups));
  return Launch(kernel, dim3(unsigned(slices * groups)), dim3(kThreads), kShared, stream, p);
}

}  // namespace hierad::kernels::resident
