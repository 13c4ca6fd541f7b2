// One model of ours, driven as worker/step drives it, with its results laid open.
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
#include "tests/parity/tensor_file.h"
#include "worker/model/hiera.h"
#include "worker/model/weights.h"

namespace hierad::parity {

// {"mode", "precision", "sdpa_backend"}: InvalidArgument for words that a job could not have.
absl::Status CheckStep(const nlohmann::json& step);

// Functions throw what LibTorch throws. One thread.
class EngineUnderTest {
 public:
  static absl::StatusOr<std::unique_ptr<EngineUnderTest>> Build(const v1::ModelSpec& model, const nlohmann::json& step,
                                                                const std::string& device, int threads,
                                                                const TensorMap& weights);

  std::string Describe() const;
  // Our own draws for these visits: keep_mask [B, n], drop_path [2 * blocks, B] and dropout [B, dim] as factors.
  TensorMap Draw(uint64_t seed, uint32_t epoch, const std::vector<uint64_t>& visits) const;
  // `inputs`: x, and keep_mask or labels, drop_path, dropout. Training: loss, pred, label, intermediate.N (N the stage),
  // grad.<name>. Else: loss, pred without draws, and features with nothing masked. `trace`: every operation's name and input shapes.
  TensorMap Run(const TensorMap& inputs, bool train, nlohmann::json* trace);

 private:
  EngineUnderTest(const Geometry& geometry, const nlohmann::json& step, const std::string& device);
  BatchTensors BatchOf(const TensorMap& inputs, bool train) const;
  ForwardResult Train(const BatchTensors& batch);

  const Geometry geometry_;
  const std::string mode_, precision_, sdpa_backend_, device_;
  std::unique_ptr<Weights> weights_;
  std::unique_ptr<Hiera> model_;
};

}  // namespace hierad::parity
