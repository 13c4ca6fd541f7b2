// step.mode fused on a GPU against the same step on the CPU, and against itself.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/plan/random_jobs.h"
#include "gtest/gtest.h"
#include "worker/comm/communicator.h"
#include "worker/step/step.h"

namespace hierad {
namespace {

struct Trial {
  std::vector<double> losses, norms;
  TrainState state;
  double eval = 0;
  std::vector<float> features;
  Reconstruction picture;   // of a masked auto-encoder
};

struct Way {
  bool gpu = true, beside = true, prefetch = false;
  float nudge = 0;   // each input off by a rounding, relative, up or down by `toss`: what a result changes by then is what it may differ by
  uint32_t toss = 0;
};

// Some steps of a job on random batches, the last rows of some batches missing.
Trial Train(const v1::JobSpec& job, int steps, const Way& way) {
  Trial trial;
  const auto geometry = Geometry::From(job.model());
  EXPECT_TRUE(geometry.ok()) << geometry.status();
  const ParameterTable table = ParameterTable::For(*geometry);
  const auto communicator = MakeSelfCommunicator();
  StepOptions options{job, way.gpu};
  options.beside = way.beside;
  auto made = way.gpu ? MakeFusedGpuStep(options, table, communicator.get()) : MakeFusedCpuStep(options, table, communicator.get());
  EXPECT_TRUE(made.ok()) << made.status();
  if (!made.ok()) return trial;
  const std::unique_ptr<Step> step = *std::move(made);
  EXPECT_TRUE(step->Initialize().ok());
  int64_t size = geometry->spec.in_chans();
  for (int64_t s : geometry->input_size) size *= s;
  const int64_t batch = job.step().batch_per_rank(), accumulation = job.step().accumulation();
  std::mt19937 random(5), toss(way.toss);
  const int64_t count = (steps + 1) * accumulation;
  std::vector<std::vector<float>> x(count, std::vector<float>(batch * size));
  std::vector<std::vector<uint64_t>> ids(count, std::vector<uint64_t>(batch));
  std::vector<std::vector<int64_t>> labels(count, std::vector<int64_t>(batch));
  std::vector<MicroBatch> batches;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t real = i % 3 == 1 ? std::max<int64_t>(1, batch - 1) : batch;
    for (float& v : x[i]) v = float(double(random()) / 2147483648.0 - 1) * (1 + (toss() % 2 == 0 ? way.nudge : -way.nudge));
    for (int64_t b = 0; b < batch; ++b) ids[i][b] = random() % 1000, labels[i][b] = int64_t(random() % job.model().num_classes());
    batches.push_back({x[i].data(), labels[i].data(), ids[i].data(), int32_t(real), uint32_t(i / 4)});
  }
  for (int s = 0; s < steps; ++s) {
    const absl::Span<const MicroBatch> mine(batches.data() + s * accumulation, accumulation);
    int64_t real = 0;
    for (const MicroBatch& b : mine) real += b.real;
    // Not always what comes next: such a copy is made again.
    if (way.prefetch) step->Prefetch(batches[s % 3 == 2 ? 0 : (s + 1) * accumulation]);
    // Each step at a rate of its own: a value on the device, for which nothing is recorded again.
    const auto result = step->RunAndTake(mine, real, 1e-3 * (1 + s % 3), {});
    EXPECT_TRUE(result.ok()) << result.status();
    if (!result.ok()) return trial;
    trial.losses.push_back(result->loss);
    trial.norms.push_back(result->grad_norm);
    if (s == 1) {
      const auto eval = step->Evaluate(batches[0]);
      EXPECT_TRUE(eval.ok()) << eval.status();
      trial.eval = eval.ok() ? eval->numerator : 0;
      const auto features = step->Features(batches[0]);
      EXPECT_TRUE(features.ok()) << features.status();
      if (features.ok()) trial.features = *features;
      if (job.model().task() == "mae") {
        auto picture = step->Reconstruct(batches[0]);
        EXPECT_TRUE(picture.ok()) << picture.status();
        if (picture.ok()) trial.picture = *std::move(picture);
      }
    }
  }
  auto state = step->Save();
  EXPECT_TRUE(state.ok()) << state.status();
  if (state.ok()) trial.state = *std::move(state);
  return trial;
}

double Distance(const std::vector<float>& a, const std::vector<float>& b) {
  EXPECT_EQ(a.size(), b.size());
  double distance = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    distance += (double(a[i]) - b[i]) * (double(a[i]) - b[i]);
    norm += double(a[i]) * a[i];
  }
  return std::sqrt(distance / std::max(norm, 1e-30));
}

