// From a micro-batch in host memory to the tensors of a forward pass: draws on the host, then, on a GPU, copies into
// device buffers whose addresses never change. One thread.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "base/plan/geometry.h"
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
  Staging(const Geometry& geometry, const v1::JobSpec& spec, const Accelerator& accelerator);

  // The first `rows` rows (at least batch.real; those beyond it weigh 0). `weight`: of a real sample in the loss.
  // kTrain draws mask, drop path and dropout by (seed, epoch, visit); kEvaluate the mask by (seed, 0, visit); kFeatures
  // keeps all. Labels out of range: REASON_DATA_ERROR. On a CPU `x` is the batch's own memory. Inside Within().
  absl::StatusOr<BatchTensors> Load(int micro_batch, const MicroBatch& batch, Use use, double weight, int64_t rows);

 private:
  BatchTensors Allocate(bool on_host) const;
  absl::Status Fill(const MicroBatch& batch, Use use, double weight, int64_t rows, const BatchTensors& host) const;

  const Geometry geometry_;
  const v1::JobSpec spec_;
  const Accelerator& accelerator_;
  std::vector<int64_t> x_shape_;
  std::vector<BatchTensors> host_;   // without x
  BatchTensors device_;              // undefined on a CPU
};

}  // namespace hierad
