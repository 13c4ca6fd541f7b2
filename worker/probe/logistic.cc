#include "worker/probe/logistic.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <map>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "worker/data/loader.h"

namespace hierad {
namespace {

constexpr uint64_t kFoldSeed = 20250101;

double Dot(const std::vector<double>& a, const std::vector<double>& b) { return std::inner_product(a.begin(), a.end(), b.begin(), 0.0); }

// Log probabilities of each class for one row of scores, in place.
void LogSoftmax(double* scores_K, int32_t classes) {
  const double most = *std::max_element(scores_K, scores_K + classes);
  double sum = 0;
  for (int32_t k = 0; k < classes; ++k) sum += std::exp(scores_K[k] - most);
  const double shift = most + std::log(sum);
  for (int32_t k = 0; k < classes; ++k) scores_K[k] -= shift;
}

// Parameters: weights [K, F], then bias [K].
class Objective {
 public:
  Objective(const LabelledRows& rows, double c) : rows_(rows), c_(c) {}

  size_t size() const { return (rows_.width + 1) * rows_.num_classes; }

  double Evaluate(const std::vector<double>& p, std::vector<double>* gradient) const {
    const int64_t width = rows_.width, classes = rows_.num_classes, penalised = width * classes;
    gradient->assign(size(), 0);
    double value = 0;
    std::vector<double> scores_K(classes);
    for (int64_t n = 0; n < rows_.rows; ++n) {
      const double* x = rows_.x_NF.data() + n * width;
      for (int64_t k = 0; k < classes; ++k) scores_K[k] = p[penalised + k] + std::inner_product(x, x + width, p.data() + k * width, 0.0);
      LogSoftmax(scores_K.data(), static_cast<int32_t>(classes));
      value -= scores_K[rows_.labels_N[n]];
      for (int64_t k = 0; k < classes; ++k) {
        const double residual = std::exp(scores_K[k]) - (rows_.labels_N[n] == k);
        double* g = gradient->data() + k * width;
        for (int64_t f = 0; f < width; ++f) g[f] += residual * x[f];
        (*gradient)[penalised + k] += residual;
      }
    }
    for (int64_t i = 0; i < penalised; ++i) {
      value += p[i] * p[i] / (2 * c_);
      (*gradient)[i] += p[i] / c_;
    }
    return value;
  }

 private:
  const LabelledRows& rows_;
  const double c_;
};

// Limited-memory BFGS (Nocedal and Wright, algorithm 7.4), backtracking to sufficient decrease. The objective is convex;
// pairs without positive curvature are left out.
class Lbfgs {
 public:
  explicit Lbfgs(double tolerance) : tolerance_(tolerance) {}

  bool Minimise(const Objective& objective, std::vector<double>* p, int* iterations) {
    std::vector<double> gradient, next_gradient, next(p->size());
    double value = objective.Evaluate(*p, &gradient);
    for (*iterations = 0; *iterations < 1000; ++*iterations) {
      if (Largest(gradient) <= tolerance_) return true;
      std::vector<double> direction = Direction(gradient);
      double slope = Dot(direction, gradient);
      if (slope >= 0) {   // rounding spoilt the memory: start again along the gradient
        pairs_.clear();
        direction = Direction(gradient);
        slope = Dot(direction, gradient);
      }
      double step = pairs_.empty() ? std::min(1.0, 1 / std::sqrt(-slope)) : 1, next_value = 0;
      bool found = false;
      for (int halvings = 0; halvings < 50 && !found; ++halvings, step *= found ? 1 : 0.5) {
        for (size_t i = 0; i < p->size(); ++i) next[i] = (*p)[i] + step * direction[i];
        next_value = objective.Evaluate(next, &next_gradient);
        found = next_value <= value + 1e-4 * step * slope;
      }
      if (!found) return false;   // at the limit of double precision
      Remember(*p, next, gradient, next_gradient);
      std::swap(*p, next);
      std::swap(gradient, next_gradient);
      value = next_value;
    }
    return false;
  }

 private:
  struct Pair {
    std::vector<double> s, y;
    double rho;
  };

