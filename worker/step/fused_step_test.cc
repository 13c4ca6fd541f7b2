// The fused step against the step over LibTorch: the same losses, gradients and parameters from the same seed.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "base/plan/random_jobs.h"
#include "base/status.h"
#include "worker/comm/communicator.h"
#include "worker/data/dataset.h"
#include "worker/model/hiera.h"
#include "worker/step/accelerator.h"
#include "worker/step/fused_testing.h"
#include "worker/step/staging.h"
#include "worker/step/step.h"

namespace hierad {
namespace {

constexpr double kTolerance = 1e-4;   // of a loss, and of a gradient's norm

struct Samples {
  std::vector<float> x;
  std::vector<int64_t> labels;
  std::vector<uint64_t> ids;
  MicroBatch batch;
};

// Random samples; rows at and beyond `real` are zeros, as the loader leaves them.
Samples MakeSamples(const v1::JobSpec& job, int real, uint32_t seed) {
  Samples s;
  std::mt19937 random(seed);
  const int rows = job.step().batch_per_rank();
  int64_t size = job.model().in_chans();
  for (int extent : job.model().input_size()) size *= extent;
  s.x.assign(rows * size, 0.0f);
  for (int64_t i = 0; i < real * size; ++i) s.x[i] = float(random()) / 1073741824.0f - 2.0f;
  for (int b = 0; b < rows; ++b) {
    s.labels.push_back(b < real ? int64_t(random() % uint32_t(job.model().num_classes())) : -1);
    s.ids.push_back(b < real ? random() : 0);
  }
  s.batch = {s.x.data(), s.labels.data(), s.ids.data(), real, /*epoch=*/2};
  return s;
}

// |a - b| / |b|
double Difference(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0, squares = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    sum += (double(a[i]) - b[i]) * (double(a[i]) - b[i]);
    squares += double(b[i]) * b[i];
  }
  return std::sqrt(sum / squares);
}

// Loss and every gradient of one micro-batch, arenas poisoned, against autograd over both rewrites.
TEST(FusedStepTest, LossAndGradientsEqualLibTorchs) {
  at::set_num_threads(1);   // of tiny operations
  RandomJobs jobs(83);
  for (int i = 0; i < 50; ++i) {
    const v1::JobSpec job = jobs.Next();
    SCOPED_TRACE(absl::StrCat("job ", i, ": ", job.model().ShortDebugString()));
    auto plan = Plan::Make(job, {});
    ASSERT_TRUE(plan.ok()) << plan.status();
    const int rows = job.step().batch_per_rank(), real = jobs.Pick(1, rows);
    const Samples samples = MakeSamples(job, real, 90 + i);
    FusedRun run(*plan, true);
    run.FillParameters();
    const double weight = 1.0 / double(run.LossElements() * real);
    std::memcpy(run.executor().Get<float>(plan->source), samples.x.data(), samples.x.size() * sizeof(float));
    for (int b = 0; b < rows; ++b) {
      run.executor().Get<int64_t>(plan->source_ids)[b] = int64_t(samples.ids[b]);
      run.executor().Get<int64_t>(plan->source_labels)[b] = samples.labels[b];
    }
    run.scalars().seed = job.seed();
    run.scalars().epoch = samples.batch.epoch;
    run.scalars().real = real;
    run.scalars().loss_weight = weight;
    run.executor().ClearSums();
    ASSERT_TRUE(run.executor().RunForwardBackward().ok());

    for (Rewrite rewrite : {Rewrite::kEager, Rewrite::kOptimized}) {
      Weights weights(plan->table, at::kCPU, at::kFloat, 0);
      for (size_t p = 0; p < plan->table.parameters.size(); ++p) {
        const std::vector<double> values = run.Values(plan->master, p);
        std::copy(values.begin(), values.end(), weights.parameters.mutable_data_ptr<float>() + plan->table.parameters[p].offset);
      }
      const auto accelerator = MakeCpuAccelerator();
      Staging staging(plan->geometry, job, {}, accelerator.get());
      auto batch = staging.Load(0, samples.batch, Staging::Use::kTrain, weight, real);
      ASSERT_TRUE(batch.ok()) << batch.status();
      const Hiera model(plan->geometry, &weights);
      const at::Tensor loss = model.Forward(*batch, {.rewrite = rewrite}).loss;
      loss.backward();
      EXPECT_NEAR(run.Loss(), loss.item<double>(), kTolerance * std::max(1.0, loss.item<double>()));
      double largest = 0;
      for (const Parameter& p : plan->table.parameters) largest = std::max(largest, weights.Gradient(p.name).norm().item<double>());
      for (size_t p = 0; p < plan->table.parameters.size(); ++p) {
        const std::vector<double> ours = run.Gradient(p);
        const at::Tensor theirs = weights.Gradient(plan->table.parameters[p].name).to(at::kDouble).flatten();
        const double norm = theirs.norm().item<double>();
        const double difference = (at::tensor(ours, at::kDouble) - theirs).norm().item<double>();
        EXPECT_LE(difference, kTolerance * std::max(norm, 1e-2 * largest)) << plan->table.parameters[p].name << ", norm " << norm;
      }
    }
    if (HasFailure()) return;
  }
}

struct Pair {
  std::unique_ptr<Communicator> communicator = MakeSelfCommunicator();
  std::unique_ptr<Step> fused, torch;
};

Pair MakePair(v1::JobSpec job) {
  Pair pair;
  auto geometry = Geometry::From(job.model());
  EXPECT_TRUE(geometry.ok());
  const ParameterTable table = ParameterTable::For(*geometry);
  for (const char* mode : {"fused", "optimized"}) {
    job.mutable_step()->set_mode(mode);
    auto step = MakeStep({job, false, 1}, *geometry, table, pair.communicator.get());
    EXPECT_TRUE(step.ok()) << step.status();
    EXPECT_TRUE((*step)->Initialize().ok());
    (std::string(mode) == "fused" ? pair.fused : pair.torch) = *std::move(step);
  }
  return pair;
}

v1::JobSpec Steady(v1::JobSpec job) {
  job.mutable_optimizer()->set_eps(1e-3);   // AdamW makes whole steps out of rounding errors where a gradient is zero
  return job;
}

TEST(FusedStepTest, TrainsAsTheTorchStep) {
  RandomJobs jobs(89);
  for (int i = 0; i < 20; ++i) {
    const v1::JobSpec job = Steady(jobs.Next());
    SCOPED_TRACE(absl::StrCat("job ", i, ": ", job.ShortDebugString()));
    Pair pair = MakePair(job);
    EXPECT_EQ(pair.fused->Save()->parameters, pair.torch->Save()->parameters) << "the same seed begins alike";
    for (int s = 0; s < 4; ++s) {
      std::vector<Samples> samples;
      std::vector<MicroBatch> batches;
      int64_t real = 0;
      for (int m = 0; m < job.step().accumulation(); ++m) {
        // The last micro-batch of a step may be short, or empty.
        const int rows = job.step().batch_per_rank(), rows_real = m > 0 && s == 2 ? 0 : jobs.Pick(1, rows);
        samples.push_back(MakeSamples(job, rows_real, uint32_t(1000 + 10 * s + m)));
        real += rows_real;
      }
      for (const Samples& one : samples) batches.push_back(one.batch);
      const auto ours = pair.fused->RunAndTake(batches, real, 1e-3, {.checkpoint = s == 1});
      const auto theirs = pair.torch->RunAndTake(batches, real, 1e-3, {.checkpoint = s == 1});
      ASSERT_TRUE(ours.ok() && theirs.ok()) << ours.status() << theirs.status();
      EXPECT_NEAR(ours->loss, theirs->loss, kTolerance * theirs->loss);
      EXPECT_NEAR(ours->grad_norm, theirs->grad_norm, kTolerance * theirs->grad_norm);
      EXPECT_EQ(ours->signals.checkpoint, s == 1);
      EXPECT_FALSE(ours->signals.stop);
    }
    const auto ours = pair.fused->Save(), theirs = pair.torch->Save();
    EXPECT_EQ(ours->step, theirs->step);
    EXPECT_EQ(ours->updates, theirs->updates);
    EXPECT_LE(Difference(ours->parameters, theirs->parameters), kTolerance);
    EXPECT_LE(Difference(ours->exp_avg, theirs->exp_avg), 10 * kTolerance);
    EXPECT_LE(Difference(ours->exp_avg_sq, theirs->exp_avg_sq), 10 * kTolerance);
  }
}

TEST(FusedStepTest, TrainsAsTheTorchStepWithMuonAndLayerDecay) {
  RandomJobs jobs(91);
  for (int i = 0; i < 8; ++i) {
    v1::JobSpec job = Steady(jobs.Next());
    job.mutable_optimizer()->set_name(i % 4 == 3 ? "adamw" : "muon");
    job.mutable_optimizer()->set_layer_decay(i % 2 == 0 ? 1.0 : 0.6);
    job.mutable_optimizer()->set_ema_decay(i % 3 == 0 ? 0.0 : 0.7);
    SCOPED_TRACE(absl::StrCat("job ", i, ": ", job.ShortDebugString()));
    Pair pair = MakePair(job);
    for (int s = 0; s < 3; ++s) {
      std::vector<Samples> samples;
      std::vector<MicroBatch> batches;
      for (int m = 0; m < job.step().accumulation(); ++m) samples.push_back(MakeSamples(job, job.step().batch_per_rank(), uint32_t(1000 + 10 * s + m)));
      for (const Samples& one : samples) batches.push_back(one.batch);
      const int64_t real = int64_t(batches.size()) * job.step().batch_per_rank();
      const auto ours = pair.fused->RunAndTake(batches, real, 1e-3, {}), theirs = pair.torch->RunAndTake(batches, real, 1e-3, {});
      ASSERT_TRUE(ours.ok() && theirs.ok()) << ours.status() << theirs.status();
      EXPECT_NEAR(ours->loss, theirs->loss, 10 * kTolerance * theirs->loss);
    }
    const auto ours = pair.fused->Save(), theirs = pair.torch->Save();
    EXPECT_LE(Difference(ours->parameters, theirs->parameters), 10 * kTolerance);
    EXPECT_LE(Difference(ours->exp_avg, theirs->exp_avg), 10 * kTolerance);
    ASSERT_EQ(ours->ema.size(), i % 3 == 0 ? 0 : ours->parameters.size());
    ASSERT_EQ(theirs->ema.size(), ours->ema.size());
    if (ours->ema.empty()) continue;
    EXPECT_LE(Difference(ours->ema, theirs->ema), kTolerance);
    EXPECT_NE(ours->ema, ours->parameters);
    // Kept by a state, snapshots included; a state without one begins anew.
    EXPECT_EQ((*(*pair.fused->Snapshot())->Read()).ema, ours->ema);
    ASSERT_TRUE(pair.fused->Load(*ours).ok());
    EXPECT_EQ(pair.fused->Save()->ema, ours->ema);
    TrainState without = *ours;
    without.ema.clear();
    ASSERT_TRUE(pair.fused->Load(without).ok());
    EXPECT_EQ(pair.fused->Save()->ema, ours->parameters);
  }
}

TEST(FusedStepTest, EvaluatesAndGivesFeaturesAsTheTorchStep) {
  RandomJobs jobs(97);
  for (int i = 0; i < 25; ++i) {
    const v1::JobSpec job = jobs.Next();
    SCOPED_TRACE(absl::StrCat("job ", i, ": ", job.model().ShortDebugString()));
    Pair pair = MakePair(job);
    const Samples samples = MakeSamples(job, jobs.Pick(1, job.step().batch_per_rank()), 5);
    const auto ours = pair.fused->Evaluate(samples.batch), theirs = pair.torch->Evaluate(samples.batch);
    ASSERT_TRUE(ours.ok() && theirs.ok()) << ours.status() << theirs.status();
    EXPECT_NEAR(ours->numerator, theirs->numerator, kTolerance * theirs->numerator);
    EXPECT_EQ(ours->weight, theirs->weight);
    const auto features = pair.fused->Features(samples.batch), expected = pair.torch->Features(samples.batch);
    ASSERT_TRUE(features.ok() && expected.ok()) << features.status() << expected.status();
    ASSERT_EQ(features->size(), expected->size());
    EXPECT_LE(Difference(*features, *expected), kTolerance);
  }
}

// A run begun in one mode goes on in the other, and evaluation in between leaves no trace.
TEST(FusedStepTest, ContinuesWhatTheTorchStepBegan) {
  RandomJobs jobs(101);
  v1::JobSpec job = Steady(jobs.Next());
  job.mutable_step()->set_accumulation(1);
  Pair straight = MakePair(job), mixed = MakePair(job);
  for (int s = 0; s < 6; ++s) {
    const Samples samples = MakeSamples(job, job.step().batch_per_rank(), uint32_t(s));
    ASSERT_TRUE(straight.fused->RunAndTake({&samples.batch, 1}, samples.batch.real, 1e-3, {}).ok());
    Step& now = s < 3 ? *mixed.torch : *mixed.fused;
    ASSERT_TRUE(now.RunAndTake({&samples.batch, 1}, samples.batch.real, 1e-3, {}).ok());
    if (s == 2) {
      ASSERT_TRUE(mixed.fused->Load(*mixed.torch->Save()).ok());
    }
    if (s == 4) {
      ASSERT_TRUE(mixed.fused->Evaluate(samples.batch).ok() && mixed.fused->Features(samples.batch).ok());
    }
  }
  const auto a = straight.fused->Save(), b = mixed.fused->Save();
  EXPECT_EQ(a->updates, b->updates);
  EXPECT_LE(Difference(a->parameters, b->parameters), kTolerance);
}

TEST(FusedStepTest, SkipsANonFiniteStepAndEndsAfterTooMany) {
  RandomJobs jobs(103);
  v1::JobSpec job = jobs.Next();
  job.mutable_step()->set_accumulation(1);
  job.mutable_step()->set_max_nan_steps(2);
  Pair pair = MakePair(job);
  Samples samples = MakeSamples(job, 1, 1);
  const auto before = pair.fused->Save();
  for (float& x : samples.x) x = std::numeric_limits<float>::infinity();
  const auto skipped = pair.fused->RunAndTake({&samples.batch, 1}, 1, 1e-3, {});
  ASSERT_TRUE(skipped.ok()) << skipped.status();
  EXPECT_TRUE(skipped->skipped);
  EXPECT_EQ(pair.fused->Save()->parameters, before->parameters);
  EXPECT_EQ(pair.fused->Save()->updates, 0);
  EXPECT_EQ(pair.fused->Save()->step, 1);
  EXPECT_FALSE(skipped->halted);
  const auto ended = pair.fused->RunAndTake({&samples.batch, 1}, 1, 1e-3, {});
  ASSERT_TRUE(ended.ok()) << ended.status();
  EXPECT_TRUE(ended->halted);
}

// Results wait in a ring until they are taken; a snapshot stays what it was while steps go on.
TEST(FusedStepTest, ResultsAndSnapshotsWaitForWhoeverTakesThem) {
  RandomJobs jobs(127);
  v1::JobSpec job = jobs.Next();
  job.mutable_step()->set_accumulation(1);
  Pair at_once = MakePair(job), later = MakePair(job);
  std::vector<StepResult> expected;
  std::vector<TrainState> states;
  const int64_t steps = kRecordSlots + 5;
  std::unique_ptr<StateSnapshot> snapshot;
  for (int64_t s = 0; s < steps; ++s) {
    const Samples samples = MakeSamples(job, 1, uint32_t(s));
    expected.push_back(*at_once.fused->RunAndTake({&samples.batch, 1}, 1, 1e-3, {.stop = s % 2 == 1}));
    EXPECT_EQ(expected.back().step, s + 1);
    EXPECT_EQ(expected.back().signals.stop, s % 2 == 1);
    ASSERT_TRUE(expected.back().times.has_value());
    EXPECT_GT(expected.back().times->forward_s + expected.back().times->backward_s, 0);
    ASSERT_TRUE(later.fused->Run({&samples.batch, 1}, 1, 1e-3, {}).ok());
    if (s == 3) {
      snapshot = *later.fused->Snapshot();
      states.push_back(*at_once.fused->Save());
      EXPECT_EQ(later.fused->Snapshot().status().code(), absl::StatusCode::kInternal) << "one at a time";
    }
  }
  // Five were overwritten; the oldest that is left is the first to be taken.
  for (int64_t s = 5; s < steps; ++s) {
    const auto result = later.fused->Take();
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->step, s + 1);
    EXPECT_EQ(result->loss, expected[size_t(s)].loss);
    EXPECT_EQ(result->grad_norm, expected[size_t(s)].grad_norm);
  }
  EXPECT_FALSE(later.fused->Take().ok());
  EXPECT_EQ(later.fused->records_lost(), 5);
  const auto saved = snapshot->Read();
  ASSERT_TRUE(saved.ok());
  EXPECT_EQ(saved->step, 4);
  EXPECT_EQ(saved->updates, 4);
  EXPECT_EQ(saved->parameters, states[0].parameters);
  EXPECT_EQ(saved->exp_avg, states[0].exp_avg);
  EXPECT_EQ(saved->exp_avg_sq, states[0].exp_avg_sq);
  snapshot.reset();
  EXPECT_TRUE(later.fused->Snapshot().ok());
  EXPECT_EQ(*later.fused->ParameterHash(), *at_once.fused->ParameterHash());
}

