// The communicator is a blocking one: a non-blocking one hands launches to a thread of NCCL's own, which a capturing
// stream does not take. What may block on a silent peer (joining, the first all-reduce, which connects) therefore runs in
// a thread that the rank stops waiting for at the deadline; the process ends soon after.
#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <cuda_runtime_api.h>
#include <functional>
#include <mutex>
#include <nccl.h>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/status.h"
#include "worker/comm/communicator.h"

namespace hierad {
namespace {

constexpr int64_t kStagingBytes = 16 << 20;
constexpr std::chrono::microseconds kPoll{100};

absl::Status CudaStatus(cudaError_t error, const std::string& what) {
  if (error == cudaSuccess) return absl::OkStatus();
  const auto reason = error == cudaErrorMemoryAllocation ? v1::REASON_CUDA_OOM : v1::REASON_GPU_FAULT;
  return ErrorOf(reason, absl::StrCat(what, ": ", cudaGetErrorString(error)));
}

absl::Status NcclStatus(ncclResult_t result, ncclComm_t comm, const std::string& what) {
  if (result == ncclSuccess || result == ncclInProgress) return absl::OkStatus();
  const char* last = ncclGetLastError(comm);
  const bool own = result == ncclInvalidArgument || result == ncclInvalidUsage || result == ncclInternalError;
  const auto reason = own ? v1::REASON_INTERNAL : result == ncclUnhandledCudaError ? v1::REASON_GPU_FAULT : v1::REASON_PEER_LOST;
  return ErrorOf(reason, absl::StrCat(what, ": NCCL: ", ncclGetErrorString(result),
                                      last != nullptr && *last != '\0' ? " (" : "", last != nullptr ? last : "",
                                      last != nullptr && *last != '\0' ? ")" : ""));
}

// Between two looks at something that has no event to wait for.
class Poll {
 public:
  void Wait() {
    if (++rounds_ < 1000) {
      std::this_thread::yield();
      return;
    }
    std::unique_lock lock(mutex_);
    never_.wait_for(lock, kPoll);
  }

 private:
  int rounds_ = 0;
  std::mutex mutex_;
  std::condition_variable never_;
};

// What joining made; shared with the joining thread, which may outlive the wait for it.
struct Joined {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  absl::Status status;
  ncclComm_t comm = nullptr;
  cudaStream_t stream = nullptr;
  float* staging = nullptr;
};

absl::Status Connect(const CommunicatorOptions& options, const ncclUniqueId& id, int device, Joined* joined) {
  RETURN_IF_ERROR(CudaStatus(cudaSetDevice(device), "cannot use the GPU"));
  RETURN_IF_ERROR(CudaStatus(cudaStreamCreateWithFlags(&joined->stream, cudaStreamNonBlocking), "cannot make a stream"));
  RETURN_IF_ERROR(CudaStatus(cudaMalloc(reinterpret_cast<void**>(&joined->staging), kStagingBytes), "cannot allocate NCCL's staging buffer"));
  RETURN_IF_ERROR(CudaStatus(cudaMemsetAsync(joined->staging, 0, kStagingBytes, joined->stream), "cannot clear the staging buffer"));
  const std::string what = absl::StrCat("rank ", options.rank, " of ", options.size, " joining");
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  if (options.max_channels > 0) config.maxCTAs = options.max_channels;
  RETURN_IF_ERROR(NcclStatus(ncclCommInitRankConfig(&joined->comm, options.size, id, options.rank, &config), nullptr, what));
  // Connects all channels now, outside of any capture.
  RETURN_IF_ERROR(NcclStatus(ncclAllReduce(joined->staging, joined->staging, kStagingBytes / sizeof(float), ncclFloat, ncclSum,
                                           joined->comm, joined->stream), joined->comm, what));
  return CudaStatus(cudaStreamSynchronize(joined->stream), what);
}

class NcclCommunicator : public Communicator {
 public:
  NcclCommunicator(const CommunicatorOptions& options, std::shared_ptr<Joined> joined)
      : options_(options), joined_(std::move(joined)), comm_(joined_->comm) {}

  ~NcclCommunicator() override {
    // Abort, not destroy: a destroy waits for peers that may be gone.
    Abort();
    cudaFree(joined_->staging);
    cudaStreamDestroy(joined_->stream);
  }

  int rank() const override { return options_.rank; }
  int size() const override { return options_.size; }

