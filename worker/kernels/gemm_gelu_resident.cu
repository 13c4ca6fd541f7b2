// Products with GELU or its backward in their epilogue for long, thin operands (m far above n and k), where bytes are the bound.
// A block keeps its 128 columns of the weights in shared memory and goes through rows; three warpgroups take tiles of 64 rows
// each on their own, so that one's products, another's arithmetic and a third's memory go on at once, with no barrier between them.
//
// Nothing but the weights passes shared memory. The order of k within a product and of its columns is free, as long as both
// operands agree: k goes in such an order that a thread's part of A for 32 k is 16 bytes of one row, and columns in such an
// order that its part of 32 columns of the result is 16 bytes of one row. So A is read, and h, dh and g are read and written,
// straight between registers and memory, 64 bytes of a row by each quad of threads.
#include <algorithm>

#include "base/plan/step_values.h"
#include "worker/kernels/device.cuh"
#include "worker/kernels/gelu.cuh"
#include "worker/kernels/gemm_gelu_tiles.h"

namespace hierad::kernels {
namespace {

constexpr int kColumns = 128, kRows = 64, kGroups = 3, kThreads = kGroups * 128;
constexpr int kBlockBytes = kColumns * 128;   // of 64 k, in rows of 128 bytes whose 16-byte pieces are exchanged by row % 8

struct Arguments {
  int m, n;
  const bf16 *a, *w;
  const float* bias;   // forward
  bf16 *h, *g, *dh;    // dh: backward
  float* parts;        // backward
  int num_parts;
};

__device__ inline uint4 Load16(const bf16* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
__device__ inline void Store16(bf16* p, const uint32_t (&v)[4]) { *reinterpret_cast<uint4*>(p) = make_uint4(v[0], v[1], v[2], v[3]); }

// acc[64 x 128] (+)= a[64 x 16] b[128 x 16]^T by a warpgroup, a in registers as of m16n8k16 (mma.cuh), b by its descriptor.
__device__ inline void Multiply(float (&acc)[64], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b, bool add) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
               "}, {%64, %65, %66, %67}, %68, p, 1, 1, 0;\n}\n"
               : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]), "+f"(acc[6]), "+f"(acc[7]),
                 "+f"(acc[8]), "+f"(acc[9]), "+f"(acc[10]), "+f"(acc[11]), "+f"(acc[12]), "+f"(acc[13]), "+f"(acc[14]), "+f"(acc[15]),
                 "+f"(acc[16]), "+f"(acc[17]), "+f"(acc[18]), "+f"(acc[19]), "+f"(acc[20]), "+f"(acc[21]), "+f"(acc[22]), "+f"(acc[23]),
                 "+f"(acc[24]), "+f"(acc[25]), "+f"(acc[26]), "+f"(acc[27]), "+f"(acc[28]), "+f"(acc[29]), "+f"(acc[30]), "+f"(acc[31]),
                 "+f"(acc[32]), "+f"(acc[33]), "+f"(acc[34]), "+f"(acc[35]), "+f"(acc[36]), "+f"(acc[37]), "+f"(acc[38]), "+f"(acc[39]),
                 "+f"(acc[40]), "+f"(acc[41]), "+f"(acc[42]), "+f"(acc[43]), "+f"(acc[44]), "+f"(acc[45]), "+f"(acc[46]), "+f"(acc[47]),
                 "+f"(acc[48]), "+f"(acc[49]), "+f"(acc[50]), "+f"(acc[51]), "+f"(acc[52]), "+f"(acc[53]), "+f"(acc[54]), "+f"(acc[55]),
                 "+f"(acc[56]), "+f"(acc[57]), "+f"(acc[58]), "+f"(acc[59]), "+f"(acc[60]), "+f"(acc[61]), "+f"(acc[62]), "+f"(acc[63])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(int(add)));
}
__device__ inline void BeginProducts() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void EndProducts() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most kPending groups are under way.
template <int kPending>
__device__ inline void WaitForProducts() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory"); }

