// Muon over the flat buffers, in the form of torch.optim.Muon; base/plan/plan.h says what each part does.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "base/plan/plan.h"
#include "worker/kernels/reference/gemm.h"

namespace hierad::reference {

struct MuonShape {
  int64_t count, rows, cols;
};

template <typename T, typename S>
void MuonMomentum(const StepRecord& record, const MuonShape& shape, int64_t first, int64_t own, double momentum, double clip_norm, bool nesterov, const S* gradients,
                  S* moments, const int64_t* places, T* x, double* scratch) {
  if (record.skipped != 0) return;
  const S clip = S((clip_norm > 0 ? std::min(1.0, clip_norm / (record.grad_norm + 1e-6)) : 1.0) / record.scaled_by), rest = S(1 - momentum);
  const int64_t size = shape.rows * shape.cols;
  std::vector<S> u(size);
  for (int64_t i = 0; i < shape.count; ++i) {
    double squares = 0;
    for (int64_t k = 0; k < size; ++k) {
      const S g = gradients[places[i] + k] * clip;
      S& m = moments[places[i] + k];
      m += (g - m) * rest;
      u[k] = nesterov ? g + (m - g) * S(momentum) : m;
      squares += double(u[k]) * double(u[k]);
    }
    std::fill_n(scratch + i * kMuonParts, kMuonParts, 0.0);
    scratch[i * kMuonParts] = squares;
    if (i < first || i >= first + own) continue;
    const S norm = S(std::max(std::sqrt(squares), kMuonEpsilon));
    for (int64_t r = 0; r < shape.rows; ++r) {
      for (int64_t c = 0; c < shape.cols; ++c) {
        x[(i - first) * size + (shape.rows > shape.cols ? c * shape.rows + r : r * shape.cols + c)] = T(u[r * shape.cols + c] / norm);
      }
    }
  }
}

// d = alpha a op(b) + beta c; one rounding at the end.
template <typename T, typename S>
void BatchedGemm(const T* a, const T* b, const T* c, T* d, int64_t count, int64_t m, int64_t n, int64_t k, bool trans_b, double alpha, double beta) {
  std::vector<S> product(m * n);
  for (int64_t i = 0; i < count; ++i) {
    Gemm(a + i * m * k, b + i * n * k, product.data(), static_cast<const S*>(nullptr), m, n, k, false, trans_b, false);
    for (int64_t e = 0; e < m * n; ++e) {
      d[i * m * n + e] = T(S(alpha) * product[e] + (c == nullptr ? S(0) : S(beta) * S(c[i * m * n + e])));
    }
  }
}

template <typename T, typename S>
void MuonUpdate(const StepScalars& scalars, const StepRecord& record, const MuonShape& shape, double weight_decay, const T* x,
                const int64_t* places, const float* scale, S* master, T* compute) {
  if (record.skipped != 0) return;
  const int64_t size = shape.rows * shape.cols;
  for (int64_t i = 0; i < shape.count; ++i) {
    const double lr = scale == nullptr ? scalars.lr : scalars.lr * double(scale[places[i] / kParameterAlign]);
    const S shrink = S(1 - lr * weight_decay), step = S(lr * kMuonScale * std::sqrt(double(std::max(shape.rows, shape.cols))));
    for (int64_t r = 0; r < shape.rows; ++r) {
      for (int64_t c = 0; c < shape.cols; ++c) {
        const int64_t at = places[i] + r * shape.cols + c;
        const S direction = S(x[i * size + (shape.rows > shape.cols ? c * shape.rows + r : r * shape.cols + c)]);
        master[at] = master[at] * shrink - step * direction;
        if (compute != nullptr) compute[at] = T(master[at]);
      }
    }
  }
}

}  // namespace hierad::reference
