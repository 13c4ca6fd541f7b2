#include "worker/kernels/gemm_gelu.h"

#include "worker/kernels/gemm_gelu_tiles.h"

namespace hierad::kernels {
namespace {

struct Card {
  int capability = 0, sm_count = 0;
};
const Card& ThisCard() {   // a process has one
  static const Card card = [] {
    Card c;
    int device = 0, major = 0, minor = 0;
    if (cudaGetDevice(&device) != cudaSuccess) return c;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    cudaDeviceGetAttribute(&c.sm_count, cudaDevAttrMultiProcessorCount, device);
    c.capability = 10 * major + minor;
    return c;
  }();
  return card;
}

// The wide tile was the faster one wherever both fit (docs/performance.md, "Products and epilogues").
bool TakesWide(int64_t n) { return n % 256 == 0; }

}  // namespace

bool TakesGemmGelu(int64_t m, int64_t n, int64_t k) {
  return ThisCard().capability == 90 && (TakesWide(n) || n % 192 == 0) && k % 8 == 0 && m > 0 && m <= INT32_MAX && n <= INT32_MAX && k <= INT32_MAX;
}

cudaError_t RunGemmGelu(const GemmGeluForward& product, cudaStream_t stream) {
  return (TakesWide(product.n) ? GemmGelu128x256 : GemmGelu128x192)(product, ThisCard().sm_count, stream);
}

cudaError_t RunGemmGeluBackward(const GemmGeluBackward& product, cudaStream_t stream) {
  return (TakesWide(product.n) ? GemmGeluBackward128x256 : GemmGeluBackward128x192)(product, ThisCard().sm_count, stream);
}

}  // namespace hierad::kernels
