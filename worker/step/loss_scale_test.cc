// Dynamic loss scaling, on the CPU and in every mode.
#include "base/plan/loss_scale.h"

#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "absl/strings/str_cat.h"
#include "base/job_yaml.h"
#include "base/random.h"
#include "gtest/gtest.h"
#include "worker/model/test_models.h"
#include "worker/step/step.h"

namespace hierad {
namespace {

// torch.amp.GradScaler's own update, step by step.
TEST(LossScaleTest, RuleIsGradScalers) {
  std::mt19937 random(5);
  for (int64_t growth_steps : {1, 2, 5}) {
    at::Tensor scale = at::full({1}, 65536.0f), tracker = at::zeros({1}, at::kInt);
    LossScale ours{65536, 0};
    for (int i = 0; i < 400; ++i) {
      // As many halvings as doublings, so that neither end of the range is met.
      const bool finite = ours.value < 1024 || (ours.value < 1e9 && random() % uint32_t(growth_steps + 1) != 0);
      at::_amp_update_scale_(scale, tracker, at::full({1}, finite ? 0.0f : 1.0f), 2.0, 0.5, growth_steps);
      ours = NextLossScale(ours, finite, growth_steps);
      ASSERT_EQ(ours.value, scale.item<float>()) << i;
      ASSERT_EQ(ours.good_steps, tracker.item<int>()) << i;
    }
  }
  EXPECT_EQ(NextLossScale({1, 5}, false, 2000).value, 1);
  EXPECT_EQ(NextLossScale({kMostLossScale, 0}, true, 1).value, kMostLossScale);
}

struct Trial {
  explicit Trial(const std::string& mode, double scale, int64_t growth_steps = 2000, const std::string& precision = "fp16") {
    at::set_num_threads(1);   // of tiny operations
    *spec.mutable_model() = SmallModel(1, "mae");
    v1::StepSpec* step_spec = spec.mutable_step();
    step_spec->set_mode(mode);
    step_spec->set_precision(precision);
    step_spec->set_batch_per_rank(2);
    step_spec->set_on_nan("stop");   // overflows are none of its business
    if (precision == "fp16") {
      step_spec->set_loss_scale(scale);
      step_spec->set_loss_scale_growth_steps(growth_steps);
    }
    spec.set_seed(3);
    FillDefaults(&spec);
    geometry = *Geometry::From(spec.model());
    auto made = MakeStep({spec, false, 1}, geometry, ParameterTable::For(geometry), communicator.get());
    EXPECT_TRUE(made.ok()) << made.status();
    step = *std::move(made);
    EXPECT_TRUE(step->Initialize().ok());
    x.resize(2 * geometry.spec.in_chans() * geometry.input_size[0]);
  }

  // The batch of step number `number`, its values times `factor`.
  StepResult Go(int number, float factor = 1) {
    const RandomStream stream{11, Draw::kSynthetic, 0, uint64_t(number)};
    for (size_t i = 0; i < x.size(); ++i) x[i] = factor * (2 * stream.Uniform(i) - 1);
    ids = {uint64_t(2 * number), uint64_t(2 * number + 1)};
    const MicroBatch batch{x.data(), nullptr, ids.data(), 2, 0};
    auto result = step->RunAndTake({&batch, 1}, 2, 1e-3, {});
    EXPECT_TRUE(result.ok()) << result.status();
    return result.ok() ? *result : StepResult{};
  }

  v1::JobSpec spec;
  Geometry geometry;
  std::unique_ptr<Communicator> communicator = MakeSelfCommunicator();
  std::unique_ptr<Step> step;
  std::vector<float> x;
  std::vector<uint64_t> ids;
};

void ExpectSameState(const TrainState& a, const TrainState& b) {
  EXPECT_EQ(a.parameters, b.parameters);
  EXPECT_EQ(a.exp_avg, b.exp_avg);
  EXPECT_EQ(a.exp_avg_sq, b.exp_avg_sq);
  EXPECT_EQ(a.updates, b.updates);
  EXPECT_EQ(a.loss_scale.value, b.loss_scale.value);
  EXPECT_EQ(a.loss_scale.good_steps, b.loss_scale.good_steps);
}

double Distance(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += (double(a[i]) - b[i]) * (double(a[i]) - b[i]);
    norm += double(b[i]) * b[i];
  }
  return std::sqrt(difference / norm);
}

class LossScalingTest : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Modes, LossScalingTest, testing::Values("eager", "optimized", "graph_safe", "fused"),
                         [](const auto& info) { return info.param; });

