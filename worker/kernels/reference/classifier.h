// What stands between the encoder and the classification head.
#pragma once

#include <cstdint>

#include "base/plan/plan.h"
#include "base/random.h"

namespace hierad::reference {

template <typename S>
void MeanTokens(const S* x, S* y, int64_t batch, int64_t tokens, int64_t dim) {
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t c = 0; c < dim; ++c) {
      S sum = 0;
      for (int64_t n = 0; n < tokens; ++n) sum += x[(b * tokens + n) * dim + c];
      y[b * dim + c] = sum / S(tokens);
    }
  }
}

template <typename S>
void MeanTokensBackward(const S* dy, S* dx, int64_t batch, int64_t tokens, int64_t dim) {
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t n = 0; n < tokens; ++n) {
      for (int64_t c = 0; c < dim; ++c) dx[(b * tokens + n) * dim + c] = dy[b * dim + c] / S(tokens);
    }
  }
}

// Inverted dropout, and (the same factors) its backward pass.
template <typename T, typename S>
void Dropout(const StepScalars& scalars, const int64_t* visit_ids, const T* x, T* y, int64_t batch, int64_t dim,
             double rate) {
  for (int64_t b = 0; b < batch; ++b) {
    const RandomStream stream{scalars.seed, Draw::kDropout, scalars.epoch, uint64_t(visit_ids[b])};
    for (int64_t c = 0; c < dim; ++c) {
      const bool dropped = scalars.train != 0 && stream.Uniform(c) < rate;
      const S factor = scalars.train == 0 ? S(1) : S(float(1 / (1 - rate)));
      y[b * dim + c] = T(dropped ? S(0) : factor * S(x[b * dim + c]));
    }
  }
}

}  // namespace hierad::reference
