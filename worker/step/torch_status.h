// The one place where exceptions of torch, CUDA and the allocator become Status.
#pragma once

#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"

namespace hierad {

// Runs `body`; what it throws becomes an error `what: first line of the message`, of class CUDA_OOM, HOST_OOM,
// GPU_FAULT or INTERNAL.
absl::Status CatchTorch(const std::string& what, absl::FunctionRef<absl::Status()> body);

}  // namespace hierad