// Of the same bits: a NaN is the same NaN.
std::vector<uint64_t> Bits(const std::vector<double>& values) {
  std::vector<uint64_t> bits(values.size());
  std::memcpy(bits.data(), values.data(), values.size() * sizeof(double));
  return bits;
}
uint64_t Bits(double value) { return Bits(std::vector<double>{value})[0]; }

// Training amplifies roundings, in some narrow models a thousandfold in four steps: by how much, nudges on the CPU tell.
void ExpectNear(const v1::JobSpec& job, float nudge, const Trial& cpu, const Trial& gpu, double loss_bound, double norm_bound) {
  std::vector<Trial> nudged;
  for (uint32_t toss = 1; toss <= 4; ++toss) nudged.push_back(Train(job, int(cpu.losses.size()), {.gpu = false, .nudge = nudge, .toss = toss}));
  const auto amplified = [&](std::vector<double> Trial::* values, size_t s) {
    double most = 0;
    for (const Trial& trial : nudged) most = std::max(most, std::abs((trial.*values)[s] - (cpu.*values)[s]));
    return 4 * most;
  };
  ASSERT_EQ(gpu.losses.size(), cpu.losses.size());
  for (size_t s = 0; s < cpu.losses.size(); ++s) {
    EXPECT_NEAR(gpu.losses[s], cpu.losses[s], loss_bound * std::abs(cpu.losses[s]) + amplified(&Trial::losses, s)) << "step " << s;
    EXPECT_NEAR(gpu.norms[s], cpu.norms[s], norm_bound * cpu.norms[s] + amplified(&Trial::norms, s)) << "step " << s;
  }
  EXPECT_EQ(cpu.state.updates, gpu.state.updates);
}

constexpr const char* kPrecisions[] = {"bf16", "fp32", "fp16"};

v1::JobSpec Fused(v1::JobSpec job, const char* precision) {
  job.mutable_step()->set_mode("fused");
  job.mutable_step()->set_precision(precision);
  return job;
}

std::unique_ptr<Step> MakeGpuStep(const v1::JobSpec& job) {
  static const std::unique_ptr<Communicator>& alone = *new std::unique_ptr<Communicator>(MakeSelfCommunicator());
  auto made = MakeFusedGpuStep({job, true}, ParameterTable::For(*Geometry::From(job.model())), alone.get());
  EXPECT_TRUE(made.ok()) << made.status();
  if (!made.ok()) return nullptr;
  EXPECT_TRUE((*made)->Initialize().ok());
  return *std::move(made);
}

// Random batches of some steps.
class Samples {
 public:
  Samples(const v1::JobSpec& job, int steps) : accumulation_(job.step().accumulation()), rows_(job.step().batch_per_rank()) {
    int64_t size = job.model().in_chans();
    for (int extent : job.model().input_size()) size *= extent;
    std::mt19937 random(7);
    for (int i = 0; i < steps * accumulation_; ++i) {
      x_.emplace_back(rows_ * size);
      for (float& v : x_.back()) v = float(double(random()) / 2147483648.0 - 1);
      ids_.emplace_back();
      labels_.emplace_back();
      for (int b = 0; b < rows_; ++b) ids_.back().push_back(random() % 1000), labels_.back().push_back(int64_t(random() % job.model().num_classes()));
    }
    for (size_t i = 0; i < x_.size(); ++i) batches_.push_back({x_[i].data(), labels_[i].data(), ids_[i].data(), rows_, uint32_t(i)});
  }
  absl::Span<const MicroBatch> Of(int step) const { return {batches_.data() + step * accumulation_, size_t(accumulation_)}; }
  int64_t Real(int) const { return int64_t(rows_) * accumulation_; }
  void Spoil(int step) { x_[step * accumulation_][0] = INFINITY; }

