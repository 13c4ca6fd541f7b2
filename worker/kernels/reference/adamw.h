// Decoupled AdamW over the flat buffers, in torch.optim.AdamW's order of operations.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "base/plan/parameters.h"
#include "base/plan/step_values.h"

namespace hierad::reference {

struct AdamWOptions {
  double beta1, beta2, eps, weight_decay, clip_norm;
};

// moments: exp_avg [size], then exp_avg_sq [size]. decay: a DecayGroup per kParameterAlign elements, scale (or nullptr) as many factors of the rate. compute: the copy in T, or
// nullptr. A skipped step changes nothing.
template <typename T, typename S>
void AdamW(const StepScalars& scalars, const StepRecord& record, const AdamWOptions& options, S* master,
           const S* gradients, S* moments, const uint8_t* decay, const float* scale, T* compute, int64_t size) {
  if (record.skipped != 0) return;
  const double t = double(record.updates), correction1 = 1 - std::pow(options.beta1, t);
  const double clip = (options.clip_norm > 0 ? std::min(1.0, options.clip_norm / (record.grad_norm + 1e-6)) : 1.0) / record.scaled_by;
  const S root2 = S(std::sqrt(1 - std::pow(options.beta2, t)));
  const S beta2 = S(options.beta2), rest1 = S(1 - options.beta1), rest2 = S(1 - options.beta2), eps = S(options.eps);
  S* exp_avg = moments;
  S* exp_avg_sq = moments + size;
  for (int64_t i = 0; i < size; ++i) {
    const uint8_t group = decay[i / kParameterAlign];
    if (group == kNotAdamW) continue;
    const double lr = scale == nullptr ? scalars.lr : scalars.lr * double(scale[i / kParameterAlign]);
    const S step_size = S(lr / correction1);
    const S g = gradients[i] * S(clip);
    S p = master[i];
    if (group == kWithDecay) p *= S(1 - lr * options.weight_decay);
    exp_avg[i] += (g - exp_avg[i]) * rest1;
    exp_avg_sq[i] = exp_avg_sq[i] * beta2 + g * g * rest2;
    p -= step_size * (exp_avg[i] / (std::sqrt(exp_avg_sq[i]) / root2 + eps));
    master[i] = p;
    if (compute != nullptr) compute[i] = T(p);
  }
}

// moments: the average is the third buffer.
template <typename S>
void AverageWeights(const StepRecord& record, double decay, const S* master, S* moments, int64_t size) {
  if (record.skipped != 0) return;
  S* average = moments + 2 * size;
  const S rest = S(1 - decay);
  for (int64_t i = 0; i < size; ++i) average[i] += (master[i] - average[i]) * rest;
}

}  // namespace hierad::reference
