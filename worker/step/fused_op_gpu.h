// One operation of a plan on the GPU: the launch of its kernel or library call with the plan's addresses, nothing else.
#pragma once

#include <cuda_runtime.h>

#include "absl/status/status.h"
#include "base/plan/plan.h"
#include "worker/comm/communicator.h"
#include "worker/kernels/gemm.h"
#include "worker/kernels/muon_products.h"
#include "worker/step/fused_addresses.h"

namespace hierad {

struct GpuContext {
  kernels::GemmLibrary* gemm;
  cudaStream_t stream;
  int lane = 0;        // streams that run at once have their own workspace in the library
  bool tf32 = false;
  Communicator* communicator = nullptr;   // of a plan of several ranks
  bool tune = false;   // products are timed and their algorithms chosen instead of merely run
  bool epilogues = true;   // GELU in the epilogue of products, where there is a kernel for it
  kernels::MuonProducts* muon = nullptr;   // Muon's products by our kernel, where there is one; nullptr: by the library
};

// Compute types fp32, bf16 and fp16.
absl::Status RunOpOnGpu(const Op& op, const Addresses& addresses, const GpuContext& context);

// The copy of the master parameters in T, where there is one.
absl::Status RefreshComputeCopyOnGpu(const Addresses& addresses, cudaStream_t stream);

// A CUDA error as a Status naming `what`; out of memory has its own class.
absl::Status CudaStatus(cudaError_t error, const std::string& what);

}  // namespace hierad
