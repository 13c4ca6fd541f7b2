// One model of ours, driven by worker/step as a worker drives it, with its results laid open. Gradients come out of the
// public step: AdamW with beta1 = 0 keeps each step's gradient as its first moment, and a learning rate of 0 moves nothing.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/plan/geometry.h"
#include "base/plan/parameters.h"
#include "hierad/v1/job.pb.h"
#include "tests/parity/tensor_file.h"
#include "worker/comm/communicator.h"
#include "worker/model/hiera.h"
#include "worker/model/weights.h"
#include "worker/step/step.h"

namespace hierad::parity {

// Functions throw what LibTorch throws. One thread.
class EngineUnderTest {
 public:
  // `request`: model, step {mode, precision, sdpa_backend, ...}, optimizer, seed, device, threads. Statuses are refusals.
  static absl::StatusOr<std::unique_ptr<EngineUnderTest>> Build(const nlohmann::json& request, const TensorMap& weights);

  std::string Describe() const { return step_ ? step_->Describe() : "the model alone"; }
  // Our own draws for these visits: keep_mask and eval_keep_mask [B, n], drop_path [2 * blocks, B], dropout [B, dim] (factors).
  TensorMap Draw(uint32_t epoch, const std::vector<uint64_t>& visits) const;
  // `inputs`: x, visits, and labels where the model classifies. loss, grad_norm and grad.<name> of one training step; but for
  // fused also pred, label and intermediate.N (N the stage); eval_loss, features, and eval_pred where the model classifies.
  TensorMap Run(const TensorMap& inputs, uint32_t epoch);
  // The losses, gradient norms and skips of real optimizer steps, and the parameters after them (param.<name>).
  // inputs: x [steps, micro-batches, B, ...], visits, labels alike, real [steps, micro-batches], lr [steps].
  TensorMap Train(const TensorMap& inputs, uint32_t epoch);
  // Every operation of one forward and backward of the model: name and input shapes.
  nlohmann::json Trace(const TensorMap& inputs, uint32_t epoch);

 private:
  explicit EngineUnderTest(const Geometry& geometry) : geometry_(geometry) {}
  MicroBatch BatchOf(const TensorMap& inputs, uint32_t epoch) const;
  BatchTensors TensorsOf(const TensorMap& inputs, uint32_t epoch, bool train) const;
  ForwardResult ForwardBackward(const BatchTensors& batch);
  void AddGradients(const float* flat, TensorMap* out) const;

  const Geometry geometry_;
  v1::JobSpec spec_;
  ParameterTable table_;
  std::unique_ptr<Communicator> communicator_;
  std::unique_ptr<Step> step_;          // null for models whose moments would not fit beside FAIR's (Huge)
  TrainState state_;
  std::unique_ptr<Weights> weights_;    // null for fused
  std::unique_ptr<Hiera> model_;
};

}  // namespace hierad::parity
