// Sums: gradients of biases, and the norm of all gradients with the step's verdict.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "base/plan/plan.h"

namespace hierad::reference {

// Sums over rows in parts. Here the first part is the whole sum, in double; the others are zero.
template <typename S>
void WholeSum(const std::vector<double>& sum, S* parts, int64_t num_parts) {
  const int64_t cols = int64_t(sum.size());
  for (int64_t c = 0; c < cols; ++c) parts[c] = S(sum[c]);
  for (int64_t i = cols; i < num_parts * cols; ++i) parts[i] = S(0);
}

template <typename T, typename S>
void ColumnSum(const T* dy, S* parts, int64_t rows, int64_t cols, int64_t num_parts) {
  std::vector<double> sum(cols, 0.0);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) sum[c] += double(S(dy[r * cols + c]));
  }
  WholeSum(sum, parts, num_parts);
}

template <typename S>
void SumParts(const S* parts, S* grad, int64_t cols, int64_t num_parts, bool accumulate) {
  for (int64_t c = 0; c < cols; ++c) {
    S sum = 0;
    for (int64_t p = 0; p < num_parts; ++p) sum += parts[p * cols + c];
    grad[c] = sum + (accumulate ? grad[c] : S(0));
  }
}

template <typename S>
double SumOfSquares(const S* values, int64_t size) {
  double squares = 0;
  for (int64_t i = 0; i < size; ++i) squares += double(values[i]) * double(values[i]);
  return squares;
}

// Writes the whole record of the step, counters included: AdamW only reads it. gradients nullptr: `sums` holds `size` sums of
// their squares.
template <typename S>
void GradientNorm(const StepScalars& scalars, const S* gradients, const double* sums, const double* loss_partials, StepRecord* record,
                  int64_t size, int64_t batch, bool own_signals, int64_t scale_growth_steps) {
  double squares = 0, numerator = 0;
  if (gradients == nullptr) {
    for (int64_t i = 0; i < size; ++i) squares += sums[i];
  } else {
    squares = SumOfSquares(gradients, size);
  }
  for (int64_t b = 0; b < batch; ++b) numerator += loss_partials[b];
  record->step = scalars.step;
  record->loss_numerator = numerator;
  record->loss = numerator * scalars.loss_weight;
  record->scaled_by = scale_growth_steps > 0 ? record->scale.value : 1;
  record->grad_norm = std::sqrt(squares) / record->scaled_by;
  record->lr = scalars.lr;
  const bool finite = std::isfinite(record->loss) && std::isfinite(record->grad_norm);
  record->skipped = finite && record->halted == 0 ? 0 : 1;
  record->overflowed = 0;
  if (record->halted == 0) {
    // A smaller scale may help where the loss is finite and its gradients are not.
    record->overflowed = std::isfinite(record->loss) && !finite && record->scaled_by > kLeastLossScale ? 1 : 0;
    if (record->overflowed == 0) record->nan_in_row = finite ? 0 : record->nan_in_row + 1;
    record->halted = scalars.nan_limit > 0 && record->nan_in_row >= scalars.nan_limit ? 1 : 0;
    if (scale_growth_steps > 0) record->scale = NextLossScale(record->scale, std::isfinite(record->grad_norm), scale_growth_steps);
  }
  record->updates += record->skipped != 0 ? 0 : 1;
  if (own_signals) record->signals = scalars.signals;
}

}  // namespace hierad::reference