 private:
  const int accumulation_, rows_;
  std::vector<std::vector<float>> x_;
  std::vector<std::vector<uint64_t>> ids_;
  std::vector<std::vector<int64_t>> labels_;
  std::vector<MicroBatch> batches_;
};

TEST(FusedGpuTest, EqualsTheCpuInSinglePrecision) {
  RandomJobs jobs(307);
  for (int i = 0; i < 40; ++i) {
    v1::JobSpec job = Fused(jobs.Next(), "fp32");
    job.mutable_optimizer()->set_name(i % 4 == 3 ? "muon" : "adamw");
    SCOPED_TRACE(absl::StrCat("job ", i, " (", job.optimizer().name(), "): ", job.model().ShortDebugString()));
    const Trial cpu = Train(job, 5, {.gpu = false}), gpu = Train(job, 5, {.prefetch = i % 2 == 1});
    ExpectNear(job, 0x1p-23f, cpu, gpu, 1e-4, 1e-3);
    if (HasFatalFailure()) return;
    EXPECT_NEAR(gpu.eval, cpu.eval, 1e-4 * std::abs(cpu.eval));
    EXPECT_LT(Distance(cpu.features, gpu.features), 1e-3);
    EXPECT_EQ(cpu.picture.input, gpu.picture.input);
    EXPECT_EQ(cpu.picture.masked, gpu.picture.masked);
    EXPECT_LT(Distance(cpu.picture.predicted, gpu.picture.predicted), 1e-3);
    EXPECT_LT(Distance(cpu.state.parameters, gpu.state.parameters), 1e-3);
    if (HasFailure()) return;
  }
}

TEST(FusedGpuTest, IsNearTheCpuInHalfPrecision) {
  RandomJobs jobs(309);
  for (int i = 0; i < 20; ++i) {
    v1::JobSpec job = Fused(jobs.Next(), "fp16");
    job.mutable_step()->set_loss_scale(1024);
    job.mutable_step()->set_loss_scale_growth_steps(3);
    if (i % 3 == 2) job.mutable_optimizer()->set_name("muon");
    SCOPED_TRACE(absl::StrCat("job ", i, ": ", job.model().ShortDebugString()));
    const Trial cpu = Train(job, 5, {.gpu = false}), gpu = Train(job, 5, {.prefetch = i % 2 == 1});
    ExpectNear(job, 0x1p-10f, cpu, gpu, 2e-2, 1e-1);
    if (HasFatalFailure()) return;
    EXPECT_LT(Distance(cpu.features, gpu.features), 2e-2);
    EXPECT_EQ(gpu.state.loss_scale.value, 2048);
    EXPECT_EQ(gpu.state.loss_scale.good_steps, 2);
    if (HasFailure()) return;
  }
}

