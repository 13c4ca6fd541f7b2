// Products of long, thin operands by a kernel of ours that keeps the weights in shared memory (gemm_resident.cuh): an alternative to
// the library's algorithms, for bf16 on cards of capability 9.0.
#pragma once

#include <cuda_runtime.h>

#include "base/plan/gemm_shape.h"

namespace hierad::kernels {

bool ResidentHas(const GemmShape& shape);
// cudaErrorNotSupported: not for this shape, or not on this card (ResidentHas). Operands as GemmLibrary::Run's, no addend.
cudaError_t RunResident(const GemmShape& shape, const void* a, const void* b, void* c, const void* bias, cudaStream_t stream);

}  // namespace hierad::kernels
