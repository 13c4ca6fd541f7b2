#include "base/plan/step_values.h"
#include "worker/kernels/gemm_gelu_tiles.h"
#include "worker/kernels/gemm_resident.cuh"

namespace hierad::kernels {
namespace {

template <typename T, bool kBackward>
cudaError_t RunByWidth(const resident::Arguments& p, int64_t k, int sm_count, cudaStream_t stream) {
  constexpr auto kEpilogue = kBackward ? resident::Epilogue::kGeluBackward : resident::Epilogue::kGelu;
  switch (k) {
    case 96: return resident::Run<T, 128, 96, kBackward, kEpilogue>(p, sm_count, stream);
    case 192: return resident::Run<T, 128, 192, kBackward, kEpilogue>(p, sm_count, stream);
    case 384: return resident::Run<T, 128, 384, kBackward, kEpilogue>(p, sm_count, stream);
    case 512: return resident::Run<T, 128, 512, kBackward, kEpilogue>(p, sm_count, stream);
    case 768: return resident::Run<T, 128, 768, kBackward, kEpilogue>(p, sm_count, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t GemmGeluResident(const GemmGeluForward& p, int sm_count, cudaStream_t stream) {
  return (p.f16 ? RunByWidth<half, false> : RunByWidth<bf16, false>)({int(p.m), int(p.n), p.a, p.w, p.bias, p.h, p.g, nullptr, nullptr, 0}, p.k, sm_count, stream);
}
cudaError_t GemmGeluBackwardResident(const GemmGeluBackward& p, int sm_count, cudaStream_t stream) {
  const int num_parts = int((p.m + kGeluPartRows - 1) / kGeluPartRows);
  return (p.f16 ? RunByWidth<half, true> : RunByWidth<bf16, true>)({int(p.m), int(p.n), p.dy, p.w, nullptr, p.dh, p.g, p.h, p.parts, num_parts}, p.k, sm_count, stream);
}

}  // namespace hierad::kernels
