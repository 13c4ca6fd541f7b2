#include "base/plan/products.h"
#include "base/plan/step_values.h"
#include "worker/kernels/gemm_gelu_tiles.h"
#include "worker/kernels/gemm_resident.cuh"

namespace hierad::kernels {

cudaError_t GemmGeluBackwardResident(const GemmGeluBackward& p, int sm_count, cudaStream_t stream) {
  constexpr auto kEpilogue = resident::Epilogue::kGeluBackward;
  if (!ResidentTakes(p.n, p.k)) return cudaErrorNotSupported;
  const int num_parts = int((p.m + kGeluPartRows - 1) / kGeluPartRows);
  const resident::Arguments arguments{int(p.m), int(p.n), p.dy, p.w, nullptr, p.dh, p.g, p.h, p.parts, num_parts};
  return (p.f16 ? resident::Run<half, 128, 96, true, kEpilogue> : resident::Run<bf16, 128, 96, true, kEpilogue>)(arguments, sm_count, stream);
}

}  // namespace hierad::kernels
