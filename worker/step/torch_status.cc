#include "worker/step/torch_status.h"

#include <exception>
#include <new>
#include <string>

#include <ATen/ATen.h>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace hierad {
namespace {

std::string FirstLine(const std::string& text) { return text.substr(0, text.find('\n')); }

absl::Status Classify(const std::string& what, const std::string& message) {
  const std::string line = FirstLine(message);
  if (message.find("can't allocate memory") != std::string::npos) {
    return ErrorOf(v1::REASON_HOST_OOM,
                   absl::StrCat(what, ": host memory ran out (", line, "); use a smaller step.batch_per_rank."));
  }
  if (message.find("CUDA error") != std::string::npos || message.find("CUDNN_STATUS") != std::string::npos ||
      message.find("CUBLAS_STATUS") != std::string::npos) {
    return ErrorOf(v1::REASON_GPU_FAULT, absl::StrCat(what, ": ", line));
  }
  return ErrorOf(v1::REASON_INTERNAL, absl::StrCat(what, ": ", line));
}

}  // namespace

absl::Status CatchTorch(const std::string& what, absl::FunctionRef<absl::Status()> body) {
  try {
    return body();
  } catch (const c10::OutOfMemoryError& error) {
    return ErrorOf(v1::REASON_CUDA_OOM, absl::StrCat(what, ": the GPU's memory ran out (",
                                                     FirstLine(error.what_without_backtrace()),
                                                     "); use a smaller step.batch_per_rank with more step.accumulation."));
  } catch (const c10::Error& error) {
    return Classify(what, error.what_without_backtrace());
  } catch (const std::bad_alloc&) {
    return ErrorOf(v1::REASON_HOST_OOM,
                   absl::StrCat(what, ": host memory ran out; use a smaller model or step.batch_per_rank."));
  } catch (const std::exception& error) {
    return Classify(what, error.what());
  }
}

}  // namespace hierad
