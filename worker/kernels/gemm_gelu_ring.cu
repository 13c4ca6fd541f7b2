#include "base/plan/step_values.h"
#include "worker/kernels/gemm_gelu_tiles.h"
#include "worker/kernels/gemm_ring.cuh"
#include "worker/kernels/tensor_map.h"

namespace hierad::kernels {

cudaError_t GemmGeluRing(const GemmGeluForward& p, int sm_count, cudaStream_t stream) {
  ring::Maps maps;
  for (const cudaError_t e : {MakeTensorMap(p.a, 1, p.m, p.k, p.f16, &maps.a), MakeTensorMap(p.w, 1, p.n, p.k, p.f16, &maps.w), MakeTensorMap(p.h, 1, p.m, p.n, p.f16, &maps.h),
                              MakeTensorMap(p.g, 1, p.m, p.n, p.f16, &maps.g)}) {
    if (e != cudaSuccess) return e;
  }
  maps.dh = maps.h;
  const ring::Arguments arguments{int(p.m), int(p.n), int(p.k), p.bias, nullptr, 0};
  constexpr auto kEpilogue = ring::Epilogue::kGelu;
  return (p.f16 ? ring::Run<half, kEpilogue> : ring::Run<bf16, kEpilogue>)(maps, arguments, sm_count, stream);
}

cudaError_t GemmGeluBackwardRing(const GemmGeluBackward& p, int sm_count, cudaStream_t stream) {
  ring::Maps maps;
  for (const cudaError_t e : {MakeTensorMap(p.dy, 1, p.m, p.k, p.f16, &maps.a), MakeTensorMap(p.w, 1, p.k, p.n, p.f16, &maps.w), MakeTensorMap(p.h, 1, p.m, p.n, p.f16, &maps.h),
                              MakeTensorMap(p.dh, 1, p.m, p.n, p.f16, &maps.dh), MakeTensorMap(p.g, 1, p.m, p.n, p.f16, &maps.g)}) {
    if (e != cudaSuccess) return e;
  }
  const ring::Arguments arguments{int(p.m), int(p.n), int(p.k), nullptr, p.parts, int((p.m + kGeluPartRows - 1) / kGeluPartRows)};
  constexpr auto kEpilogue = ring::Epilogue::kGeluBackward;
  return (p.f16 ? ring::Run<half, kEpilogue> : ring::Run<bf16, kEpilogue>)(maps, arguments, sm_count, stream);
}

}  // namespace hierad::kernels
