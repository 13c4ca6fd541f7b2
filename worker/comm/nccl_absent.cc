// Builds without CUDA.
#include "absl/status/status.h"
#include "worker/comm/communicator.h"

namespace hierad {
namespace {

absl::Status Absent() {
  return absl::FailedPreconditionError("this hiera-worker was built without CUDA; run the job with resources.device: cpu");
}

}  // namespace

int CudaDeviceCount() { return 0; }

absl::StatusOr<std::string> MakeNcclRendezvous() { return Absent(); }

absl::StatusOr<std::unique_ptr<Communicator>> JoinNccl(const CommunicatorOptions&, const std::string&) { return Absent(); }

}  // namespace hierad
