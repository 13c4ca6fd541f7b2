// step.mode fused on a CPU: the plan's operations over the plain kernels. What the GPU's fused step does in graphs,
// this does call by call, over the same plan and arenas.
#include <atomic>
#include <cmath>
#include <cstring>
#include <fstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/random.h"
#include "base/status.h"
#include "worker/model/initialize.h"
#include "worker/step/fused_executor.h"
#include "worker/step/fused_layout.h"
#include "worker/step/fused_op_cpu.h"
#include "worker/step/reconstruct.h"
#include "worker/step/record_reader.h"
#include "worker/step/step.h"

namespace hierad {
namespace {

// What lies in the snapshot arena; lets go of it at the end.
class SavedState : public StateSnapshot {
 public:
  SavedState(const FusedExecutor& executor, std::atomic<bool>* lent) : executor_(executor), lent_(lent) {}
  ~SavedState() override { *lent_ = false; }

  absl::StatusOr<TrainState> Read() override {
    const Plan& plan = executor_.plan();
    StepRecord record;
    std::memcpy(&record, executor_.Get<char>(plan.saved) + (1 + plan.num_moments) * plan.flat_size * int64_t(sizeof(float)), sizeof record);
    return StateOfSnapshot(plan, executor_.Get<float>(plan.saved), record);
  }

 private:
  const FusedExecutor& executor_;
  std::atomic<bool>* const lent_;
};

class FusedCpuStep : public Step {
 public:
  FusedCpuStep(const StepOptions& options, const ParameterTable& table, Communicator* communicator, std::unique_ptr<FusedExecutor> executor)
      : spec_(options.spec), table_(table), communicator_(*communicator), executor_(std::move(executor)),
        reader_(executor_->Get<RecordSlot>(executor_->plan().ring)) {}

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
    ToPlanOrder(plan, state.parameters.data(), executor_->Get<float>(plan.master));
    const std::vector<float> moments = MomentsOf(plan, plan.options.rank, state);
    std::memcpy(executor_->Get<float>(plan.moments), moments.data(), moments.size() * sizeof(float));
    RefreshComputeCopyOnCpu(executor_->addresses());
    record() = RecordFrom(state, spec_.step(), record().published);
    reader_.SkipTo(record().published);
    features_are_fresh_ = false;
    return absl::OkStatus();
  }

  absl::StatusOr<TrainState> Save() override {
    const Plan& plan = executor_->plan();
    const float* moments = executor_->Get<float>(plan.moments);
    return StateOfRanks(plan, executor_->Get<float>(plan.master), {moments, moments + MomentsSize(plan)}, record(), &communicator_);
  }
  bool shared_state() const override { return executor_->plan().sharded; }
  std::string WaitingIn() const override {
    return DescribeProgress(executor_->plan(), executor_->Get<CollectiveProgress>(executor_->plan().progress));
  }
  absl::StatusOr<uint64_t> ParameterHash() override { return HashOf(Parameters()); }

  absl::StatusOr<std::unique_ptr<StateSnapshot>> Snapshot() override {
    if (executor_->plan().saved == kNone) {
      RETURN_IF_ERROR(executor_->RunSnapshot());
      return nullptr;
    }
    if (snapshot_lent_.exchange(true)) return ErrorOf(v1::REASON_INTERNAL, "a snapshot was asked for while another is being read.");
    RETURN_IF_ERROR(executor_->RunSnapshot());
    return std::make_unique<SavedState>(*executor_, &snapshot_lent_);
  }

  absl::Status Run(absl::Span<const MicroBatch> micro_batches, int64_t real_samples, double lr,
                                 StepSignals signals) override {
    const Plan& plan = executor_->plan();
    if (micro_batches.size() > 1 && !plan.accumulate) {
      return ErrorOf(v1::REASON_INTERNAL, absl::StrCat(micro_batches.size(), " micro-batches were given to a step planned for one."));
    }
    executor_->ClearSums();
    features_are_fresh_ = false;
    StepScalars& s = scalars();
    s.step = record().step + 1;
    s.lr = lr;
    s.nan_limit = NanLimit(spec_.step());
    s.signals = (signals.stop ? 1 : 0) | (signals.checkpoint ? 2 : 0);
    s.loss_weight = 1.0 / (double(std::max<int64_t>(1, real_samples)) * double(LossElements(plan.geometry)));
    size_t last = micro_batches.size();   // of those with samples: the one whose backward pass reduces
    while (last > 0 && micro_batches[last - 1].real == 0) --last;
    for (size_t i = 0; i < last; ++i) {
      if (micro_batches[i].real == 0) continue;
      RETURN_IF_ERROR(Stage(micro_batches[i], int(i % 2), Draw::kMask, executor_.get()));
      RETURN_IF_ERROR(executor_->RunForwardBackward(/*reduce=*/i + 1 == last));
    }
    if (last == 0) RETURN_IF_ERROR(executor_->RunReductions());
    return executor_->RunUpdate();
  }

  absl::StatusOr<StepResult> Take() override {
    StepRecord taken;
    if (!reader_.Next(&taken)) return ErrorOf(v1::REASON_INTERNAL, "a result was asked for, but every step's was taken.");
    return ResultOf(taken);
  }
  int64_t records_lost() const override { return reader_.lost(); }

