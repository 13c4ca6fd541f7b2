// Rows of the fusion heads: a stage's output, unrolled, in the spatial order of the final mask unit.
#pragma once

#include <cstdint>

namespace hierad::reference {

struct FusionShape {
  int64_t batch, kept, finals, taps, dim;

  // Element of x[b, token, c], token = order[f * taps + p] * kept + j.
  int64_t In(const int32_t* order, int64_t b, int64_t j, int64_t f, int64_t p) const {
    return (b * finals * taps * kept + order[f * taps + p] * kept + j) * dim;
  }
  // Element of rows[b, j, f, c, p] at c = 0.
  int64_t Row(int64_t b, int64_t j, int64_t f, int64_t p) const { return ((b * kept + j) * finals + f) * dim * taps + p; }
};

template <typename To, typename S>
void FusionGather(const FusionShape& s, const S* x, const int32_t* order, To* rows) {
  for (int64_t b = 0; b < s.batch; ++b) {
    for (int64_t j = 0; j < s.kept; ++j) {
      for (int64_t f = 0; f < s.finals; ++f) {
        for (int64_t p = 0; p < s.taps; ++p) {
          const S* from = x + s.In(order, b, j, f, p);
          To* to = rows + s.Row(b, j, f, p);
          for (int64_t c = 0; c < s.dim; ++c) to[c * s.taps] = To(from[c]);
        }
      }
    }
  }
}

// dx (+)= the transpose: every token is read by one place of one row.
template <typename From, typename S>
void FusionGatherBackward(const FusionShape& s, const From* drows, const int32_t* order, S* dx, bool accumulate) {
  for (int64_t b = 0; b < s.batch; ++b) {
    for (int64_t j = 0; j < s.kept; ++j) {
      for (int64_t f = 0; f < s.finals; ++f) {
        for (int64_t p = 0; p < s.taps; ++p) {
          const From* from = drows + s.Row(b, j, f, p);
          S* to = dx + s.In(order, b, j, f, p);
          for (int64_t c = 0; c < s.dim; ++c) to[c] = S(from[c * s.taps]) + (accumulate ? to[c] : S(0));
        }
      }
    }
  }
}

}  // namespace hierad::reference
