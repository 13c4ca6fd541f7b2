// Layer norm and its backward pass.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "worker/kernels/reference/types.h"

namespace hierad::reference {

template <typename T, typename S>
void LayerNorm(const S* x, const S* gamma, const S* beta, T* y, S* mean, S* rstd, int64_t rows, int64_t cols) {
  for (int64_t r = 0; r < rows; ++r) {
    const S* in = x + r * cols;
    S sum = 0, squares = 0;
    for (int64_t c = 0; c < cols; ++c) sum += in[c];
    const S m = sum / S(cols);
    for (int64_t c = 0; c < cols; ++c) squares += (in[c] - m) * (in[c] - m);
    const S scale = 1 / std::sqrt(squares / S(cols) + S(kNormEpsilon));
    mean[r] = m;
    rstd[r] = scale;
    for (int64_t c = 0; c < cols; ++c) y[r * cols + c] = T((in[c] - m) * scale * gamma[c] + beta[c]);
  }
}

// dx_out = dx_in + dLN(dy); dx_in nullptr: 0; dx_in == dx_out: in place.
template <typename T, typename S>
void LayerNormBackward(const T* dy, const S* x, const S* mean, const S* rstd, const S* gamma, const S* dx_in, S* dx_out,
                       S* dgamma, S* dbeta, int64_t rows, int64_t cols, bool accumulate) {
  std::vector<double> gamma_sum(cols, 0.0), beta_sum(cols, 0.0);
  for (int64_t r = 0; r < rows; ++r) {
    const T* d = dy + r * cols;
    const S* in = x + r * cols;
    S sum = 0, dot = 0;
    for (int64_t c = 0; c < cols; ++c) {
      const S normed = (in[c] - mean[r]) * rstd[r], g = S(d[c]) * gamma[c];
      sum += g;
      dot += g * normed;
      gamma_sum[c] += double(S(d[c]) * normed);
      beta_sum[c] += double(S(d[c]));
    }
    sum /= S(cols);
    dot /= S(cols);
    for (int64_t c = 0; c < cols; ++c) {
      const S normed = (in[c] - mean[r]) * rstd[r];
      const S dx = (S(d[c]) * gamma[c] - sum - normed * dot) * rstd[r];
      dx_out[r * cols + c] = dx_in == nullptr ? dx : dx_in[r * cols + c] + dx;
    }
  }
  for (int64_t c = 0; c < cols; ++c) {
    dgamma[c] = S(gamma_sum[c]) + (accumulate ? dgamma[c] : S(0));
    dbeta[c] = S(beta_sum[c]) + (accumulate ? dbeta[c] : S(0));
  }
}

}  // namespace hierad::reference