  absl::Status AllReduceSum(float* data, int64_t count, void* stream) override {
    return NcclStatus(ncclAllReduce(data, data, size_t(count), ncclFloat, ncclSum, comm_, static_cast<cudaStream_t>(stream)),
                      comm_, absl::StrCat("all_reduce of ", count, " floats"));
  }

  absl::Status AllReduceSumBF16(uint16_t* data, int64_t count, void* stream) override {
    return NcclStatus(ncclAllReduce(data, data, size_t(count), ncclBfloat16, ncclSum, comm_, static_cast<cudaStream_t>(stream)),
                      comm_, absl::StrCat("all_reduce of ", count, " values in bf16"));
  }

  absl::Status ReduceScatterSum(float* data, int64_t count, void* stream) override {
    return Scatter(data, data + rank() * count, count, ncclFloat, stream);
  }
  absl::Status ReduceScatterSumBF16(uint16_t* data, int64_t count, void* stream) override {
    return Scatter(data, data + rank() * count, count, ncclBfloat16, stream);
  }

  absl::Status AllGather(void* data, int64_t bytes, void* stream) override {
    return NcclStatus(ncclAllGather(static_cast<char*>(data) + rank() * bytes, data, size_t(bytes), ncclUint8, comm_, static_cast<cudaStream_t>(stream)),
                      comm_, absl::StrCat("all_gather of ", bytes, " bytes a rank"));
  }

  absl::Status Gather(const void* own, void* all, int64_t bytes, int root, void* stream) override {
    const std::string what = absl::StrCat("gather of ", bytes, " bytes a rank");
    const auto to = static_cast<cudaStream_t>(stream);
    RETURN_IF_ERROR(NcclStatus(ncclGroupStart(), comm_, what));
    ncclResult_t result = ncclSend(own, size_t(bytes), ncclUint8, root, comm_, to);
    for (int r = 0; r < size() && rank() == root && result == ncclSuccess; ++r) {
      result = ncclRecv(static_cast<char*>(all) + r * bytes, size_t(bytes), ncclUint8, r, comm_, to);
    }
    const ncclResult_t ended = ncclGroupEnd();
    return NcclStatus(result != ncclSuccess ? result : ended, comm_, what);
  }

  absl::Status Broadcast(void* data, int64_t bytes, int root, void* stream) override {
    return NcclStatus(ncclBroadcast(data, data, size_t(bytes), ncclUint8, root, comm_, static_cast<cudaStream_t>(stream)),
                      comm_, absl::StrCat("broadcast of ", bytes, " bytes"));
  }

  absl::Status Barrier() override {
    Enter("barrier");
    absl::Status status = AllReduceSum(joined_->staging, 1, joined_->stream);
    if (status.ok()) status = Finish("barrier");
    Enter("");
    return status;
  }

  absl::Status BroadcastHost(void* data, int64_t bytes, int root) override {
    const std::string what = absl::StrCat("broadcast of ", bytes, " bytes");
    Enter(what);
    absl::Status status;
    for (int64_t at = 0; at < bytes && status.ok(); at += kStagingBytes) {
      status = BroadcastChunk(static_cast<char*>(data) + at, std::min(kStagingBytes, bytes - at), root, what);
    }
    Enter("");
    return status;
  }

  void Abort() override {
    std::lock_guard lock(comm_mutex_);
    if (!std::exchange(aborted_, true)) ncclCommAbort(comm_);
  }

  absl::Status CheckAsync() override {
    ncclResult_t error = ncclSuccess;
    std::lock_guard lock(comm_mutex_);
    if (aborted_) return ErrorOf(v1::REASON_PEER_LOST, absl::StrCat("rank ", options_.rank, ": the collectives were aborted"));
    RETURN_IF_ERROR(NcclStatus(ncclCommGetAsyncError(comm_, &error), comm_, "asking NCCL for errors"));
    return NcclStatus(error, comm_, absl::StrCat("rank ", options_.rank));
  }

  std::string WaitingIn() const override {
    std::lock_guard lock(mutex_);
    if (waiting_in_.empty()) return "";
    return absl::StrCat(waiting_in_, activity_.empty() ? "" : ", ", activity_);
  }

  void SetActivity(const std::string& activity) override {
    std::lock_guard lock(mutex_);
    activity_ = activity;
  }

 private:
  absl::Status Scatter(const void* from, void* to, int64_t count, ncclDataType_t type, void* stream) {
    return NcclStatus(ncclReduceScatter(from, to, size_t(count), type, ncclSum, comm_, static_cast<cudaStream_t>(stream)), comm_,
                      absl::StrCat("reduce_scatter of ", count, " values a rank"));
  }

