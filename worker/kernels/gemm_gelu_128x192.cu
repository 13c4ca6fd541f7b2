#include "worker/kernels/gemm_gelu.cuh"
#include "worker/kernels/gemm_gelu_tiles.h"

namespace hierad::kernels {

using Config = GeluConfig<Cooperative, 128, 192, 64, 2, 1>;

cudaError_t GemmGelu128x192(const GemmGeluForward& product, int sm_count, cudaStream_t stream) { return RunForward<Config>(product, sm_count, stream); }

}  // namespace hierad::kernels
