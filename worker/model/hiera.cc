#include "worker/model/hiera.h"

#include <string>

#include <ATen/ATen.h>

#include "worker/model/operations.h"
#include "worker/model/parts.h"

namespace hierad {
namespace {

Affine LinearOf(Weights* weights, const std::string& name) {
  return {weights->Product(name + ".weight"), weights->Product(name + ".bias"), weights->Direct(name)};
}

BlockWeights Block(Weights* weights, const std::string& name, bool shortcut) {
  auto norm = [&](const char* part) {
    return Affine{weights->Exact(name + part + ".weight"), weights->Exact(name + part + ".bias")};
  };
  auto linear = [&](const char* part) { return LinearOf(weights, name + part); };
  return {norm(".norm1"),   linear(".attn.qkv"), linear(".attn.proj"), norm(".norm2"),
          linear(".mlp.fc1"), linear(".mlp.fc2"), shortcut ? linear(".proj") : Affine{}};
}

at::Tensor Indices(const std::vector<int64_t>& values, at::Device device) {
  return at::tensor(values, at::TensorOptions().dtype(at::kLong)).to(device);
}

std::vector<int64_t> Inverse(const std::vector<int64_t>& order) {
  std::vector<int64_t> inverse(order.size());
  for (size_t i = 0; i < order.size(); ++i) inverse[order[i]] = int64_t(i);
  return inverse;
}

// Position in the final grid of final token (unit w, slot f): where pooling's first token of n = f * n + w lies, divided
// by the pooled strides (those tokens come first in the unrolled order, having s_1 = ... = s_q_pool = 0).
std::vector<int64_t> FinalTokens(const Geometry& g, const std::vector<int64_t>& order) {
  std::vector<int64_t> final_tokens(g.num_tokens_final);
  for (int64_t w = 0; w < g.num_mask_units; ++w) {
    for (int64_t f = 0; f < g.mask_unit_final_tokens; ++f) {
      int64_t position = order[f * g.num_mask_units + w], result = 0, scale = 1;
      for (int d = g.dims - 1; d >= 0; --d) {
        result += position % g.tokens[d] / (g.tokens[d] / g.tokens_final[d]) * scale;
        position /= g.tokens[d];
        scale *= g.tokens_final[d];
      }
      final_tokens[w * g.mask_unit_final_tokens + f] = result;
    }
  }
  return final_tokens;
}

}  // namespace

Hiera::Parts::Parts(const Geometry& geometry, Weights* weights)
    : geometry(geometry), compute_type(weights->compute_type()) {
  auto exact = [&](const std::string& name) { return weights->Exact(name); };
  auto norm_of = [&](const std::string& name) { return Affine{exact(name + ".weight"), exact(name + ".bias")}; };
  auto product = [&](const std::string& name) {
    return Affine{weights->Product(name + ".weight"), weights->Product(name + ".bias")};
  };
  if (geometry.separate_pos_embed) {
    pos_embed_spatial = exact("pos_embed_spatial");
    pos_embed_temporal = exact("pos_embed_temporal");
  } else {
    pos_embed = exact("pos_embed");
  }
  patch_embed = product("patch_embed.proj");
  for (const BlockShape& block : geometry.blocks) {
    blocks.push_back(Block(weights, "blocks." + std::to_string(block.index), block.dim_in != block.dim_out));
  }
  if (geometry.spec.task() == "mae") {
    encoder_norm = norm_of("encoder_norm");
    for (size_t i = 0; i < geometry.fusion_kernels.size(); ++i) {
      fusion.push_back(product("multi_scale_fusion_heads." + std::to_string(i)));
    }
    decoder_embed = LinearOf(weights, "decoder_embed");
    mask_token = exact("mask_token");
    decoder_pos_embed = exact("decoder_pos_embed");
    for (int64_t i = 0; i < geometry.decoder_depth; ++i) {
      decoder_blocks.push_back(Block(weights, "decoder_blocks." + std::to_string(i), false));
    }
    decoder_norm = norm_of("decoder_norm");
    decoder_pred = LinearOf(weights, "decoder_pred");
  } else {
    norm = norm_of("norm");
    head = LinearOf(weights, "head.projection");
  }

  const at::Device device = weights->parameters.device();
  const int64_t n = geometry.num_mask_units, slots = geometry.mask_unit_tokens;
  const std::vector<int64_t> order = geometry.UnrollOrder();
  std::vector<int64_t> by_unit(order.size()), unit_of(order.size()), slot_of(order.size());
  for (int64_t w = 0; w < n; ++w) {
    for (int64_t t = 0; t < slots; ++t) {
      const int64_t position = order[t * n + w];
      by_unit[w * slots + t] = position;
      unit_of[position] = w;
      slot_of[position] = t;
    }
  }
  tokens_of_unit = Indices(by_unit, device).view({n, slots});
  unit_of_token = Indices(unit_of, device);
  slot_of_token = Indices(slot_of, device);
  const std::vector<int64_t> final_order = FinalTokens(geometry, order);
  final_tokens = Indices(final_order, device);
  final_inverse = Indices(Inverse(final_order), device);
}

at::Tensor Hiera::Parts::PosEmbed() const {
  if (!geometry.separate_pos_embed) return pos_embed;
  const int64_t frames = geometry.tokens[0], dim = geometry.spec.embed_dim();
  return (pos_embed_spatial.unsqueeze(1) + pos_embed_temporal.unsqueeze(2)).view({1, frames * pos_embed_spatial.size(1), dim});
}

BlockForm Hiera::Parts::Form(int block) const {
  const BlockShape& shape = geometry.blocks[block];
  return {shape.heads, shape.q_stride, shape.mask_unit_attn};
}

at::Tensor Hiera::Parts::MaskedInput(const at::Tensor& x, const at::Tensor& keep_mask) const {
  // [B, 1, (unit, samples of a unit)...] against x viewed alike.
  std::vector<int64_t> split{x.size(0), x.size(1)}, mask_shape{x.size(0), 1};
  for (int d = 0; d < geometry.dims; ++d) {
    split.push_back(geometry.mask_units[d]);
    split.push_back(geometry.input_size[d] / geometry.mask_units[d]);
    mask_shape.push_back(geometry.mask_units[d]);
    mask_shape.push_back(1);
  }
  return (x.view(split) * keep_mask.view(mask_shape)).view(x.sizes());
}

// The convolution as a matrix product. LibTorch's 3-D convolution on a CPU (oneDNN) is not safe here: its weight gradient
// reads and writes outside its memory where the kernel is longer than the frames, as with kernel 7 and stride 2 on 6 frames.
at::Tensor Hiera::Parts::PatchProduct(const at::Tensor& x) const {
  const Geometry& g = geometry;
  std::vector<int64_t> margins;   // last axis first
  for (int d = g.dims - 1; d >= 0; --d) margins.insert(margins.end(), 2, g.patch_padding[d]);
  at::Tensor cells = at::constant_pad_nd(x.to(compute_type), margins, 0);
  for (int d = 0; d < g.dims; ++d) cells = cells.unfold(2 + d, g.patch_kernel[d], g.patch_stride[d]);
  cells = cells.permute({0, 2, 3, 4, 1, 5, 6, 7}).reshape({x.size(0), g.num_tokens, -1});
  return at::linear(cells, patch_embed.weight.flatten(1), patch_embed.bias);
}

at::Tensor Hiera::Parts::PatchConvolution(const at::Tensor& x) const {
  if (geometry.dims == 3 && x.device().is_cpu()) return PatchProduct(x);
  return Convolution(x, patch_embed, geometry.patch_stride, geometry.patch_padding).flatten(2).transpose(1, 2);
}

at::Tensor Hiera::Parts::Patches(const at::Tensor& x) const {
  const Geometry& g = geometry;
  const int64_t size = g.pred_stride, B = x.size(0), channels = x.size(1);
  const std::vector<int64_t> result{B, g.num_tokens_final, g.pred_dim};
  if (g.dims == 1) {   // channel fastest
    return x.view({B, channels, -1, size}).permute({0, 2, 3, 1}).reshape(result);
  }
  if (g.dims == 2) {   // channel slowest
    return x.view({B, channels, g.tokens_final[0], size, g.tokens_final[1], size}).permute({0, 2, 4, 1, 3, 5}).reshape(result);
  }
  // The first frame of each token; channel fastest.
  const at::Tensor frames = x.slice(2, 0, c10::nullopt, g.patch_stride[0]);
  return frames.unflatten(4, {g.tokens_final[2], size}).unflatten(3, {g.tokens_final[1], size})
      .permute({0, 2, 3, 5, 4, 6, 1}).reshape(result);
}

at::Tensor Hiera::Parts::NormalizedTarget(const at::Tensor& label) const {
  if (!geometry.spec.norm_target()) return label;
  const auto [variance, mean] = at::var_mean(label, at::OptionalIntArrayRef({-1}), std::optional<at::Scalar>(1), true);
  return (label - mean) / (variance + 1e-6).sqrt();
}

at::Tensor Hiera::Parts::Linear(const at::Tensor& x, const Affine& affine) const {
  if (affine.direct != nullptr) return DirectLinear(x.to(compute_type), affine.weight, affine.bias, affine.direct);
  return at::linear(x.to(compute_type), affine.weight, affine.bias);
}

at::Tensor Hiera::Parts::Convolution(const at::Tensor& x, const Affine& affine, at::IntArrayRef stride,
                                     at::IntArrayRef padding) const {
  const at::Tensor input = x.to(compute_type);
  switch (geometry.dims) {
    case 1: return at::conv1d(input, affine.weight, affine.bias, stride, padding);
    case 2: return at::conv2d(input, affine.weight, affine.bias, stride, padding);
    default: return at::conv3d(input, affine.weight, affine.bias, stride, padding);
  }
}

at::Tensor LayerNorm(const at::Tensor& x, const Affine& affine) {
  return at::layer_norm(x.to(at::kFloat), {x.size(-1)}, affine.weight, affine.bias, kNormEpsilon);
}

void SetUnits(const at::Tensor& keep_mask, int64_t kept, BatchTensors* batch) {
  const int64_t n = keep_mask.size(1);
  TORCH_CHECK(keep_mask.sum(1).eq(kept).all().item<bool>(), "keep_mask must keep ", kept, " units in each row");
  batch->units = keep_mask.logical_not().to(at::kLong).mul(n).add(at::arange(n, keep_mask.device())).argsort(int64_t{1});
  batch->rank = batch->units.argsort(int64_t{1});
}

Hiera::Hiera(const Geometry& geometry, Weights* weights) : parts_(std::make_unique<Parts>(geometry, weights)) {}
Hiera::~Hiera() = default;
const Geometry& Hiera::geometry() const { return parts_->geometry; }

int64_t Hiera::loss_elements() const {
  const Geometry& g = parts_->geometry;
  if (g.spec.task() != "mae") return 1;
  return (g.num_mask_units - g.num_kept) * g.mask_unit_final_tokens * g.pred_dim;
}

ReconstructResult Hiera::Reconstruct(const BatchTensors& batch, Rewrite rewrite) const {
  const Geometry& g = parts_->geometry;
  const int64_t B = batch.x.size(0), N = g.num_tokens_final;
  // In FAIR's order, which is that of the true places of a mask over the final grid.
  const at::Tensor pred = Forward(batch, {.rewrite = rewrite, .keep_outputs = true}).pred.to(at::kFloat);
  const at::Tensor units = batch.units.narrow(1, g.num_kept, g.num_mask_units - g.num_kept).reshape({-1});
  const at::Tensor places = parts_->final_tokens.view({g.num_mask_units, -1}).index_select(0, units).view({B, -1});
  const at::Tensor removed = at::zeros({B, N}, places.options().dtype(at::kBool)).scatter_(1, places, true);
  const at::Tensor index = removed.view({-1}).nonzero().view({-1});
  return {at::zeros({B * N, g.pred_dim}, pred.options()).index_copy_(0, index, pred).view({B, N, g.pred_dim}), removed};
}

at::Tensor Hiera::Features(const BatchTensors& batch, Rewrite rewrite) const {
  return rewrite == Rewrite::kEager ? EagerFeatures(*parts_, batch) : OptimizedFeatures(*parts_, batch);
}

ForwardResult Hiera::Forward(const BatchTensors& batch, const ForwardOptions& options) const {
  if (parts_->geometry.spec.task() == "mae") {
    return options.rewrite == Rewrite::kEager ? EagerMae(*parts_, batch, options.keep_outputs)
                                              : OptimizedMae(*parts_, batch, options.keep_outputs);
  }
  at::Tensor features = Features(batch, options.rewrite);
  if (batch.dropout.defined()) features = features * batch.dropout;
  ForwardResult result;
  result.pred = parts_->Linear(features, parts_->head).to(at::kFloat);
  if (batch.labels.defined()) {
    const at::Tensor losses = at::cross_entropy_loss(result.pred, batch.labels, {}, at::Reduction::None);
    result.loss = (losses * batch.weight).sum();
  }
  return result;
}

}  // namespace hierad
