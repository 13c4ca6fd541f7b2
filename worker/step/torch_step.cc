// The step over LibTorch. eager and optimized run every operation; graph_safe replays a record of forward and backward.
// All-reduce, norm, clipping and AdamW are outside the record and work on the flat buffers.
#include <algorithm>
#include <cmath>
#include <deque>
#include <optional>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "worker/model/hiera.h"
#include "worker/model/initialize.h"
#include "worker/optim/adamw.h"
#include "worker/optim/muon.h"
#include "worker/step/accelerator.h"
#include "worker/step/staging.h"
#include "worker/step/reconstruct.h"
#include "worker/step/step.h"
#include "worker/step/torch_status.h"

namespace hierad {
namespace {

// Behind the gradients, summed with them in one all-reduce.
enum Tail : int64_t { kLoss, kStop, kCheckpoint, kNotFinite, kTailSize };

enum class Mode { kEager, kOptimized, kGraphSafe };

at::ScalarType ComputeScalar(const v1::StepSpec& step) {
  return step.precision() == "bf16" ? at::kBFloat16 : step.precision() == "fp16" ? at::kHalf : at::kFloat;
}

class TorchStep : public Step {
 public:
  TorchStep(const StepOptions& options, Mode mode, const Geometry& geometry, const ParameterTable& table,
            Communicator* communicator, std::unique_ptr<Accelerator> accelerator, const std::string& attention)
      : spec_(options.spec), mode_(mode), table_(table), communicator_(*communicator),
        accelerator_(std::move(accelerator)),
        weights_(table, accelerator_->device(), ComputeScalar(spec_.step()), kTailSize,
                 /*direct=*/mode != Mode::kEager),
        model_(geometry, &weights_),
        adamw_(table, spec_.optimizer(), weights_.parameters, weights_.gradients),
        staging_(geometry, spec_, options.rows, accelerator_.get()),
        results_(accelerator_->HostBuffer({kTailSize + 1}, at::kFloat)), not_finite_(accelerator_->HostBuffer({1}, at::kLong)) {
    if (spec_.step().precision() == "fp16") scale_ = at::ones({}, adamw_.exp_avg.options());
    if (spec_.optimizer().ema_decay() > 0) ema_ = at::zeros({table.flat_size}, adamw_.exp_avg.options());
    if (spec_.optimizer().name() == "muon") {
      muon_.emplace(table, spec_.optimizer(), weights_.parameters, weights_.gradients, adamw_.exp_avg,
                    ComputeScalar(spec_.step()));
    }
    description_ = absl::StrCat(spec_.step().mode(), " on ", accelerator_->name(),
                                options.cuda ? "" : absl::StrCat(", ", options.threads, " threads"), ", ",
                                spec_.step().precision(), ", attention ", mode == Mode::kEager ? "math (5-D)" : attention);
  }

  absl::Status Initialize() override {
    TrainState state;
    state.parameters.resize(table_.flat_size);
    InitializeParameters(table_, spec_.seed(), state.parameters.data());
    state.exp_avg.resize(table_.flat_size);
    state.exp_avg_sq.resize(table_.flat_size);
    return Load(state);
  }

  absl::Status Load(const TrainState& state) override {
    for (const std::vector<float>* buffer : {&state.parameters, &state.exp_avg, &state.exp_avg_sq}) {
      if (int64_t(buffer->size()) != table_.flat_size) {
        return ErrorOf(v1::REASON_INTERNAL, absl::StrCat("a state of ", buffer->size(), " elements was loaded into a step of ",
                                                         table_.flat_size, "."));
      }
    }
    return Inside("loading the state", [&] {
      auto copy = [&](const at::Tensor& to, const std::vector<float>& from) {
        to.copy_(at::from_blob(const_cast<float*>(from.data()), {table_.flat_size}));
      };
      copy(weights_.parameters, state.parameters);
      copy(adamw_.exp_avg, state.exp_avg);
      copy(adamw_.exp_avg_sq, state.exp_avg_sq);
      if (ema_.defined()) copy(ema_, state.ema.empty() ? state.parameters : state.ema);
      weights_.RefreshComputeCopy();
      accelerator_->Synchronize();
      step_ = state.step;
      updates_ = state.updates;
      nan_steps_in_row_ = state.nan_steps_in_row;
      loss_scale_ = LossScaleFrom(state, spec_.step());
      halted_ = false;
      results_ready_.clear();
      return absl::OkStatus();
    });
  }

