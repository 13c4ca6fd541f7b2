#include "worker/kernels/gemm_gelu.cuh"
#include "worker/kernels/gemm_gelu_tiles.h"

namespace hierad::kernels {

using Config = GeluConfig<PingPong, 128, 128, 64, 2, 1>;

cudaError_t GemmGelu128x128(const GemmGeluForward& product, int sm_count, cudaStream_t stream) { return RunForward<Config>(product, sm_count, stream); }
cudaError_t GemmGeluBackward128x128(const GemmGeluBackward& product, int sm_count, cudaStream_t stream) {
  return RunBackward<Config>(product, sm_count, stream);
}

}  // namespace hierad::kernels
