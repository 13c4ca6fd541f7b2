// Launches of kernels, with arguments converted to the kernel's parameters.
#pragma once

#include <cuda_runtime.h>

namespace hierad::kernels {

template <typename... Parameters, typename... Arguments>
cudaError_t Launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream, const Arguments&... arguments) {
  kernel<<<grid, block, shared_bytes, stream>>>(static_cast<Parameters>(arguments)...);
  return cudaPeekAtLastError();   // callers that launch several kernels ask once, at the end
}

}  // namespace hierad::kernels
