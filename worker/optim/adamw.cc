#include "worker/optim/adamw.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <ATen/Parallel.h>

namespace hierad {

AdamW::AdamW(const ParameterTable& table, const v1::OptimizerSpec& spec, const at::Tensor& parameters,
             const at::Tensor& gradients)
    : beta1_(spec.beta1()), beta2_(spec.beta2()), eps_(spec.eps()) {
  exp_avg = at::zeros({table.flat_size}, parameters.options());
  exp_avg_sq = at::zeros({table.flat_size}, parameters.options());
  step_ = at::zeros({}, parameters.options());
  std::map<std::pair<bool, int>, Group> groups;
  for (const Parameter& p : table.parameters) {
    if (spec.name() == "muon" && p.matrix) continue;
    const double scale = RateFactor(p.layer, table.num_layers, spec);
    const double weight_decay = p.decay ? spec.weight_decay() : 0.0;
    Group& group = groups.try_emplace({p.decay, scale == 1 ? table.num_layers : p.layer}, Group{weight_decay, scale, {}, {}, {}, {}, {}}).first->second;
    group.parameters.push_back(parameters.narrow(0, p.offset, p.size));
    group.gradients.push_back(gradients.narrow(0, p.offset, p.size));
    group.exp_avg.push_back(exp_avg.narrow(0, p.offset, p.size));
    group.exp_avg_sq.push_back(exp_avg_sq.narrow(0, p.offset, p.size));
    group.steps.push_back(step_);
  }
  for (auto& [key, group] : groups) groups_.push_back(std::move(group));
}

void AdamW::Update(int64_t t, double lr, const at::Tensor& divisor, const at::Tensor& skip) {
  c10::NoGradGuard no_grad;
  step_.fill_(double(t));
  for (Group& group : groups_) {
    if (group.parameters.empty()) continue;
    at::_fused_adamw_(group.parameters, group.gradients, group.exp_avg, group.exp_avg_sq, {}, group.steps, lr * group.scale, beta1_,
                      beta2_, group.weight_decay, eps_, /*amsgrad=*/false, /*maximize=*/false, divisor, skip);
  }
}

double Norm(const float* data, int64_t size) {
  constexpr int64_t kChunk = 1 << 16;
  const int64_t chunks = (size + kChunk - 1) / kChunk;
  std::vector<double> sums(chunks);
  at::parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      const float* p = data + chunk * kChunk;
      const int64_t count = std::min(kChunk, size - chunk * kChunk);
      double lanes[8] = {};
      int64_t i = 0;
      for (; i + 8 <= count; i += 8) {
        for (int lane = 0; lane < 8; ++lane) lanes[lane] += double(p[i + lane]) * double(p[i + lane]);
      }
      for (; i < count; ++i) lanes[0] += double(p[i]) * double(p[i]);
      for (double lane : lanes) sums[chunk] += lane;
    }
  });
  double sum = 0;
  for (double chunk : sums) sum += chunk;
  return std::sqrt(sum);
}

}  // namespace hierad
