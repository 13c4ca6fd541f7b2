// GELU in its exact (erf) form, and its derivative, for kernels that store bf16, and for those that store fp32.
#pragma once

#include <cuda_runtime.h>

namespace hierad::kernels {

__device__ inline float FastExp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// |x| up to where Phi(-|x|) is nothing, so that no power of it is infinite.
__device__ inline float Bounded(float x) { return fminf(fabsf(x), 16.0f); }

// Phi(-a), the standard normal distribution, for a of Bounded. Its logarithm is so smooth that a polynomial gives it within 2.5e-4 of
// its value (bf16 resolves 4e-3) up to 5.5; beyond, it falls on, and a times the error is below 4e-11.
__device__ inline float NormalTail(float a) {
  float p = -0.000233252256f;
  p = fmaf(p, a, 0.00486980518f);
  p = fmaf(p, a, -0.0445992798f);
  p = fmaf(p, a, -0.46968022f);
  p = fmaf(p, a, -1.14626181f);
  p = fmaf(p, a, -1.0003587f);
  return FastExp2(p);
}

// x Phi(x), `tail` being NormalTail(a); not a number if x is none.
__device__ inline float GeluFromTail(float x, float a, float tail) {
  float positive;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(positive) : "f"(x));
  return fmaf(-a, tail, positive);
}
__device__ inline float FastGelu(float x) {
  const float a = Bounded(x);
  return GeluFromTail(x, a, NormalTail(a));
}

// Its derivative, Phi(x) + x phi(x). For -a it is tail (1 - a phi(a) / tail), whose second factor is nearly a parabola: within 2e-4 of
// the whole without a second exponential.
__device__ inline float GeluDerivative(float x, float a, float tail) {
  float p = 0.00933325663f;
  p = fmaf(p, a, -0.0859478489f);
  p = fmaf(p, a, -0.656311154f);
  p = fmaf(p, a, -0.791691959f);
  p = fmaf(p, a, 0.99963516f);
  return copysignf(fmaf(-tail, p, 0.5f), x) + 0.5f;
}

// Both, to what T resolves.
template <typename T>
__device__ inline void GeluBoth(float x, float* g, float* derivative) {
  if constexpr (sizeof(T) == sizeof(float)) {
    const float distribution = 0.5f * (1.0f + erff(x * 0.70710678118654752f));
    *g = x * distribution;
    *derivative = distribution + x * 0.39894228040143268f * expf(-0.5f * x * x);
  } else {
    const float a = Bounded(x), tail = NormalTail(a);
    *g = GeluFromTail(x, a, tail);
    *derivative = GeluDerivative(x, a, tail);
  }
}

}  // namespace hierad::kernels
