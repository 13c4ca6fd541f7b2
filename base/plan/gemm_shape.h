// A matrix product as a library sees it; its key names it in tables of algorithms.
#pragma once

#include <cstdint>
#include <string>

namespace hierad {

// Row-major c[m, n] = op(a) op(b) (+ bias[n]) (+ c), as Gemm. `wide_out`: c is fp32 where a and b are bf16
// or fp16.
struct GemmShape {
  int64_t m, n, k;
  bool trans_a, trans_b, accumulate, bias, bf16, wide_out, tf32;
  // `batch` products of contiguous operands; alpha, and beta of an addend of c's type (not with accumulate).
  int64_t batch = 1;
  float alpha = 1, beta = 0;
  bool f16 = false;
  std::string Key() const;
};

}  // namespace hierad
