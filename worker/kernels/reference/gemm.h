// Matrix product, row-major.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace hierad::reference {

// c[m, n] = op(a) op(b) (+ bias[n]) (+ c). a: [m, k] or, transposed, [k, m]; b: [k, n] or, transposed, [n, k].
// Tiles of 4 x 16 over packed panels, so that the inner loops have constant length and become vector instructions.
template <typename T, typename C, typename S>
void Gemm(const T* a, const T* b, C* c, const S* bias, int64_t m, int64_t n, int64_t k, bool trans_a, bool trans_b,
          bool accumulate) {
  constexpr int kRows = 4, kCols = 16;
  const int64_t row_tiles = (m + kRows - 1) / kRows;
  std::vector<S> left(row_tiles * kRows * k, S(0)), right(kCols * k);
  for (int64_t i = 0; i < m; ++i) {
    S* tile = left.data() + i / kRows * kRows * k + i % kRows;
    for (int64_t p = 0; p < k; ++p) tile[p * kRows] = S(trans_a ? a[p * m + i] : a[i * k + p]);
  }
  for (int64_t j0 = 0; j0 < n; j0 += kCols) {
    const int64_t cols = std::min<int64_t>(kCols, n - j0);
    for (int64_t p = 0; p < k; ++p) {
      for (int64_t j = 0; j < kCols; ++j) {
        right[p * kCols + j] = j >= cols ? S(0) : S(trans_b ? b[(j0 + j) * k + p] : b[p * n + j0 + j]);
      }
    }
    for (int64_t i0 = 0; i0 < m; i0 += kRows) {
      S sum[kRows][kCols] = {};
      const S* l = left.data() + i0 * k;
      for (int64_t p = 0; p < k; ++p) {
        for (int i = 0; i < kRows; ++i) {
          for (int j = 0; j < kCols; ++j) sum[i][j] += l[p * kRows + i] * right[p * kCols + j];
        }
      }
      for (int64_t i = i0; i < std::min(i0 + kRows, m); ++i) {
        for (int64_t j = 0; j < cols; ++j) {
          S value = sum[i - i0][j];
          if (bias != nullptr) value += bias[j0 + j];
          C& out = c[i * n + j0 + j];
          if (accumulate) value += S(out);
          out = C(value);
        }
      }
    }
  }
}

}  // namespace hierad::reference
