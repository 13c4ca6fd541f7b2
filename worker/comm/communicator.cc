#include "worker/comm/communicator.h"

#include <algorithm>
#include <bit>
#include <cstring>
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

// What every communicator can do by its all-reduce and broadcast; those that do better override it.
absl::Status Communicator::ReduceScatterSum(float* data, int64_t count, void* stream) { return AllReduceSum(data, count * size(), stream); }

absl::Status Communicator::ReduceScatterSumBF16(uint16_t* data, int64_t count, void* stream) {
  return AllReduceSumBF16(data, count * size(), stream);
}

absl::Status Communicator::AllGather(void* data, int64_t bytes, void* stream) {
  for (int r = 0; r < size(); ++r) RETURN_IF_ERROR(Broadcast(static_cast<char*>(data) + r * bytes, bytes, r, stream));
  return absl::OkStatus();
}

absl::Status Communicator::Gather(const void* own, void* all, int64_t bytes, int root, void* stream) {
  constexpr int64_t kChunk = 4 << 20;
  std::vector<char> chunk(size_t(std::min(bytes, kChunk)));   // a broadcast writes to who does not want it too
  for (int r = 0; r < size(); ++r) {
    for (int64_t at = 0; at < bytes; at += kChunk) {
      const int64_t n = std::min(kChunk, bytes - at);
      if (rank() == r) std::memcpy(chunk.data(), static_cast<const char*>(own) + at, size_t(n));
      RETURN_IF_ERROR(Broadcast(chunk.data(), n, r, stream));
      if (rank() == root) std::memcpy(static_cast<char*>(all) + r * bytes + at, chunk.data(), size_t(n));
    }
  }
  return absl::OkStatus();
}

}  // namespace hierad