  static double Largest(const std::vector<double>& v) {
    double most = 0;
    for (double x : v) most = std::max(most, std::abs(x));
    return most;
  }

  std::vector<double> Direction(const std::vector<double>& gradient) const {
    std::vector<double> q = gradient, alpha(pairs_.size());
    for (size_t i = pairs_.size(); i-- > 0;) {
      alpha[i] = pairs_[i].rho * Dot(pairs_[i].s, q);
      for (size_t j = 0; j < q.size(); ++j) q[j] -= alpha[i] * pairs_[i].y[j];
    }
    const double scale = pairs_.empty() ? 1 : 1 / (pairs_.back().rho * Dot(pairs_.back().y, pairs_.back().y));
    for (double& x : q) x *= scale;
    for (size_t i = 0; i < pairs_.size(); ++i) {
      const double beta = pairs_[i].rho * Dot(pairs_[i].y, q);
      for (size_t j = 0; j < q.size(); ++j) q[j] += (alpha[i] - beta) * pairs_[i].s[j];
    }
    for (double& x : q) x = -x;
    return q;
  }

  void Remember(const std::vector<double>& p, const std::vector<double>& next, const std::vector<double>& g, const std::vector<double>& next_g) {
    Pair pair{std::vector<double>(p.size()), std::vector<double>(p.size()), 0};
    for (size_t i = 0; i < p.size(); ++i) {
      pair.s[i] = next[i] - p[i];
      pair.y[i] = next_g[i] - g[i];
    }
    const double curvature = Dot(pair.s, pair.y);
    if (curvature <= 1e-12 * Dot(pair.y, pair.y)) return;
    pair.rho = 1 / curvature;
    pairs_.push_back(std::move(pair));
    if (pairs_.size() > 20) pairs_.pop_front();
  }

