// Launches of kernels. On cards of capability 9.0 and later a kernel may be brought onto the card while the last blocks of the
// one before it in its stream still work (programmatic dependent launch), which hides most of what a launch costs; in a graph
// too. For that every kernel begins with BeginKernel(): what is before it in the stream is over and seen only behind it.
#pragma once

#include <cuda_runtime.h>

#include "worker/kernels/card.h"

namespace hierad::kernels {

// First statement of every kernel: waits for the kernels before, then lets the next one come. In this order a kernel that has
// begun knows that all before its predecessor are over, so that order is kept along the whole stream.
__device__ inline void BeginKernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

template <typename... Parameters, typename... Arguments>
cudaError_t Launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream, const Arguments&... arguments) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = block, config.dynamicSmemBytes = shared_bytes, config.stream = stream;
  config.attrs = &overlap, config.numAttrs = LaunchesOverlap() ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

}  // namespace hierad::kernels
