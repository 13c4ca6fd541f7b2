#include "worker/kernels/card.h"

#include <cuda_runtime.h>

namespace hierad::kernels {

const Card& ThisCard() {   // a process has one
  static const Card card = [] {
    Card c;
    int device = 0, major = 0, minor = 0;
    if (cudaGetDevice(&device) != cudaSuccess) return c;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    cudaDeviceGetAttribute(&c.sm_count, cudaDevAttrMultiProcessorCount, device);
    cudaDeviceGetAttribute(&c.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    c.capability = 10 * major + minor;
    return c;
  }();
  return card;
}

}  // namespace hierad::kernels
