// The decoder's input: visible tokens and mask tokens in spatial order, with their position.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace hierad::reference {

struct DecoderShape {
  int64_t batch, mask_units, kept, finals, dim;
};

// Calls visit(b, unit, j, f, token): j is the unit's place among the kept ones, -1 where it is removed.
template <typename Visit>
void ForEachDecoderToken(const DecoderShape& s, const uint8_t* keep_mask, const int32_t* order, const Visit& visit) {
  for (int64_t b = 0; b < s.batch; ++b) {
    int64_t next = 0;
    for (int64_t unit = 0; unit < s.mask_units; ++unit) {
      const int64_t j = keep_mask[b * s.mask_units + unit] != 0 ? next++ : -1;
      for (int64_t f = 0; f < s.finals; ++f) visit(b, j, f, int64_t{order[unit * s.finals + f]});
    }
  }
}

template <typename T, typename S>
void DecoderAssemble(const DecoderShape& s, const T* y, const S* mask_token, const S* position, const uint8_t* keep_mask,
                     const int32_t* order, S* x) {
  ForEachDecoderToken(s, keep_mask, order, [&](int64_t b, int64_t j, int64_t f, int64_t token) {
    S* to = x + (b * s.mask_units * s.finals + token) * s.dim;
    for (int64_t c = 0; c < s.dim; ++c) {
      const S value = j < 0 ? mask_token[c] : S(y[((b * s.kept + j) * s.finals + f) * s.dim + c]);
      to[c] = value + position[token * s.dim + c];
    }
  });
}

// rows[b, r * finals + f] = x[b, order[unit * finals + f]], unit the r-th removed one; or back, with zeros elsewhere.
template <typename T>
void TakeMasked(const DecoderShape& s, const T* x, const uint8_t* keep_mask, const int32_t* order, T* rows) {
  ForEachDecoderToken(s, keep_mask, order, [&](int64_t b, int64_t j, int64_t, int64_t token) {
    if (j >= 0) return;
    std::copy_n(x + (b * s.mask_units * s.finals + token) * s.dim, s.dim, rows);
    rows += s.dim;
  });
}
template <typename T>
void PutMasked(const DecoderShape& s, const T* rows, const uint8_t* keep_mask, const int32_t* order, T* x) {
  ForEachDecoderToken(s, keep_mask, order, [&](int64_t b, int64_t j, int64_t, int64_t token) {
    T* to = x + (b * s.mask_units * s.finals + token) * s.dim;
    if (j >= 0) {
      std::fill_n(to, s.dim, T(0.0f));
    } else {
      std::copy_n(rows, s.dim, to);
      rows += s.dim;
    }
  });
}

template <typename T, typename S>
void DecoderAssembleBackward(const DecoderShape& s, const S* dx, const uint8_t* keep_mask, const int32_t* order, T* dy,
                             S* dmask_token, S* dposition, bool accumulate) {
  std::vector<double> token_sum(s.dim, 0.0);
  if (!accumulate) {
    for (int64_t i = 0; i < s.mask_units * s.finals * s.dim; ++i) dposition[i] = S(0);
  }
  ForEachDecoderToken(s, keep_mask, order, [&](int64_t b, int64_t j, int64_t f, int64_t token) {
    const S* from = dx + (b * s.mask_units * s.finals + token) * s.dim;
    for (int64_t c = 0; c < s.dim; ++c) {
      dposition[token * s.dim + c] += from[c];
      if (j < 0) {
        token_sum[c] += double(from[c]);
      } else {
        dy[((b * s.kept + j) * s.finals + f) * s.dim + c] = T(from[c]);
      }
    }
  });
  for (int64_t c = 0; c < s.dim; ++c) dmask_token[c] = S(token_sum[c]) + (accumulate ? dmask_token[c] : S(0));
}

}  // namespace hierad::reference
