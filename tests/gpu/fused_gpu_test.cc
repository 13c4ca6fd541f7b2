// step.mode fused on a GPU against the same step on the CPU, and against itself.
#include <cmath>
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
};

struct Way {
  bool gpu = true, beside = true, prefetch = false;
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
  std::mt19937 random(5);
  const int64_t count = (steps + 1) * accumulation;
  std::vector<std::vector<float>> x(count, std::vector<float>(batch * size));
  std::vector<std::vector<uint64_t>> ids(count, std::vector<uint64_t>(batch));
  std::vector<std::vector<int64_t>> labels(count, std::vector<int64_t>(batch));
  std::vector<MicroBatch> batches;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t real = i % 3 == 1 ? std::max<int64_t>(1, batch - 1) : batch;
    for (float& v : x[i]) v = float(double(random()) / 2147483648.0 - 1);
    for (int64_t b = 0; b < batch; ++b) ids[i][b] = random() % 1000, labels[i][b] = int64_t(random() % job.model().num_classes());
    batches.push_back({x[i].data(), labels[i].data(), ids[i].data(), int32_t(real), uint32_t(i / 4)});
  }
  for (int s = 0; s < steps; ++s) {
    const absl::Span<const MicroBatch> mine(batches.data() + s * accumulation, accumulation);
    int64_t real = 0;
    for (const MicroBatch& b : mine) real += b.real;
    // Not always what comes next: such a copy is made again.
    if (way.prefetch) step->Prefetch(batches[s % 3 == 2 ? 0 : (s + 1) * accumulation]);
    const auto result = step->Run(mine, real, 1e-3, {});
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

v1::JobSpec Fused(v1::JobSpec job, const char* precision) {
  job.mutable_step()->set_mode("fused");
  job.mutable_step()->set_precision(precision);
  return job;
}

TEST(FusedGpuTest, EqualsTheCpuInSinglePrecision) {
  RandomJobs jobs(307);
  for (int i = 0; i < 40; ++i) {
    const v1::JobSpec job = Fused(jobs.Next(), "fp32");
    SCOPED_TRACE(absl::StrCat("job ", i, ": ", job.model().ShortDebugString()));
    const Trial cpu = Train(job, 5, {.gpu = false}), gpu = Train(job, 5, {.prefetch = i % 2 == 1});
    ASSERT_EQ(gpu.losses.size(), cpu.losses.size());
    for (size_t s = 0; s < cpu.losses.size(); ++s) {
      EXPECT_NEAR(gpu.losses[s], cpu.losses[s], 1e-4 * std::abs(cpu.losses[s])) << "step " << s;
      EXPECT_NEAR(gpu.norms[s], cpu.norms[s], 1e-3 * cpu.norms[s]) << "step " << s;
    }
    EXPECT_NEAR(gpu.eval, cpu.eval, 1e-4 * std::abs(cpu.eval));
    EXPECT_LT(Distance(cpu.features, gpu.features), 1e-3);
    EXPECT_LT(Distance(cpu.state.parameters, gpu.state.parameters), 1e-3);
    EXPECT_EQ(cpu.state.updates, gpu.state.updates);
    if (HasFailure()) return;
  }
}

// Two runs, same bits; a second stream and copies ahead change none.
TEST(FusedGpuTest, BitsDoNotDependOnWhatRunsBeside) {
  RandomJobs jobs(311);
  for (int i = 0; i < 16; ++i) {
    const v1::JobSpec job = Fused(jobs.Next(), i % 2 == 0 ? "bf16" : "fp32");
    SCOPED_TRACE(absl::StrCat("job ", i, ": ", job.model().ShortDebugString()));
    const Trial first = Train(job, 6, {});
    for (const Way& way : {Way{}, Way{.beside = false}, Way{.prefetch = true}}) {
      const Trial again = Train(job, 6, way);
      EXPECT_EQ(first.losses, again.losses);
      EXPECT_EQ(first.norms, again.norms);
      EXPECT_EQ(first.state.parameters, again.state.parameters);
      EXPECT_EQ(first.state.exp_avg_sq, again.state.exp_avg_sq);
      EXPECT_EQ(first.features, again.features);
    }
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace hierad
