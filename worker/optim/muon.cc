#include "worker/optim/muon.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include "base/plan/step_values.h"

namespace hierad {

Muon::Muon(const ParameterTable& table, const v1::OptimizerSpec& spec, const at::Tensor& parameters, const at::Tensor& gradients,
           const at::Tensor& momentum, at::ScalarType compute)
    : momentum_(spec.muon_momentum()), weight_decay_(spec.weight_decay()), nesterov_(spec.muon_nesterov()), compute_(compute) {
  std::map<std::pair<int64_t, int64_t>, Group> groups;
  for (const Parameter& p : table.parameters) {
    if (!p.matrix) continue;
    Group& group = groups.try_emplace({p.shape[0], p.shape[1]}, Group{p.shape[0], p.shape[1], {}, {}, {}, {}}).first->second;
    auto view = [&](const at::Tensor& flat) { return flat.narrow(0, p.offset, p.size).view({p.shape[0], p.shape[1]}); };
    group.parameters.push_back(view(parameters));
    group.gradients.push_back(view(gradients));
    group.momentum.push_back(view(momentum));
    group.scales.push_back(RateFactor(p.layer, table.num_layers, spec));
  }
  for (auto& [shape, group] : groups) groups_.push_back(std::move(group));
}

at::Tensor Muon::Orthogonal(const at::Tensor& direction) const {
  const at::Tensor norm = at::linalg_vector_norm(direction, 2, at::IntArrayRef{1, 2}, /*keepdim=*/true).clamp_min(kMuonEpsilon);
  at::Tensor x = (direction / norm).to(compute_);
  const bool transposed = x.size(1) > x.size(2);
  if (transposed) x = x.transpose(1, 2).contiguous();
  for (int round = 0; round < kMuonRounds; ++round) {
    const at::Tensor gram = at::bmm(x, x.transpose(1, 2));
    const at::Tensor polynomial = at::baddbmm(gram, gram, gram, kMuonB, kMuonC);
    x = at::baddbmm(x, polynomial, x, kMuonA, 1.0);
  }
  return (transposed ? x.transpose(1, 2) : x).to(at::kFloat);
}

void Muon::Update(double lr, const at::Tensor& divisor, const at::Tensor& skip) {
  const c10::NoGradGuard no_grad;
  const at::Tensor skipped = skip.to(at::kBool);
  for (Group& group : groups_) {
    const at::Tensor gradient = at::stack(group.gradients) / divisor;
    const at::Tensor momentum = at::lerp(at::stack(group.momentum), gradient, 1 - momentum_);
    const at::Tensor x = Orthogonal(nesterov_ ? at::lerp(gradient, momentum, momentum_) : momentum);
    const double scale = kMuonScale * std::sqrt(double(std::max(group.rows, group.cols)));
    for (size_t i = 0; i < group.parameters.size(); ++i) {
      at::Tensor& p = group.parameters[i];
      const double rate = lr * group.scales[i];
      p.copy_(at::where(skipped, p, p * (1 - rate * weight_decay_) - x[int64_t(i)] * (rate * scale)));
      group.momentum[i].copy_(at::where(skipped, group.momentum[i], momentum[int64_t(i)]));
    }
  }
}

}  // namespace hierad