  absl::StatusOr<TrainState> Save() override {
    TrainState state{step_, updates_, nan_steps_in_row_, {}, {}, {}, {}, loss_scale_};
    RETURN_IF_ERROR(Inside("saving the state", [&] {
      auto copy = [&](std::vector<float>* to, const at::Tensor& from) {
        to->resize(table_.flat_size);
        at::from_blob(to->data(), {table_.flat_size}).copy_(from);
      };
      copy(&state.parameters, weights_.parameters);
      copy(&state.exp_avg, adamw_.exp_avg);
      copy(&state.exp_avg_sq, adamw_.exp_avg_sq);
      if (ema_.defined()) copy(&state.ema, ema_);
      return absl::OkStatus();
    }));
    return state;
  }

  absl::Status Run(absl::Span<const MicroBatch> micro_batches, int64_t real_samples, double lr, StepSignals signals) override {
    StepResult result;
    StepResult::Times times{};   // idle: none is under way beside it, so that nothing is hidden
    RETURN_IF_ERROR(Inside(absl::StrCat("step ", step_ + 1), [&]() -> absl::Status {
      // A record adds to what is there, the first time too.
      const bool captured = mode_ == Mode::kGraphSafe && accelerator_->captures();
      const bool any = std::any_of(micro_batches.begin(), micro_batches.end(), [](const MicroBatch& b) { return b.real > 0; });
      weights_.BeginStep(/*overwrite=*/any && !captured);
      const double weight = 1.0 / (double(std::max<int64_t>(1, real_samples)) * double(model_.loss_elements()));
      if (scale_.defined()) scale_.fill_(loss_scale_.value);
      int passes = 0;
      for (size_t i = 0; i < micro_batches.size(); ++i) {
        if (micro_batches[i].real == 0) continue;
        RETURN_IF_ERROR(ForwardBackward(int(i), micro_batches[i], weight));
        ++passes;
        if (accelerator_->device().is_cpu()) AddPassTimes(1, &times);
      }
      if (passes == 0) accelerator_->Mark(Moment::kBackwardDone);
      at::Tensor tail = weights_.gradients.narrow(0, table_.flat_size, kTailSize);
      if (signals.stop) tail[kStop].fill_(1);
      if (signals.checkpoint) tail[kCheckpoint].fill_(1);
      tail.narrow(0, kNotFinite, 1).copy_(staging_.not_finite().ne(0));
      not_finite_.copy_(staging_.not_finite(), /*non_blocking=*/true);
      staging_.ClearNotFinite();
      RETURN_IF_ERROR(communicator_.AllReduceSum(weights_.gradients.mutable_data_ptr<float>(),
                                                 table_.flat_size + kTailSize, accelerator_->stream()));
      accelerator_->Mark(Moment::kReduced);
      const at::Tensor norm = scale_.defined() ? GradientNorm() / scale_ : GradientNorm();
      Update(tail, norm, lr);
      results_.copy_(at::cat({tail, norm.view({1})}), /*non_blocking=*/true);
      accelerator_->Mark(Moment::kUpdated);
      accelerator_->Synchronize();
      // Of several passes on a GPU only the last one's moments are left; they are alike.
      if (!accelerator_->device().is_cpu() && passes > 0) AddPassTimes(passes, &times);
      times.communication_s = communicator_.size() > 1 ? accelerator_->Between(Moment::kBackwardDone, Moment::kReduced) : 0;
      times.optimizer_s = accelerator_->Between(Moment::kReduced, Moment::kUpdated);
      return communicator_.CheckAsync();
    }));
    const float* values = results_.const_data_ptr<float>();
    result.loss = values[kLoss];
    result.grad_norm = values[kTailSize];
    const bool finite_gradients = std::isfinite(values[kTailSize]), finite = std::isfinite(values[kLoss]) && finite_gradients;
    result.skipped = halted_ || !finite;
    result.signals = {values[kStop] > 0, values[kCheckpoint] > 0};
    result.input_not_finite = values[kNotFinite] > 0;
    if (const int64_t visit = *not_finite_.const_data_ptr<int64_t>(); visit != 0) result.not_finite_visit = uint64_t(visit) - 1;
    result.step = ++step_;
    result.times = times;
    if (!result.skipped) ++updates_;
    if (scale_.defined()) result.loss_scale = loss_scale_.value;
    if (!halted_) {
      result.overflowed = loss_scale_.value > kLeastLossScale && std::isfinite(values[kLoss]) && !finite_gradients;
      if (!result.overflowed) nan_steps_in_row_ = finite ? 0 : nan_steps_in_row_ + 1;
      halted_ = nan_steps_in_row_ >= NanLimit(spec_.step());
      if (scale_.defined()) loss_scale_ = NextLossScale(loss_scale_, finite_gradients, spec_.step().loss_scale_growth_steps());
    }
    result.nan_in_row = nan_steps_in_row_;
    result.halted = halted_;
    results_ready_.push_back(result);
    return absl::OkStatus();
  }