// Rows of one type with rules, and the numbers that the model sees of them.
struct StoredRows {
  RowFormat format;
  std::vector<uint8_t> bytes;
  std::vector<float> x, x_plain;   // with and without what is drawn
  std::vector<int64_t> labels;
  std::vector<uint64_t> ids;

  StoredRows(const v1::JobSpec& job, DType type, int real, uint32_t epoch, std::mt19937* random, bool synthetic = false) : format(RowFormat::Plain(*Geometry::From(job.model()))) {
    auto unit = [&] { return double((*random)()) / 4294967296.0; };
    const double widest = type == DType::kU8 ? 255 : type == DType::kI16 ? 32767 : 2;
    format.type = type;
    if (synthetic) format.rules.synthetic = 100;
    for (float& offset : format.offset) offset = float(widest * unit() / 2);
    for (float& scale : format.scale) scale = float((1 + unit()) / widest);
    format.rules.points = std::max<int64_t>(1, format.rules.samples - int64_t((*random)() % 3));
    format.rules.clip = float(0.9 * widest);
    format.rules.shift = 2, format.rules.flip = 0.5, format.rules.channel_drop = 0.2;
    format.rules.amplitude_least = 0.5, format.rules.amplitude_most = 1.5;
    const int rows = job.step().batch_per_rank();
    const int64_t values = format.rules.channels * format.rules.samples;
    bytes.resize(size_t(rows * format.row_bytes()));
    x.assign(size_t(rows * values), 0.0f), x_plain = x;
    for (int b = 0; b < rows; ++b) {
      labels.push_back(b < real ? int64_t((*random)() % uint32_t(job.model().num_classes())) : -1);
      ids.push_back(b < real ? (*random)() : 0);
      for (int64_t i = 0; i < values && b < real && !synthetic; ++i) Put(b * values + i, *random);
      const Visit visit{0, ids.back(), job.seed(), epoch, true};
      if (b >= real) continue;
      EXPECT_TRUE(ConvertRow(format, bytes.data() + b * format.row_bytes(), visit, true, x.data() + b * values));
      EXPECT_TRUE(ConvertRow(format, bytes.data() + b * format.row_bytes(), visit, false, x_plain.data() + b * values));
    }
  }
  void Put(int64_t i, std::mt19937& random) {
    const auto half = uint16_t((random() & 0x83FF) | (10 + random() % 6) << 10);   // up to 2
    const float number = float(random()) / 1073741824.0f - 2.0f;
    switch (format.type) {
      case DType::kU8: bytes[i] = uint8_t(random()); break;
      case DType::kI16:
      case DType::kF16: std::memcpy(bytes.data() + 2 * i, &half, 2); break;
      default: std::memcpy(bytes.data() + 4 * i, &number, 4); break;
    }
  }
  MicroBatch Stored(int real, uint32_t epoch) const { return {bytes.data(), labels.data(), ids.data(), real, epoch}; }
  MicroBatch Numbers(bool drawn, int real, uint32_t epoch) const { return {drawn ? x.data() : x_plain.data(), labels.data(), ids.data(), real, epoch}; }
};

