#include "worker/comm/communicator.h"

#include <algorithm>
#include <vector>

#include "base/status.h"
#include "worker/kernels/reference/types.h"

namespace hierad {

absl::Status Communicator::AllReduceSumBF16(uint16_t* data, int64_t count, void* stream) {
  constexpr int64_t kChunk = 1 << 20;
  std::vector<float> wide(std::min(count, kChunk));
  for (int64_t at = 0; at < count; at += kChunk) {
    const int64_t n = std::min(kChunk, count - at);
    for (int64_t i = 0; i < n; ++i) wide[i] = std::bit_cast<float>(uint32_t{data[at + i]} << 16);
    RETURN_IF_ERROR(AllReduceSum(wide.data(), n, stream));
    for (int64_t i = 0; i < n; ++i) data[at + i] = reference::BFloat16(wide[i]).bits;
  }
  return absl::OkStatus();
}

}  // namespace hierad
