// Layer norm and its backward pass.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "worker/kernels/reference/reduce.h"
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

// dx_out = dx_in + dLN(dy); dx_in nullptr: dx_in_narrow + dx_in_low, or 0 where those are nullptr too; dx_in == dx_out: in place.
// dx_out nullptr: dx_narrow + dx_low take it. dx_narrow and dx_parts may be nullptr.
template <typename T, typename S>
void LayerNormBackward(const T* dy, const S* x, const S* mean, const S* rstd, const S* gamma, const S* dx_in, const T* dx_in_narrow,
                       const T* dx_in_low, S* dx_out, T* dx_narrow, T* dx_low, S* dgamma_parts, S* dbeta_parts, S* dx_parts, int64_t rows, int64_t cols, int64_t num_parts) {
  std::vector<double> gamma_sum(cols, 0.0), beta_sum(cols, 0.0), dx_sum(cols, 0.0);
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
      const int64_t i = r * cols + c;
      const S before = dx_in != nullptr ? dx_in[i] : dx_in_narrow != nullptr ? S(dx_in_narrow[i]) + S(dx_in_low[i]) : S(0);
      const S out = before + dx;
      if (dx_out != nullptr) dx_out[i] = out;
      if (dx_narrow != nullptr) dx_narrow[i] = T(out);
      if (dx_low != nullptr) dx_low[i] = T(out - S(T(out)));
      dx_sum[c] += double(out);
    }
  }
  WholeSum(gamma_sum, dgamma_parts, num_parts);
  WholeSum(beta_sum, dbeta_parts, num_parts);
  if (dx_parts != nullptr) WholeSum(dx_sum, dx_parts, num_parts);
}

}  // namespace hierad::reference
