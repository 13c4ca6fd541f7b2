#include <algorithm>

#include <ATen/ATen.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>

#include "worker/kernels/kernels.h"
#include "worker/step/accelerator.h"

namespace hierad {
namespace {

class CudaAccelerator : public Accelerator {
 public:
  // One stream of our own for everything: a capture is not allowed on the default one, and autograd's accumulation runs
  // on the stream on which a leaf was first used.
  CudaAccelerator() : stream_(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, 0)) {
    for (cudaEvent_t& event : moments_) C10_CUDA_CHECK(cudaEventCreate(&event));
  }

  // The record refers to memory of the allocator's pool: it goes first.
  ~CudaAccelerator() override {
    graph_.reset();
    for (cudaEvent_t event : moments_) cudaEventDestroy(event);
  }

  at::Device device() const override { return at::Device(at::kCUDA, 0); }
  std::string name() const override { return at::cuda::getDeviceProperties(0)->name; }
  void* stream() const override { return stream_.stream(); }
  void Within(absl::FunctionRef<void()> body) override {
    const c10::cuda::CUDAStreamGuard guard(stream_);
    body();
  }
  void Synchronize() override { stream_.synchronize(); }
  at::Tensor HostBuffer(at::IntArrayRef shape, at::ScalarType type) const override {
    return at::empty(shape, at::TensorOptions().dtype(type).pinned_memory(true));
  }
  bool captures() const override { return true; }

  void Capture(absl::FunctionRef<void()> body) override {
    constexpr int kWarmUps = 3;   // lazy set-up of libraries, workspaces and heuristics must lie behind us
    for (int i = 0; i < kWarmUps; ++i) body();
    stream_.synchronize();
    c10::cuda::CUDACachingAllocator::emptyCache();   // or the warm-up's memory is held beside the graph's
    auto graph = std::make_unique<at::cuda::CUDAGraph>();
    graph->capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
    try {
      body();
    } catch (...) {
      try {
        graph->capture_end();   // leave the stream usable, and say what failed first
      } catch (...) {
      }
      throw;
    }
    graph->capture_end();
    graph_ = std::move(graph);
  }
  void Replay() override { graph_->replay(); }

  int64_t peak_memory_bytes() const override {
    const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(0);
    return stats.reserved_bytes[0].peak;
  }

  void ConvertRows(const RowBatch<float>& batch) override { C10_CUDA_CHECK(kernels::ConvertInput(batch, stream_.stream())); }

  // An external record is a node of the graph: each replay takes the time anew.
  void Mark(Moment moment) override {
    cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
    C10_CUDA_CHECK(cudaStreamIsCapturing(stream_, &capturing));
    C10_CUDA_CHECK(cudaEventRecordWithFlags(moments_[int(moment)], stream_,
                                            capturing == cudaStreamCaptureStatusActive ? cudaEventRecordExternal : cudaEventRecordDefault));
  }
  double Between(Moment from, Moment to) const override {
    float ms = 0;
    // A moment that this step did not pass: no error of the step.
    if (cudaEventElapsedTime(&ms, moments_[int(from)], moments_[int(to)]) != cudaSuccess) {
      (void)cudaGetLastError();
      return 0;
    }
    return std::max(0.0, double(ms) * 1e-3);
  }

 private:
  cudaEvent_t moments_[kMoments] = {};
  const c10::cuda::CUDAStream stream_;
  std::unique_ptr<at::cuda::CUDAGraph> graph_;
};

}  // namespace

std::unique_ptr<Accelerator> MakeCudaAccelerator() {
  if (at::cuda::device_count() == 0) return nullptr;
  at::globalContext().lazyInitDevice(at::kCUDA);
  return std::make_unique<CudaAccelerator>();
}

}  // namespace hierad