std::unique_ptr<Step> MakeOne(v1::JobSpec job, const char* mode, const RowFormat& rows, Communicator* communicator) {
  job.mutable_step()->set_mode(mode);
  StepOptions options{job, false, 1};
  options.rows = rows;
  const auto geometry = Geometry::From(job.model());
  auto step = MakeStep(options, *geometry, ParameterTable::For(*geometry), communicator);
  EXPECT_TRUE(step.ok()) << step.status();
  EXPECT_TRUE((*step)->Initialize().ok());
  return *std::move(step);
}

// A step converts rows of any type to the very numbers that the host makes of them: same bits after it.
TEST(FusedStepTest, RowsOfEveryTypeAreTheirNumbersInEveryMode) {
  at::set_num_threads(1);
  RandomJobs jobs(109);
  std::mt19937 random(113);
  const auto alone = MakeSelfCommunicator();
  for (int i = 0; i < 20; ++i) {
    v1::JobSpec job = jobs.Next();
    job.mutable_step()->set_accumulation(1);
    const DType type = std::vector{DType::kU8, DType::kI16, DType::kF16, DType::kF32, DType::kF32}[i % 5];
    const char* mode = std::vector{"fused", "eager", "optimized", "graph_safe"}[i / 5];
    const int rows = job.step().batch_per_rank();
    const StoredRows first(job, type, rows, 3, &random, /*synthetic=*/i % 5 == 4);
    SCOPED_TRACE(absl::StrCat(mode, ", rows ", RowsName(first.format), ": ", job.model().ShortDebugString()));
    const auto stored = MakeOne(job, mode, first.format, alone.get()), numbers = MakeOne(job, mode, {}, alone.get());
    const auto a = stored->RunAndTake(std::vector{first.Stored(rows, 3)}, rows, 1e-3, {}), b = numbers->RunAndTake(std::vector{first.Numbers(true, rows, 3)}, rows, 1e-3, {});
    ASSERT_TRUE(a.ok() && b.ok()) << a.status() << b.status();
    EXPECT_EQ(a->loss, b->loss);
    EXPECT_EQ(a->grad_norm, b->grad_norm);
    EXPECT_FALSE(a->input_not_finite);
    EXPECT_EQ(stored->Save()->parameters, numbers->Save()->parameters);
    const auto eval = stored->Evaluate(first.Stored(std::max(1, rows - 1), 3)), expected = numbers->Evaluate(first.Numbers(false, std::max(1, rows - 1), 3));
    ASSERT_TRUE(eval.ok() && expected.ok()) << eval.status() << expected.status();
    EXPECT_EQ(eval->numerator, expected->numerator);
    EXPECT_EQ(*stored->Features(first.Stored(rows, 3)), *numbers->Features(first.Numbers(false, rows, 3)));
    if (HasFailure()) return;
  }
}

