// What the two rewrites share: weights by place, index tables, label patches, small pieces. Internal to worker/model.
#pragma once

#include <vector>

#include <ATen/ATen.h>

#include "worker/model/hiera.h"

namespace hierad {

inline constexpr double kNormEpsilon = 1e-6;

struct Affine {
  at::Tensor weight, bias;
  const LinearGradients* direct = nullptr;   // of linear layers, if the weights are direct
};

struct BlockWeights {
  Affine norm1, qkv, attention_out, norm2, fc1, fc2;
  Affine shortcut;   // undefined where the width stays
};

// How one block attends.
struct BlockForm {
  int64_t heads;
  int64_t q_stride;
  bool windowed;
};

struct Hiera::Parts {
  Parts(const Geometry& geometry, Weights* weights);

  Geometry geometry;
  at::ScalarType compute_type;
  at::Tensor pos_embed, pos_embed_spatial, pos_embed_temporal;
  Affine patch_embed;
  std::vector<BlockWeights> blocks;
  Affine norm, head;                 // classify
  Affine encoder_norm;               // MAE, as all below
  std::vector<Affine> fusion;
  Affine decoder_embed, decoder_norm, decoder_pred;
  at::Tensor mask_token, decoder_pos_embed;
  std::vector<BlockWeights> decoder_blocks;

  // Index tables on the device, int64.
  at::Tensor tokens_of_unit;         // [n, T]: row-major position of the unit's tokens, in unrolled order
  at::Tensor unit_of_token, slot_of_token;   // [N]: the inverse
  at::Tensor final_tokens;           // [n * F]: row-major position in the final grid of (unit, slot)
  at::Tensor final_inverse;          // [n * F]

  at::Tensor PosEmbed() const;       // [1, N, C]
  BlockForm Form(int block) const;
  BlockForm DecoderForm() const { return {geometry.decoder_heads, 1, false}; }
  // x with removed units zeroed: the overlapping patch convolution must not see them.
  at::Tensor MaskedInput(const at::Tensor& x, const at::Tensor& keep_mask) const;
  at::Tensor PatchConvolution(const at::Tensor& x) const;          // [B, N, C], tokens row-major
  at::Tensor PatchProduct(const at::Tensor& x) const;              // the same, for video on a CPU
  at::Tensor Patches(const at::Tensor& x) const;                   // [B, n * F, pred_dim], final tokens row-major
  at::Tensor NormalizedTarget(const at::Tensor& label) const;      // over the last axis, if spec.norm_target
  at::Tensor Linear(const at::Tensor& x, const Affine& affine) const;
  at::Tensor Convolution(const at::Tensor& x, const Affine& affine, at::IntArrayRef stride, at::IntArrayRef padding) const;
};

at::Tensor LayerNorm(const at::Tensor& x, const Affine& affine);   // in fp32, whatever x is

// The rewrites (eager.cc, optimized.cc).
ForwardResult EagerMae(const Hiera::Parts& parts, const BatchTensors& batch, bool keep_outputs);
at::Tensor EagerFeatures(const Hiera::Parts& parts, const BatchTensors& batch);
ForwardResult OptimizedMae(const Hiera::Parts& parts, const BatchTensors& batch, bool keep_outputs);
at::Tensor OptimizedFeatures(const Hiera::Parts& parts, const BatchTensors& batch);

}  // namespace hierad
