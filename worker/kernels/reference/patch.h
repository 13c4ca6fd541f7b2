// Patch embedding: rows of the convolution for kept tokens, and the position embedding.
#pragma once

#include <cstdint>
#include <vector>

#include "base/plan/geometry.h"

namespace hierad::reference {

// Mask unit of token j-th kept unit; without a mask all units are kept.
inline int64_t KeptUnit(const int32_t* keep_idx, int64_t b, int64_t j, int64_t kept) {
  return keep_idx == nullptr ? j : keep_idx[b * kept + j];
}

// rows[b, t * kept + j, (c, kernel...)] of x[b, c, samples...]: zero outside the input and in removed mask units.
template <typename T, typename S>
void PatchGather(const Geometry& g, const S* x, const uint8_t* keep_mask, const int32_t* keep_idx,
                 const int32_t* unroll_order, T* rows, int64_t batch, int64_t kept) {
  const int dims = g.dims;
  int64_t taps = 1, samples = 1;
  for (int d = 0; d < dims; ++d) taps *= g.patch_kernel[d], samples *= g.input_size[d];
  const int64_t channels = g.spec.in_chans();
  std::vector<int64_t> place(taps);   // of each tap in a channel; -1: reads as zero
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t t = 0; t < g.mask_unit_tokens; ++t) {
      for (int64_t j = 0; j < kept; ++j) {
        const int64_t token = unroll_order[t * g.num_mask_units + KeptUnit(keep_idx, b, j, kept)];
        for (int64_t tap = 0; tap < taps; ++tap) {
          int64_t rest = tap, position = token, scale = 1, unit = 0, unit_scale = 1, at = 0;
          bool inside = true;
          for (int d = dims - 1; d >= 0; --d) {
            const int64_t i = position % g.tokens[d] * g.patch_stride[d] - g.patch_padding[d] + rest % g.patch_kernel[d];
            position /= g.tokens[d];
            rest /= g.patch_kernel[d];
            inside = inside && i >= 0 && i < g.input_size[d];
            at += i * scale;
            scale *= g.input_size[d];
            unit += i / (g.patch_stride[d] * g.mask_unit_size[d]) * unit_scale;
            unit_scale *= g.mask_units[d];
          }
          place[tap] = inside && (keep_mask == nullptr || keep_mask[b * g.num_mask_units + unit] != 0) ? at : -1;
        }
        T* row = rows + ((b * g.mask_unit_tokens + t) * kept + j) * channels * taps;
        for (int64_t c = 0; c < channels; ++c) {
          const S* channel = x + (b * channels + c) * samples;
          for (int64_t tap = 0; tap < taps; ++tap) row[c * taps + tap] = T(place[tap] < 0 ? S(0) : channel[place[tap]]);
        }
      }
    }
  }
}

// x[b, n] = y[b, n] + position of token n; with `temporal`, position is the spatial part. `spatial`: rows of `position`.
template <typename T, typename S>
void AddPosition(const T* y, const S* position, const S* temporal, const int32_t* keep_idx, const int32_t* unroll_order,
                 S* x, int64_t batch, int64_t tokens, int64_t kept, int64_t mask_units, int64_t spatial, int64_t dim) {
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t n = 0; n < tokens; ++n) {
      const int64_t token = unroll_order[n / kept * mask_units + KeptUnit(keep_idx, b, n % kept, kept)];
      const int64_t row = (b * tokens + n) * dim;
      for (int64_t c = 0; c < dim; ++c) {
        S p = position[token % spatial * dim + c];
        if (temporal != nullptr) p += temporal[token / spatial * dim + c];
        x[row + c] = S(y[row + c]) + p;
      }
    }
  }
}

// Gradients of the position sum over the samples that kept the token.
template <typename S>
void AddPositionBackward(const S* dx, const int32_t* keep_idx, const int32_t* unroll_order, S* dposition, S* dtemporal,
                         int64_t batch, int64_t tokens, int64_t kept, int64_t mask_units, int64_t spatial,
                         int64_t frames, int64_t dim, bool accumulate) {
  if (!accumulate) {
    for (int64_t i = 0; i < spatial * dim; ++i) dposition[i] = S(0);
    if (dtemporal != nullptr) {
      for (int64_t i = 0; i < frames * dim; ++i) dtemporal[i] = S(0);
    }
  }
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t n = 0; n < tokens; ++n) {
      const int64_t token = unroll_order[n / kept * mask_units + KeptUnit(keep_idx, b, n % kept, kept)];
      const int64_t row = (b * tokens + n) * dim;
      for (int64_t c = 0; c < dim; ++c) {
        dposition[token % spatial * dim + c] += dx[row + c];
        if (dtemporal != nullptr) dtemporal[token / spatial * dim + c] += dx[row + c];
      }
    }
  }
}

}  // namespace hierad::reference
