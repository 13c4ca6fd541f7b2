#include "worker/probe/logistic.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "base/random.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace hierad {
namespace {

LabelledRows Rows(std::vector<std::vector<double>> x, std::vector<int32_t> labels, int32_t classes) {
  LabelledRows rows{static_cast<int64_t>(x.size()), static_cast<int64_t>(x[0].size()), {}, std::move(labels), classes};
  for (const auto& row : x) rows.x_NF.insert(rows.x_NF.end(), row.begin(), row.end());
  return rows;
}

// Normal features, of which the first `useful` carry the class.
LabelledRows Random(int64_t n, int64_t width, int32_t classes, int useful, double shift, uint64_t seed) {
  LabelledRows rows{n, width, {}, {}, classes};
  for (int64_t i = 0; i < n; ++i) {
    const RandomStream draws{seed, Draw::kSynthetic, 0, static_cast<uint64_t>(i)};
    rows.labels_N.push_back(static_cast<int32_t>(i % classes));
    for (int64_t f = 0; f < width; ++f) {
      double x = -6;   // near normal
      for (int j = 0; j < 12; ++j) x += draws.Uniform(f * 12 + j);
      rows.x_NF.push_back(x + (f < useful ? shift * rows.labels_N.back() : 0));
    }
  }
  return rows;
}

// Two points at +1 and -1: w1 = -w0 = w solves w / c = 2 sigmoid(-2w), the derivative of
// 2 log(1 + exp(-2w)) + w^2 / c in w, halved.
TEST(FitLogistic, SolvesTheTwoPointProblem) {
  for (double c : {0.01, 1.0, 100.0}) {
    const LogisticModel model = FitLogistic(Rows({{-1}, {1}}, {0, 1}, 2), c);
    EXPECT_TRUE(model.converged);
    const double w = model.weights_KF[1];
    EXPECT_NEAR(model.weights_KF[0], -w, 1e-9);
    EXPECT_NEAR(model.bias_K[0], model.bias_K[1], 1e-9);
    EXPECT_GT(w, 0);
    double least = 0, most = 100;   // bisection of the equation above
    for (int i = 0; i < 200; ++i) {
      const double middle = (least + most) / 2;
      (middle / c < 2 / (1 + std::exp(2 * middle)) ? least : most) = middle;
    }
    EXPECT_NEAR(w, least, 1e-4 * least + 1e-6) << c;
  }
}

// Without useful features the bias alone is left: log odds are those of the class counts.
TEST(FitLogistic, TheFreeBiasGivesTheClassFrequencies) {
  const LogisticModel model = FitLogistic(Rows({{0}, {0}, {0}, {0}, {0}, {0}}, {0, 1, 1, 2, 2, 2}, 3), 1);
  EXPECT_NEAR(model.bias_K[1] - model.bias_K[0], std::log(2), 1e-5);
  EXPECT_NEAR(model.bias_K[2] - model.bias_K[0], std::log(3), 1e-5);
}

TEST(FitLogistic, AtItsMinimumTheGradientVanishes) {
  const LabelledRows rows = Random(120, 40, 3, 4, 0.7, 1);
  const double c = 0.3;
  const LogisticModel model = FitLogistic(rows, c);
  EXPECT_TRUE(model.converged);
  const auto value = [&](const LogisticModel& m) {
    double squares = 0;
    for (double w : m.weights_KF) squares += w * w;
    return m.MeanLogLoss(rows) * rows.rows + squares / (2 * c);
  };
  for (size_t i = 0; i < model.weights_KF.size(); i += 7) {
    LogisticModel up = model, down = model;
    up.weights_KF[i] += 1e-4;
    down.weights_KF[i] -= 1e-4;
    EXPECT_NEAR((value(up) - value(down)) / 2e-4, 0, 1e-3);
  }
}

TEST(Standardization, IsOfTheTrainingRowsAndKeepsConstants) {
  const LabelledRows train = Rows({{1, 5}, {3, 5}}, {0, 1}, 2);
  const Standardization scale = Standardization::Of(train);
  EXPECT_THAT(scale.Apply(train).x_NF, testing::ElementsAre(-1, 0, 1, 0));
  EXPECT_THAT(scale.Apply(Rows({{5, 6}}, {0}, 2)).x_NF, testing::ElementsAre(3, 1));
}

TEST(MakeFolds, StratifiesByClass) {
  LabelledRows rows = Random(103, 1, 2, 0, 0, 1);
  for (int64_t n = 0; n < 103; ++n) rows.labels_N[n] = n >= 80;
  const auto folds = MakeFolds(rows, {}, 5);
  ASSERT_TRUE(folds.ok());
  for (int fold = 0; fold < 5; ++fold) {
    int all = 0, ones = 0;
    for (int64_t n = 0; n < 103; ++n)
      if ((*folds)[n] == fold) ++all, ones += rows.labels_N[n];
    EXPECT_TRUE(all == 20 || all == 21);
    EXPECT_TRUE(ones == 4 || ones == 5);
  }
  EXPECT_FALSE(MakeFolds(Rows({{1}, {2}}, {0, 1}, 2), {}, 5).ok());
}

TEST(MakeFolds, GroupsStayTogether) {
  const LabelledRows rows = Random(100, 1, 2, 0, 0, 1);
  std::vector<int64_t> groups;
  for (int64_t n = 0; n < 100; ++n) groups.push_back(n / 10);
  const auto folds = MakeFolds(rows, groups, 5);
  ASSERT_TRUE(folds.ok());
  for (int64_t n = 0; n < 100; ++n) EXPECT_EQ((*folds)[n], (*folds)[n / 10 * 10]);
  EXPECT_EQ(std::set<int>(folds->begin(), folds->end()).size(), 5u);
  EXPECT_EQ(std::count(folds->begin(), folds->end(), 3), 20);
  EXPECT_FALSE(MakeFolds(rows, std::vector<int64_t>(100, 1), 5).ok());
}

// By hand: folds of the first and the second half.
TEST(ChooseStrength, TakesTheBestOfTheGridOnHeldOutRows) {
  const LabelledRows rows = Random(80, 60, 2, 3, 1.0, 1);
  std::vector<int> fold_N(80);
  LabelledRows halves[2] = {{40, 60, {}, {}, 2}, {40, 60, {}, {}, 2}};
  for (int n = 0; n < 80; ++n) {
    LabelledRows& half = halves[fold_N[n] = n / 40];
    half.labels_N.push_back(rows.labels_N[n]);
    half.x_NF.insert(half.x_NF.end(), rows.x_NF.begin() + n * 60, rows.x_NF.begin() + (n + 1) * 60);
  }
  double best_accuracy = 0, best_loss = 1e9, best_c = 0;
  for (double c : StrengthGrid()) {
    double accuracy = 0, loss = 0;
    for (int held_out : {0, 1}) {
      const Standardization scale = Standardization::Of(halves[1 - held_out]);
      const LogisticModel model = FitLogistic(scale.Apply(halves[1 - held_out]), c);
      accuracy += model.Accuracy(scale.Apply(halves[held_out])) / 2;
      loss += model.MeanLogLoss(scale.Apply(halves[held_out]));
    }
    if (loss < best_loss) best_accuracy = accuracy, best_loss = loss, best_c = c;
  }
  const ChosenStrength chosen = ChooseStrength(rows, fold_N, 2);
  EXPECT_EQ(chosen.c, best_c);
  EXPECT_NEAR(chosen.accuracy, best_accuracy, 1e-12);
}

TEST(ChooseStrength, EstimatesWhatIsThere) {
  const LabelledRows clean = Random(600, 2, 2, 2, 1.0, 2), nothing = Random(200, 20, 2, 0, 0, 3);
  EXPECT_NEAR(ChooseStrength(clean, *MakeFolds(clean, {}, 5), 5).accuracy, 0.76, 0.04);   // Bayes: Phi(sqrt(2) / 2)
  EXPECT_NEAR(ChooseStrength(nothing, *MakeFolds(nothing, {}, 5), 5).accuracy, 0.5, 0.12);
}

}  // namespace
}  // namespace hierad
