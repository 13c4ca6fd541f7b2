// Products with GELU in their epilogue: the hidden layer of an MLP is not read and written once more for it. bf16 and, by
// one of the kernels (base/plan/products.h), fp16, on cards of capability 9.0; elsewhere, in fp32, and for shapes that are not taken, a library product and an elementwise kernel.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace hierad::kernels {

// h[m, n] = a[m, k] w[n, k]^T + bias[n]; g = gelu(h), of h as it is stored.
struct GemmGeluForward {
  int64_t m, n, k;
  const void *a, *w;
  const float* bias;
  void *h, *g;
  bool f16 = false;   // else bf16
};
// dh[m, n] = (dy[m, k] w[k, n]) gelu'(h); g = gelu(h) again; parts[p, n], one for each kGeluPartRows
// rows: sums of dh over rows, whose split is the kernel's own; together they are the sum over all.
struct GemmGeluBackward {
  int64_t m, n, k;
  const void *dy, *w, *h;
  void *dh, *g;
  float* parts;
  bool f16 = false;
};

// Whether this card has them for the shape.
bool TakesGemmGelu(bool backward, bool f16, int64_t m, int64_t n, int64_t k);
cudaError_t RunGemmGelu(const GemmGeluForward& product, cudaStream_t stream);
cudaError_t RunGemmGeluBackward(const GemmGeluBackward& product, cudaStream_t stream);

}  // namespace hierad::kernels
