// Who makes them (base/plan/products.h), each in a file of its own.
#pragma once

#include "worker/kernels/gemm_gelu.h"

namespace hierad::kernels {

// The instance of gemm_gelu.cuh by cooperative tiles: n is a multiple of 256. It takes a minute to compile.
cudaError_t GemmGelu128x256(const GemmGeluForward& product, int sm_count, cudaStream_t stream);
cudaError_t GemmGeluBackward128x256(const GemmGeluBackward& product, int sm_count, cudaStream_t stream);

// By a ring of boxes beside columns of the weights (gemm_ring.cuh): shapes of RingTakes, bf16 and fp16.
cudaError_t GemmGeluRing(const GemmGeluForward& product, int sm_count, cudaStream_t stream);
cudaError_t GemmGeluBackwardRing(const GemmGeluBackward& product, int sm_count, cudaStream_t stream);

}  // namespace hierad::kernels
