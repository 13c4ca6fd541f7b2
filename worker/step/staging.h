// From a micro-batch in host memory to the tensors of a forward pass: rows copied as they are stored and converted on the
// device, draws on the host, all into buffers whose addresses never change. One thread.
#pragma once

#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "base/plan/geometry.h"
#include "base/plan/row_format.h"
#include "hierad/v1/job.pb.h"
#include "worker/data/loader.h"
#include "worker/model/hiera.h"
#include "worker/step/accelerator.h"

namespace hierad {

class Staging {
 public:
  // Of what a batch is loaded for.
  enum class Use { kTrain, kEvaluate, kFeatures };

  // `accelerator` outlives this. One host set for each micro-batch of a step, since copies are asynchronous.
  Staging(const Geometry& geometry, const v1::JobSpec& spec, const RowFormat& rows, Accelerator* accelerator);

  // The first `rows` rows (at least batch.real; those beyond it weigh 0). `weight`: of a real sample in the loss.
  // kTrain draws mask, drop path and dropout by (seed, epoch, visit), and what the rows' format says; kEvaluate the mask by
  // (seed, 0, visit); kFeatures keeps all. Labels out of range: REASON_DATA_ERROR. Inside Within().
  absl::StatusOr<BatchTensors> Load(int micro_batch, const MicroBatch& batch, Use use, double weight, int64_t rows);

  // Of all Loads since it was last cleared, [1] int64 on the device: RowBatch::not_finite.
  const at::Tensor& not_finite() const { return not_finite_; }
  void ClearNotFinite() { not_finite_.zero_(); }

 private:
  // Buffers that the conversion of rows reads, beside the batch's own.
  struct RowTensors { at::Tensor rows, ids, scalars; };

  BatchTensors Allocate(bool on_host) const;
  RowTensors AllocateRows(bool on_host) const;
  absl::Status Fill(const MicroBatch& batch, Use use, double weight, int64_t rows, const BatchTensors& host) const;
  void Convert(int set, const MicroBatch& batch, Use use, int64_t rows);

  const Geometry geometry_;
  const v1::JobSpec spec_;
  const RowFormat format_;
  Accelerator& accelerator_;
  std::vector<int64_t> x_shape_;
  std::vector<BatchTensors> host_;       // without x
  std::vector<RowTensors> host_rows_;    // without rows
  BatchTensors device_;                  // on a CPU x alone
  RowTensors device_rows_;               // undefined on a CPU
  at::Tensor offset_, scale_, not_finite_;
};

}  // namespace hierad
