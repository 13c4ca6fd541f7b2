// For the trainer's tests: a step of a few numbers instead of a model, and a session that keeps what it hears.
#pragma once

#include <cmath>
#include <csignal>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unistd.h>
#include <utility>
#include <vector>

#include "base/fs.h"
#include "base/random.h"
#include "base/status.h"
#include "worker/session.h"
#include "worker/step/step.h"

namespace hierad {

// Every parameter follows the mean of the inputs it sees, with momentum: any sample missed, doubled or seen in another
// order by another rank changes the weights.
class FakeStep : public Step {
 public:
  struct Faults {
    int records_behind = 0;
    bool shared = false;   // shared_state: Save is refused where the ranks are not after the same step
    std::function<bool(int64_t step)> non_finite = [](int64_t) { return false; };
    std::function<bool(int64_t step)> overflows = [](int64_t) { return false; };   // of a loss scale
    std::function<absl::Status(int64_t step, int rank)> error = [](int64_t, int) { return absl::OkStatus(); };
    std::function<void(int64_t step, double lr)> see_rate = [](int64_t, double) {};
    std::function<void(int64_t step)> see_picture = [](int64_t) {};   // the weights that it shows
    std::string algorithms;
  };

  FakeStep(const StepOptions& options, const Geometry& geometry, const ParameterTable& table, Communicator* communicator, Faults faults)
      : sample_size_(RowFormat::Plain(geometry).rules.channels * RowFormat::Plain(geometry).rules.samples), rows_(options.rows), table_(table), communicator_(communicator), faults_(std::move(faults)),
        seed_(options.spec.seed()), nan_limit_(NanLimit(options.spec.step())) {}

  absl::Status Initialize() override {
    for (auto* flat : {&state_.parameters, &state_.exp_avg, &state_.exp_avg_sq}) flat->assign(size_t(table_.flat_size), 0.0f);
    for (const Parameter& p : table_.parameters) {
      for (int64_t i = 0; i < p.size; ++i) {
        state_.parameters[size_t(p.offset + i)] = RandomStream{seed_, Draw::kInit, 0, uint64_t(p.offset)}.Uniform(uint64_t(i));
      }
    }
    return absl::OkStatus();
  }
  absl::Status Load(const TrainState& state) override {
    state_ = state;
    halted_ = false;
    return absl::OkStatus();
  }
  absl::StatusOr<TrainState> Save() override {
    for (int r = 0; faults_.shared && r < communicator_->size(); ++r) {
      int64_t step = state_.step;
      RETURN_IF_ERROR(communicator_->BroadcastHost(&step, sizeof step, r));
      if (step != state_.step) return absl::InternalError("the ranks save after different steps");
    }
    return state_;
  }
  absl::StatusOr<std::unique_ptr<StateSnapshot>> Snapshot() override {
    ASSIGN_OR_RETURN(auto snapshot, Step::Snapshot());
    return communicator_->rank() == 0 ? std::move(snapshot) : nullptr;
  }
  bool shared_state() const override { return faults_.shared; }
  int records_behind() const override { return faults_.records_behind; }
  absl::StatusOr<StepResult> Take() override {
    if (results_.empty()) return absl::InternalError("nothing to take");
    const StepResult result = results_.front();
    results_.pop_front();
    return result;
  }

  absl::Status Run(absl::Span<const MicroBatch> batches, int64_t real_samples, double lr, StepSignals signals) override {
    RETURN_IF_ERROR(faults_.error(state_.step, communicator_->rank()));
    faults_.see_rate(state_.step, lr);
    std::vector<float> sums(kNumbers + 4);
    std::optional<uint64_t> not_finite;
    for (const MicroBatch& batch : batches) {
      for (int b = 0; b < batch.real; ++b) {
        const float* const x = Sample(batch, b);
        for (int i = 0; i < sample_size_; ++i)
          if (!std::isfinite(x[i])) not_finite = batch.visit_ids_B[b];
        for (int i = 0; i < kNumbers; ++i) {
          sums[size_t(i)] += x[i % sample_size_] + float(batch.visit_ids_B[b] % 97) * 1e-3f + float(batch.epoch);
        }
      }
    }
    sums[kNumbers] = signals.stop;
    sums[kNumbers + 1] = signals.checkpoint;
    sums[kNumbers + 3] = not_finite.has_value() ? 1 : 0;
    sums[kNumbers + 2] = faults_.non_finite(state_.step) ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
    RETURN_IF_ERROR(communicator_->AllReduceSum(sums.data(), int64_t(sums.size()), nullptr));
    StepResult result;
    result.signals = {sums[kNumbers] > 0, sums[kNumbers + 1] > 0};
    const bool finite = std::isfinite(sums[kNumbers + 2]);
    result.input_not_finite = sums[kNumbers + 3] > 0;
    result.not_finite_visit = not_finite;
    result.overflowed = !halted_ && finite && faults_.overflows(state_.step);
    if (result.overflowed) result.loss_scale = 1024;
    result.skipped = halted_ || !finite || result.overflowed;
    result.grad_norm = sums[0] / double(real_samples);
    result.loss = halted_ || !finite ? std::nan("") : Distance(sums, real_samples);
    result.step = ++state_.step;
    if (!halted_ && !result.overflowed) {
      state_.nan_steps_in_row = finite ? 0 : state_.nan_steps_in_row + 1;
      halted_ = state_.nan_steps_in_row >= nan_limit_;
    }
    result.nan_in_row = state_.nan_steps_in_row;
    result.halted = halted_;
    results_.push_back(result);
    if (result.skipped) return absl::OkStatus();
    ++state_.updates;
    for (const Parameter& p : table_.parameters) {
      for (int64_t i = 0; i < p.size; ++i) {
        const size_t at = size_t(p.offset + i);
        const float gradient = state_.parameters[at] - sums[size_t(i) % kNumbers] / float(real_samples);
        state_.exp_avg[at] = 0.9f * state_.exp_avg[at] + 0.1f * gradient;
        state_.parameters[at] -= float(lr) * state_.exp_avg[at];
      }
    }
    return absl::OkStatus();
  }
  absl::StatusOr<LossSum> Evaluate(const MicroBatch& batch) override {
    LossSum sum;
    for (int b = 0; b < batch.real; ++b) sum.numerator += std::abs(double(state_.parameters[0]) - Sample(batch, b)[0]);
    sum.weight = batch.real;
    return sum;
  }
  absl::StatusOr<std::vector<float>> Features(const MicroBatch&) override { return absl::UnimplementedError("not asked for"); }
  absl::StatusOr<Reconstruction> Reconstruct(const MicroBatch& batch) override {
    faults_.see_picture(state_.step);
    return Step::Reconstruct(batch);
  }
  std::string algorithms() const override { return faults_.algorithms; }
  std::string Describe() const override { return "fake"; }