// Where the word of k pair (16 step + 8 i + 2 q, + 1) of physical column `column` lies.
__device__ inline int WordOffset(int column, int step, int i, int q) {
  return (step >> 2) * kBlockBytes + column * 128 + ((((step & 3) * 2 + i) ^ (column & 7)) * 16) + q * 4;
}

// w[n, k] of columns n0.. into shared memory.
template <int kK>
__device__ inline void TakeWeights(const bf16* w, int n0, unsigned char* shared) {
  const int lane = threadIdx.x & 31, q = lane & 3, e = lane >> 2 & 1, quarter = lane >> 3;
  for (int item = threadIdx.x >> 5; item < kK / 2; item += kThreads / 32) {
    const int j = item & 3, group = item >> 2 & 3, k32 = item >> 4;
    const uint4 v = Load16(w + int64_t(n0 + 32 * group + 8 * quarter + 2 * j + e) * kK + 32 * k32 + 8 * q);
    const int column = 32 * group + 8 * j + 2 * quarter + e;
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      *reinterpret_cast<uint32_t*>(shared + WordOffset(column, 2 * k32 + (word >> 1), word & 1, q)) = words[word];
    }
  }
}
// The same of w[k, n], n columns a row.
template <int kK>
__device__ inline void TakeWeightsAcross(const bf16* w, int n, int n0, unsigned char* shared) {
  const int lane = threadIdx.x & 31, quarter = lane & 3, q = lane >> 2 & 3, i = lane >> 4;
  for (int item = threadIdx.x >> 5; item < kK / 4; item += kThreads / 32) {
    const int s = item & 1, group = item >> 1 & 3, k32 = item >> 3;
    const bf16* const p = w + int64_t(32 * k32 + 8 * q + 4 * s + 2 * i) * n + n0 + 32 * group + 8 * quarter;
    const uint4 even = Load16(p), odd = Load16(p + n);
    const uint32_t low[4] = {even.x, even.y, even.z, even.w}, high[4] = {odd.x, odd.y, odd.z, odd.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int column = 32 * group + 8 * j + 2 * quarter;
      *reinterpret_cast<uint32_t*>(shared + WordOffset(column, 2 * k32 + s, i, q)) = __byte_perm(low[j], high[j], 0x5410);
      *reinterpret_cast<uint32_t*>(shared + WordOffset(column + 1, 2 * k32 + s, i, q)) = __byte_perm(low[j], high[j], 0x7632);
    }
  }
}

template <int kK, bool kBackward>
__global__ __launch_bounds__(kThreads, 1) void ResidentGelu(Arguments p) {
  BeginKernel();
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kChunk = kK % 64 == 0 ? 64 : 96, kChunks = kK / kChunk, kPieces = kChunk / 32;
  constexpr int kRing = kChunks == 1 ? 1 : kBackward ? 2 : 3;   // chunks of A in registers
  static_assert(kK % kChunk == 0);
  extern __shared__ __align__(1024) unsigned char shared[];
  float* const beside = reinterpret_cast<float*>(shared + (kK + 63) / 64 * kBlockBytes);   // bias, or sums by warp
  const int slices = p.n / kColumns, n0 = int(blockIdx.x) % slices * kColumns, group = int(blockIdx.x) / slices, groups = int(gridDim.x) / slices;
  const int warpgroup = threadIdx.x >> 7, warp = threadIdx.x >> 5, lane = threadIdx.x & 31, q = lane & 3;
  if constexpr (kBackward) {
    TakeWeightsAcross<kK>(p.w, p.n, n0, shared);
  } else {
    TakeWeights<kK>(p.w, n0, shared);
    if (threadIdx.x < kColumns) beside[threadIdx.x] = p.bias[n0 + threadIdx.x];
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");   // wgmma reads what was written as usual
  __syncthreads();

  // Rows of 128 bytes, eight of them 1,024 apart, 128-byte swizzle.
  const uint64_t weights = uint64_t((uint32_t(__cvta_generic_to_shared(shared)) & 0x3FFFF) >> 4) | uint64_t(1) << 16 | uint64_t(64) << 32 | uint64_t(1) << 62;
  const int tiles = (p.m + kRows - 1) / kRows, stride = groups * kGroups;
  const int row_in_tile = (warp & 3) * 16 + (lane >> 2);
  uint4 a[kRing][kPieces][2];
  auto load = [&](uint4 (&to)[kPieces][2], int tile, int chunk) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bf16* const row = p.a + int64_t(min(tile * kRows + row_in_tile + 8 * r, p.m - 1)) * kK + chunk * kChunk + 8 * q;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) to[i][r] = Load16(row + 32 * i);
    }
  };
  float sums[kBackward ? 32 : 1] = {};
  int tile = group * kGroups + warpgroup;
  if (tile < tiles) load(a[0], tile, 0);
  for (; tile < tiles; tile += stride) {
    const int64_t first = int64_t(tile) * kRows + row_in_tile;
    const bool inside[2] = {first < p.m, first + 8 < p.m};
    const int64_t at[2] = {(inside[0] ? first : p.m - 1) * p.n + n0 + 8 * q, (inside[1] ? first + 8 : p.m - 1) * p.n + n0 + 8 * q};
    uint4 h[2][2];   // of two groups of 32 columns
    auto load_h = [&](int pair) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int r = 0; r < 2; ++r) h[i][r] = Load16(p.h + at[r] + 32 * (2 * pair + i));
      }
    };
    if constexpr (kBackward) load_h(0);
