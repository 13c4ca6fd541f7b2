// FAIR's operations in FAIR's order, to compare and to measure against. Tokens are [B, N, C] in unrolled order,
// n = t * windows + w.
#include <vector>

#include <ATen/ATen.h>

#include "worker/model/parts.h"

namespace hierad {
namespace {

using at::Tensor;

Tensor BooleanSelect(const Tensor& x, const Tensor& mask) {
  c10::List<std::optional<Tensor>> indices;
  indices.push_back(mask);
  return x.index(indices);
}

// Moves each stride's offset in front of what is left, level by level.
Tensor Unroll(const Geometry& g, Tensor x) {
  const int64_t B = x.size(0), C = x.size(2);
  std::vector<int64_t> size = g.tokens;
  int64_t batch = B;
  for (int level = 0; level < g.spec.stages_size() - 1; ++level) {
    std::vector<int64_t> shape{batch}, order{0};
    for (int d = 0; d < g.dims; ++d) {
      size[d] /= g.q_stride[d];
      shape.push_back(size[d]);
      shape.push_back(g.q_stride[d]);
    }
    shape.push_back(C);
    for (int d = 0; d < g.dims; ++d) order.push_back(2 + 2 * d);
    for (int d = 0; d < g.dims; ++d) order.push_back(1 + 2 * d);
    order.push_back(1 + 2 * g.dims);
    x = x.reshape(shape).permute(order).flatten(0, g.dims);
    batch *= g.flat_q_stride;
  }
  return x.reshape({B, g.num_tokens, C});
}

// [B, N', C] after `levels_left` of the levels remain to be undone -> [B, units, unit..., C].
Tensor Reroll(const Geometry& g, Tensor x, int levels_left) {
  const int64_t B = x.size(0), C = x.size(2);
  int64_t N = x.size(1);
  std::vector<int64_t> unit(g.dims, 1);
  for (int level = 0; level < levels_left; ++level) {
    N /= g.flat_q_stride;
    std::vector<int64_t> shape{B}, order{0, 1 + g.dims}, merged{B, N};
    shape.insert(shape.end(), g.q_stride.begin(), g.q_stride.end());
    shape.push_back(N);
    shape.insert(shape.end(), unit.begin(), unit.end());
    shape.push_back(C);
    for (int d = 0; d < g.dims; ++d) {
      order.push_back(1 + d);
      order.push_back(2 + g.dims + d);
      unit[d] *= g.q_stride[d];
      merged.push_back(unit[d]);
    }
    order.push_back(2 + 2 * g.dims);
    merged.push_back(C);
    x = x.view(shape).permute(order).reshape(merged);
  }
  std::vector<int64_t> shape{B, N};
  shape.insert(shape.end(), unit.begin(), unit.end());
  shape.push_back(C);
  return x.view(shape);
}

// [B, units, unit..., C] -> [B, tokens_final..., C].
Tensor UndoWindows(const Geometry& g, const Tensor& x) {
  const int64_t B = x.size(0), C = x.size(-1);
  std::vector<int64_t> split{B}, order{0}, merged{B};
  split.insert(split.end(), g.mask_units.begin(), g.mask_units.end());
  split.insert(split.end(), g.mask_unit_final.begin(), g.mask_unit_final.end());
  split.push_back(C);
  for (int d = 0; d < g.dims; ++d) {
    order.push_back(1 + d);
    order.push_back(1 + g.dims + d);
    merged.push_back(g.tokens_final[d]);
  }
  order.push_back(1 + 2 * g.dims);
  merged.push_back(C);
  return x.reshape(split).permute(order).reshape(merged);
}

Tensor Attention(const Hiera::Parts& parts, const BlockWeights& w, const BlockForm& form, int64_t windows,
                 const Tensor& x) {
  const int64_t B = x.size(0), W = form.windowed ? windows : 1;
  const Tensor projected = parts.Linear(x, w.qkv);
  const int64_t dim = projected.size(2) / 3, head_dim = dim / form.heads;
  const Tensor qkv = projected.reshape({B, -1, W, 3, form.heads, head_dim}).permute({3, 0, 4, 2, 1, 5});
  Tensor q = qkv[0];
  if (form.q_stride > 1) {
    q = std::get<0>(q.reshape({B, form.heads, W, form.q_stride, -1, head_dim}).max(3));
  }
  const Tensor out = at::scaled_dot_product_attention(q, qkv[1], qkv[2]);
  return parts.Linear(out.transpose(1, 3).reshape({B, -1, dim}), w.attention_out);
}

Tensor DropPath(const Tensor& branch, const Tensor& factors, int64_t draw) {
  return factors.defined() ? branch * factors[draw].to(branch.scalar_type()).view({-1, 1, 1}) : branch;
}

Tensor Block(const Hiera::Parts& parts, const BlockWeights& w, const BlockForm& form, int64_t windows, Tensor x,
             const Tensor& drop_path, int64_t index) {
  const Tensor normed = LayerNorm(x, w.norm1);
  if (w.shortcut.weight.defined()) {
    x = parts.Linear(normed, w.shortcut);
    x = std::get<0>(x.view({x.size(0), form.q_stride, -1, x.size(2)}).max(1));
  }
  x = x + DropPath(Attention(parts, w, form, windows, normed), drop_path, 2 * index);
  const Tensor hidden = at::gelu(parts.Linear(LayerNorm(x, w.norm2), w.fc1));
  return x + DropPath(parts.Linear(hidden, w.fc2), drop_path, 2 * index + 1);
}

// Output of the last block, and of each stage that feeds the fusion, rerolled.
Tensor Encoder(const Hiera::Parts& parts, const BatchTensors& batch, int64_t kept, std::vector<Tensor>* intermediates) {
  const Geometry& g = parts.geometry;
  const int64_t B = batch.x.size(0);
  const bool masked = kept < g.num_mask_units;
  const Tensor keep_mask = batch.rank.lt(kept);
  Tensor x = parts.PatchConvolution(masked ? parts.MaskedInput(batch.x, keep_mask) : batch.x);
  x = Unroll(g, x + parts.PosEmbed());
  if (masked) {
    const Tensor tiled = keep_mask.unsqueeze(2).tile({1, g.mask_unit_tokens, x.size(2)});
    x = BooleanSelect(x, tiled).view({B, -1, x.size(2)});
  }
  const int levels = g.spec.stages_size() - 1;
  size_t next_fusion = 0;
  for (const BlockShape& shape : g.blocks) {
    x = Block(parts, parts.blocks[shape.index], parts.Form(shape.index), kept, x, batch.drop_path, shape.index);
    const bool feeds = next_fusion < g.fusion_stages.size() && shape.index == g.stage_ends[g.fusion_stages[next_fusion]];
    if (intermediates != nullptr && feeds) {
      intermediates->push_back(Reroll(g, x, levels - std::min(shape.stage, g.spec.q_pool())));
      ++next_fusion;
    }
  }
  return x;
}

Tensor Fused(const Hiera::Parts& parts, const std::vector<Tensor>& intermediates) {
  const Geometry& g = parts.geometry;
  Tensor sum = intermediates.back();
  std::vector<int64_t> back{0}, forth{0, g.dims + 1};
  for (int d = 0; d < g.dims; ++d) {
    back.push_back(2 + d);
    forth.push_back(1 + d);
  }
  back.push_back(1);
  for (size_t i = 0; i < parts.fusion.size(); ++i) {
    const Tensor& x = intermediates[i];   // [B, K, unit..., C]
    const std::vector<int64_t> none(g.dims, 0);
    const Tensor y = parts.Convolution(x.flatten(0, 1).permute(forth), parts.fusion[i], g.fusion_kernels[i], none);
    sum = sum + y.permute(back).reshape(sum.sizes());
  }
  return LayerNorm(sum, parts.encoder_norm);
}

Tensor Decoder(const Hiera::Parts& parts, const Tensor& latent, const Tensor& keep_mask, Tensor* token_mask) {
  const Geometry& g = parts.geometry;
  const int64_t B = latent.size(0);
  const Tensor embedded = parts.Linear(latent, parts.decoder_embed);
  std::vector<int64_t> shape{B, g.num_mask_units}, ones{B, g.num_mask_units};
  for (int d = 0; d < g.dims; ++d) {
    shape.push_back(g.mask_unit_final[d]);
    ones.push_back(1);
  }
  shape.push_back(g.decoder_dim);
  ones.push_back(1);
  const Tensor mask = keep_mask.view(ones).expand(shape);
  c10::List<std::optional<Tensor>> indices;
  indices.push_back(mask);
  Tensor x = at::zeros(shape, embedded.options()).index_put(indices, embedded.flatten());
  x = mask.logical_not() * parts.mask_token.view({-1}) + mask * x;
  x = UndoWindows(g, x).flatten(1, g.dims);
  *token_mask = UndoWindows(g, mask.narrow(-1, 0, 1)).reshape({B, -1});
  x = x + parts.decoder_pos_embed;
  for (const BlockWeights& block : parts.decoder_blocks) x = Block(parts, block, parts.DecoderForm(), 1, x, {}, 0);
  return parts.Linear(LayerNorm(x, parts.decoder_norm), parts.decoder_pred);
}

}  // namespace

ForwardResult EagerMae(const Hiera::Parts& parts, const BatchTensors& batch, bool keep_outputs) {
  const Geometry& g = parts.geometry;
  std::vector<Tensor> intermediates;
  Encoder(parts, batch, g.num_kept, &intermediates);
  Tensor token_mask;
  const Tensor pred_all = Decoder(parts, Fused(parts, intermediates), batch.rank.lt(g.num_kept), &token_mask);
  const Tensor removed = token_mask.logical_not();
  const Tensor label = parts.NormalizedTarget(BooleanSelect(parts.Patches(batch.x), removed));
  const Tensor pred = BooleanSelect(pred_all, removed);
  ForwardResult result;
  const Tensor squares = (pred - label).to(at::kFloat).square();
  result.loss = (squares.view({batch.x.size(0), -1}).sum(1) * batch.weight).sum();
  if (keep_outputs) {
    result.pred = pred;
    result.label = label;
    result.intermediates = intermediates;
  }
  return result;
}

Tensor EagerFeatures(const Hiera::Parts& parts, const BatchTensors& batch) {
  const Geometry& g = parts.geometry;
  if (g.spec.task() != "mae") {
    return LayerNorm(Encoder(parts, batch, g.num_mask_units, nullptr).mean(1), parts.norm);
  }
  std::vector<Tensor> intermediates;
  Encoder(parts, batch, g.num_mask_units, &intermediates);
  return Fused(parts, intermediates).flatten(1, g.dims + 1).mean(1);
}

}  // namespace hierad
