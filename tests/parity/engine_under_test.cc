#include "tests/parity/engine_under_test.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <google/protobuf/util/json_util.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "base/job_validate.h"
#include "base/job_yaml.h"
#include "base/status.h"
#include "worker/model/draws.h"
#include "worker/step/accelerator.h"

namespace hierad::parity {
namespace {

constexpr int64_t kLargeModel = 300'000'000;   // elements; with moments and copies of them 24 GiB are too few

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

template <typename T>
T Must(absl::StatusOr<T> result) {
  if (!result.ok()) throw std::runtime_error(std::string(result.status().message()));
  return *std::move(result);
}

absl::StatusOr<v1::JobSpec> JobOf(const nlohmann::json& request) {
  v1::JobSpec spec;
  nlohmann::json job{{"name", "parity"}, {"seed", request.at("seed")}, {"model", request.at("model")}, {"step", request.at("step")}};
  job["optimizer"] = request.value("optimizer", nlohmann::json{{"beta1", 0.0}, {"clip_norm", 0.0}});
  job["resources"] = {{"device", request.at("device")}};
  job["data"] = {{"source", "synthetic"}};
  job["schedule"] = {{"steps", 1000}};
  const auto parsed = google::protobuf::util::JsonStringToMessage(job.dump(), &spec);
  if (!parsed.ok()) throw std::runtime_error("job: " + std::string(parsed.message()));
  FillDefaults(&spec);
  RETURN_IF_ERROR(CheckJob(spec));
  return spec;
}

}  // namespace

absl::StatusOr<std::unique_ptr<EngineUnderTest>> EngineUnderTest::Build(const nlohmann::json& request, const TensorMap& weights) {
  ASSIGN_OR_RETURN(v1::JobSpec spec, JobOf(request));
  ASSIGN_OR_RETURN(const Geometry geometry, Geometry::From(spec.model()));
  std::unique_ptr<EngineUnderTest> engine(new EngineUnderTest(geometry));
  engine->spec_ = spec;
  engine->table_ = ParameterTable::For(geometry);
  const ParameterTable& table = engine->table_;
  const bool cuda = request.at("device") == "cuda", fused = spec.step().mode() == "fused";
  const int threads = request.at("threads");
  at::set_num_threads(threads);
  TrainState& state = engine->state_;
  state.parameters.resize(table.flat_size);
  for (const Parameter& parameter : table.parameters) {
    const auto found = weights.find(parameter.name);
    if (found == weights.end()) throw std::runtime_error("FAIR's model has no parameter " + parameter.name);
    if (found->second.sizes() != at::IntArrayRef(parameter.shape)) throw std::runtime_error("FAIR's " + parameter.name + " has another shape");
    std::memcpy(state.parameters.data() + parameter.offset, found->second.data_ptr(), size_t(parameter.size) * sizeof(float));
  }
  if (weights.size() != table.parameters.size()) throw std::runtime_error("FAIR's model has parameters that ours lacks");
  if (fused || table.num_elements < kLargeModel) {
    state.exp_avg.resize(table.flat_size);
    state.exp_avg_sq.resize(table.flat_size);
    engine->communicator_ = MakeSelfCommunicator();
    ASSIGN_OR_RETURN(engine->step_, MakeStep({spec, cuda, threads}, geometry, table, engine->communicator_.get()));
    RETURN_IF_ERROR(engine->step_->Load(state));
  }
  if (fused) return engine;
  // A large model has no step that would have set them: cuDNN's convolutions take TF32 unless told otherwise.
  if (!engine->step_) ApplyTorchSettings(spec.step().sdpa_backend(), spec.step().tf32(), cuda, spec.step().mode() == "eager");
  engine->weights_ = std::make_unique<Weights>(table, at::Device(cuda ? at::kCUDA : at::kCPU),
                                               spec.step().precision() == "bf16" ? at::kBFloat16 : at::kFloat, 0);
  engine->weights_->parameters.copy_(at::from_blob(state.parameters.data(), {table.flat_size}));
  engine->weights_->RefreshComputeCopy();
  engine->model_ = std::make_unique<Hiera>(geometry, engine->weights_.get());
  if (!engine->step_) std::vector<float>().swap(state.parameters);
  return engine;
}

TensorMap EngineUnderTest::Draw(uint32_t epoch, const std::vector<uint64_t>& visits) const {
  const int64_t B = int64_t(visits.size()), n = geometry_.num_mask_units, dim = geometry_.encoder_dim_out;
  const int64_t draws = 2 * int64_t(geometry_.blocks.size());
  TensorMap tensors{{"keep_mask", at::empty({B, n}, at::kLong)},
                    {"eval_keep_mask", at::empty({B, n}, at::kLong)},
                    {"drop_path", at::empty({draws, B}, at::kFloat)},
                    {"dropout", at::empty({B, dim}, at::kFloat)}};
  std::vector<int64_t> units(n), rank(n);
  const uint64_t seed = spec_.seed();
  for (int64_t b = 0; b < B; ++b) {
    for (const bool eval : {false, true}) {
      const RandomStream stream{seed, eval ? Draw::kEvalMask : Draw::kMask, eval ? 0 : epoch, visits[b]};
      DrawMaskUnits(stream, n, geometry_.num_kept, units.data(), rank.data());
      int64_t* keep = tensors[eval ? "eval_keep_mask" : "keep_mask"].data_ptr<int64_t>() + b * n;
      for (int64_t i = 0; i < n; ++i) keep[i] = rank[i] < geometry_.num_kept;
    }
    DrawDropPath(seed, epoch, visits[b], geometry_, tensors["drop_path"].data_ptr<float>() + b, B);
    DrawDropout(seed, epoch, visits[b], geometry_.spec.head_dropout(), dim, tensors["dropout"].data_ptr<float>() + b * dim);
  }
  return tensors;
}

MicroBatch EngineUnderTest::BatchOf(const TensorMap& inputs, uint32_t epoch) const {
  MicroBatch batch;
  batch.x_BCS = inputs.at("x").const_data_ptr<float>();
  if (inputs.contains("labels")) batch.labels_B = inputs.at("labels").const_data_ptr<int64_t>();
  batch.visit_ids_B = reinterpret_cast<const uint64_t*>(inputs.at("visits").const_data_ptr<int64_t>());
  batch.real = int32_t(inputs.at("visits").numel());
  batch.epoch = epoch;
  return batch;
}

BatchTensors EngineUnderTest::TensorsOf(const TensorMap& inputs, uint32_t epoch, bool train) const {
  const at::Device device = weights_->parameters.device();
  const at::Tensor& visits = inputs.at("visits");
  const uint64_t* ids = reinterpret_cast<const uint64_t*>(visits.const_data_ptr<int64_t>());
  const TensorMap drawn = Draw(epoch, {ids, ids + visits.numel()});
  BatchTensors batch;
  batch.x = inputs.at("x").to(device);
  const bool mae = geometry_.spec.task() == "mae";
  const at::Tensor mask = drawn.at("keep_mask");
  SetUnits((mae ? mask : at::ones_like(mask)).to(at::kBool).to(device), geometry_.num_kept, &batch);
  if (!mae) batch.labels = inputs.at("labels").to(device);
  const double weight = 1.0 / (double(visits.numel()) * double(model_->loss_elements()));
  batch.weight = at::full({visits.numel()}, weight, at::TensorOptions(device).dtype(at::kFloat));
  if (train && geometry_.spec.drop_path_rate() > 0) batch.drop_path = drawn.at("drop_path").to(device);
  if (train && !mae && geometry_.spec.head_dropout() > 0) batch.dropout = drawn.at("dropout").to(device);
  return batch;
}

ForwardResult EngineUnderTest::ForwardBackward(const BatchTensors& batch) {
  weights_->ZeroGradients();
  weights_->BeginBackward();
  ForwardResult result = model_->Forward(batch, {spec_.step().mode() == "eager" ? Rewrite::kEager : Rewrite::kOptimized, true});
  result.loss.backward();
  weights_->EndBackward();
  return result;
}

void EngineUnderTest::AddGradients(const float* flat, TensorMap* out) const {
  for (const Parameter& p : table_.parameters) {
    (*out)["grad." + p.name] = at::from_blob(const_cast<float*>(flat + p.offset), p.shape, at::kFloat).clone();
  }
}

TensorMap EngineUnderTest::Run(const TensorMap& inputs, uint32_t epoch) {
  TensorMap out;
  const bool mae = geometry_.spec.task() == "mae";
  const MicroBatch batch = BatchOf(inputs, epoch);
  if (step_) {
    const auto loaded = step_->Load(state_);
    if (!loaded.ok()) throw std::runtime_error(std::string(loaded.message()));
    const StepResult result = Must(step_->RunAndTake({&batch, 1}, batch.real, /*lr=*/0.0, {}));
    if (result.skipped) throw std::runtime_error("the step was skipped: its loss or gradient is not finite");
    out["loss"] = at::scalar_tensor(result.loss, at::kFloat);
    out["grad_norm"] = at::scalar_tensor(result.grad_norm, at::kFloat);
    const TrainState after = Must(step_->Save());
    if (after.parameters != state_.parameters) throw std::runtime_error("a step with learning rate 0 moved the parameters");
    AddGradients(after.exp_avg.data(), &out);
    const Step::LossSum sum = Must(step_->Evaluate(batch));
    out["eval_loss"] = at::scalar_tensor(sum.numerator / sum.weight, at::kFloat);
    std::vector<float> features = Must(step_->Features(batch));
    out["features"] = at::from_blob(features.data(), {batch.real, geometry_.encoder_dim_out}, at::kFloat).clone();
  }
  if (!model_) return out;
  ForwardResult result;
  if (step_) {
    at::NoGradGuard no_grad;
    result = model_->Forward(TensorsOf(inputs, epoch, true), {spec_.step().mode() == "eager" ? Rewrite::kEager : Rewrite::kOptimized, true});
  } else {
    result = ForwardBackward(TensorsOf(inputs, epoch, true));
    out["loss"] = result.loss;
    for (const Parameter& p : table_.parameters) out["grad." + p.name] = weights_->Gradient(p.name);
  }
  out["pred"] = result.pred;
  if (result.label.defined()) out["label"] = result.label;
  for (size_t i = 0; i < result.intermediates.size(); ++i) {
    out["intermediate." + std::to_string(geometry_.fusion_stages[i])] = result.intermediates[i];
  }
  if (!mae) {
    at::NoGradGuard no_grad;
    out["eval_pred"] = model_->Forward(TensorsOf(inputs, epoch, false), {spec_.step().mode() == "eager" ? Rewrite::kEager : Rewrite::kOptimized, true}).pred;
  }
  return out;
}

TensorMap EngineUnderTest::Train(const TensorMap& inputs, uint32_t epoch) {
  const at::Tensor &x = inputs.at("x"), &visits = inputs.at("visits"), &real = inputs.at("real"), &lr = inputs.at("lr");
  const int64_t steps = x.size(0), micro = x.size(1);
  TensorMap out{{"losses", at::zeros({steps}, at::kFloat)}, {"norms", at::zeros({steps}, at::kFloat)}};
  for (int64_t s = 0; s < steps; ++s) {
    std::vector<MicroBatch> batches;
    std::vector<TensorMap> kept;
    for (int64_t m = 0; m < micro; ++m) {
      kept.push_back({{"x", x[s][m].contiguous()}, {"visits", visits[s][m].contiguous()}});
      if (inputs.contains("labels")) kept.back()["labels"] = inputs.at("labels")[s][m].contiguous();
      batches.push_back(BatchOf(kept.back(), epoch));
      batches.back().real = int32_t(real[s][m].item<int64_t>());
    }
    const StepResult result = Must(step_->RunAndTake(batches, real[s].sum().item<int64_t>(), lr[s].item<double>(), {}));
    if (result.skipped) throw std::runtime_error("a step was skipped");
    out["losses"][s] = result.loss;
    out["norms"][s] = result.grad_norm;
  }
  const TrainState after = Must(step_->Save());
  for (const Parameter& p : table_.parameters) {
    out["param." + p.name] = at::from_blob(const_cast<float*>(after.parameters.data() + p.offset), p.shape, at::kFloat).clone();
  }
  return out;
}

nlohmann::json EngineUnderTest::Trace(const TensorMap& inputs, uint32_t epoch) {
  const BatchTensors batch = TensorsOf(inputs, epoch, true);
  nlohmann::json trace = nlohmann::json::array();
  const OperationTrace recording(&trace);
  ForwardBackward(batch);
  return trace;
}

}  // namespace hierad::parity