  const double tolerance_;
  std::deque<Pair> pairs_;
};

LabelledRows Select(const LabelledRows& rows, const std::vector<int>& fold_N, int fold, bool inside) {
  LabelledRows out{0, rows.width, {}, {}, rows.num_classes};
  for (int64_t n = 0; n < rows.rows; ++n) {
    if ((fold_N[n] == fold) != inside) continue;
    out.x_NF.insert(out.x_NF.end(), rows.x_NF.begin() + n * rows.width, rows.x_NF.begin() + (n + 1) * rows.width);
    out.labels_N.push_back(rows.labels_N[n]);
    ++out.rows;
  }
  return out;
}

}  // namespace

Standardization Standardization::Of(const LabelledRows& rows) {
  Standardization out{std::vector<double>(rows.width, 0), std::vector<double>(rows.width, 0)};
  for (int64_t f = 0; f < rows.width; ++f) {
    double sum = 0, squares = 0;
    for (int64_t n = 0; n < rows.rows; ++n) sum += rows.x_NF[n * rows.width + f];
    const double mean = sum / rows.rows;
    for (int64_t n = 0; n < rows.rows; ++n) {
      const double d = rows.x_NF[n * rows.width + f] - mean;
      squares += d * d;
    }
    const double std = std::sqrt(squares / rows.rows);
    out.mean_F[f] = mean;
    out.std_F[f] = std > 0 ? std : 1;
  }
  return out;
}

LabelledRows Standardization::Apply(const LabelledRows& rows) const {
  LabelledRows out = rows;
  for (int64_t i = 0; i < rows.rows * rows.width; ++i) out.x_NF[i] = (out.x_NF[i] - mean_F[i % rows.width]) / std_F[i % rows.width];
  return out;
}

LogisticModel FitLogistic(const LabelledRows& rows, double c) {
  const Objective objective(rows, c);
  std::vector<double> p(objective.size(), 0);
  LogisticModel model;
  model.width = rows.width;
  model.num_classes = rows.num_classes;
  model.converged = Lbfgs(1e-6 * rows.rows).Minimise(objective, &p, &model.iterations);
  model.weights_KF.assign(p.begin(), p.begin() + rows.width * rows.num_classes);
  model.bias_K.assign(p.end() - rows.num_classes, p.end());
  return model;
}

std::vector<int32_t> LogisticModel::Predict(const LabelledRows& rows) const {
  std::vector<int32_t> out(rows.rows);
  std::vector<double> scores_K(num_classes);
  for (int64_t n = 0; n < rows.rows; ++n) {
    const double* x = rows.x_NF.data() + n * width;
    for (int32_t k = 0; k < num_classes; ++k) scores_K[k] = bias_K[k] + std::inner_product(x, x + width, weights_KF.data() + k * width, 0.0);
    out[n] = static_cast<int32_t>(std::max_element(scores_K.begin(), scores_K.end()) - scores_K.begin());
  }
  return out;
}

double LogisticModel::Accuracy(const LabelledRows& rows) const {
  const std::vector<int32_t> predicted = Predict(rows);
  int64_t right = 0;
  for (int64_t n = 0; n < rows.rows; ++n) right += predicted[n] == rows.labels_N[n];
  return static_cast<double>(right) / rows.rows;
}

double LogisticModel::MeanLogLoss(const LabelledRows& rows) const {
  double sum = 0;
  std::vector<double> scores_K(num_classes);
  for (int64_t n = 0; n < rows.rows; ++n) {
    const double* x = rows.x_NF.data() + n * width;
    for (int32_t k = 0; k < num_classes; ++k) scores_K[k] = bias_K[k] + std::inner_product(x, x + width, weights_KF.data() + k * width, 0.0);
    LogSoftmax(scores_K.data(), num_classes);
    sum -= scores_K[rows.labels_N[n]];
  }
  return sum / rows.rows;
}

const std::vector<double>& StrengthGrid() {
  static const std::vector<double> grid = {1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1, 3, 10, 30, 100};
  return grid;
}

absl::StatusOr<std::vector<int>> MakeFolds(const LabelledRows& rows, const std::vector<int64_t>& groups_N, int folds) {
  // Units are dealt to the folds in a fixed shuffled order, class by class where they are single rows.
  std::map<int64_t, std::vector<int64_t>> units;   // group, or row
  for (int64_t n = 0; n < rows.rows; ++n) units[groups_N.empty() ? n : groups_N[n]].push_back(n);
  if (static_cast<int>(units.size()) < folds)
    return ErrorOf(v1::REASON_USER_ERROR, absl::StrCat(units.size(), groups_N.empty() ? " labelled samples" : " groups", " for ", folds, "-fold cross-validation; at least ", folds, " are needed"));
  std::vector<const std::vector<int64_t>*> dealt;
  for (const auto& [key, members] : units) dealt.push_back(&members);
  std::vector<const std::vector<int64_t>*> shuffled;
  for (uint64_t i : EpochOrder(kFoldSeed, 0, dealt.size())) shuffled.push_back(dealt[i]);
  if (groups_N.empty())
    std::stable_sort(shuffled.begin(), shuffled.end(), [&](const auto* a, const auto* b) { return rows.labels_N[a->front()] < rows.labels_N[b->front()]; });
  std::vector<int> fold_N(rows.rows);
  int next = 0;
  for (const auto* members : shuffled) {
    for (int64_t n : *members) fold_N[n] = next;
    next = (next + 1) % folds;
  }
  return fold_N;
}

ChosenStrength ChooseStrength(const LabelledRows& rows, const std::vector<int>& fold_N, int folds) {
  const std::vector<double>& grid = StrengthGrid();
  std::vector<double> right(grid.size(), 0), loss(grid.size(), 0);
  for (int fold = 0; fold < folds; ++fold) {
    LabelledRows train = Select(rows, fold_N, fold, false), held_out = Select(rows, fold_N, fold, true);
    const Standardization scale = Standardization::Of(train);
    train = scale.Apply(train);
    held_out = scale.Apply(held_out);
    for (size_t i = 0; i < grid.size(); ++i) {
      const LogisticModel model = FitLogistic(train, grid[i]);
      right[i] += std::round(model.Accuracy(held_out) * held_out.rows);
      loss[i] += model.MeanLogLoss(held_out) * held_out.rows;
    }
  }
  size_t best = 0;
  for (size_t i = 1; i < grid.size(); ++i)
    if (loss[i] < loss[best]) best = i;
  return {grid[best], right[best] / rows.rows};
}

}  // namespace hierad
