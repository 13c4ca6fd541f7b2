// Sums: gradients of biases, and the norm of all gradients with the step's verdict.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "base/plan/plan.h"

namespace hierad::reference {

template <typename T, typename S>
void ColumnSum(const T* dy, S* grad, int64_t rows, int64_t cols, bool accumulate) {
  std::vector<double> sum(cols, 0.0);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) sum[c] += double(S(dy[r * cols + c]));
  }
  for (int64_t c = 0; c < cols; ++c) grad[c] = S(sum[c]) + (accumulate ? grad[c] : S(0));
}

// Writes the whole record of the step, counters included: AdamW only reads it.
template <typename S>
void GradientNorm(const StepScalars& scalars, const S* gradients, const double* loss_partials, StepRecord* record,
                  int64_t size, int64_t batch) {
  double squares = 0, numerator = 0;
  for (int64_t i = 0; i < size; ++i) squares += double(gradients[i]) * double(gradients[i]);
  for (int64_t b = 0; b < batch; ++b) numerator += loss_partials[b];
  record->step = scalars.step;
  record->loss_numerator = numerator;
  record->loss = numerator * scalars.loss_weight;
  record->grad_norm = std::sqrt(squares);
  record->lr = scalars.lr;
  record->skipped = std::isfinite(record->loss) && std::isfinite(record->grad_norm) ? 0 : 1;
  record->nan_in_row = record->skipped != 0 ? record->nan_in_row + 1 : 0;
  record->updates += record->skipped != 0 ? 0 : 1;
}

}  // namespace hierad::reference
