// The instances of gemm_gelu.cuh, by their tile; each in a file of its own, as it takes a minute to compile. n is a multiple of
// the tile's second extent; parts of sums are of 128 rows.
#pragma once

#include "worker/kernels/gemm_gelu.h"

namespace hierad::kernels {

cudaError_t GemmGelu128x192(const GemmGeluForward& product, int sm_count, cudaStream_t stream);
cudaError_t GemmGelu128x256(const GemmGeluForward& product, int sm_count, cudaStream_t stream);
cudaError_t GemmGeluBackward128x256(const GemmGeluBackward& product, int sm_count, cudaStream_t stream);

// The weights kept in shared memory (gemm_gelu_resident.cu): shapes of ResidentTakes (base/plan/products.h).
cudaError_t GemmGeluBackwardResident(const GemmGeluBackward& product, int sm_count, cudaStream_t stream);

}  // namespace hierad::kernels
