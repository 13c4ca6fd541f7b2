// The model's parameters on one device: flat fp32 buffers over the parameter table, and autograd leaves that are views
// into them, so that all-reduce, norm and optimizer see one buffer each. In bf16 and fp16, matrix products use leaves of a
// flat copy in that type; their gradients are added to the fp32 ones once per backward. Addresses never change. One thread.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "base/plan/parameters.h"

namespace hierad {

class Weights;

// Where a linear layer's backward puts its gradients itself (operations.h, DirectLinear), instead of handing them to
// autograd, which would add them in a pass of its own.
struct LinearGradients {
  at::Tensor weight, bias;   // views into the flat gradients of the compute type
  const Weights* owner;
};

class Weights {
 public:
  // `tail`: further fp32 elements behind the gradients, reduced with them. All buffers begin as zeros.
  // `direct`: linear layers write their gradients themselves; only for a model that uses each once per backward.
  Weights(const ParameterTable& table, at::Device device, at::ScalarType compute_type, int64_t tail, bool direct = false);

  // Leaf [shape] by FAIR's name: of the compute copy (linear layers, convolutions), or fp32 (norms, embeddings).
  at::Tensor Product(const std::string& name);
  at::Tensor Exact(const std::string& name);
  // Of the linear layer `name`; nullptr unless direct. Valid as long as this.
  const LinearGradients* Direct(const std::string& name);

  at::Tensor parameters;        // [flat_size] fp32
  at::Tensor gradients;         // [flat_size + tail] fp32
  const ParameterTable& table() const { return table_; }
  at::ScalarType compute_type() const { return compute_type_; }

  // Views by name into `parameters` and `gradients`.
  at::Tensor Parameter(const std::string& name) const;
  at::Tensor Gradient(const std::string& name) const;

  void RefreshComputeCopy();    // after `parameters` changed
  // A step: BeginStep, then BeginBackward ... EndBackward for each micro-batch. `overwrite`: the first backward may
  // overwrite direct gradients instead of adding to zeros (there must be one); false: everything is zeroed.
  void BeginStep(bool overwrite);
  void ZeroGradients() { BeginStep(false); }
  void BeginBackward();         // makes the compute copy's gradients ready
  void EndBackward();           // adds them to `gradients`
  // Whether a direct gradient is added to what is there.
  bool accumulate() const { return compute_type_ == at::kFloat && !overwrite_; }

 private:
  at::Tensor View(const at::Tensor& flat, const std::string& name) const;
  at::Tensor Leaf(const at::Tensor& values, const at::Tensor& gradients, const std::string& name);

  void ZeroIndirect(const at::Tensor& flat);

  const ParameterTable table_;
  const at::ScalarType compute_type_;
  at::Tensor compute_parameters_, compute_gradients_;   // [flat_size], undefined in fp32
  const bool direct_;
  bool overwrite_ = false;
  std::vector<std::unique_ptr<LinearGradients>> linear_gradients_;
  std::set<std::string> direct_names_;   // of parameters
};

}  // namespace hierad