#pragma unroll
    for (int c = 1; c < kRing - 1 && c < kChunks; ++c) load(a[c], tile, c);
    float acc[64];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      BeginProducts();
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const uint4 &upper = a[c % kRing][i][0], &lower = a[c % kRing][i][1];
        const int step = (c * kPieces + i) * 2;
        const uint64_t b = weights + (step >> 2) * (kBlockBytes >> 4) + (step & 3) * 2;
        Multiply(acc, upper.x, lower.x, upper.y, lower.y, b, step > 0);
        Multiply(acc, upper.z, lower.z, upper.w, lower.w, b + 2, true);
      }
      EndProducts();
      if (c + kRing - 1 < kChunks && kRing > 1) {
        if (c > 0) WaitForProducts<1>();   // the chunk before c is done: its registers are free
        load(a[(c + kRing - 1) % kRing], tile, c + kRing - 1);
      }
    }
    WaitForProducts<0>();
#pragma unroll
    for (int i = 0; i < 64; ++i) asm volatile("" : "+f"(acc[i])::"memory");
    if (tile + stride < tiles) load(a[0], tile + stride, 0);
    if (kBackward && (tile + 1) * kRows > p.m) {   // rows behind the last add nothing
#pragma unroll
      for (int i = 0; i < 64; ++i) acc[i] = inside[i >> 1 & 1] ? acc[i] : 0.0f;
    }
#pragma unroll
    for (int part = 0; part < 4; ++part) {   // of 32 columns; acc[4 (4 part + j) + 2 r + e]: row r, column 8 q + 2 j + e
      uint32_t first_out[2][4], second_out[2][4];
      if constexpr (kBackward) {
        const uint4 upper = h[part & 1][0], lower = h[part & 1][1];
        const uint32_t words[2][4] = {{upper.x, upper.y, upper.z, upper.w}, {lower.x, lower.y, lower.z, lower.w}};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const float2 x = UnpackPair<bf16>(words[r][j]);
            const float* const d = acc + 4 * (4 * part + j) + 2 * r;
            float g[2], slope[2];
            GeluBoth<bf16>(x.x, &g[0], &slope[0]);
            GeluBoth<bf16>(x.y, &g[1], &slope[1]);
            const float low = d[0] * slope[0], high = d[1] * slope[1];
            sums[8 * part + 2 * j] += low, sums[8 * part + 2 * j + 1] += high;
            first_out[r][j] = PackPair<bf16>(low, high), second_out[r][j] = PackPair<bf16>(g[0], g[1]);
          }
        }
        if (part == 1) load_h(1);
      } else {
        const float4 bias[2] = {*reinterpret_cast<const float4*>(beside + 32 * part + 8 * q), *reinterpret_cast<const float4*>(beside + 32 * part + 8 * q + 4)};
        const float b[8] = {bias[0].x, bias[0].y, bias[0].z, bias[0].w, bias[1].x, bias[1].y, bias[1].z, bias[1].w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const float* const d = acc + 4 * (4 * part + j) + 2 * r;
            first_out[r][j] = PackPair<bf16>(d[0] + b[2 * j], d[1] + b[2 * j + 1]);
            const float2 x = UnpackPair<bf16>(first_out[r][j]);
            second_out[r][j] = PackPair<bf16>(FastGelu(x.x), FastGelu(x.y));
          }
        }
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (!inside[r]) continue;
        Store16((kBackward ? p.dh : p.h) + at[r] + 32 * part, first_out[r]);
        Store16(p.g + at[r] + 32 * part, second_out[r]);
      }
    }
  }
  if constexpr (kBackward) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
