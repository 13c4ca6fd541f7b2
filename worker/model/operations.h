// Differentiable operations that ATen lacks or does with atomics: rows selected and placed by index, where every index
// occurs once, so that the backward is a selection too (deterministic, no scatter), and the loss.
#pragma once

#include <ATen/core/Tensor.h>

#include "worker/model/weights.h"

namespace hierad {

// rows [N, R] -> [M, R]: out[m] = rows[index[m]]. `inverse` [N]: m with index[m] == n, or M where there is none.
// `complete`: there is no such n.
at::Tensor TakeRows(const at::Tensor& rows, const at::Tensor& index, const at::Tensor& inverse, bool complete);

// rows [M, R], filler [R] -> [N, R]: out[n] = rows[place[n]], or filler where place[n] == M.
// `taken` [M]: n of each row; `filled` [N - M]: n of each filler.
at::Tensor PlaceRows(const at::Tensor& rows, const at::Tensor& filler, const at::Tensor& place, const at::Tensor& taken,
                     const at::Tensor& filled);

// x [W, T, ...] -> [W, T / stride, ...]: max over the slowest axis of T = (stride, rest); the gradient goes to the element
// that torch's max picks. stride < 256.
at::Tensor MaxPool(const at::Tensor& x, int64_t stride);

// x [..., in] of the weight's type -> x weight^T + bias, whose backward writes the gradients of weight and bias to
// `gradients` (which outlives it) and gives only x's to autograd.
at::Tensor DirectLinear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                        const LinearGradients* gradients);

// sum_b weight[b] * sum (pred - label)^2: pred [B, ...] any floating type, label alike in fp32, weight [B] fp32.
at::Tensor WeightedSquaredError(const at::Tensor& pred, const at::Tensor& label, const at::Tensor& weight);

}  // namespace hierad