  absl::StatusOr<StepResult> Take() override {
    if (results_ready_.empty()) return ErrorOf(v1::REASON_INTERNAL, "a result was asked for, but every step's was taken.");
    const StepResult result = results_ready_.front();
    results_ready_.pop_front();
    return result;
  }

  absl::StatusOr<LossSum> Evaluate(const MicroBatch& batch) override {
    LossSum sum;
    if (batch.real == 0) return sum;
    RETURN_IF_ERROR(Inside("evaluation", [&]() -> absl::Status {
      ASSIGN_OR_RETURN(const BatchTensors tensors, staging_.Load(0, batch, Staging::Use::kEvaluate, 1.0, batch.real));
      sum.numerator = model_.Forward(tensors, {.rewrite = rewrite()}).loss.item<double>();
      sum.weight = double(batch.real) * double(model_.loss_elements());
      if (const int64_t visit = staging_.not_finite().item<int64_t>(); visit != 0) sum.not_finite_visit = uint64_t(visit) - 1;
      staging_.ClearNotFinite();
      return absl::OkStatus();
    }));
    return sum;
  }

  absl::StatusOr<std::vector<float>> Features(const MicroBatch& batch) override {
    std::vector<float> features(batch.real * model_.geometry().encoder_dim_out);
    if (batch.real == 0) return features;
    RETURN_IF_ERROR(Inside("computing features", [&]() -> absl::Status {
      ASSIGN_OR_RETURN(const BatchTensors tensors, staging_.Load(0, batch, Staging::Use::kFeatures, 1.0, batch.real));
      at::from_blob(features.data(), {batch.real, model_.geometry().encoder_dim_out})
          .copy_(model_.Features(tensors, rewrite()));
      staging_.ClearNotFinite();   // no step's affair
      return absl::OkStatus();
    }));
    return features;
  }

  absl::StatusOr<Reconstruction> Reconstruct(const MicroBatch& batch) override {
    const Geometry& g = model_.geometry();
    if (g.spec.task() != "mae") return Step::Reconstruct(batch);
    if (batch.real == 0) return PutBack(g, 0, nullptr, {}, {});
    std::vector<float> x, pred;
    std::vector<uint8_t> removed;
    RETURN_IF_ERROR(Inside("drawing pictures", [&]() -> absl::Status {
      ASSIGN_OR_RETURN(const BatchTensors tensors, staging_.Load(0, batch, Staging::Use::kEvaluate, 1.0, batch.real));
      const ReconstructResult result = model_.Reconstruct(tensors, rewrite());
      const auto to_host = [](const at::Tensor& from, auto* to, at::ScalarType type) {
        to->resize(from.numel());
        at::from_blob(to->data(), {from.numel()}, type).copy_(from.reshape({-1}));
      };
      to_host(tensors.x, &x, at::kFloat);
      to_host(result.pred, &pred, at::kFloat);
      to_host(result.removed, &removed, at::kByte);
      staging_.ClearNotFinite();   // no step's affair
      return absl::OkStatus();
    }));
    return PutBack(g, batch.real, x.data(), removed, pred);
  }