// The sample is named, by the step that took it alone.
TEST(FusedStepTest, ASampleThatIsNotFiniteIsNamedInEveryMode) {
  at::set_num_threads(1);
  RandomJobs jobs(127);
  std::mt19937 random(131);
  const auto alone = MakeSelfCommunicator();
  for (const char* mode : {"fused", "eager", "optimized", "graph_safe"}) {
    for (const DType type : {DType::kF32, DType::kF16}) {
      SCOPED_TRACE(absl::StrCat(mode, ", rows ", RowTypeName(type)));
      v1::JobSpec job = jobs.Next();
      job.mutable_step()->set_accumulation(2);
      job.mutable_step()->set_batch_per_rank(3);
      StoredRows good(job, type, 3, 3, &random);
      good.format.rules = RowFormat::Plain(*Geometry::From(job.model())).rules;
      StoredRows bad = good;
      const int64_t values = good.format.rules.channels * good.format.rules.samples;
      if (type == DType::kF32) std::memcpy(bad.bytes.data() + 4 * values, "\0\0\xC0\x7F", 4);
      else std::memcpy(bad.bytes.data() + 2 * values, "\0\x7C", 2);
      const auto step = MakeOne(job, mode, good.format, alone.get());
      const auto run = [&](const MicroBatch& first, const MicroBatch& second) { return *step->RunAndTake(std::vector{first, second}, 6, 1e-3, {}); };
      EXPECT_FALSE(run(good.Stored(3, 3), good.Stored(3, 3)).input_not_finite);
      const TrainState before = *step->Save();
      const StepResult result = run(bad.Stored(3, 3), good.Stored(3, 3));
      EXPECT_TRUE(result.input_not_finite);
      EXPECT_EQ(result.not_finite_visit, bad.ids[1]);
      EXPECT_EQ(step->Save()->parameters, before.parameters);
      EXPECT_FALSE(run(good.Stored(3, 3), good.Stored(3, 3)).input_not_finite);
      EXPECT_EQ(step->Evaluate(bad.Stored(3, 3))->not_finite_visit, bad.ids[1]);
      EXPECT_FALSE(step->Evaluate(good.Stored(3, 3))->not_finite_visit.has_value());
      EXPECT_FALSE(run(good.Stored(3, 3), good.Stored(1, 3)).input_not_finite);
    }
  }
}