  absl::Status BroadcastChunk(char* data, int64_t bytes, int root, const std::string& what) {
    if (rank() == root) {
      RETURN_IF_ERROR(CudaStatus(cudaMemcpyAsync(joined_->staging, data, size_t(bytes), cudaMemcpyHostToDevice, joined_->stream), what));
    }
    RETURN_IF_ERROR(Broadcast(joined_->staging, bytes, root, joined_->stream));
    RETURN_IF_ERROR(Finish(what));
    if (rank() == root) return absl::OkStatus();
    RETURN_IF_ERROR(CudaStatus(cudaMemcpyAsync(data, joined_->staging, size_t(bytes), cudaMemcpyDeviceToHost, joined_->stream), what));
    return CudaStatus(cudaStreamSynchronize(joined_->stream), what);
  }

  absl::Status Finish(const std::string& what) {
    const auto begin = Clock::System().Monotonic();
    Poll poll;
    cudaError_t error;
    while ((error = cudaStreamQuery(joined_->stream)) == cudaErrorNotReady) {
      RETURN_IF_ERROR(CheckAsync());
      if (options_.abandon != nullptr && options_.abandon->load()) {
        return ErrorOf(v1::REASON_CANCELLED, absl::StrCat("rank ", options_.rank, " gave up waiting in ", what));
      }
      if (Clock::System().Monotonic() - begin > options_.busy_timeout) {
        return ErrorOf(v1::REASON_PEER_LOST,
                       absl::StrCat("rank ", options_.rank, " waited ", options_.busy_timeout.count() / 1000, " s in ", WaitingIn(),
                                    ": NCCL does not say which rank is missing; see the other ranks' logs"));
      }
      poll.Wait();
    }
    return CudaStatus(error, what);
  }

  void Enter(const std::string& what) {
    std::lock_guard lock(mutex_);
    waiting_in_ = what;
  }

  const CommunicatorOptions options_;
  const std::shared_ptr<Joined> joined_;
  const ncclComm_t comm_;
  std::mutex comm_mutex_;   // of the questions that another thread's Abort must not meet
  bool aborted_ = false;
  mutable std::mutex mutex_;
  std::string waiting_in_, activity_;
};

}  // namespace

int CudaDeviceCount() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

absl::StatusOr<std::string> MakeNcclRendezvous() {
  ncclUniqueId id;
  RETURN_IF_ERROR(NcclStatus(ncclGetUniqueId(&id), nullptr, "cannot open NCCL's rendezvous"));
  return std::string(id.internal, sizeof id.internal);
}

absl::StatusOr<std::unique_ptr<Communicator>> JoinNccl(const CommunicatorOptions& options, const std::string& rendezvous) {
  ncclUniqueId id;
  if (rendezvous.size() != sizeof id.internal) {
    return absl::InternalError(absl::StrCat("the rendezvous has ", rendezvous.size(), " bytes, an ncclUniqueId has ", sizeof id.internal));
  }
  std::memcpy(id.internal, rendezvous.data(), sizeof id.internal);
  int device = 0;
  RETURN_IF_ERROR(CudaStatus(cudaGetDevice(&device), "cannot use the GPU"));
  auto joined = std::make_shared<Joined>();
  std::thread([joined, options, id, device] {
    const absl::Status status = Connect(options, id, device, joined.get());
    std::lock_guard lock(joined->mutex);
    joined->status = status;
    joined->done = true;
    joined->changed.notify_all();
  }).detach();
  const auto begin = Clock::System().Monotonic();
  std::unique_lock lock(joined->mutex);
  while (!joined->changed.wait_for(lock, std::chrono::milliseconds(50), [&] { return joined->done; })) {
    if (options.abandon != nullptr && options.abandon->load()) {
      return ErrorOf(v1::REASON_CANCELLED, absl::StrCat("rank ", options.rank, " gave up joining"));
    }
    if (Clock::System().Monotonic() - begin > options.join_timeout) {
      return ErrorOf(v1::REASON_PEER_LOST,
                     absl::StrCat("rank ", options.rank, " of ", options.size, ": not all ranks joined NCCL within ",
                                  options.join_timeout.count() / 1000, " s; see the other ranks' logs, and NCCL_SOCKET_IFNAME if they "
                                  "are on several nodes"));
    }
  }
  RETURN_IF_ERROR(joined->status);
  lock.unlock();
  return std::unique_ptr<Communicator>(std::make_unique<NcclCommunicator>(options, std::move(joined)));
}

}  // namespace hierad
