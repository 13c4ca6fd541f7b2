// Descriptions of matrices for copies of boxes (boxes.cuh), as the driver makes them.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace hierad::kernels {

// `count` row-major matrices of bf16 or fp16 behind one another, in boxes of 64 x 64. cudaErrorNotSupported: the driver has no such thing, or
// the address or the row's bytes are no multiple of 16.
cudaError_t MakeTensorMap(const void* matrices, int64_t count, int64_t rows, int64_t columns, bool f16, CUtensorMap* map);

}  // namespace hierad::kernels
