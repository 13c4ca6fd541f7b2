// GELU in its exact (erf) form.
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>

#include "worker/kernels/reference/reduce.h"

namespace hierad::reference {

template <typename T, typename S>
void Gelu(const T* h, T* g, int64_t size) {
  const S root_half = S(1 / std::numbers::sqrt2);
  for (int64_t i = 0; i < size; ++i) {
    const S x = S(h[i]);
    g[i] = T(x * (S(0.5) * (S(1) + std::erf(x * root_half))));
  }
}

// dh may be dg. g: as Gelu, again. dh_parts: sums over the rows of dh.
template <typename T, typename S>
void GeluBackward(const T* h, const T* dg, T* dh, T* g, S* dh_parts, int64_t rows, int64_t cols, int64_t num_parts) {
  const int64_t size = rows * cols;
  const S root_half = S(1 / std::numbers::sqrt2), density = S(std::numbers::inv_sqrtpi / std::numbers::sqrt2);
  for (int64_t i = 0; i < size; ++i) {
    const S x = S(h[i]);
    const S half = S(0.5) * (S(1) + std::erf(x * root_half));
    dh[i] = T(S(dg[i]) * (half + x * density * std::exp(S(-0.5) * x * x)));
    g[i] = T(x * half);
  }
  ColumnSum(dh, dh_parts, rows, cols, num_parts);
}

}  // namespace hierad::reference
