#include "worker/kernels/gemm_resident.h"

#include "worker/kernels/card.h"
#include "worker/kernels/gemm_resident.cuh"

namespace hierad::kernels {
bool ResidentHas(const GemmShape& s) {
  const bool plain = s.bf16 && !s.wide_out && !s.trans_a && s.trans_b && s.bias && !s.accumulate && s.batch == 1 && s.alpha == 1 && s.beta == 0;
  return plain && ThisCard().capability == 90 && s.n % 96 == 0 && s.k == 96 && s.m > 0 && s.m <= INT32_MAX - 64;
}

cudaError_t RunResident(const GemmShape& s, const void* a, const void* b, void* c, const void* bias, cudaStream_t stream) {
  if (!ResidentHas(s)) return cudaErrorNotSupported;
  return resident::Run<bf16, 96, 96>({int(s.m), int(s.n), a, b, bias, c}, ThisCard().sm_count, stream);
}

}  // namespace hierad::kernels
