// Collectives between the ranks of one attempt. CPU: a shared-memory segment, or TCP where the ranks are on several nodes;
// sums in rank order, the same bits either way. GPU: NCCL. All are joined by a rendezvous blob that rank 0 makes and hierad
// relays.
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
  // The same for bf16, as bit patterns. On a CPU the addends are exact and the sum is rounded once.
  virtual absl::Status AllReduceSumBF16(uint16_t* data, int64_t count, void* stream);
  // `data` of rank `root` to all.
  virtual absl::Status Broadcast(void* data, int64_t bytes, int root, void* stream) = 0;
  // data holds size() parts of `count`; afterwards part rank() holds its sums over the ranks (the bits of an all-reduce on a
  // CPU), and the other parts anything.
  virtual absl::Status ReduceScatterSum(float* data, int64_t count, void* stream);
  virtual absl::Status ReduceScatterSumBF16(uint16_t* data, int64_t count, void* stream);
  // data holds size() parts of `bytes`: part r of rank r to all.
  virtual absl::Status AllGather(void* data, int64_t bytes, void* stream);
  // `own` of every rank, in rank order, into `all` of rank `root` (nullptr on the others).
  virtual absl::Status Gather(const void* own, void* all, int64_t bytes, int root, void* stream);
  // Returns when every rank has entered (host-side, also with NCCL).
  virtual absl::Status Barrier() = 0;
  // Errors that arrive asynchronously (NCCL); OK on CPU.
  virtual absl::Status CheckAsync() { return absl::OkStatus(); }
  // Ends what is under way on the device (NCCL), for a process that is about to leave: afterwards every call fails. Any thread.
  virtual void Abort() {}
  // Like Broadcast for host memory, with NCCL too; returns when done.
  virtual absl::Status BroadcastHost(void* data, int64_t bytes, int root) = 0;
  // What the rank is waiting in ("all_reduce of 540,123 floats, step 17"), empty when it is not. Any thread may ask.
  virtual std::string WaitingIn() const = 0;
  // What the rank is at ("step 17"): for WaitingIn, and for the messages of ranks that wait for this one.
  virtual void SetActivity(const std::string& activity) = 0;
};

struct CommunicatorOptions {
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds join_timeout{120'000};  // for all ranks to join
  // CPU: a peer that shows no sign of life for so long is lost. Longer than hierad's hang_after, whose verdict says more.
  std::chrono::milliseconds timeout{45'000};
  std::chrono::milliseconds busy_timeout{600'000};  // a living peer that does not enter for so long; NCCL: a host-side wait
  int max_channels = 0;   // NCCL: multiprocessors that an all-reduce takes at most; 0: NCCL's own choice
  // Set by another thread to make a waiting collective return Cancelled.
  const std::atomic<bool>* abandon = nullptr;
};

// One rank alone: every collective is the identity.
std::unique_ptr<Communicator> MakeSelfCommunicator();

// CPU, all ranks on one machine under one user. Rank 0 makes a segment (chunks of at most 4 MiB: `max_bytes` is the
// largest collective, larger ones only take more chunks); the blob says where its open descriptor is found. The segment
// has no name in any file system, so a crash leaves nothing behind. Rank 0 joins in the process that made it.
// Each rank holds a record lock on the segment, which the kernel drops when the process ends: that is how the others
// see its death, whatever became of its pid.
absl::StatusOr<std::string> MakeSharedMemoryRendezvous(const CommunicatorOptions& options, const std::string& unique_name,
                                                       int64_t max_bytes);
absl::StatusOr<std::unique_ptr<Communicator>> JoinSharedMemory(const CommunicatorOptions& options,
                                                               const std::string& rendezvous);

// CPU, ranks on several nodes. Rank 0 listens at `address` on a port that the system chooses; the blob names both, and a
// token that the others must know.
absl::StatusOr<std::string> MakeTcpRendezvous(const std::string& address);
absl::StatusOr<std::unique_ptr<Communicator>> JoinTcp(const CommunicatorOptions& options, const std::string& rendezvous);

// By the kind of the rendezvous.
absl::StatusOr<std::unique_ptr<Communicator>> JoinCpu(const CommunicatorOptions& options, const std::string& rendezvous);

// GPUs that this process may use; 0 in builds without CUDA.
int CudaDeviceCount();

// GPU (in builds with CUDA; else FailedPrecondition). The current device is the rank's.
absl::StatusOr<std::string> MakeNcclRendezvous();
absl::StatusOr<std::unique_ptr<Communicator>> JoinNccl(const CommunicatorOptions& options, const std::string& rendezvous);

}  // namespace hierad
