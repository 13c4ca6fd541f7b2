// Collectives between the ranks of one attempt. CPU: a shared-memory segment, sums in rank order (deterministic).
// GPU: NCCL. Both are joined by a rendezvous blob that rank 0 makes and hierad relays.
// Not thread-safe: one thread uses a communicator. A lost or silent peer ends in an error of REASON_PEER_LOST that names
// the collective (and the missing ranks where they are known), never in a hang.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace hierad {

class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // data[i] = sum over ranks, the same bits on every rank. Pointers are host memory for the CPU communicator and device
  // memory for NCCL, where the call is enqueued on `stream` (a cudaStream_t; ignored on CPU) and returns at once.
  virtual absl::Status AllReduceSum(float* data, int64_t count, void* stream) = 0;
  // `data` of rank `root` to all.
  virtual absl::Status Broadcast(void* data, int64_t bytes, int root, void* stream) = 0;
  // Returns when every rank has entered (host-side, also with NCCL).
  virtual absl::Status Barrier() = 0;
  // Errors that arrive asynchronously (NCCL); OK on CPU.
  virtual absl::Status CheckAsync() { return absl::OkStatus(); }
  // What the rank is waiting in ("all_reduce of 540,123 floats, step 17"), empty when it is not. Any thread may ask.
  virtual std::string WaitingIn() const = 0;
};

struct CommunicatorOptions {
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds timeout{60'000};   // of one collective
  // Set by another thread to make a waiting collective return Cancelled.
  const std::atomic<bool>* abandon = nullptr;
};

// One rank alone: every collective is the identity.
std::unique_ptr<Communicator> MakeSelfCommunicator();

// CPU. Rank 0 makes the segment (sized for `max_bytes` per collective) and its name is the blob; the segment's name is
// removed from the system as soon as every rank has joined, so a crash leaves nothing behind.
absl::StatusOr<std::string> MakeSharedMemoryRendezvous(const CommunicatorOptions& options, const std::string& unique_name,
                                                       int64_t max_bytes);
absl::StatusOr<std::unique_ptr<Communicator>> JoinSharedMemory(const CommunicatorOptions& options,
                                                               const std::string& rendezvous);

// GPU (in builds with CUDA; else FailedPrecondition). The current device is the rank's.
absl::StatusOr<std::string> MakeNcclRendezvous();
absl::StatusOr<std::unique_ptr<Communicator>> JoinNccl(const CommunicatorOptions& options, const std::string& rendezvous);

}  // namespace hierad
