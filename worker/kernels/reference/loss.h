// The two losses and their gradients. partials[b], of MaeLoss [b, kLossParts]: the numerator of sample b, in double.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "base/plan/plan.h"
#include "worker/kernels/reference/types.h"

namespace hierad::reference {

struct MaeLossShape {
  int64_t batch, mask_units, kept, finals, pred_dim, sample_size;
  bool norm_target, accumulate;
};

// What a sample's gradient is multiplied by. record: of a step whose gradients are scaled, else nullptr.
template <typename S>
S GradientWeight(const StepScalars& scalars, const StepRecord* record) {
  return S(record == nullptr ? scalars.loss_weight : scalars.loss_weight * record->scale.value);
}

// label[token, e] = x[b, label_index[token, e]]; normalised by mean and unbiased variance + 1e-6 if asked.
template <typename S>
void Target(const S* x_b, const int32_t* index, int64_t size, bool normalize, std::vector<S>* label) {
  S sum = 0, squares = 0;
  for (int64_t e = 0; e < size; ++e) sum += (*label)[e] = x_b[index[e]];
  if (!normalize) return;
  const S mean = sum / S(size);
  for (S& value : *label) value -= mean, squares += value * value;
  const S deviation = std::sqrt(squares / S(size - 1) + S(kNormEpsilon));
  for (S& value : *label) value /= deviation;
}

template <typename T, typename S>
void MaeLoss(const StepScalars& scalars, const StepRecord* record, const MaeLossShape& s, const T* pred, const S* x, const uint8_t* keep_mask,
             const int32_t* order, const int32_t* label_index, T* dpred, double* partials) {
  std::vector<S> label(s.pred_dim);
  const int64_t tokens = (s.mask_units - s.kept) * s.finals, chunk = std::max<int64_t>(1, (tokens + kLossParts - 1) / kLossParts);
  const S weight = GradientWeight<S>(scalars, record);
  int64_t row = 0;
  for (int64_t b = 0; b < s.batch; ++b) {
    double sums[kLossParts] = {};
    int64_t i = 0;   // masked token of the sample
    for (int64_t unit = 0; unit < s.mask_units; ++unit) {
      if (keep_mask[b * s.mask_units + unit] != 0) continue;
      for (int64_t f = 0; f < s.finals; ++f, ++i, row += s.pred_dim) {
        const int64_t token = order[unit * s.finals + f];
        if (b >= scalars.real) {
          for (int64_t e = 0; e < s.pred_dim; ++e) dpred[row + e] = T(S(0));
          continue;
        }
        Target(x + b * s.sample_size, label_index + token * s.pred_dim, s.pred_dim, s.norm_target, &label);
        for (int64_t e = 0; e < s.pred_dim; ++e) {
          const S difference = S(pred[row + e]) - label[e];
          sums[i / chunk] += double(difference) * double(difference);
          dpred[row + e] = T(S(2) * difference * weight);
        }
      }
    }
    for (int64_t p = 0; p < kLossParts; ++p) partials[b * kLossParts + p] = sums[p] + (s.accumulate ? partials[b * kLossParts + p] : 0.0);
  }
}

template <typename T, typename S>
void CrossEntropy(const StepScalars& scalars, const StepRecord* record, const T* logits, const int64_t* labels, T* dlogits, double* partials,
                  int64_t batch, int64_t classes, bool accumulate) {
  const S weight = GradientWeight<S>(scalars, record);
  for (int64_t b = 0; b < batch; ++b) {
    const T* z = logits + b * classes;
    T* dz = dlogits + b * classes;
    double loss = 0;
    if (b >= scalars.real) {
      for (int64_t c = 0; c < classes; ++c) dz[c] = T(S(0));
    } else {
      S most = S(z[0]), total = 0;
      for (int64_t c = 1; c < classes; ++c) most = Exceeds(S(z[c]), most) ? S(z[c]) : most;
      for (int64_t c = 0; c < classes; ++c) total += std::exp(S(z[c]) - most);
      loss = double(most + std::log(total) - S(z[labels[b]]));
      for (int64_t c = 0; c < classes; ++c) {
        const S p = std::exp(S(z[c]) - most) / total;
        dz[c] = T((p - S(c == labels[b] ? 1 : 0)) * weight);
      }
    }
    partials[b] = loss + (accumulate ? partials[b] : 0.0);
  }
}

}  // namespace hierad::reference
