#include "worker/kernels/gemm_gelu.h"

#include "base/plan/products.h"
#include "worker/kernels/card.h"
#include "worker/kernels/gemm_gelu_tiles.h"

namespace hierad::kernels {
namespace {

// The wide tile was the faster one wherever both fit (docs/performance.md, "Products and epilogues").
bool TakesWide(int64_t n) { return n % 256 == 0; }
// Where bytes are the bound.
bool KeepsWeights(int64_t n, int64_t k) { return k <= 384 && ResidentTakes(n, k); }

}  // namespace

bool TakesGemmGelu(int64_t m, int64_t n, int64_t k) { return TakesGeluEpilogue(ThisCard().capability, m, n, k); }

cudaError_t RunGemmGelu(const GemmGeluForward& product, cudaStream_t stream) {
  if (KeepsWeights(product.n, product.k)) return GemmGeluResident(product, ThisCard().sm_count, stream);
  return (TakesWide(product.n) ? GemmGelu128x256 : GemmGelu128x192)(product, ThisCard().sm_count, stream);
}

cudaError_t RunGemmGeluBackward(const GemmGeluBackward& product, cudaStream_t stream) {
  if (KeepsWeights(product.n, product.k)) return GemmGeluBackwardResident(product, ThisCard().sm_count, stream);
  return (TakesWide(product.n) ? GemmGeluBackward128x256 : GemmGeluBackward128x192)(product, ThisCard().sm_count, stream);
}

}  // namespace hierad::kernels
