#include <cmath>
#include <limits>
#include <vector>

#include <ATen/ATen.h>

#include "gtest/gtest.h"
#include "worker/optim/adamw.h"
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
  const ParameterTable table{{Make(100, 0, true), Make(37, 128, false)}, 192, 137};
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

TEST(AdamWTest, SkipChangesNothing) {
  const ParameterTable table{{Make(64, 0, true)}, 64, 64};
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
