// GELU in its exact (erf) form.
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>

namespace hierad::reference {

template <typename T, typename S>
void Gelu(const T* h, T* g, int64_t size) {
  const S root_half = S(1 / std::numbers::sqrt2);
  for (int64_t i = 0; i < size; ++i) {
    const S x = S(h[i]);
    g[i] = T(x * (S(0.5) * (S(1) + std::erf(x * root_half))));
  }
}

// dh may be dg. g: as Gelu, again.
template <typename T, typename S>
void GeluBackward(const T* h, const T* dg, T* dh, T* g, int64_t size) {
  const S root_half = S(1 / std::numbers::sqrt2), density = S(std::numbers::inv_sqrtpi / std::numbers::sqrt2);
  for (int64_t i = 0; i < size; ++i) {
    const S x = S(h[i]);
    const S half = S(0.5) * (S(1) + std::erf(x * root_half));
    dh[i] = T(S(dg[i]) * (half + x * density * std::exp(S(-0.5) * x * x)));
    g[i] = T(x * half);
  }
}

}  // namespace hierad::reference