  absl::StatusOr<LossSum> Evaluate(const MicroBatch& batch) override {
    if (batch.real == 0) return LossSum{};
    RETURN_IF_ERROR(Stage(batch, 0, Draw::kEvalMask, executor_.get()));
    executor_->ClearSums();
    RETURN_IF_ERROR(executor_->RunForward());
    return LossSum{LossNumerator(), double(batch.real) * double(LossElements(executor_->plan().geometry)), VisitOf(std::exchange(*executor_->Get<uint64_t>(executor_->plan().not_finite), 0))};
  }

  absl::StatusOr<Reconstruction> Reconstruct(const MicroBatch& batch) override {
    const Plan& plan = executor_->plan();
    const Geometry& g = plan.geometry;
    if (g.spec.task() != "mae") return Step::Reconstruct(batch);
    if (batch.real == 0) return PutBack(g, 0, nullptr, {}, {});
    RETURN_IF_ERROR(Evaluate(batch).status());   // nothing has written over what it predicted
    std::vector<float> rows(plan.tensors[plan.pred].shape[0] / plan.batch * batch.real * g.pred_dim);   // of removed tokens
    for (size_t i = 0; i < rows.size(); ++i) rows[i] = Widened(plan.options.compute, executor_->Get<void>(plan.pred), int64_t(i));
    const uint8_t* const keep_mask = executor_->Get<uint8_t>(plan.keep_mask);
    return PutBack(g, batch.real, executor_->Get<float>(plan.x), RemovedTokens(g, batch.real, keep_mask), AtRemovedTokens(g, batch.real, keep_mask, rows));
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
    for (int64_t b = 0; b < batch.real; ++b) {
      for (int64_t c = 0; c < dim; ++c) {
        double sum = 0;
        for (int64_t n = 0; n < tokens; ++n) {
          sum += Widened(plan.options.compute, features_->Get<void>(plan.encoded), (b * tokens + n) * dim + c);
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
                        executor_->plan().TotalBytes() + executor_->plan().SnapshotBytes(), " bytes planned");
  }

 private:
  StepScalars& scalars() { return *executor_->Get<StepScalars>(executor_->plan().scalars); }
  StepRecord& record() { return *executor_->Get<StepRecord>(executor_->plan().record); }

  std::vector<float> Parameters() {
    std::vector<float> flat(table_.flat_size);
    FromPlanOrder(executor_->plan(), executor_->Get<float>(executor_->plan().master), flat.data());
    return flat;
  }

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
    const int64_t rows = plan.batch;
    if (plan.source != kNone) {
      const int64_t bytes = plan.tensors[plan.source].bytes / 2;
      std::memcpy(executor->Get<char>(plan.source) + slot * bytes, batch.x_BCS, bytes);
    }
    std::memcpy(executor->Get<int64_t>(plan.source_ids) + slot * rows, batch.visit_ids_B, rows * sizeof(int64_t));
    if (batch.labels_B != nullptr) {
      std::memcpy(executor->Get<int64_t>(plan.source_labels) + slot * rows, batch.labels_B, rows * sizeof(int64_t));
    }
    return absl::OkStatus();
  }

  double LossNumerator() const {
    const Plan& plan = executor_->plan();
    double sum = 0;
    for (int64_t i = 0; i < plan.losses(); ++i) sum += executor_->Get<double>(plan.loss_partials)[i];
    return sum;
  }

  absl::Status PrepareFeatures() {
    if (features_ == nullptr) {
      PlanOptions options = executor_->plan().options;
      options.features = true;
      ASSIGN_OR_RETURN(Plan plan, Plan::Make(spec_, options));
      ASSIGN_OR_RETURN(features_, FusedExecutor::Make(std::move(plan), {}));
    }
    if (features_are_fresh_) return absl::OkStatus();
    const std::vector<float> flat = Parameters();
    ToPlanOrder(features_->plan(), flat.data(), features_->Get<float>(features_->plan().master));
    RefreshComputeCopyOnCpu(features_->addresses());
    features_are_fresh_ = true;
    return absl::OkStatus();
  }

  const v1::JobSpec spec_;
  const ParameterTable table_;
  Communicator& communicator_;
  const std::unique_ptr<FusedExecutor> executor_;
  RecordReader reader_;
  std::atomic<bool> snapshot_lent_{false};
  std::unique_ptr<FusedExecutor> features_;   // made when first asked for
  bool features_are_fresh_ = false;           // its parameters are the step's
};

}  // namespace

absl::StatusOr<std::unique_ptr<Step>> MakeFusedCpuStep(const StepOptions& options, const ParameterTable& table,
                                                       Communicator* communicator) {
  const ComputeType compute = ComputeTypeOf(options.spec.step());
  StepOptions here = options;
  here.spec.mutable_resources()->set_ranks(communicator->size());
  PlanOptions plan_options{.compute = compute, .rows = options.rows, .rank = communicator->rank()};
  if (options.bucket_elements > 0) plan_options.bucket_elements = options.bucket_elements;
  ASSIGN_OR_RETURN(Plan plan, Plan::Make(here.spec, plan_options));
  ASSIGN_OR_RETURN(std::unique_ptr<FusedExecutor> executor, FusedExecutor::Make(std::move(plan), {.communicator = communicator}));
  return std::make_unique<FusedCpuStep>(here, table, communicator, std::move(executor));
}

}  // namespace hierad
