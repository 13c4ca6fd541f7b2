// The residual stream: branches added with drop path, pooling of the shortcut, conversion of type.
#pragma once

#include <cstdint>

#include "base/plan/plan.h"
#include "base/random.h"
#include "worker/kernels/reference/types.h"

namespace hierad::reference {

template <typename From, typename To>
void Cast(const From* from, To* to, int64_t size) {
  for (int64_t i = 0; i < size; ++i) to[i] = To(from[i]);
}

// Factor of one visit's residual branch: 0 or 1 / (1 - rate); 1 without drop path. which: 0 attention, 1 MLP.
template <typename S>
S DropPathFactor(const StepScalars* scalars, const int64_t* visit_ids, int64_t b, double rate, int block, int which) {
  if (rate <= 0 || scalars->train == 0) return S(1);
  const RandomStream stream{scalars->seed, Draw::kDropPath, scalars->epoch, uint64_t(visit_ids[b])};
  return stream.Uniform(2 * block + which) < rate ? S(0) : S(float(1 / (1 - rate)));
}

struct DropPath {
  double rate;
  int block, which;
};

template <typename T, typename S>
void Residual(const StepScalars* scalars, const int64_t* visit_ids, const DropPath& drop, const S* base, const T* y,
              S* out, int64_t batch, int64_t sample_size) {
  for (int64_t b = 0; b < batch; ++b) {
    const S factor = DropPathFactor<S>(scalars, visit_ids, b, drop.rate, drop.block, drop.which);
    for (int64_t i = b * sample_size; i < (b + 1) * sample_size; ++i) {
      out[i] = factor == 0 ? base[i] : base[i] + factor * S(y[i]);
    }
  }
}

template <typename T, typename S>
void ResidualBackward(const StepScalars* scalars, const int64_t* visit_ids, const DropPath& drop, const S* dout, T* dy,
                      int64_t batch, int64_t sample_size) {
  for (int64_t b = 0; b < batch; ++b) {
    const S factor = DropPathFactor<S>(scalars, visit_ids, b, drop.rate, drop.block, drop.which);
    for (int64_t i = b * sample_size; i < (b + 1) * sample_size; ++i) dy[i] = T(factor == 0 ? S(0) : factor * dout[i]);
  }
}

// y[b, q_stride, n', d] -> base[b, n', d]; ties: the first.
template <typename T, typename S>
void MaxPool(const T* y, S* base, uint8_t* argmax, int64_t batch, int64_t sample_out, int64_t q_stride) {
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t i = 0; i < sample_out; ++i) {
      S best = S(y[b * q_stride * sample_out + i]);
      int64_t place = 0;
      for (int64_t s = 1; s < q_stride; ++s) {
        const S value = S(y[(b * q_stride + s) * sample_out + i]);
        if (Exceeds(value, best)) best = value, place = s;
      }
      base[b * sample_out + i] = best;
      argmax[b * sample_out + i] = uint8_t(place);
    }
  }
}

template <typename T, typename S>
void MaxPoolBackward(const S* dbase, const uint8_t* argmax, T* dy, int64_t batch, int64_t sample_out, int64_t q_stride) {
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t s = 0; s < q_stride; ++s) {
      for (int64_t i = 0; i < sample_out; ++i) {
        const int64_t at = b * sample_out + i;
        dy[(b * q_stride + s) * sample_out + i] = T(argmax[at] == s ? dbase[at] : S(0));
      }
    }
  }
}

}  // namespace hierad::reference
