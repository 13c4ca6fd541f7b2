// The two rewrites compute the same function: loss, predictions, labels, intermediates, every gradient.
#include "worker/model/hiera.h"

#include <cmath>
#include <string>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>

#include "gtest/gtest.h"
#include "worker/model/draws.h"
#include "worker/model/initialize.h"
#include "worker/model/test_models.h"

namespace hierad {
namespace {

struct Model {
  explicit Model(const v1::ModelSpec& spec, at::ScalarType type = at::kFloat, bool direct = false)
      : geometry(*Geometry::From(spec)), table(ParameterTable::For(geometry)), weights(table, at::kCPU, type, 3, direct),
        hiera(geometry, &weights) {
    at::set_num_threads(1);   // tests run beside others: two spinning threads would wait for each other
    InitializeParameters(table, 3, weights.parameters.mutable_data_ptr<float>());
    // Away from the symmetric start: biases, norms and tokens of every kind must matter.
    at::manual_seed(1);
    weights.parameters.add_(at::randn_like(weights.parameters), 0.05);
    weights.RefreshComputeCopy();
  }

  BatchTensors Batch(int64_t B, bool drop_path = false) const {
    BatchTensors batch;
    std::vector<int64_t> shape{B, geometry.spec.in_chans()};
    shape.insert(shape.end(), geometry.input_size.begin(), geometry.input_size.end());
    at::manual_seed(2);
    batch.x = at::randn(shape);
    const int64_t n = geometry.num_mask_units;
    batch.units = at::empty({B, n}, at::kLong);
    batch.rank = at::empty({B, n}, at::kLong);
    batch.drop_path = drop_path ? at::empty({2 * int64_t(geometry.blocks.size()), B}) : at::Tensor();
    for (int64_t b = 0; b < B; ++b) {
      DrawMaskUnits({0, Draw::kMask, 0, uint64_t(b)}, n, geometry.num_kept, batch.units[b].mutable_data_ptr<int64_t>(),
                    batch.rank[b].mutable_data_ptr<int64_t>());
      if (drop_path) DrawDropPath(0, 0, b, geometry, batch.drop_path.mutable_data_ptr<float>() + b, B);
    }
    batch.weight = at::rand({B}) + 0.5;
    batch.labels = at::arange(B) % geometry.spec.num_classes();
    return batch;
  }

  // Loss, outputs and all gradients.
  std::pair<ForwardResult, at::Tensor> Run(const BatchTensors& batch, Rewrite rewrite, bool overwrite = false) {
    weights.BeginStep(overwrite);
    weights.BeginBackward();
    ForwardResult result = hiera.Forward(batch, {rewrite, true});
    result.loss.backward();
    weights.EndBackward();
    return {result, weights.gradients.clone()};
  }

