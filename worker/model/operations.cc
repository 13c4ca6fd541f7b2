#include "worker/model/operations.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

namespace hierad {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct TakeRowsFunction : torch::autograd::Function<TakeRowsFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& rows, const at::Tensor& index,
                            const at::Tensor& inverse, bool complete) {
    context->save_for_backward({inverse});
    context->saved_data["complete"] = complete;
    return rows.index_select(0, index);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const at::Tensor inverse = context->get_saved_variables()[0];
    at::Tensor g = gradients[0];
    if (!context->saved_data["complete"].toBool()) g = at::cat({g, at::zeros({1, g.size(1)}, g.options())});
    return {g.index_select(0, inverse), {}, {}, {}};
  }
};

struct PlaceRowsFunction : torch::autograd::Function<PlaceRowsFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& rows, const at::Tensor& filler,
                            const at::Tensor& place, const at::Tensor& taken, const at::Tensor& filled) {
    context->save_for_backward({taken, filled});
    return at::cat({rows, filler.to(rows.scalar_type()).view({1, -1})}).index_select(0, place);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor& g = gradients[0];
    return {g.index_select(0, saved[0]), g.index_select(0, saved[1]).sum(0, false, at::kFloat), {}, {}, {}};
  }
};

struct MaxPoolFunction : torch::autograd::Function<MaxPoolFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, int64_t stride) {
    std::vector<int64_t> shape = x.sizes().vec();
    shape[1] /= stride;
    shape.insert(shape.begin() + 1, stride);
    const auto [values, indices] = x.view(shape).max(1);
    context->save_for_backward({indices.to(stride <= 256 ? at::kByte : at::kInt)});   // small: it lives until backward
    context->saved_data["stride"] = stride;
    return values;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const at::Tensor winner = context->get_saved_variables()[0].unsqueeze(1);
    const int64_t stride = context->saved_data["stride"].toInt();
    std::vector<int64_t> shape(winner.dim(), 1);
    shape[1] = stride;
    const at::Tensor each = at::arange(stride, winner.options()).view(shape);
    return {at::mul(winner == each, gradients[0].unsqueeze(1)).flatten(1, 2), {}};
  }
};

struct DirectLinearFunction : torch::autograd::Function<DirectLinearFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                            const at::Tensor& bias, const LinearGradients* gradients) {
    context->save_for_backward({x, weight});
    context->saved_data["gradients"] = reinterpret_cast<int64_t>(gradients);
    return at::linear(x, weight, bias);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const variable_list saved = context->get_saved_variables();
    const auto* to = reinterpret_cast<const LinearGradients*>(context->saved_data["gradients"].toInt());
    const at::Tensor &x = saved[0], &weight = saved[1];
    const at::Tensor g = gradients[0].reshape({-1, weight.size(0)});
    at::Tensor weight_gradient = to->weight, bias_gradient = to->bias;
    if (to->owner->accumulate()) {
      weight_gradient.addmm_(g.t(), x.reshape({-1, weight.size(1)}));
      bias_gradient.add_(g.sum(0));
    } else {
      at::mm_out(weight_gradient, g.t(), x.reshape({-1, weight.size(1)}));
      at::sum_out(bias_gradient, g, at::IntArrayRef{0});
    }
    return {at::mm(g, weight).view(x.sizes()), {}, {}, {}};
  }
};

struct SquaredErrorFunction : torch::autograd::Function<SquaredErrorFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& pred, const at::Tensor& label,
                            const at::Tensor& weight) {
    const at::Tensor difference = (pred.to(at::kFloat) - label).view({weight.size(0), -1});
    context->save_for_backward({difference, weight});
    context->saved_data["type"] = pred.scalar_type();
    context->saved_data["shape"] = pred.sizes().vec();
    return (difference.square().sum(1) * weight).sum();
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor factor = (saved[1] * gradients[0] * 2).unsqueeze(1);
    at::Tensor g = at::empty(context->saved_data["shape"].toIntVector(),
                             saved[0].options().dtype(context->saved_data["type"].toScalarType()));
    at::Tensor flat = g.view({saved[1].size(0), -1});
    at::mul_out(flat, saved[0], factor);
    return {g, {}, {}};
  }
};

}  // namespace

at::Tensor TakeRows(const at::Tensor& rows, const at::Tensor& index, const at::Tensor& inverse, bool complete) {
  return TakeRowsFunction::apply(rows, index, inverse, complete);
}

at::Tensor PlaceRows(const at::Tensor& rows, const at::Tensor& filler, const at::Tensor& place, const at::Tensor& taken,
                     const at::Tensor& filled) {
  return PlaceRowsFunction::apply(rows, filler, place, taken, filled);
}

at::Tensor MaxPool(const at::Tensor& x, int64_t stride) { return MaxPoolFunction::apply(x, stride); }

at::Tensor DirectLinear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                        const LinearGradients* gradients) {
  return DirectLinearFunction::apply(x, weight, bias, gradients);
}

at::Tensor WeightedSquaredError(const at::Tensor& pred, const at::Tensor& label, const at::Tensor& weight) {
  return SquaredErrorFunction::apply(pred, label, weight);
}

}  // namespace hierad
