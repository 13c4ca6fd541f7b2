// For tests: ranks as processes that share one GPU, which NCCL does not take. A collective is a copy to the host, the CPU
// communicator's collective in a host function, and a copy back; all three are recorded in a graph like NCCL's kernels.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "base/status.h"
#include "worker/comm/communicator.h"

namespace hierad {

class StagedCommunicator : public Communicator {
 public:
  explicit StagedCommunicator(std::unique_ptr<Communicator> ranks) : ranks_(std::move(ranks)) {
    if (cudaMallocHost(reinterpret_cast<void**>(&memory_), kBytes) != cudaSuccess) memory_ = nullptr;
  }
  ~StagedCommunicator() override { cudaFreeHost(memory_); }

  int rank() const override { return ranks_->rank(); }
  int size() const override { return ranks_->size(); }
  absl::Status AllReduceSum(float* data, int64_t count, void* stream) override {
    return Stage(data, data, count * 4, count * 4, stream, [=, this](char* host) { return ranks_->AllReduceSum(reinterpret_cast<float*>(host), count, nullptr); });
  }
  absl::Status AllReduceSumBF16(uint16_t* data, int64_t count, void* stream) override {
    return Stage(data, data, count * 2, count * 2, stream, [=, this](char* host) { return ranks_->AllReduceSumBF16(reinterpret_cast<uint16_t*>(host), count, nullptr); });
  }
  absl::Status ReduceScatterSum(float* data, int64_t count, void* stream) override {
    return Stage(data, data, size() * count * 4, size() * count * 4, stream, [=, this](char* host) {
      return ranks_->ReduceScatterSum(reinterpret_cast<float*>(host), count, nullptr);
    });
  }
  absl::Status ReduceScatterSumBF16(uint16_t* data, int64_t count, void* stream) override { return AllReduceSumBF16(data, size() * count, stream); }
  absl::Status AllGather(void* data, int64_t bytes, void* stream) override {
    return Stage(data, data, size() * bytes, size() * bytes, stream, [=, this](char* host) { return ranks_->AllGather(host, bytes, nullptr); });
  }
  absl::Status Gather(const void* own, void* all, int64_t bytes, int root, void* stream) override {
    return Stage(own, all, bytes, rank() == root ? size() * bytes : 0, stream, [=, this](char* host) {
      const std::string mine(host, size_t(bytes));
      return ranks_->Gather(mine.data(), rank() == root ? host : nullptr, bytes, root, nullptr);
    });
  }
  absl::Status Broadcast(void* data, int64_t bytes, int root, void* stream) override {
    return Stage(data, data, bytes, bytes, stream, [=, this](char* host) { return ranks_->Broadcast(host, bytes, root, nullptr); });
  }
  absl::Status Barrier() override { return ranks_->Barrier(); }
  absl::Status BroadcastHost(void* data, int64_t bytes, int root) override { return ranks_->BroadcastHost(data, bytes, root); }
  absl::Status CheckAsync() override {
    std::lock_guard lock(mutex_);
    return failed_;
  }
  std::string WaitingIn() const override { return ""; }   // of the device the step tells
  void SetActivity(const std::string& activity) override { ranks_->SetActivity(activity); }

 private:
  static constexpr int64_t kBytes = int64_t{256} << 20;
  struct Call {
    StagedCommunicator* owner;
    std::function<absl::Status()> body;
  };

  absl::Status Stage(const void* from, void* to, int64_t in, int64_t out, void* stream_pointer, const std::function<absl::Status(char*)>& body) {
    const auto stream = static_cast<cudaStream_t>(stream_pointer);
    char* host = memory_ + used_;
    used_ += (std::max(in, out) + 255) / 256 * 256;
    if (memory_ == nullptr || used_ > kBytes) return ErrorOf(v1::REASON_INTERNAL, "the test's staging memory is used up");
    calls_.push_back({this, [host, body] { return body(host); }});
    auto run = [](void* data) {
      auto* call = static_cast<Call*>(data);
      const absl::Status status = call->body();
      std::lock_guard lock(call->owner->mutex_);
      if (call->owner->failed_.ok()) call->owner->failed_ = status;
    };
    cudaError_t error = cudaMemcpyAsync(host, from, size_t(in), cudaMemcpyDeviceToHost, stream);
    if (error == cudaSuccess) error = cudaLaunchHostFunc(stream, run, &calls_.back());
    if (error == cudaSuccess && out > 0) error = cudaMemcpyAsync(to, host, size_t(out), cudaMemcpyHostToDevice, stream);
    return error == cudaSuccess ? absl::OkStatus() : ErrorOf(v1::REASON_INTERNAL, cudaGetErrorString(error));
  }

  const std::unique_ptr<Communicator> ranks_;
  char* memory_ = nullptr;
  int64_t used_ = 0;
  std::deque<Call> calls_;   // recorded ones run again
  std::mutex mutex_;
  absl::Status failed_;
};

}  // namespace hierad
