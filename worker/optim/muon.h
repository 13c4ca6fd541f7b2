// Muon for the matrices of the parameter table, in the form of torch.optim.Muon with adjust_lr_fn match_rms_adamw; the rest is
// AdamW's. Matrices of one shape go through Newton-Schulz together. One thread.
#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "base/plan/parameters.h"
#include "hierad/v1/job.pb.h"

namespace hierad {

class Muon {
 public:
  // Flat fp32 buffers, updated in place. `compute`: the type of Newton-Schulz's products.
  Muon(const ParameterTable& table, const v1::OptimizerSpec& spec, const at::Tensor& parameters, const at::Tensor& gradients,
       const at::Tensor& momentum, at::ScalarType compute);

  // With gradients / `divisor`. Where `skip` is 1 nothing changes. Both: one fp32 element on the parameters' device.
  void Update(double lr, const at::Tensor& divisor, const at::Tensor& skip);

 private:
  struct Group {   // of one shape
    int64_t rows, cols;
    std::vector<at::Tensor> parameters, gradients, momentum;
    std::vector<double> scales;   // of the rate: layer decay
  };
  at::Tensor Orthogonal(const at::Tensor& direction) const;

  const double momentum_, weight_decay_;
  const bool nesterov_;
  const at::ScalarType compute_;
  std::vector<Group> groups_;
};

}  // namespace hierad