// From far too large a scale, the steps enqueued without a look at what came of them.
TEST(FusedGpuTest, OverflowsAreLeftOutAndHalveTheScaleOnTheDevice) {
  RandomJobs jobs(319);
  for (int i = 0; i < 6; ++i) {
    v1::JobSpec job = Fused(jobs.Next(), "fp16");
    job.mutable_step()->set_on_nan("stop");   // overflows are none of its business
    job.mutable_step()->set_loss_scale(4294967296.0);
    SCOPED_TRACE(absl::StrCat("job ", i, ": ", job.model().ShortDebugString()));
    const Samples samples(job, 1);
    const auto step = MakeGpuStep(job);
    ASSERT_TRUE(step);
    int skips = 0, first = 40;   // step that was not left out
    double fits = 0;
    for (int s = 0; s < 40; ++s) ASSERT_TRUE(step->Run(samples.Of(0), samples.Real(0), 1e-3, {}).ok());
    for (int s = 0; s < 40; ++s) {
      const auto result = step->Take();
      ASSERT_TRUE(result.ok()) << result.status();
      EXPECT_EQ(result->skipped, result->overflowed) << s;
      EXPECT_EQ(result->nan_in_row, 0);
      if (first == 40) {
        EXPECT_EQ(result->loss_scale, std::ldexp(4294967296.0, -s));
      }
      if (result->skipped) ++skips;
      if (!result->skipped && s < first) first = s, fits = result->loss_scale;
    }
    EXPECT_GE(first, 3);
    ASSERT_LT(first, 33);
    const TrainState state = *step->Save();
    EXPECT_EQ(state.updates, 40 - skips);
    job.mutable_step()->set_loss_scale(fits);
    const auto fitting = MakeGpuStep(job);
    ASSERT_TRUE(fitting);
    for (int s = first; s < 40; ++s) ASSERT_TRUE(fitting->RunAndTake(samples.Of(0), samples.Real(0), 1e-3, {}).ok());
    EXPECT_EQ(fitting->Save()->parameters, state.parameters);
    EXPECT_EQ(fitting->Save()->loss_scale.value, state.loss_scale.value);
  }
}

// Two runs, same bits; a second stream and copies ahead change none.
TEST(FusedGpuTest, BitsDoNotDependOnWhatRunsBeside) {
  RandomJobs jobs(311);
  for (int i = 0; i < 16; ++i) {
    v1::JobSpec job = Fused(jobs.Next(), kPrecisions[i % 3]);
    job.mutable_optimizer()->set_name(i % 4 < 2 ? "muon" : "adamw");   // its shapes run beside each other
    SCOPED_TRACE(absl::StrCat("job ", i, " (", job.optimizer().name(), "): ", job.model().ShortDebugString()));
    const Trial first = Train(job, 6, {});
    for (const Way& way : {Way{}, Way{.beside = false}, Way{.prefetch = true}, Way{.beside = false, .prefetch = true}}) {
      const Trial again = Train(job, 6, way);
      EXPECT_EQ(Bits(first.losses), Bits(again.losses));
      EXPECT_EQ(Bits(first.norms), Bits(again.norms));
      EXPECT_EQ(first.state.parameters, again.state.parameters);
      EXPECT_EQ(first.state.exp_avg_sq, again.state.exp_avg_sq);
      EXPECT_EQ(first.features, again.features);
    }
    if (HasFailure()) return;
  }
}

