#include "tests/parity/engine_under_test.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <mutex>
#include <set>
#include <stdexcept>
#include <utility>

#include "base/status.h"
#include "worker/model/draws.h"

namespace hierad::parity {
namespace {

Rewrite RewriteOf(const std::string& mode) { return mode == "eager" ? Rewrite::kEager : Rewrite::kOptimized; }

// Records every operation, of backward too, while it lives. Autograd may call from its own thread.
class OperationTrace {
 public:
  explicit OperationTrace(nlohmann::json* trace) {
    trace_ = trace;
    handle_ = at::addGlobalCallback(at::RecordFunctionCallback(&Record).needsInputs(true).scopes(
        {at::RecordScope::FUNCTION}));
  }
  ~OperationTrace() {
    at::removeCallback(handle_);
    trace_ = nullptr;
  }

 private:
  static std::unique_ptr<at::ObserverContext> Record(const at::RecordFunction& function) {
    nlohmann::json shapes = nlohmann::json::array();
    for (const c10::IValue& input : function.inputs()) {
      if (input.isTensor() && input.toTensor().defined()) shapes.push_back(input.toTensor().sizes().vec());
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    trace_->push_back({{"name", function.name()}, {"shapes", shapes}});
    return nullptr;
  }

  static inline std::mutex mutex_;
  static inline nlohmann::json* trace_ = nullptr;
  at::CallbackHandle handle_;
};

}  // namespace

absl::Status CheckStep(const nlohmann::json& step) {
  const std::pair<const char*, std::set<std::string>> words[] = {
      {"mode", {"eager", "optimized", "graph_safe"}},
      {"precision", {"fp32", "bf16"}},
      {"sdpa_backend", {"auto", "math", "flash", "mem_efficient", "cudnn"}}};
  for (const auto& [key, allowed] : words) {
    const std::string value = step.at(key);
    if (!allowed.contains(value)) {
      std::string list;
      for (const std::string& word : allowed) list += (list.empty() ? "" : ", ") + word;
      return ErrorOf(v1::REASON_USER_ERROR, "step." + std::string(key) + ": '" + value + "' is not known; allowed are " + list + ".");
    }
  }
  return absl::OkStatus();
}

EngineUnderTest::EngineUnderTest(const Geometry& geometry, const nlohmann::json& step, const std::string& device)
    : geometry_(geometry),
      mode_(step.at("mode")),
      precision_(step.at("precision")),
      sdpa_backend_(step.at("sdpa_backend")),
      device_(device) {}

absl::StatusOr<std::unique_ptr<EngineUnderTest>> EngineUnderTest::Build(const v1::ModelSpec& model,
                                                                        const nlohmann::json& step,
                                                                        const std::string& device, int threads,
                                                                        const TensorMap& weights) {
  ASSIGN_OR_RETURN(const Geometry geometry, Geometry::From(model));
  RETURN_IF_ERROR(CheckStep(step));
  at::set_num_threads(threads);
  at::globalContext().setAllowTF32CuBLAS(false);
  at::globalContext().setAllowTF32CuDNN(false);
  std::unique_ptr<EngineUnderTest> engine(new EngineUnderTest(geometry, step, device));
  const ParameterTable table = ParameterTable::For(geometry);
  engine->weights_ = std::make_unique<Weights>(table, at::Device(device == "cuda" ? at::kCUDA : at::kCPU),
                                               engine->precision_ == "bf16" ? at::kBFloat16 : at::kFloat, 0);
  for (const Parameter& parameter : table.parameters) {
    const auto found = weights.find(parameter.name);
    if (found == weights.end()) throw std::runtime_error("FAIR's model has no parameter " + parameter.name);
    if (found->second.sizes() != at::IntArrayRef(parameter.shape)) {
      throw std::runtime_error("FAIR's " + parameter.name + " has another shape");
    }
    engine->weights_->Parameter(parameter.name).copy_(found->second);
  }
  if (weights.size() != table.parameters.size()) throw std::runtime_error("FAIR's model has parameters that ours lacks");
  engine->weights_->RefreshComputeCopy();
  engine->model_ = std::make_unique<Hiera>(geometry, engine->weights_.get());
  return engine;
}

std::string EngineUnderTest::Describe() const { return mode_ + " " + precision_ + " " + device_ + " " + sdpa_backend_; }

TensorMap EngineUnderTest::Draw(uint64_t seed, uint32_t epoch, const std::vector<uint64_t>& visits) const {
  const int64_t B = int64_t(visits.size()), n = geometry_.num_mask_units, dim = geometry_.encoder_dim_out;
  const int64_t draws = 2 * int64_t(geometry_.blocks.size());
  TensorMap tensors{{"keep_mask", at::empty({B, n}, at::kLong)},
                    {"drop_path", at::empty({draws, B}, at::kFloat)},
                    {"dropout", at::empty({B, dim}, at::kFloat)}};
  std::vector<int64_t> units(n), rank(n);
  for (int64_t b = 0; b < B; ++b) {
    DrawMaskUnits({seed, Draw::kMask, epoch, visits[b]}, n, geometry_.num_kept, units.data(), rank.data());
    int64_t* keep = tensors["keep_mask"].data_ptr<int64_t>() + b * n;
    for (int64_t i = 0; i < n; ++i) keep[i] = rank[i] < geometry_.num_kept;
    DrawDropPath(seed, epoch, visits[b], geometry_, tensors["drop_path"].data_ptr<float>() + b, B);
    DrawDropout(seed, epoch, visits[b], geometry_.spec.head_dropout(), dim, tensors["dropout"].data_ptr<float>() + b * dim);
  }
  return tensors;
}

BatchTensors EngineUnderTest::BatchOf(const TensorMap& inputs, bool train) const {
  const at::Device device = weights_->parameters.device();
  BatchTensors batch;
  batch.x = inputs.at("x").to(at::kFloat).to(device);
  const int64_t B = batch.x.size(0), n = geometry_.num_mask_units;
  const bool mae = geometry_.spec.task() == "mae";
  SetUnits(mae ? inputs.at("keep_mask").to(at::kBool).to(device) : at::ones({B, n}, at::TensorOptions(device).dtype(at::kBool)),
           geometry_.num_kept, &batch);
  if (!mae) batch.labels = inputs.at("labels").to(device);
  const Hiera& model = *model_;
  batch.weight = at::full({B}, 1.0 / (double(B) * double(model.loss_elements())), at::TensorOptions(device).dtype(at::kFloat));
  if (train && geometry_.spec.drop_path_rate() > 0) batch.drop_path = inputs.at("drop_path").to(device);
  if (train && !mae && geometry_.spec.head_dropout() > 0) batch.dropout = inputs.at("dropout").to(device);
  return batch;
}

ForwardResult EngineUnderTest::Train(const BatchTensors& batch) {
  weights_->ZeroGradients();
  weights_->BeginBackward();
  ForwardResult result = model_->Forward(batch, {RewriteOf(mode_), true});
  result.loss.backward();
  weights_->EndBackward();
  return result;
}

TensorMap EngineUnderTest::Run(const TensorMap& inputs, bool train, nlohmann::json* trace) {
  const BatchTensors batch = BatchOf(inputs, train);
  TensorMap out;
  ForwardResult result;
  if (train) {
    std::unique_ptr<OperationTrace> recording;
    if (trace != nullptr) recording = std::make_unique<OperationTrace>(trace);
    result = Train(batch);
    recording.reset();
    for (const Parameter& p : weights_->table().parameters) out["grad." + p.name] = weights_->Gradient(p.name);
    for (size_t i = 0; i < result.intermediates.size(); ++i) {
      out["intermediate." + std::to_string(geometry_.fusion_stages[i])] = result.intermediates[i];
    }
  } else {
    at::NoGradGuard no_grad;
    result = model_->Forward(batch, {RewriteOf(mode_), true});
    BatchTensors whole = batch;
    SetUnits(at::ones_like(batch.units, at::kBool), geometry_.num_mask_units, &whole);
    out["features"] = model_->Features(whole, RewriteOf(mode_));
  }
  out["loss"] = result.loss;
  out["pred"] = result.pred;
  if (result.label.defined()) out["label"] = result.label;
  return out;
}

}  // namespace hierad::parity
