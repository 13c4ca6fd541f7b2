// GELU in its exact (erf) form, and its derivative, for kernels that store bf16, and for those that store fp32.
#pragma once

#include <cuda_runtime.h>

namespace hierad::kernels {

__device__ inline float FastExp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Phi(-|x|), the standard normal distribution. Its logarithm is so smooth that a polynomial of |x| gives it within 2.5e-4 of
// its value (bf16 resolves 4e-3) up to 5.5; beyond, it falls on, and x times the error is below 4e-11.
__device__ inline float NormalTail(float x) {
  const float a = fabsf(x);
  float p = -0.000233252256f;
  p = fmaf(p, a, 0.00486980518f);
  p = fmaf(p, a, -0.0445992798f);
  p = fmaf(p, a, -0.46968022f);
  p = fmaf(p, a, -1.14626181f);
  p = fmaf(p, a, -1.0003587f);
  return FastExp2(p);
}

// x Phi(x), `tail` being NormalTail(x).
__device__ inline float GeluFromTail(float x, float tail) { return fmaf(-fabsf(x), tail, fmaxf(x, 0.0f)); }

// Its derivative, Phi(x) + x phi(x).
__device__ inline float GeluDerivative(float x, float tail) {
  constexpr float kHalfLog2E = 0.72134752044448170f, kDensity = 0.39894228040143268f;
  const float beyond_half = copysignf(0.5f - tail, x);
  return fmaf(x * kDensity, FastExp2(x * x * -kHalfLog2E), beyond_half) + 0.5f;
}

// Both, to what T resolves.
template <typename T>
__device__ inline void GeluBoth(float x, float* g, float* derivative) {
  if constexpr (sizeof(T) == sizeof(float)) {
    const float distribution = 0.5f * (1.0f + erff(x * 0.70710678118654752f));
    *g = x * distribution;
    *derivative = distribution + x * 0.39894228040143268f * expf(-0.5f * x * x);
  } else {
    const float tail = NormalTail(x);
    *g = GeluFromTail(x, tail);
    *derivative = GeluDerivative(x, tail);
  }
}

}  // namespace hierad::kernels
