// Attention inside windows, with the query max-pool of Hiera's transitions inside, forward and backward. Q, K and V are
// read in place from the qkv product, their gradients are written in place for its backward.
//   qkv [B, N, 3, H, D], N = keys * windows, token n = t * windows + w; o [B, N / q_stride, H * D]
//   lse [B, H, windows, keys / q_stride]: log of the softmax's denominator; argmax: u8, o's shape (null when q_stride is 1)
// Deterministic: no atomics, every sum in a fixed order. Device pointers, 16-byte aligned.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace hierad::kernels {

struct AttentionShape {
  int batch, windows, keys, q_stride, heads, head_dim;
  int path = 0;    // for benchmarks: 1 short, 2 whole, 3 streamed, 4 by warpgroups, 5 whole windows by warpgroups, 6 short windows by one; 0: the choice
  __host__ __device__ int queries() const { return keys / q_stride; }
  __host__ __device__ int64_t units() const { return int64_t(batch) * windows * heads; }
};

// Tensor-core kernels take head_dim <= 128, a multiple of 8.
bool HasTensorCoreAttention(const AttentionShape& shape);

cudaError_t AttentionForward(const AttentionShape& shape, const __nv_bfloat16* qkv, __nv_bfloat16* o, float* lse,
                             uint8_t* argmax, cudaStream_t stream);
cudaError_t AttentionForward(const AttentionShape& shape, const __half* qkv, __half* o, float* lse, uint8_t* argmax,
                             cudaStream_t stream);
cudaError_t AttentionForward(const AttentionShape& shape, const float* qkv, float* o, float* lse, uint8_t* argmax,
                             cudaStream_t stream);
cudaError_t AttentionForward(const AttentionShape& shape, const double* qkv, double* o, double* lse, uint8_t* argmax,
                             cudaStream_t stream);

// `scratch`: lse's size, receives sum over D of o * d_o.
cudaError_t AttentionBackward(const AttentionShape& shape, const __nv_bfloat16* qkv, const __nv_bfloat16* o,
                              const __nv_bfloat16* d_o, const float* lse, const uint8_t* argmax, __nv_bfloat16* dqkv,
                              float* scratch, cudaStream_t stream);
cudaError_t AttentionBackward(const AttentionShape& shape, const __half* qkv, const __half* o, const __half* d_o,
                              const float* lse, const uint8_t* argmax, __half* dqkv, float* scratch, cudaStream_t stream);
cudaError_t AttentionBackward(const AttentionShape& shape, const float* qkv, const float* o, const float* d_o,
                              const float* lse, const uint8_t* argmax, float* dqkv, float* scratch, cudaStream_t stream);
cudaError_t AttentionBackward(const AttentionShape& shape, const double* qkv, const double* o, const double* d_o,
                              const double* lse, const uint8_t* argmax, double* dqkv, double* scratch, cudaStream_t stream);

// The plain kernels behind the fp32 and fp64 overloads, for any head_dim; bf16 and fp16 where the tensor cores do not fit.
template <typename T, typename S>
cudaError_t PlainAttentionForward(const AttentionShape& shape, const T* qkv, T* o, S* lse, uint8_t* argmax, cudaStream_t stream);
template <typename T, typename S>
cudaError_t PlainAttentionBackward(const AttentionShape& shape, const T* qkv, const T* o, const T* d_o, const S* lse,
                                   const uint8_t* argmax, T* dqkv, S* scratch, cudaStream_t stream);

}  // namespace hierad::kernels