  Geometry geometry;
  ParameterTable table;
  Weights weights;
  Hiera hiera;
};

double Difference(const at::Tensor& a, const at::Tensor& b) {
  EXPECT_EQ(a.sizes(), b.sizes());
  const at::Tensor x = a.detach().to(at::kDouble), y = b.detach().to(at::kDouble);
  return ((x - y).norm() / (y.norm() + 1e-30)).item<double>();
}

class RewritesTest : public testing::TestWithParam<std::tuple<int, std::string>> {};

TEST_P(RewritesTest, Agree) {
  const auto [dims, task] = GetParam();
  v1::ModelSpec spec = SmallModel(dims, task);
  spec.set_drop_path_rate(0.4);
  Model model(spec);
  const BatchTensors batch = model.Batch(6, /*drop_path=*/true);
  const auto [eager, eager_gradients] = model.Run(batch, Rewrite::kEager);
  const auto [optimized, optimized_gradients] = model.Run(batch, Rewrite::kOptimized);
  EXPECT_NEAR(eager.loss.item<float>(), optimized.loss.item<float>(), 1e-5 * std::abs(eager.loss.item<float>()));
  EXPECT_LT(Difference(optimized.pred, eager.pred), 1e-5);
  if (task == "mae") {
    EXPECT_LT(Difference(optimized.label, eager.label), 1e-6);
    ASSERT_EQ(eager.intermediates.size(), model.geometry.fusion_stages.size());
    ASSERT_EQ(optimized.intermediates.size(), eager.intermediates.size());
    for (size_t i = 0; i < eager.intermediates.size(); ++i) {
      EXPECT_LT(Difference(optimized.intermediates[i], eager.intermediates[i]), 1e-5) << i;
    }
  }
  for (const Parameter& p : model.table.parameters) {
    const at::Tensor a = eager_gradients.narrow(0, p.offset, p.size), b = optimized_gradients.narrow(0, p.offset, p.size);
    EXPECT_GT(a.abs().max().item<float>(), 0) << p.name << " has no gradient";
    EXPECT_LT(Difference(b, a), 1e-4) << p.name;
  }
}

INSTANTIATE_TEST_SUITE_P(Dims, RewritesTest, testing::Combine(testing::Values(1, 2, 3), testing::Values("mae", "classify")),
                         [](const auto& info) {
                           return std::get<1>(info.param) + std::to_string(std::get<0>(info.param)) + "d";
                         });

// Linear layers that write their gradients themselves: the same gradients, over whatever was there, and added to.
TEST(HieraTest, DirectGradientsAreAutograds) {
  for (at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    for (const char* task : {"mae", "classify"}) {
      Model plain(SmallModel(2, task), type), direct(SmallModel(2, task), type, true);
      const BatchTensors batch = plain.Batch(3);
      const at::Tensor expected = plain.Run(batch, Rewrite::kOptimized).second;
      EXPECT_LT(Difference(direct.Run(batch, Rewrite::kOptimized).second, expected), 1e-6);
      for (const Parameter& p : direct.table.parameters) direct.weights.Gradient(p.name).fill_(7);
      EXPECT_LT(Difference(direct.Run(batch, Rewrite::kOptimized, /*overwrite=*/true).second, expected), 1e-6);
      direct.weights.BeginBackward();   // a second micro-batch
      direct.hiera.Forward(batch, {}).loss.backward();
      direct.weights.EndBackward();
      EXPECT_LT(Difference(direct.weights.gradients, expected * 2), 1e-6);
    }
  }
}

TEST(HieraTest, FeaturesAgree) {
  for (int dims : {1, 2, 3}) {
    Model model(SmallModel(dims));
    BatchTensors batch = model.Batch(2);
    for (int64_t b = 0; b < 2; ++b) {
      KeepAllMaskUnits(model.geometry.num_mask_units, batch.units[b].mutable_data_ptr<int64_t>(),
                       batch.rank[b].mutable_data_ptr<int64_t>());
    }
    const at::Tensor eager = model.hiera.Features(batch, Rewrite::kEager);
    EXPECT_EQ(eager.sizes(), at::IntArrayRef({2, model.geometry.encoder_dim_out}));
    EXPECT_LT(Difference(model.hiera.Features(batch, Rewrite::kOptimized), eager), 1e-5);
  }
}

// Along directions that weigh the gradient's elements at random, the loss changes as the gradient says.
TEST(HieraTest, GradientsAreThoseOfTheLoss) {
  Model model(SmallModel(2));
  const BatchTensors batch = model.Batch(2);
  const auto [result, gradients] = model.Run(batch, Rewrite::kOptimized);
  const c10::NoGradGuard no_grad;
  at::manual_seed(4);
  for (int trial = 0; trial < 3; ++trial) {
    at::Tensor direction = (gradients * at::rand_like(gradients)).narrow(0, 0, model.table.flat_size);
    direction = direction / direction.norm();
    constexpr double kStep = 2e-3;
    const at::Tensor saved = model.weights.parameters.clone();
    auto loss_at = [&](double distance) {
      model.weights.parameters.copy_(saved).add_(direction, distance);
      return model.hiera.Forward(batch, {}).loss.item<double>();
    };
    const double numeric = (loss_at(kStep) - loss_at(-kStep)) / (2 * kStep);
    model.weights.parameters.copy_(saved);
    const double analytic = (gradients.narrow(0, 0, model.table.flat_size) * direction).sum().item<double>();
    EXPECT_NEAR(numeric, analytic, 0.005 * std::abs(analytic)) << result.loss.item<float>();
  }
}

// What was removed reaches the loss as label only: the encoder must not see it.
TEST(HieraTest, RemovedUnitsAreInvisible) {
  for (Rewrite rewrite : {Rewrite::kEager, Rewrite::kOptimized}) {
    Model model(SmallModel(2));
    BatchTensors batch = model.Batch(2);
    const ForwardResult before = model.hiera.Forward(batch, {rewrite, true});
    const int64_t n_x = model.geometry.mask_units[1];
    for (int64_t b = 0; b < 2; ++b) {
      for (int64_t i = model.geometry.num_kept; i < model.geometry.num_mask_units; ++i) {
        const int64_t unit = batch.units[b][i].item<int64_t>();
        batch.x[b].narrow(1, unit / n_x * 16, 16).narrow(2, unit % n_x * 16, 16).fill_(1e3);
      }
    }
    const ForwardResult after = model.hiera.Forward(batch, {rewrite, true});
    EXPECT_TRUE(at::equal(before.pred, after.pred));
    EXPECT_FALSE(at::equal(before.label, after.label));
  }
}

TEST(HieraTest, WeightsOfSamplesAreFactorsOfTheirLosses) {
  Model model(SmallModel(1));
  BatchTensors batch = model.Batch(3);
  auto loss = [&](std::vector<float> weight) {
    batch.weight = at::tensor(weight);
    return model.hiera.Forward(batch, {}).loss.item<double>();
  };
  const double a = loss({1, 0, 0}), b = loss({0, 1, 0}), c = loss({0, 0, 1});
  EXPECT_NEAR(loss({1, 2, 3}), a + 2 * b + 3 * c, 1e-4 * (a + b + c));
  EXPECT_GT(a, 0);
}

TEST(HieraTest, Bf16StaysNearFp32) {
  Model exact(SmallModel(2)), rounded(SmallModel(2), at::kBFloat16);
  for (Rewrite rewrite : {Rewrite::kEager, Rewrite::kOptimized}) {
    const auto [a, a_gradients] = exact.Run(exact.Batch(3), rewrite);
    const auto [b, b_gradients] = rounded.Run(rounded.Batch(3), rewrite);
    EXPECT_NEAR(a.loss.item<float>(), b.loss.item<float>(), 0.02 * a.loss.item<float>());
    EXPECT_LT(Difference(b_gradients, a_gradients), 0.05);
  }
}

TEST(HieraTest, SetUnitsReadsABooleanMask) {
  const at::Tensor mask = at::tensor(std::vector<int64_t>{0, 1, 1, 0, 1, 1, 0, 0}).view({2, 4}).to(at::kBool);
  BatchTensors batch;
  SetUnits(mask, 2, &batch);
  EXPECT_TRUE(at::equal(batch.units, at::tensor(std::vector<int64_t>{1, 2, 0, 3, 0, 1, 2, 3}).view({2, 4})));
  EXPECT_TRUE(at::equal(batch.rank, at::tensor(std::vector<int64_t>{2, 0, 1, 3, 0, 1, 2, 3}).view({2, 4})));
}

}  // namespace
}  // namespace hierad