// Steps are given without waiting; results come in order, a snapshot taken between two of them holds that moment.
TEST(FusedGpuTest, StepsUnderWayTellWhatStepsAloneTell) {
  RandomJobs jobs(313);
  for (int i = 0; i < 12; ++i) {
    v1::JobSpec job = Fused(jobs.Next(), kPrecisions[i % 3]);
    SCOPED_TRACE(absl::StrCat("job ", i, ": ", job.model().ShortDebugString()));
    Samples samples(job, 14);
    const auto at_once = MakeGpuStep(job), under_way = MakeGpuStep(job);
    ASSERT_TRUE(at_once && under_way);
    std::vector<StepResult> expected;
    TrainState state;
    std::unique_ptr<StateSnapshot> snapshot;
    for (int s = 0; s < 14; ++s) {
      const auto result = at_once->RunAndTake(samples.Of(s), samples.Real(s), 1e-3, {.checkpoint = s == 5});
      ASSERT_TRUE(result.ok()) << result.status();
      expected.push_back(*result);
      if (s == 6) state = *at_once->Save();
      ASSERT_TRUE(under_way->Run(samples.Of(s), samples.Real(s), 1e-3, {.checkpoint = s == 5}).ok());
      if (s == 6) {
        auto taken = under_way->Snapshot();
        ASSERT_TRUE(taken.ok()) << taken.status();
        snapshot = *std::move(taken);
      }
    }
    const auto saved = snapshot->Read();
    ASSERT_TRUE(saved.ok()) << saved.status();
    EXPECT_EQ(saved->step, state.step);
    EXPECT_EQ(saved->updates, state.updates);
    EXPECT_EQ(saved->parameters, state.parameters);
    EXPECT_EQ(saved->exp_avg, state.exp_avg);
    EXPECT_EQ(saved->exp_avg_sq, state.exp_avg_sq);
    EXPECT_EQ(saved->loss_scale.value, state.loss_scale.value);
    EXPECT_EQ(saved->loss_scale.good_steps, state.loss_scale.good_steps);
    for (const StepResult& same : expected) {
      const auto result = under_way->Take();
      ASSERT_TRUE(result.ok()) << result.status();
      EXPECT_EQ(result->step, same.step);
      EXPECT_EQ(Bits(result->loss), Bits(same.loss));
      EXPECT_EQ(Bits(result->grad_norm), Bits(same.grad_norm));
      EXPECT_EQ(result->signals.checkpoint, same.signals.checkpoint);
      ASSERT_TRUE(result->times.has_value());
      EXPECT_GT(result->times->forward_s, 0);
      EXPECT_GT(result->times->backward_s, 0);
      EXPECT_GT(result->times->optimizer_s, 0);
    }
    EXPECT_FALSE(under_way->Take().ok());
    EXPECT_EQ(under_way->records_lost(), 0);
    EXPECT_EQ(*under_way->ParameterHash(), *at_once->ParameterHash());
    if (HasFailure()) return;
  }
}

// A step that is not finite halts the run on the device: what was enqueued behind it changes nothing.
TEST(FusedGpuTest, AHaltedRunChangesNothing) {
  v1::JobSpec job = Fused(RandomJobs(317).Next(), "fp32");
  job.mutable_step()->set_on_nan("stop");
  job.mutable_step()->set_accumulation(1);
  Samples samples(job, 4);
  const auto step = MakeGpuStep(job);
  ASSERT_TRUE(step);
  ASSERT_TRUE(step->RunAndTake(samples.Of(0), samples.Real(0), 1e-3, {}).ok());
  const TrainState before = *step->Save();
  samples.Spoil(1);
  for (int s = 1; s < 4; ++s) ASSERT_TRUE(step->Run(samples.Of(s), samples.Real(s), 1e-3, {}).ok());
  for (int s = 1; s < 4; ++s) {
    const auto result = step->Take();
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_TRUE(result->halted);
    EXPECT_TRUE(result->skipped);
  }
  EXPECT_EQ(step->Save()->parameters, before.parameters);
  EXPECT_EQ(step->Save()->updates, before.updates);
}

TEST(FusedGpuTest, WhatIsComputedAgainChangesNoBit) {
  RandomJobs jobs(331);
  for (int i = 0; i < 16; ++i) {
    v1::JobSpec job = Fused(jobs.Next(), kPrecisions[i % 3]);
    SCOPED_TRACE(absl::StrCat("job ", i, ": ", job.model().ShortDebugString()));
    const Trial kept = Train(job, 4, {});
    for (int stage = 1; stage <= job.model().stages_size(); ++stage) {
      if (jobs.Pick(0, 1) == 1) job.mutable_step()->add_checkpoint_stages(stage);
    }
    job.mutable_step()->set_checkpoint_decoder(jobs.Pick(0, 1) == 1);
    const Trial again = Train(job, 4, {});
    EXPECT_EQ(Bits(kept.losses), Bits(again.losses));
    EXPECT_EQ(Bits(kept.norms), Bits(again.norms));
    EXPECT_EQ(kept.state.parameters, again.state.parameters);
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace hierad
