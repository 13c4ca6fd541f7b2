#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <vector>

#include <ATen/ATen.h>

#include "gtest/gtest.h"
#include "worker/kernels/reference/adamw.h"
#include "worker/optim/adamw.h"
#include "worker/optim/muon.h"
#include "worker/optim/schedule.h"

namespace hierad {
namespace {

Parameter Make(int64_t size, int64_t offset, bool decay) {
  Parameter p{};
  p.shape = {size};
  p.size = size;
  p.offset = offset;
  p.decay = decay;
  return p;
}

v1::OptimizerSpec Optimizer() {
  v1::OptimizerSpec spec;
  spec.set_beta1(0.9);
  spec.set_beta2(0.95);
  spec.set_eps(1e-8);
  spec.set_weight_decay(0.05);
  return spec;
}

TEST(AdamWTest, FollowsTheDefinitionInDouble) {
  const ParameterTable table{{Make(100, 0, true), Make(37, 128, false)}, 192, 137, 1};
  at::manual_seed(1);
  const at::Tensor parameters = at::randn({192}), gradients = at::zeros({192 + 3});
  AdamW adamw(table, Optimizer(), parameters, gradients);
  std::vector<double> p(192), m(192), v(192);
  for (int i = 0; i < 192; ++i) p[i] = parameters[i].item<float>();
  const at::Tensor run = at::zeros({});
  for (int t = 1; t <= 20; ++t) {
    gradients.copy_(at::randn({195}));
    const double lr = 1e-3 * t, divisor = 1 + 0.1 * t;
    for (const Parameter& parameter : table.parameters) {
      for (int64_t i = parameter.offset; i < parameter.offset + parameter.size; ++i) {
        const double g = gradients[i].item<float>() / divisor;
        if (parameter.decay) p[i] *= 1 - lr * 0.05;
        m[i] = 0.9 * m[i] + 0.1 * g;
        v[i] = 0.95 * v[i] + 0.05 * g * g;
        p[i] -= lr * (m[i] / (1 - std::pow(0.9, t))) / (std::sqrt(v[i] / (1 - std::pow(0.95, t))) + 1e-8);
      }
    }
    adamw.Update(t, lr, at::full({}, divisor), run);
  }
  for (const Parameter& parameter : table.parameters) {
    for (int64_t i = parameter.offset; i < parameter.offset + parameter.size; ++i) {
      EXPECT_NEAR(parameters[i].item<float>(), p[i], 2e-6) << i;
      EXPECT_NEAR(adamw.exp_avg_sq[i].item<float>(), v[i], 1e-5) << i;
    }
  }
}

double RelativeDistance(const std::vector<float>& got, const std::vector<double>& expected) {
  double distance = 0, norm = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    distance += (got[i] - expected[i]) * (got[i] - expected[i]);
    norm += expected[i] * expected[i];
  }
  return std::sqrt(distance / norm);
}

// The plain kernel of step.mode fused against torch.optim.AdamW (its fused form) and against the definition in double: 100
// steps, parameters of a spread like a model's.
TEST(AdamWTest, ThePlannedStepsKernelFollowsTorchForAHundredSteps) {
  constexpr int64_t kSize = 64 * 40;
  const v1::OptimizerSpec spec = Optimizer();
  const ParameterTable table{{Make(kSize / 2, 0, true), Make(kSize / 2, kSize / 2, false)}, kSize, kSize, 1};
  at::manual_seed(3);
  const at::Tensor start = at::randn({kSize}) * 0.1, parameters = start.clone(), gradients = at::zeros({kSize});
  AdamW adamw(table, spec, parameters, gradients);
  std::vector<float> master(start.const_data_ptr<float>(), start.const_data_ptr<float>() + kSize), moments(2 * kSize, 0.0f);
  std::vector<double> p(master.begin(), master.end()), m(kSize), v(kSize);
  std::vector<uint8_t> decay(kSize / kParameterAlign, kWithDecay);
  std::fill(decay.begin() + ptrdiff_t(decay.size() / 2), decay.end(), uint8_t{kWithoutDecay});
  for (int t = 1; t <= 100; ++t) {
    gradients.copy_(at::randn({kSize}) * at::exp(at::randn({kSize})));
    const double lr = 1e-3 * (1 + t % 7);
    adamw.Update(t, lr, at::ones({}), at::zeros({}));
    StepScalars scalars{};
    scalars.lr = lr;
    StepRecord record{};
    record.updates = t;
    record.scaled_by = 1;
    reference::AdamW<float, float>(scalars, record, {spec.beta1(), spec.beta2(), spec.eps(), spec.weight_decay(), 0.0}, master.data(),
                                   gradients.const_data_ptr<float>(), moments.data(), decay.data(), nullptr, nullptr, kSize);
    for (int64_t i = 0; i < kSize; ++i) {
      const double g = gradients.const_data_ptr<float>()[i];
      if (i < kSize / 2) p[i] *= 1 - lr * spec.weight_decay();
      m[i] = spec.beta1() * m[i] + (1 - spec.beta1()) * g;
      v[i] = spec.beta2() * v[i] + (1 - spec.beta2()) * g * g;
      p[i] -= lr * (m[i] / (1 - std::pow(spec.beta1(), t))) / (std::sqrt(v[i] / (1 - std::pow(spec.beta2(), t))) + spec.eps());
    }
  }
  const std::vector<double> torch(parameters.const_data_ptr<float>(), parameters.const_data_ptr<float>() + kSize);
  std::printf("after 100 steps: from torch %.1e, from double %.1e\n", RelativeDistance(master, torch), RelativeDistance(master, p));
  EXPECT_LE(RelativeDistance(master, torch), 1e-6);
  EXPECT_LE(RelativeDistance(master, p), 1e-6);
}

TEST(MuonTest, LayersOfOneShapeGoTogetherAndASkippedStepChangesNothing) {
  Parameter tall = Make(12 * 5, 0, true), again = Make(12 * 5, 64, true), wide = Make(4 * 9, 128, true), bias = Make(12, 192, false);
  tall.shape = again.shape = {12, 5};
  wide.shape = {4, 9};
  tall.matrix = again.matrix = wide.matrix = true;
  const ParameterTable table{{tall, again, wide, bias}, 256, 168, 1};
  v1::OptimizerSpec spec = Optimizer();
  spec.set_name("muon");
  spec.set_muon_momentum(0.95);
  spec.set_muon_nesterov(true);
  at::manual_seed(5);
  const at::Tensor parameters = at::randn({256}), gradients = at::randn({256}), momentum = at::zeros({256}), before = parameters.clone();
  Muon muon(table, spec, parameters, gradients, momentum, at::kFloat);
  muon.Update(1e-2, at::ones({}), at::ones({}));
  EXPECT_TRUE(at::equal(parameters, before));
  muon.Update(1e-2, at::ones({}), at::zeros({}));
  for (const Parameter& p : table.parameters) {
    const at::Tensor now = parameters.narrow(0, p.offset, p.size), then = before.narrow(0, p.offset, p.size);
    if (!p.matrix) {
      EXPECT_TRUE(at::equal(now, then));
      continue;
    }
    // All singular values of the step come near 1.
    const at::Tensor step = (then * (1 - 1e-2 * spec.weight_decay()) - now).view(p.shape) / (1e-2 * 0.2 * std::sqrt(double(std::max(p.shape[0], p.shape[1]))));
    const at::Tensor values = at::linalg_svdvals(step);
    EXPECT_GT(values.min().item<double>(), 0.5);
    EXPECT_LT(values.max().item<double>(), 1.4);
  }
}

TEST(AdamWTest, SkipChangesNothing) {
  const ParameterTable table{{Make(64, 0, true)}, 64, 64, 1};
  const at::Tensor parameters = at::randn({64}), gradients = at::randn({64});
  AdamW adamw(table, Optimizer(), parameters, gradients);
  adamw.Update(1, 1e-3, at::ones({}), at::zeros({}));
  const at::Tensor before = parameters.clone(), average = adamw.exp_avg.clone();
  gradients.fill_(std::numeric_limits<float>::quiet_NaN());
  adamw.Update(2, 1e-3, at::ones({}), at::ones({}));
  EXPECT_TRUE(at::equal(parameters, before));
  EXPECT_TRUE(at::equal(adamw.exp_avg, average));
}

TEST(NormTest, SumsInDoubleWhateverTheThreads) {
  std::vector<float> data(300001, 0.1f);
  EXPECT_NEAR(Norm(data.data(), int64_t(data.size())), std::sqrt(300001.0) * double(0.1f), 1e-9);
  data[5] = std::numeric_limits<float>::infinity();
  EXPECT_FALSE(std::isfinite(Norm(data.data(), int64_t(data.size()))));
}

v1::JobSpec Schedule(const char* decay) {
  v1::JobSpec spec;
  spec.mutable_optimizer()->set_lr(1.0);
  spec.mutable_schedule()->set_warmup_ratio(0.1);
  spec.mutable_schedule()->set_decay(decay);
  spec.mutable_schedule()->set_min_lr(0.2);
  return spec;
}

TEST(LearningRateTest, WarmsUpThenFollowsACosine) {
  const v1::JobSpec spec = Schedule("cosine");
  EXPECT_DOUBLE_EQ(LearningRate(spec, 0, 100), 0.1);
  EXPECT_DOUBLE_EQ(LearningRate(spec, 9, 100), 1.0);
  EXPECT_DOUBLE_EQ(LearningRate(spec, 10, 100), 1.0);
  EXPECT_NEAR(LearningRate(spec, 55, 100), 0.6, 1e-12);   // half way
  EXPECT_NEAR(LearningRate(spec, 99, 100), 0.2 + 0.4 * (1 + std::cos(M_PI * 89.0 / 90.0)), 1e-12);
  EXPECT_NEAR(LearningRate(spec, 100, 100), 0.2, 1e-12);
}

TEST(LearningRateTest, ConstantAndWithoutWarmUp) {
  v1::JobSpec spec = Schedule("constant");
  EXPECT_DOUBLE_EQ(LearningRate(spec, 99, 100), 1.0);
  spec.mutable_schedule()->set_warmup_ratio(0);
  EXPECT_DOUBLE_EQ(LearningRate(spec, 0, 100), 1.0);
}

TEST(LearningRateTest, BaseRateScalesWithTheEffectiveBatch) {
  v1::JobSpec spec;
  spec.mutable_optimizer()->set_blr(8e-4);
  spec.mutable_step()->set_batch_per_rank(64);
  spec.mutable_step()->set_accumulation(2);
  spec.mutable_resources()->set_ranks(4);
  spec.mutable_schedule()->set_warmup_ratio(0);
  spec.mutable_schedule()->set_decay("constant");
  EXPECT_DOUBLE_EQ(LearningRate(spec, 0, 10), 8e-4 * 512 / 256);
}

}  // namespace
}  // namespace hierad
