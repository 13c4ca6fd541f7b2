#include "worker/model/weights.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

namespace hierad {

Weights::Weights(const ParameterTable& table, at::Device device, at::ScalarType compute_type, int64_t tail,
                 bool direct)
    : table_(table), compute_type_(compute_type), direct_(direct) {
  const at::TensorOptions options = at::TensorOptions().device(device).dtype(at::kFloat);
  parameters = at::zeros({table.flat_size}, options);
  gradients = at::zeros({table.flat_size + tail}, options);
  if (compute_type != at::kFloat) {
    compute_parameters_ = at::zeros({table.flat_size}, options.dtype(compute_type));
    compute_gradients_ = at::zeros({table.flat_size}, options.dtype(compute_type));
  }
}

at::Tensor Weights::View(const at::Tensor& flat, const std::string& name) const {
  const hierad::Parameter* p = table_.Find(name);
  TORCH_INTERNAL_ASSERT(p != nullptr, "no parameter ", name);
  return flat.narrow(0, p->offset, p->size).view(p->shape);
}

at::Tensor Weights::Leaf(const at::Tensor& values, const at::Tensor& gradients, const std::string& name) {
  at::Tensor leaf = View(values, name).detach();
  leaf.requires_grad_(true);
  leaf.mutable_grad() = View(gradients, name);   // autograd adds into a gradient that is there
  return leaf;
}

at::Tensor Weights::Product(const std::string& name) {
  return compute_type_ == at::kFloat ? Leaf(parameters, gradients, name)
                                     : Leaf(compute_parameters_, compute_gradients_, name);
}

at::Tensor Weights::Exact(const std::string& name) { return Leaf(parameters, gradients, name); }
at::Tensor Weights::Parameter(const std::string& name) const { return View(parameters, name); }
at::Tensor Weights::Gradient(const std::string& name) const { return View(gradients, name); }

void Weights::RefreshComputeCopy() {
  c10::NoGradGuard no_grad;
  if (compute_type_ != at::kFloat) compute_parameters_.copy_(parameters);
}

const LinearGradients* Weights::Direct(const std::string& name) {
  if (!direct_) return nullptr;
  const at::Tensor& flat = compute_type_ == at::kFloat ? gradients : compute_gradients_;
  linear_gradients_.push_back(std::make_unique<LinearGradients>(
      LinearGradients{View(flat, name + ".weight"), View(flat, name + ".bias"), this}));
  direct_names_.insert({name + ".weight", name + ".bias"});
  return linear_gradients_.back().get();
}

// All but what direct gradients will overwrite, the tail included; neighbours in one stroke.
void Weights::ZeroIndirect(const at::Tensor& flat) {
  int64_t begin = 0;
  for (const hierad::Parameter& p : table_.parameters) {
    if (!direct_names_.contains(p.name)) continue;
    if (p.offset > begin) flat.narrow(0, begin, p.offset - begin).zero_();
    begin = (p.offset + p.size + kParameterAlign - 1) / kParameterAlign * kParameterAlign;   // padding stays zero
  }
  if (flat.size(0) > begin) flat.narrow(0, begin, flat.size(0) - begin).zero_();
}

void Weights::BeginStep(bool overwrite) {
  overwrite_ = overwrite && direct_ && compute_type_ == at::kFloat;
  if (overwrite_) {
    ZeroIndirect(gradients);
  } else {
    gradients.zero_();
  }
}

void Weights::BeginBackward() {
  if (compute_type_ != at::kFloat) ZeroIndirect(compute_gradients_);
}

void Weights::EndBackward() {
  c10::NoGradGuard no_grad;
  overwrite_ = false;
  if (compute_type_ != at::kFloat) gradients.narrow(0, 0, table_.flat_size).add_(compute_gradients_);
}

}  // namespace hierad
