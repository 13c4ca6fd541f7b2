// AdamW over the flat buffers, with timm's groups of decay and layer decay (without Muon's matrices), through ATen's fused kernels on CPU and GPU alike. Elementwise,
// so the result does not depend on threads or ranks. One thread.
#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "base/plan/parameters.h"
#include "hierad/v1/job.pb.h"

namespace hierad {

class AdamW {
 public:
  // `parameters` and `gradients`: flat fp32, at least table.flat_size elements, updated in place. Moments begin as zeros.
  AdamW(const ParameterTable& table, const v1::OptimizerSpec& spec, const at::Tensor& parameters,
        const at::Tensor& gradients);

  // Update number `t` (from 1) with gradients / `divisor`. Where `skip` is 1 nothing changes. Both: one fp32 element on
  // the parameters' device.
  void Update(int64_t t, double lr, const at::Tensor& divisor, const at::Tensor& skip);

  at::Tensor exp_avg, exp_avg_sq;   // [flat_size]

 private:
  struct Group {
    double weight_decay;
    double scale;   // of the rate
    std::vector<at::Tensor> parameters, gradients, exp_avg, exp_avg_sq, steps;
  };
  double beta1_, beta2_, eps_;
  at::Tensor step_;
  std::vector<Group> groups_;
};

// Square root of the sum of squares of a contiguous fp32 CPU buffer, in double, summed in an order that does not depend
// on the number of threads.
double Norm(const float* data, int64_t size);

}  // namespace hierad
