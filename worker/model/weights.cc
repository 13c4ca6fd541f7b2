#include "worker/model/weights.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

namespace hierad {

Weights::Weights(const ParameterTable& table, at::Device device, at::ScalarType compute_type, int64_t tail)
    : table_(table), compute_type_(compute_type) {
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

void Weights::ZeroGradients() { gradients.zero_(); }

void Weights::BeginBackward() {
  if (compute_type_ != at::kFloat) compute_gradients_.zero_();
}

void Weights::EndBackward() {
  c10::NoGradGuard no_grad;
  if (compute_type_ != at::kFloat) gradients.narrow(0, 0, table_.flat_size).add_(compute_gradients_);
}

}  // namespace hierad
