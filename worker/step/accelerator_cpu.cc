#include <ATen/ATen.h>

#include <cstdlib>
#include <fstream>
#include <string>

#include "base/clock.h"
#include "worker/kernels/reference/input.h"
#include "worker/step/accelerator.h"

namespace hierad {
namespace {

class CpuAccelerator : public Accelerator {
 public:
  at::Device device() const override { return at::kCPU; }
  std::string name() const override { return "CPU"; }
  void* stream() const override { return nullptr; }
  void Within(absl::FunctionRef<void()> body) override { body(); }
  void Synchronize() override {}
  at::Tensor HostBuffer(at::IntArrayRef shape, at::ScalarType type) const override {
    return at::empty(shape, at::TensorOptions().dtype(type));
  }
  bool captures() const override { return false; }
  void Capture(absl::FunctionRef<void()>) override {}
  void Replay() override {}
  int64_t peak_memory_bytes() const override {
    std::ifstream status("/proc/self/status");
    for (std::string line; std::getline(status, line);) {
      if (line.starts_with("VmHWM:")) return std::stoll(line.substr(6)) * 1024;
    }
    return 0;
  }
  void ConvertRows(const RowBatch<float>& batch) override { reference::ConvertInput(batch); }
  void Mark(Moment moment) override { at_[int(moment)] = Clock::System().Monotonic(); }
  double Between(Moment from, Moment to) const override {
    return std::chrono::duration<double>(at_[int(to)] - at_[int(from)]).count();
  }

 private:
  std::chrono::nanoseconds at_[kMoments] = {};
};

}  // namespace

std::unique_ptr<Accelerator> MakeCpuAccelerator() { return std::make_unique<CpuAccelerator>(); }

std::string ApplyTorchSettings(const std::string& sdpa_backend, bool tf32, bool cuda, bool allow_math, bool deterministic) {
  at::Context& context = at::globalContext();
  context.setAllowTF32CuBLAS(tf32);
  context.setAllowTF32CuDNN(tf32);
  context.setBenchmarkCuDNN(false);
  const bool any = sdpa_backend == "auto" || sdpa_backend.empty();
  // auto leaves cuDNN's attention out: its plans are made lazily, which a capture does not allow.
  context.setSDPUseFlash(any || sdpa_backend == "flash");
  context.setSDPUseMemEfficient(any || sdpa_backend == "mem_efficient");
  context.setSDPUseCuDNN(sdpa_backend == "cudnn");
  context.setSDPUseMath(any || sdpa_backend == "math" || allow_math || !cuda);
  if (cuda && deterministic) {
    setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);   // what cuBLAS asks for in return for determinism
    context.setDeterministicAlgorithms(true, /*warn_only=*/false);
    context.setDeterministicFillUninitializedMemory(false);
  }
  return any ? (cuda ? "flash or mem_efficient" : "flash") : sdpa_backend;
}

}  // namespace hierad
