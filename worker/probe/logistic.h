// L2-regularised multinomial logistic regression in double precision, and the choice of its strength by
// cross-validation. Deterministic: the same input gives the same bits. Pure arithmetic; thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace hierad {

// Rows of equal width, and a class for each.
struct LabelledRows {
  int64_t rows = 0, width = 0;
  std::vector<double> x_NF;
  std::vector<int32_t> labels_N;   // in [0, num_classes)
  int32_t num_classes = 0;
};

// Column means and standard deviations of a training set; a constant column keeps divisor 1.
struct Standardization {
  std::vector<double> mean_F, std_F;
  static Standardization Of(const LabelledRows& rows);
  LabelledRows Apply(const LabelledRows& rows) const;
};

struct LogisticModel {
  int64_t width = 0;
  int32_t num_classes = 0;
  std::vector<double> weights_KF, bias_K;
  int iterations = 0;
  bool converged = false;

  std::vector<int32_t> Predict(const LabelledRows& rows) const;
  double Accuracy(const LabelledRows& rows) const;
  double MeanLogLoss(const LabelledRows& rows) const;   // nats
};

// Minimises sum of log losses + |weights|^2 / (2 c); the bias is free. L-BFGS from zero, until the largest gradient
// entry is below 1e-6 x rows, or 1000 iterations.
LogisticModel FitLogistic(const LabelledRows& rows, double c);

// The fixed grid of strengths, strongest penalty (smallest c) first.
const std::vector<double>& StrengthGrid();

// Fold of each row, in [0, folds). Without groups (empty): stratified by class. With: rows of one group share a fold.
// Shuffled from a fixed seed. InvalidArgument: fewer rows, or groups, than folds.
absl::StatusOr<std::vector<int>> MakeFolds(const LabelledRows& rows, const std::vector<int64_t>& groups_N, int folds);

struct ChosenStrength {
  double c = 0;
  double accuracy = 0;   // over the held-out rows of all folds
};

// Each fold is standardised by the others. The least log loss on the held-out rows is chosen: with some hundred samples
// accuracy moves in steps and by chance. Of equals, the strongest penalty.
ChosenStrength ChooseStrength(const LabelledRows& rows, const std::vector<int>& fold_N, int folds);

}  // namespace hierad