TEST(FusedStepTest, RefusesALabelOutOfRange) {
  RandomJobs jobs(107);
  v1::JobSpec job = jobs.Next();
  while (job.model().task() != "classify") job = jobs.Next();
  Pair pair = MakePair(job);
  Samples samples = MakeSamples(job, 1, 1);
  samples.labels[0] = job.model().num_classes();
  EXPECT_EQ(ReasonOf(pair.fused->RunAndTake({&samples.batch, 1}, 1, 1e-3, {}).status()), v1::REASON_DATA_ERROR);
}

TEST(FusedStepTest, Bfloat16TrainsNearFloat) {
  RandomJobs jobs(109);
  for (int i = 0; i < 5; ++i) {
    v1::JobSpec job = Steady(jobs.Next());
    job.mutable_step()->set_precision("fp32");
    Pair exact = MakePair(job);
    job.mutable_step()->set_precision("bf16");
    Pair rounded = MakePair(job);
    std::vector<Samples> samples;
    std::vector<MicroBatch> batches;
    for (int m = 0; m < job.step().accumulation(); ++m) samples.push_back(MakeSamples(job, job.step().batch_per_rank(), uint32_t(m)));
    for (const Samples& one : samples) batches.push_back(one.batch);
    for (int s = 0; s < 3; ++s) {
      const auto a = exact.fused->RunAndTake(batches, int64_t(batches.size()) * job.step().batch_per_rank(), 1e-3, {});
      const auto b = rounded.fused->RunAndTake(batches, int64_t(batches.size()) * job.step().batch_per_rank(), 1e-3, {});
      ASSERT_TRUE(a.ok() && b.ok());
      EXPECT_NEAR(a->loss, b->loss, 0.03 * a->loss) << job.model().ShortDebugString();
    }
  }
}

}  // namespace
}  // namespace hierad
