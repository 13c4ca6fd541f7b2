#include "worker/kernels/tensor_map.h"

namespace hierad::kernels {
namespace {

// As the driver has it, which is not linked.
decltype(&cuTensorMapEncodeTiled) Encode() {
  static const auto encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(error == cudaSuccess && result == cudaDriverEntryPointSuccess ? found : nullptr);
  }();
  return encode;
}

}  // namespace

cudaError_t MakeTensorMap(const void* matrices, int64_t count, int64_t rows, int64_t columns, bool f16, CUtensorMap* map) {
  const cuuint64_t sizes[] = {cuuint64_t(columns), cuuint64_t(rows), cuuint64_t(count)}, strides[] = {cuuint64_t(columns) * 2, cuuint64_t(columns * rows) * 2};
  const cuuint32_t box[] = {64, 64, 1}, steps[] = {1, 1, 1};
  if (Encode() == nullptr) return cudaErrorNotSupported;
  const CUresult made = Encode()(map, f16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(matrices), sizes, strides, box, steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return made == CUDA_SUCCESS ? cudaSuccess : cudaErrorNotSupported;
}

}  // namespace hierad::kernels
