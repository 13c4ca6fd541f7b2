#include "worker/kernels/gemm_gelu.h"

#include "base/plan/products.h"
#include "worker/kernels/card.h"
#include "worker/kernels/gemm_gelu_tiles.h"

namespace hierad::kernels {
namespace {

GeluEpilogue ChoiceOf(bool backward, bool f16, int64_t m, int64_t n, int64_t k) {
  return GeluEpilogueOf(ThisCard().capability, f16 ? ComputeType::kF16 : ComputeType::kBF16, backward, m, n, k);
}

template <typename Product>
using Runner = cudaError_t (*)(const Product&, int, cudaStream_t);

template <typename Product>
cudaError_t Run(const Product& product, GeluEpilogue choice, Runner<Product> ring, Runner<Product> tiles256, cudaStream_t stream) {
  switch (choice) {
    case GeluEpilogue::kRing: return ring(product, ThisCard().sm_count, stream);
    case GeluEpilogue::kTiles256: return tiles256(product, ThisCard().sm_count, stream);
    case GeluEpilogue::kNone: break;
  }
  return cudaErrorNotSupported;
}

}  // namespace

bool TakesGemmGelu(bool backward, bool f16, int64_t m, int64_t n, int64_t k) { return ChoiceOf(backward, f16, m, n, k) != GeluEpilogue::kNone; }

cudaError_t RunGemmGelu(const GemmGeluForward& p, cudaStream_t stream) {
  return Run<GemmGeluForward>(p, ChoiceOf(false, p.f16, p.m, p.n, p.k), &GemmGeluRing, &GemmGelu128x256, stream);
}

cudaError_t RunGemmGeluBackward(const GemmGeluBackward& p, cudaStream_t stream) {
  return Run<GemmGeluBackward>(p, ChoiceOf(true, p.f16, p.m, p.n, p.k), &GemmGeluBackwardRing, &GemmGeluBackward128x256, stream);
}

}  // namespace hierad::kernels
