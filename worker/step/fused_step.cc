// step.mode fused on a CPU: the plan's operations over the plain kernels. What the GPU's fused step does on one graph,
// this does call by call, over the same plan and arenas.
#include <bit>
#include <cmath>
#include <cstring>
#include <fstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/random.h"
#include "base/status.h"
#include "worker/kernels/reference/types.h"
#include "worker/model/initialize.h"
#include "worker/step/fused_executor.h"
#include "worker/step/fused_layout.h"
#include "worker/step/fused_op_cpu.h"
#include "worker/step/numerics.h"
#include "worker/step/step.h"

namespace hierad {
namespace {

template <typename Body>
absl::Status Timed(double* seconds, const Body& body) {
  const auto begin = Clock::System().Monotonic();
  const absl::Status status = body();
  *seconds += std::chrono::duration<double>(Clock::System().Monotonic() - begin).count();
  return status;
}

class FusedCpuStep : public Step {
 public:
  FusedCpuStep(const StepOptions& options, const ParameterTable& table, Communicator* communicator,
               std::unique_ptr<FusedExecutor> executor)
      : spec_(options.spec), table_(table), communicator_(*communicator), executor_(std::move(executor)) {}

  absl::Status Initialize() override {
    TrainState state;
    state.parameters.resize(table_.flat_size);
    InitializeParameters(table_, spec_.seed(), state.parameters.data());
    state.exp_avg.resize(table_.flat_size);
    state.exp_avg_sq.resize(table_.flat_size);
    return Load(state);
  }

  absl::Status Load(const TrainState& state) override {
    RETURN_IF_ERROR(CheckState(state, table_));
    const Plan& plan = executor_->plan();
    auto* moments = executor_->Get<float>(plan.moments);
    ToPlanOrder(plan, state.parameters.data(), executor_->Get<float>(plan.master));
    ToPlanOrder(plan, state.exp_avg.data(), moments);
    ToPlanOrder(plan, state.exp_avg_sq.data(), moments + plan.flat_size);
    RefreshComputeCopyOnCpu(executor_->addresses());
    step_ = state.step;
    record().updates = state.updates;
    record().nan_in_row = state.nan_steps_in_row;
    features_are_fresh_ = false;
    return absl::OkStatus();
  }

  absl::StatusOr<TrainState> Save() override {
    const Plan& plan = executor_->plan();
    TrainState state{step_, record().updates, record().nan_in_row, {}, {}, {}};
    for (std::vector<float>* buffer : {&state.parameters, &state.exp_avg, &state.exp_avg_sq}) buffer->assign(table_.flat_size, 0.0f);
    const auto* moments = executor_->Get<float>(plan.moments);
    FromPlanOrder(plan, executor_->Get<float>(plan.master), state.parameters.data());
    FromPlanOrder(plan, moments, state.exp_avg.data());
    FromPlanOrder(plan, moments + plan.flat_size, state.exp_avg_sq.data());
    return state;
  }

  absl::StatusOr<StepResult> Run(absl::Span<const MicroBatch> micro_batches, int64_t real_samples, double lr,
                                 StepSignals signals) override {
    const Plan& plan = executor_->plan();
    if (micro_batches.size() > 1 && !plan.accumulate) {
      return ErrorOf(v1::REASON_INTERNAL, absl::StrCat(micro_batches.size(), " micro-batches were given to a step planned for one."));
    }
    StepResult result;
    executor_->ClearSums();
    features_are_fresh_ = false;
    scalars().step = step_ + 1;
    scalars().lr = lr;
    scalars().loss_weight = 1.0 / (double(std::max<int64_t>(1, real_samples)) * double(LossElements(plan.geometry)));
    for (size_t i = 0; i < micro_batches.size(); ++i) {
      if (micro_batches[i].real == 0) continue;
      RETURN_IF_ERROR(Stage(micro_batches[i], int(i % 2), Draw::kMask, executor_.get()));
      RETURN_IF_ERROR(Timed(&result.forward_s, [&] { return executor_->RunForward(); }));
      RETURN_IF_ERROR(Timed(&result.backward_s, [&] { return executor_->RunBackward(); }));
    }
    RETURN_IF_ERROR(Timed(&result.comm_s, [&] { return Reduce(signals, &result.signals); }));
    RETURN_IF_ERROR(Timed(&result.optimizer_s, [&] { return executor_->RunUpdate(); }));
    result.loss = record().loss;
    result.grad_norm = record().grad_norm;
    result.skipped = record().skipped != 0;
    ++step_;
    RETURN_IF_ERROR(CheckNumerics(spec_, result, step_, record().nan_in_row, lr));
    return result;
  }

  absl::StatusOr<LossSum> Evaluate(const MicroBatch& batch) override {
    if (batch.real == 0) return LossSum{};
    RETURN_IF_ERROR(Stage(batch, 0, Draw::kEvalMask, executor_.get()));
    executor_->ClearSums();
    RETURN_IF_ERROR(executor_->RunForward());
    return LossSum{LossNumerator(), double(batch.real) * double(LossElements(executor_->plan().geometry))};
  }