#pragma unroll
      for (int across = 4; across < 32; across <<= 1) sums[i] += __shfl_xor_sync(~0u, sums[i], across);
      if (lane < 4) beside[warp * kColumns + 32 * (i >> 3) + 8 * q + (i & 7)] = sums[i];
    }
    __syncthreads();
    if (threadIdx.x < kColumns) {
      float sum = 0;
      for (int w = 0; w < kThreads / 32; ++w) sum += beside[w * kColumns + threadIdx.x];
      for (int part = group; part < p.num_parts; part += groups) {   // one part a group of rows; the others are empty
        p.parts[int64_t(part) * p.n + n0 + threadIdx.x] = part == group ? sum : 0.0f;
      }
    }
  }
#endif
}

template <int kK, bool kBackward>
cudaError_t RunResident(const Arguments& p, int sm_count, cudaStream_t stream) {
  constexpr int kShared = (kK + 63) / 64 * kBlockBytes + (kBackward ? kThreads / 32 : 1) * kColumns * int(sizeof(float));
  const auto kernel = ResidentGelu<kK, kBackward>;
  if (const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared); e != cudaSuccess) return e;
  const int slices = p.n / kColumns, tiles = (p.m + kRows - 1) / kRows;
  const int groups = std::max(1, std::min(sm_count / slices, (tiles + kGroups - 1) / kGroups));
  return Launch(kernel, dim3(unsigned(slices * groups)), dim3(kThreads), kShared, stream, p);
}

template <bool kBackward>
cudaError_t RunByWidth(const Arguments& p, int64_t k, int sm_count, cudaStream_t stream) {
  if (p.n % kColumns != 0) return cudaErrorInvalidValue;
  switch (k) {
    case 96: return RunResident<96, kBackward>(p, sm_count, stream);
    case 192: return RunResident<192, kBackward>(p, sm_count, stream);
    case 384: return RunResident<384, kBackward>(p, sm_count, stream);
    case 512: return RunResident<512, kBackward>(p, sm_count, stream);
    case 768: return RunResident<768, kBackward>(p, sm_count, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t GemmGeluResident(const GemmGeluForward& p, int sm_count, cudaStream_t stream) {
  const Arguments arguments{int(p.m), int(p.n), static_cast<const bf16*>(p.a), static_cast<const bf16*>(p.w), p.bias,
                            static_cast<bf16*>(p.h), static_cast<bf16*>(p.g), nullptr, nullptr, 0};
  return RunByWidth<false>(arguments, p.k, sm_count, stream);
}
cudaError_t GemmGeluBackwardResident(const GemmGeluBackward& p, int sm_count, cudaStream_t stream) {
  const Arguments arguments{int(p.m), int(p.n), static_cast<const bf16*>(p.dy), static_cast<const bf16*>(p.w), nullptr,
                            const_cast<bf16*>(static_cast<const bf16*>(p.h)), static_cast<bf16*>(p.g), static_cast<bf16*>(p.dh), p.parts,
                            int((p.m + kGeluPartRows - 1) / kGeluPartRows)};
  return RunByWidth<true>(arguments, p.k, sm_count, stream);
}

}  // namespace hierad::kernels
