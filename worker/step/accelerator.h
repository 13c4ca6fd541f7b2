// What differs between a CPU and a GPU below a step: device, stream, capture. accelerator_cuda.cc is compiled only in
// builds with CUDA. One thread; functions throw c10::Error.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include <ATen/core/Tensor.h>

#include "absl/functional/function_ref.h"
#include "base/plan/rows.h"

namespace hierad {

class Accelerator {
 public:
  virtual ~Accelerator() = default;
  virtual at::Device device() const = 0;
  virtual std::string name() const = 0;
  // cudaStream_t that everything inside Within() is enqueued on; nullptr on CPU.
  virtual void* stream() const = 0;
  virtual void Within(absl::FunctionRef<void()> body) = 0;
  // Waits for the stream.
  virtual void Synchronize() = 0;
  // Host memory that copies to the device may overlap with; uninitialised.
  virtual at::Tensor HostBuffer(at::IntArrayRef shape, at::ScalarType type) const = 0;
  // Whether Capture does anything; without it a captured body is simply run again.
  virtual bool captures() const = 0;
  // Inside Within(): runs `body` to warm up, then records it. Replay() runs the record; addresses must stay.
  virtual void Capture(absl::FunctionRef<void()> body) = 0;
  virtual void Replay() = 0;
  virtual int64_t peak_memory_bytes() const = 0;
  // Inside Within(): enqueues the conversion; all that it points to lies on the device.
  virtual void ConvertRows(const RowBatch<float>& batch) = 0;

  // Moments of a step, on the stream's own clock; also inside Capture, where each Replay passes them again.
  enum class Moment { kBegin, kForwardDone, kBackwardDone, kReduced, kUpdated };
  static constexpr int kMoments = 5;
  virtual void Mark(Moment moment) = 0;
  // Seconds between the newest passings of two moments. On a GPU after Synchronize().
  virtual double Between(Moment from, Moment to) const = 0;
};

std::unique_ptr<Accelerator> MakeCpuAccelerator();
// Device 0 of the process; nullptr in builds without CUDA or where there is no GPU.
std::unique_ptr<Accelerator> MakeCudaAccelerator();

// Applies step.sdpa_backend, step.tf32 and determinism to torch's global settings; returns the attention kernels chosen.
// `allow_math`: attention in plain products may serve where the chosen kernel cannot (5-D operands).
std::string ApplyTorchSettings(const std::string& sdpa_backend, bool tf32, bool cuda, bool allow_math, bool deterministic = true);

}  // namespace hierad