// From far too large a scale: each overflow is left out and halves it, until one fits; what follows is the training of a run
// that began with that one.
TEST_P(LossScalingTest, OverflowsAreLeftOutAndHalveTheScale) {
  Trial run(GetParam(), kMostLossScale);
  int skips = 0;
  double fits = 0;
  const TrainState before = *run.step->Save();
  for (; skips < 32; ++skips) {
    const StepResult result = run.Go(0);
    EXPECT_EQ(result.loss_scale, std::ldexp(kMostLossScale, -skips));
    EXPECT_TRUE(std::isfinite(result.loss));
    EXPECT_EQ(result.nan_in_row, 0);
    EXPECT_FALSE(result.halted);
    ASSERT_EQ(result.skipped, result.overflowed);
    fits = result.loss_scale;
    if (!result.skipped) break;
    EXPECT_FALSE(std::isfinite(result.grad_norm));
    EXPECT_EQ(run.step->Save()->parameters, before.parameters);
  }
  ASSERT_GE(skips, 3);
  ASSERT_LT(skips, 32);
  Trial fitting(GetParam(), fits), too_large(GetParam(), 2 * fits);
  EXPECT_TRUE(too_large.Go(0).overflowed);
  EXPECT_FALSE(fitting.Go(0).skipped);
  EXPECT_FALSE(too_large.Go(0).overflowed);
  for (int i = 1; i < 4; ++i) {
    const StepResult a = run.Go(i), b = fitting.Go(i);
    EXPECT_EQ(a.loss, b.loss);
    EXPECT_EQ(a.grad_norm, b.grad_norm);
    EXPECT_EQ(a.skipped, b.skipped);
  }
  ExpectSameState(*run.step->Save(), *fitting.step->Save());
  EXPECT_EQ(run.step->Save()->step, fitting.step->Save()->step + skips);
}

TEST_P(LossScalingTest, TrainsAsFp32DoesWithinHalfPrecision) {
  Trial half(GetParam(), 4096), single(GetParam(), 0, 0, "fp32");
  for (int i = 0; i < 5; ++i) {
    const StepResult a = half.Go(i), b = single.Go(i);
    EXPECT_FALSE(a.skipped);
    EXPECT_NEAR(a.loss, b.loss, 2e-3 * b.loss);
    EXPECT_NEAR(a.grad_norm, b.grad_norm, (i == 0 ? 5e-3 : 3e-2) * b.grad_norm);   // the same weights, and what they became
    EXPECT_EQ(b.loss_scale, 0);
  }
  const TrainState a = *half.step->Save(), b = *single.step->Save();
  EXPECT_LT(Distance(a.exp_avg, b.exp_avg), 2e-2);
  EXPECT_GT(Distance(a.exp_avg, b.exp_avg), 1e-6) << "fp16 rounds nothing";
  EXPECT_LT(Distance(a.parameters, b.parameters), 5e-3);
  EXPECT_EQ(b.loss_scale.value, 0);
}

TEST_P(LossScalingTest, GoesOnBitForBitAcrossAChangeOfScale) {
  Trial straight(GetParam(), 1 << 10, 3);
  std::vector<double> scales;
  for (int i = 0; i < 8; ++i) scales.push_back(straight.Go(i).loss_scale);
  EXPECT_EQ(scales, (std::vector<double>{1024, 1024, 1024, 2048, 2048, 2048, 4096, 4096}));
  for (int cut : {2, 3, 5}) {
    Trial before(GetParam(), 1 << 10, 3), after(GetParam(), 4, 3);
    for (int i = 0; i < cut; ++i) before.Go(i);
    ASSERT_TRUE(after.step->Load(*before.step->Save()).ok());
    for (int i = cut; i < 8; ++i) EXPECT_EQ(after.Go(i).loss_scale, scales[size_t(i)]);
    ExpectSameState(*after.step->Save(), *straight.step->Save());
    EXPECT_EQ(after.step->Save()->step, 8);
  }
}

TEST_P(LossScalingTest, AnotherModeTakesTheScaleOver) {
  Trial run(GetParam(), 1 << 10, 3);
  for (int i = 0; i < 4; ++i) run.Go(i);
  Trial other(GetParam() == "fused" ? "optimized" : "fused", 65536, 3);
  ASSERT_TRUE(other.step->Load(*run.step->Save()).ok());
  EXPECT_EQ(other.Go(4).loss_scale, 2048);
  EXPECT_EQ(run.Go(4).loss_scale, 2048);
  EXPECT_LT(Distance(other.step->Save()->parameters, run.step->Save()->parameters), 5e-3);
  Trial single(GetParam(), 0, 0, "fp32"), fresh(GetParam(), 512, 3);
  ASSERT_TRUE(single.step->Load(*run.step->Save()).ok());
  EXPECT_FALSE(single.Go(5).skipped);
  ASSERT_TRUE(fresh.step->Load(*single.step->Save()).ok());
  EXPECT_EQ(fresh.Go(6).loss_scale, 512) << "a run in fp32 has no scale to hand on";
}

// A smaller scale does not help a loss that is not finite.
TEST_P(LossScalingTest, ALossThatIsNotFiniteIsNoOverflow) {
  Trial run(GetParam(), 1024);
  const StepResult result = run.Go(0, std::numeric_limits<float>::infinity());
  EXPECT_TRUE(result.skipped);
  EXPECT_FALSE(result.overflowed);
  EXPECT_EQ(result.nan_in_row, 1);
  EXPECT_TRUE(result.halted);
}

}  // namespace
}  // namespace hierad
