// Matrix products through cuBLASLt, with bias in the epilogue. One library object a device and thread; shapes are prepared
// once (descriptor and algorithm), so that a captured step only launches. The algorithm of a shape is the library's first
// choice, or the one that Tune found fastest, here or where a table came from; the same card, library version and tables give
// the same bits.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/plan/gemm_shape.h"
#include "base/plan/step_values.h"
#include "worker/kernels/algorithm_table.h"

namespace hierad::kernels {

using hierad::GemmShape;

class GemmLibrary {
 public:
  static constexpr int kLanes = kGemmLanes;
  // `workspace_bytes` of device memory a lane are taken for split-K and the like.
  static absl::StatusOr<std::unique_ptr<GemmLibrary>> Make(int64_t workspace_bytes = kGemmWorkspaceBytes);
  ~GemmLibrary();

  // bias: of c's type. Prepares the shape when it is new (not while capturing). Streams that run at once take different lanes.
  absl::Status Run(const GemmShape& shape, const void* a, const void* b, void* c, const void* bias, cudaStream_t stream, int lane = 0,
                   const void* addend = nullptr);
  // Times the library's candidates on these operands (c is overwritten) and keeps the fastest.
  absl::Status Tune(const GemmShape& shape, const void* a, const void* b, void* c, const void* bias, cudaStream_t stream);

  int64_t workspace_bytes() const { return kLanes * workspace_bytes_; }
  const AlgorithmTable& table() const { return table_; }

 private:
  struct Prepared;
  GemmLibrary() = default;
  absl::StatusOr<Prepared*> Prepare(const GemmShape& shape);
  absl::Status Launch(const Prepared& p, const void* a, const void* b, void* c, const void* bias, cudaStream_t stream, int lane,
                      const void* addend = nullptr) const;

  void* handle_ = nullptr;   // cublasLtHandle_t
  char* workspace_ = nullptr;   // kLanes times workspace_bytes_
  int64_t workspace_bytes_ = 0;
  std::map<std::string, std::unique_ptr<Prepared>> prepared_;
  AlgorithmTable table_;
};

}  // namespace hierad::kernels