  std::string Describe() const override { return description_; }
  int64_t peak_memory_bytes() const override { return accelerator_->peak_memory_bytes(); }

 private:
  // On the step's stream, without recording gradients, exceptions turned into Status.
  absl::Status Inside(const std::string& what, absl::FunctionRef<absl::Status()> body) {
    absl::Status status;
    const absl::Status caught = CatchTorch(what, [&] {
      const c10::NoGradGuard no_grad;
      accelerator_->Within([&] { status = body(); });
      return absl::OkStatus();
    });
    return caught.ok() ? status : caught;
  }

  using Moment = Accelerator::Moment;

  void AddPassTimes(int passes, StepResult::Times* times) const {
    times->forward_s += passes * accelerator_->Between(Moment::kBegin, Moment::kForwardDone);
    times->backward_s += passes * accelerator_->Between(Moment::kForwardDone, Moment::kBackwardDone);
  }

  Rewrite rewrite() const { return mode_ == Mode::kEager ? Rewrite::kEager : Rewrite::kOptimized; }

  absl::Status ForwardBackward(int micro_batch, const MicroBatch& batch, double weight) {
    // graph_safe computes missing samples too, with weight 0: its shapes are fixed.
    const int64_t rows = mode_ == Mode::kGraphSafe ? spec_.step().batch_per_rank() : batch.real;
    ASSIGN_OR_RETURN(const BatchTensors tensors,
                     staging_.Load(micro_batch, batch, Staging::Use::kTrain, weight, rows));
    auto body = [&] {
      accelerator_->Mark(Moment::kBegin);
      weights_.BeginBackward();
      at::Tensor loss;
      {
        const c10::AutoGradMode record(true);
        loss = model_.Forward(tensors, {.rewrite = rewrite()}).loss;
        accelerator_->Mark(Moment::kForwardDone);
        (scale_.defined() ? loss * scale_ : loss).backward();
      }
      weights_.EndBackward();
      weights_.gradients[table_.flat_size + kLoss].add_(loss.detach());
      accelerator_->Mark(Moment::kBackwardDone);
    };
    if (mode_ != Mode::kGraphSafe || !accelerator_->captures()) {
      body();
      return absl::OkStatus();
    }
    if (!captured_) RETURN_IF_ERROR(Capture(body));
    accelerator_->Replay();
    return absl::OkStatus();
  }

  absl::Status Capture(absl::FunctionRef<void()> body) {
    absl::Status status = CatchTorch("step.mode graph_safe: forward and backward could not be captured", [&] {
      accelerator_->Capture(body);
      return absl::OkStatus();
    });
    if (!status.ok()) {
      return ReasonOf(status) == v1::REASON_CUDA_OOM
                 ? status
                 : ErrorOf(ReasonOf(status), absl::StrCat(std::string(status.message()), "; step.mode: optimized runs without a capture."));
    }
    captured_ = true;
    weights_.ZeroGradients();   // of the warm-up; a capture is always in a step's first micro-batch with real samples
    return absl::OkStatus();
  }

  at::Tensor GradientNorm() {
    const at::Tensor gradients = weights_.gradients.narrow(0, 0, table_.flat_size);
    if (!gradients.device().is_cpu()) return at::linalg_vector_norm(gradients);
    return at::scalar_tensor(Norm(gradients.const_data_ptr<float>(), table_.flat_size), at::kFloat);
  }