  absl::StatusOr<std::vector<float>> Features(const MicroBatch& batch) override {
    const int64_t dim = executor_->plan().geometry.encoder_dim_out;
    std::vector<float> features(batch.real * dim);
    if (batch.real == 0) return features;
    RETURN_IF_ERROR(PrepareFeatures());
    RETURN_IF_ERROR(Stage(batch, 0, Draw::kEvalMask, features_.get()));
    RETURN_IF_ERROR(features_->RunForward());
    const Plan& plan = features_->plan();
    const int64_t tokens = plan.tensors[plan.encoded].shape[0] / plan.batch;
    const bool bf16 = plan.options.compute == ComputeType::kBF16;
    for (int64_t b = 0; b < batch.real; ++b) {
      for (int64_t c = 0; c < dim; ++c) {
        double sum = 0;
        for (int64_t n = 0; n < tokens; ++n) {
          const int64_t at = (b * tokens + n) * dim + c;
          sum += bf16 ? float(features_->Get<reference::BFloat16>(plan.encoded)[at]) : features_->Get<float>(plan.encoded)[at];
        }
        features[b * dim + c] = float(sum / double(tokens));
      }
    }
    return features;
  }

  int64_t peak_memory_bytes() const override {
    std::ifstream status("/proc/self/status");
    for (std::string line; std::getline(status, line);) {
      if (line.starts_with("VmHWM:")) return std::stoll(line.substr(6)) * 1024;
    }
    return 0;
  }

  std::string Describe() const override {
    return absl::StrCat("fused on CPU, 1 thread, ", spec_.step().precision(), ", plain kernels, ",
                        executor_->plan().forward_backward.size() + executor_->plan().update.size(), " operations, ",
                        executor_->plan().TotalBytes(), " bytes planned");
  }

 private:
  StepScalars& scalars() { return *executor_->Get<StepScalars>(executor_->plan().scalars); }
  StepRecord& record() { return *executor_->Get<StepRecord>(executor_->plan().record); }

  // The batch into a staging slot, and the scalars that go with it.
  absl::Status Stage(const MicroBatch& batch, int slot, Draw mask_draw, FusedExecutor* executor) {
    const Plan& plan = executor->plan();
    if (!plan.options.features) RETURN_IF_ERROR(CheckLabels(batch, plan.geometry));
    StepScalars& s = *executor->Get<StepScalars>(plan.scalars);
    s.seed = spec_.seed();
    s.mask_draw = uint32_t(mask_draw);
    s.train = mask_draw == Draw::kMask ? 1 : 0;
    s.epoch = s.train != 0 ? batch.epoch : 0;
    s.real = batch.real;
    s.slot = slot;
    const int64_t bytes = plan.tensors[plan.source].bytes / 2, rows = plan.batch;
    std::memcpy(executor->Get<char>(plan.source) + slot * bytes, batch.x_BCS, bytes);
    std::memcpy(executor->Get<int64_t>(plan.source_ids) + slot * rows, batch.visit_ids_B, rows * sizeof(int64_t));
    if (batch.labels_B != nullptr) {
      std::memcpy(executor->Get<int64_t>(plan.source_labels) + slot * rows, batch.labels_B, rows * sizeof(int64_t));
    }
    return absl::OkStatus();
  }

  double LossNumerator() const {
    const Plan& plan = executor_->plan();
    double sum = 0;
    for (int64_t b = 0; b < plan.batch; ++b) sum += executor_->Get<double>(plan.loss_partials)[b];
    return sum;
  }

  // Gradients, loss numerator and signals of all ranks.
  absl::Status Reduce(StepSignals signals, StepSignals* all) {
    const Plan& plan = executor_->plan();
    *all = signals;
    if (communicator_.size() == 1) return absl::OkStatus();
    auto* gradients = executor_->Get<float>(plan.gradients);
    PackTail(LossNumerator(), signals, gradients + plan.flat_size);
    RETURN_IF_ERROR(communicator_.AllReduceSum(gradients, plan.flat_size + kTailUsed, nullptr));
    auto* partials = executor_->Get<double>(plan.loss_partials);
    std::fill(partials, partials + plan.batch, 0.0);
    partials[0] = UnpackTail(gradients + plan.flat_size, all);
    return absl::OkStatus();
  }

  absl::Status PrepareFeatures() {
    if (features_ == nullptr) {
      PlanOptions options = executor_->plan().options;
      options.features = true;
      ASSIGN_OR_RETURN(Plan plan, Plan::Make(spec_, options));
      ASSIGN_OR_RETURN(features_, FusedExecutor::Make(std::move(plan), {}));
    }
    if (features_are_fresh_) return absl::OkStatus();
    std::vector<float> flat(table_.flat_size);
    FromPlanOrder(executor_->plan(), executor_->Get<float>(executor_->plan().master), flat.data());
    ToPlanOrder(features_->plan(), flat.data(), features_->Get<float>(features_->plan().master));
    RefreshComputeCopyOnCpu(features_->addresses());
    features_are_fresh_ = true;
    return absl::OkStatus();
  }

  const v1::JobSpec spec_;
  const ParameterTable table_;
  Communicator& communicator_;
  const std::unique_ptr<FusedExecutor> executor_;
  std::unique_ptr<FusedExecutor> features_;   // made when first asked for
  bool features_are_fresh_ = false;           // its parameters are the step's
  int64_t step_ = 0;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Step>> MakeFusedCpuStep(const StepOptions& options, const ParameterTable& table,
                                                       Communicator* communicator) {
  const ComputeType compute = options.spec.step().precision() == "bf16" ? ComputeType::kBF16 : ComputeType::kF32;
  ASSIGN_OR_RETURN(Plan plan, Plan::Make(options.spec, {.compute = compute}));
  ASSIGN_OR_RETURN(std::unique_ptr<FusedExecutor> executor, FusedExecutor::Make(std::move(plan), {}));
  return std::make_unique<FusedCpuStep>(options, table, communicator, std::move(executor));
}

}  // namespace hierad
