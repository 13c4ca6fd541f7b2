// The model's parameters on one device: flat fp32 buffers over the parameter table, and autograd leaves that are views
// into them, so that all-reduce, norm and optimizer see one buffer each. In bf16, matrix products use leaves of a flat
// bf16 copy; their gradients are added to the fp32 ones once per backward. Addresses never change. One thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "base/plan/parameters.h"

namespace hierad {

class Weights {
 public:
  // `tail`: further fp32 elements behind the gradients, reduced with them. All buffers begin as zeros.
  Weights(const ParameterTable& table, at::Device device, at::ScalarType compute_type, int64_t tail);

  // Leaf [shape] by FAIR's name: of the compute copy (linear layers, convolutions), or fp32 (norms, embeddings).
  at::Tensor Product(const std::string& name);
  at::Tensor Exact(const std::string& name);

  at::Tensor parameters;        // [flat_size] fp32
  at::Tensor gradients;         // [flat_size + tail] fp32
  const ParameterTable& table() const { return table_; }
  at::ScalarType compute_type() const { return compute_type_; }

  // Views by name into `parameters` and `gradients`.
  at::Tensor Parameter(const std::string& name) const;
  at::Tensor Gradient(const std::string& name) const;

  void RefreshComputeCopy();    // after `parameters` changed
  void ZeroGradients();
  void BeginBackward();         // zeroes the compute copy's gradients
  void EndBackward();           // adds them to `gradients`

 private:
  at::Tensor View(const at::Tensor& flat, const std::string& name) const;
  at::Tensor Leaf(const at::Tensor& values, const at::Tensor& gradients, const std::string& name);

  const ParameterTable table_;
  const at::ScalarType compute_type_;
  at::Tensor compute_parameters_, compute_gradients_;   // [flat_size], undefined in fp32
};

}  // namespace hierad