  void Update(const at::Tensor& tail, const at::Tensor& norm, double lr) {
    const double clip = spec_.optimizer().clip_norm();
    at::Tensor divisor = clip > 0 ? ((norm + 1e-6) / clip).clamp_min(1.0) : at::ones_like(norm);
    const at::Tensor skip = halted_ ? at::ones_like(norm) : at::isfinite(norm).logical_and(at::isfinite(tail[kLoss])).logical_not().to(at::kFloat);
    if (scale_.defined()) divisor = divisor * scale_;   // with the clip, what the gradients were scaled by
    adamw_.Update(updates_ + 1, lr, divisor, skip);
    if (muon_.has_value()) muon_->Update(lr, divisor, skip);
    if (ema_.defined()) {
      const at::Tensor averaged = at::lerp(ema_, weights_.parameters.narrow(0, 0, table_.flat_size), 1 - spec_.optimizer().ema_decay());
      ema_.copy_(at::where(skip.to(at::kBool), ema_, averaged));
    }
    weights_.RefreshComputeCopy();
  }

  const v1::JobSpec spec_;
  const Mode mode_;
  const ParameterTable table_;
  Communicator& communicator_;
  const std::unique_ptr<Accelerator> accelerator_;   // before all tensors: their memory is its
  Weights weights_;
  Hiera model_;
  AdamW adamw_;
  at::Tensor ema_;             // undefined: none is kept
  at::Tensor scale_;           // loss_scale_'s value on the device; undefined: gradients are not scaled
  std::optional<Muon> muon_;   // its momentum is AdamW's exp_avg
  Staging staging_;
  at::Tensor results_, not_finite_;   // host: tail and norm; what staging tells
  std::deque<StepResult> results_ready_;
  bool captured_ = false, halted_ = false;
  int64_t step_ = 0, updates_ = 0, nan_steps_in_row_ = 0;
  LossScale loss_scale_;       // of the next step
  std::string description_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Step>> MakeTorchStep(const StepOptions& options, const Geometry& geometry,
                                                    const ParameterTable& table, Communicator* communicator) {
  const v1::StepSpec* step = &options.spec.step();
  Mode mode;
  if (step->mode() == "eager") {
    mode = Mode::kEager;
  } else if (step->mode() == "optimized") {
    mode = Mode::kOptimized;
  } else if (step->mode() == "graph_safe") {
    mode = Mode::kGraphSafe;
  } else {
    return ErrorOf(v1::REASON_USER_ERROR, absl::StrCat("step.mode: '", step->mode(),
                                                       "' is not known; allowed are eager, optimized and graph_safe."));
  }
  const std::string& backend = step->sdpa_backend();
  if (!options.cuda && (backend == "mem_efficient" || backend == "cudnn")) {
    return ErrorOf(v1::REASON_USER_ERROR, absl::StrCat("step.sdpa_backend: ", backend,
                                                       " runs on a GPU only; a CPU rank allows auto, flash and math."));
  }
  std::unique_ptr<Step> made;
  RETURN_IF_ERROR(CatchTorch("preparing the step", [&]() -> absl::Status {
    at::set_num_threads(std::max(1, options.threads));
    const std::string attention = ApplyTorchSettings(backend, step->tf32(), options.cuda, mode == Mode::kEager, options.deterministic);
    std::unique_ptr<Accelerator> accelerator = options.cuda ? MakeCudaAccelerator() : MakeCpuAccelerator();
    if (accelerator == nullptr) {
      return ErrorOf(v1::REASON_USER_ERROR, "resources.device: cuda, but this worker sees no GPU or was built without "
                                            "CUDA; use resources.device: cpu or another node.");
    }
    Accelerator* on = accelerator.get();
    on->Within([&] {
      made = std::make_unique<TorchStep>(options, mode, geometry, table, communicator, std::move(accelerator), attention);
    });
    return absl::OkStatus();
  }));
  return made;
}

}  // namespace hierad