 private:
  static constexpr int kNumbers = 64;

  // Rows of fp32, or what a synthetic set's are drawn as.
  const float* Sample(const MicroBatch& batch, int b) {
    if (rows_.rules.synthetic == 0) return static_cast<const float*>(batch.x_BCS) + b * sample_size_;
    drawn_.resize(size_t(sample_size_));
    ConvertRow(rows_, nullptr, {0, batch.visit_ids_B[b], seed_, batch.epoch}, /*draws=*/true, drawn_.data());
    return drawn_.data();
  }

  double Distance(const std::vector<float>& sums, int64_t real_samples) const {
    return std::abs(double(state_.parameters[0]) - double(sums[0]) / double(real_samples));
  }

  const int64_t sample_size_;
  const RowFormat rows_;
  std::vector<float> drawn_;
  const ParameterTable table_;
  Communicator* const communicator_;
  const Faults faults_;
  const uint64_t seed_;
  const int64_t nan_limit_;
  TrainState state_;
  std::deque<StepResult> results_;
  bool halted_ = false;
};

class FakeSession : public Session {
 public:
  // Called with each new progress; may change what is wanted, or end the process.
  std::function<void(FakeSession*, int64_t step)> on_step = [](FakeSession*, int64_t) {};
  std::function<void(v1::Phase phase, int64_t step)> on_phase = [](v1::Phase, int64_t) {};
  int rendezvous_in = -1;                // rank > 0 reads here
  std::vector<int> rendezvous_out;       // rank 0 writes there

  Want wanted = Want::kRun;
  int64_t request = 0;
  double wanted_lr = 0;
  std::vector<v1::Phase> phases;
  std::vector<v1::StepMetrics> metrics;
  std::vector<v1::CheckpointInfo> checkpoints;
  int64_t step = 0, total_steps = 0, first_step = 0, nan_steps = 0;
  double samples_per_s = 0;
  v1::RankTotals totals;
  v1::DataCounters data;

  void SetPhase(v1::Phase phase) override {
    if (phases.empty() || phases.back() != phase) phases.push_back(phase);
    on_phase(phase, step);
  }
  void SetProgress(int64_t done, int64_t total, int64_t first) override {
    step = done;
    total_steps = total;
    first_step = first;
    on_step(this, done);
  }
  void SetTotals(const v1::RankTotals& t) override { totals = t; }
  void SetCounters(int64_t nan, double speed) override {
    nan_steps = nan;
    samples_per_s = speed;
  }
  void SetDataCounters(const v1::DataCounters& counters) override { data = counters; }
  void SetWaitingIn(std::function<std::string()>) override {}
  void AddMetrics(const v1::StepMetrics& m) override { metrics.push_back(m); }
  void SetCheckpoints(const std::vector<v1::CheckpointInfo>& list) override { checkpoints = list; }
  void OfferRendezvous(const std::string& blob) override {
    std::string padded = blob;
    padded.resize(kBlobBytes);
    for (int fd : rendezvous_out) (void)WriteAll(fd, padded, "pipe");
  }
  absl::StatusOr<std::string> AwaitRendezvous(std::chrono::milliseconds) override {
    std::string padded(kBlobBytes, '\0');
    if (read(rendezvous_in, padded.data(), padded.size()) != ssize_t(padded.size())) return ErrorOf(v1::REASON_PEER_LOST, "no rendezvous");
    return std::string(padded.c_str());
  }
  Want want() const override { return wanted; }
  int64_t checkpoint_request() const override { return request; }
  double peak_lr() const override { return wanted_lr; }
  void AbandonOnStop(std::atomic<bool>*) override {}
  bool End(v1::Reason, const std::string&, std::chrono::milliseconds) override { return true; }

 private:
  static constexpr size_t kBlobBytes = 256;
};

}  // namespace hierad
