// The rewrite for speed: the tokens of a mask unit lie side by side ("window-major"), [B * K, T, C], T in unrolled order.
// Attention inside units is then 4-D without a copy, global attention a view of the same memory (attention does not care
// about token order), query pooling a max over the slowest axis of T, and fusion convolutions linear layers. The decoder
// keeps this order too; only labels and position embeddings are looked up. Removed units are selected by index before
// decoder_pred, so nothing is predicted that the loss ignores. No shape depends on data.
#include <vector>

#include <ATen/ATen.h>

#include "worker/model/operations.h"
#include "worker/model/parts.h"

namespace hierad {
namespace {

using at::Tensor;

// Row indices of one batch, from `units` and `rank`. R = n - K.
struct Rows {
  int64_t B, n, kept;
  Tensor units;          // [B * K] row of each kept unit in [B * n]
  Tensor removed;        // [B * R] row of each removed unit
  Tensor place;          // [B * n] row in [B * K], or B * K for removed
  Tensor removed_place;  // [B * n] row in [B * R], or B * R for kept
  Tensor tokens;         // [B * K * T] row in [B * N]
  Tensor tokens_place;   // [B * N] row in [B * K * T], or B * K * T
};

Rows MakeRows(const Hiera::Parts& parts, const BatchTensors& batch, int64_t kept) {
  const Geometry& g = parts.geometry;
  Rows rows;
  const int64_t B = rows.B = batch.units.size(0), n = rows.n = g.num_mask_units, T = g.mask_unit_tokens;
  rows.kept = kept;
  const int64_t removed = n - kept;
  const Tensor sample = at::arange(B, batch.units.options()).unsqueeze(1);   // [B, 1]
  const Tensor unit_rows = batch.units + sample * n;
  rows.units = unit_rows.narrow(1, 0, kept).reshape({-1});
  rows.removed = unit_rows.narrow(1, kept, removed).reshape({-1});
  const Tensor is_kept = batch.rank.lt(kept);
  rows.place = at::where(is_kept, batch.rank + sample * kept, B * kept).view({-1});
  rows.removed_place = at::where(is_kept, B * removed, batch.rank + (sample * removed - kept)).view({-1});
  const Tensor kept_units = batch.units.narrow(1, 0, kept).reshape({-1});
  rows.tokens = (parts.tokens_of_unit.index_select(0, kept_units).view({B, kept * T}) + sample * g.num_tokens).view({-1});
  const Tensor rank_of_token = batch.rank.index_select(1, parts.unit_of_token);   // [B, N]
  rows.tokens_place =
      at::where(rank_of_token.lt(kept), (rank_of_token + sample * kept) * T + parts.slot_of_token, B * kept * T).view({-1});
  return rows;
}

Tensor Pool(const Tensor& x, int64_t stride) { return stride == 1 ? x : MaxPool(x, stride); }

// normed [B * W, T, C] -> [B * W, T', C'].
Tensor Attention(const Hiera::Parts& parts, const BlockWeights& w, const BlockForm& form, int64_t B,
                 const Tensor& normed) {
  const int64_t windows = normed.size(0), T = normed.size(1);
  const int64_t dim = w.attention_out.weight.size(0), head_dim = dim / form.heads;
  const Tensor qkv = parts.Linear(normed, w.qkv).view({windows, T, 3, form.heads, head_dim});
  Tensor q = Pool(qkv.select(2, 0), form.q_stride), k = qkv.select(2, 1), v = qkv.select(2, 2);
  const int64_t T_out = q.size(1);
  if (!form.windowed) {
    q = q.reshape({B, -1, form.heads, head_dim});
    k = k.view({B, -1, form.heads, head_dim});
    v = v.view({B, -1, form.heads, head_dim});
  }
  const Tensor out = at::scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2));
  return parts.Linear(out.transpose(1, 2).reshape({windows, T_out, dim}), w.attention_out);
}

Tensor AddBranch(const Tensor& x, const Tensor& branch, const Tensor& factors, int64_t draw, int64_t B) {
  if (!factors.defined()) return x + branch;
  const Tensor factor = factors[draw].to(branch.scalar_type()).view({B, 1, 1});
  return (x.view({B, -1, x.size(2)}) + branch.view({B, -1, x.size(2)}) * factor).view(x.sizes());
}

Tensor Block(const Hiera::Parts& parts, const BlockWeights& w, const BlockForm& form, int64_t B, Tensor x,
             const Tensor& drop_path, int64_t index) {
  const Tensor normed = LayerNorm(x, w.norm1).to(parts.compute_type);
  if (w.shortcut.weight.defined()) x = Pool(parts.Linear(normed, w.shortcut), form.q_stride);
  x = AddBranch(x, Attention(parts, w, form, B, normed), drop_path, 2 * index, B);
  const Tensor hidden = at::gelu(parts.Linear(LayerNorm(x, w.norm2), w.fc1));
  return AddBranch(x, parts.Linear(hidden, w.fc2), drop_path, 2 * index + 1, B);
}

// [B * K, T, C] of the last block; outputs of the stages that feed the fusion, the last included.
Tensor Encoder(const Hiera::Parts& parts, const BatchTensors& batch, const Rows& rows, std::vector<Tensor>* stages) {
  const Geometry& g = parts.geometry;
  const bool masked = rows.kept < g.num_mask_units;
  const Tensor input = masked ? parts.MaskedInput(batch.x, batch.rank.lt(rows.kept)) : batch.x;
  const Tensor embedded = (parts.PatchConvolution(input).contiguous() + parts.PosEmbed()).flatten(0, 1);
  Tensor x = TakeRows(embedded, rows.tokens, rows.tokens_place, !masked)
                 .view({rows.B * rows.kept, g.mask_unit_tokens, embedded.size(1)});
  size_t next_fusion = 0;
  for (const BlockShape& shape : g.blocks) {
    x = Block(parts, parts.blocks[shape.index], parts.Form(shape.index), rows.B, x, batch.drop_path, shape.index);
    if (stages != nullptr && next_fusion < g.fusion_stages.size() &&
        shape.index == g.stage_ends[g.fusion_stages[next_fusion]]) {
      stages->push_back(x);
      ++next_fusion;
    }
  }
  return x;
}

// A convolution whose kernel equals its stride, over tokens in unrolled order: its weight [D, C, kernel...] as the
// matrix [D, P * C], P running over the kernel in unrolled order (finest level slowest, axes row-major within a level).
Tensor FusionMatrix(const Geometry& g, const Tensor& weight, int levels) {
  std::vector<int64_t> shape{weight.size(0), weight.size(1)}, order{0};
  for (int d = 0; d < g.dims; ++d) {
    for (int level = levels; level >= 1; --level) shape.push_back(g.q_stride[d]);
  }
  for (int level = 1; level <= levels; ++level) {
    for (int d = 0; d < g.dims; ++d) order.push_back(2 + d * levels + (levels - level));
  }
  order.push_back(1);
  return weight.reshape(shape).permute(order).reshape({weight.size(0), -1});
}

// [B * K * F, D] fp32, after encoder_norm.
Tensor Fused(const Hiera::Parts& parts, const std::vector<Tensor>& stages) {
  const Geometry& g = parts.geometry;
  const int64_t F = g.mask_unit_final_tokens;
  Tensor sum = stages.back().flatten(0, 1);
  for (size_t i = 0; i < parts.fusion.size(); ++i) {
    const Tensor& x = stages[i];   // [B * K, P * F, C]
    const int64_t P = x.size(1) / F, C = x.size(2);
    const Tensor cells = x.view({-1, P, F, C}).transpose(1, 2).reshape({-1, P * C});
    const Tensor matrix = FusionMatrix(g, parts.fusion[i].weight, g.spec.q_pool() - g.fusion_stages[i]);
    sum = sum + parts.Linear(cells, {matrix, parts.fusion[i].bias});
  }
  return LayerNorm(sum, parts.encoder_norm);
}

// -> predictions of the removed units, [B * R * F, pred_dim].
Tensor Decoder(const Hiera::Parts& parts, const Rows& rows, const Tensor& latent) {
  const Geometry& g = parts.geometry;
  const int64_t F = g.mask_unit_final_tokens, D = g.decoder_dim;
  const Tensor visible = parts.Linear(latent, parts.decoder_embed).to(at::kFloat).view({-1, F * D});
  const Tensor filler = parts.mask_token.view({1, D}).expand({F, D}).reshape({F * D});
  const Tensor position = TakeRows(parts.decoder_pos_embed.view({-1, D}), parts.final_tokens, parts.final_inverse, true);
  Tensor x = PlaceRows(visible, filler, rows.place, rows.units, rows.removed);
  x = (x.view({rows.B, rows.n * F, D}) + position).view({rows.B * rows.n, F, D});
  for (const BlockWeights& block : parts.decoder_blocks) {
    x = Block(parts, block, parts.DecoderForm(), rows.B, x, {}, 0);
  }
  const Tensor removed = TakeRows(x.view({-1, F * D}), rows.removed, rows.removed_place, false).view({-1, D});
  return parts.Linear(LayerNorm(removed, parts.decoder_norm), parts.decoder_pred);
}

Tensor Labels(const Hiera::Parts& parts, const BatchTensors& batch, const Rows& rows) {
  const Geometry& g = parts.geometry;
  const int64_t F = g.mask_unit_final_tokens;
  const Tensor removed_units = batch.units.narrow(1, rows.kept, rows.n - rows.kept).reshape({-1});
  const Tensor sample = at::arange(rows.B, batch.units.options()).unsqueeze(1) * g.num_tokens_final;
  const Tensor index = parts.final_tokens.view({rows.n, F}).index_select(0, removed_units).view({rows.B, -1}) + sample;
  return parts.NormalizedTarget(parts.Patches(batch.x).flatten(0, 1).index_select(0, index.view({-1})));
}

// Removed tokens [B * R * F, P] from (unit, slot) order to FAIR's, row-major in the final grid.
Tensor InFairOrder(const Hiera::Parts& parts, const BatchTensors& batch, const Rows& rows, const Tensor& x) {
  const int64_t F = parts.geometry.mask_unit_final_tokens, P = x.size(1);
  const Tensor removed = batch.units.narrow(1, rows.kept, rows.n - rows.kept).reshape({-1});
  const Tensor order = parts.final_tokens.view({rows.n, F}).index_select(0, removed).view({rows.B, -1}).argsort(int64_t{1});
  return x.view({rows.B, -1, P}).gather(1, order.unsqueeze(2).expand({-1, -1, P})).flatten(0, 1);
}

// [B * K, T, C] in unrolled order -> [B, K, unit..., C].
Tensor InFairUnits(const Geometry& g, const Tensor& x, int64_t B, int levels) {
  std::vector<int64_t> split{x.size(0)}, order{0}, merged{B, -1};
  for (int level = 1; level <= levels; ++level) split.insert(split.end(), g.q_stride.begin(), g.q_stride.end());
  split.push_back(x.size(2));
  for (int d = 0; d < g.dims; ++d) {
    int64_t extent = 1;
    for (int level = levels; level >= 1; --level) {
      order.push_back(1 + (level - 1) * g.dims + d);
      extent *= g.q_stride[d];
    }
    merged.push_back(extent);
  }
  order.push_back(1 + levels * g.dims);
  merged.push_back(x.size(2));
  return x.view(split).permute(order).reshape(merged);
}

}  // namespace

ForwardResult OptimizedMae(const Hiera::Parts& parts, const BatchTensors& batch, bool keep_outputs) {
  const Geometry& g = parts.geometry;
  const Rows rows = MakeRows(parts, batch, g.num_kept);
  std::vector<Tensor> stages;
  Encoder(parts, batch, rows, &stages);
  const Tensor pred = Decoder(parts, rows, Fused(parts, stages));
  const Tensor label = Labels(parts, batch, rows);
  ForwardResult result;
  result.loss = WeightedSquaredError(pred, label, batch.weight);
  if (keep_outputs) {
    result.pred = InFairOrder(parts, batch, rows, pred);
    result.label = InFairOrder(parts, batch, rows, label);
    for (size_t i = 0; i < stages.size(); ++i) {
      const int levels = g.spec.stages_size() - 1 - std::min(g.fusion_stages[i], g.spec.q_pool());
      result.intermediates.push_back(InFairUnits(g, stages[i], rows.B, levels));
    }
  }
  return result;
}

Tensor OptimizedFeatures(const Hiera::Parts& parts, const BatchTensors& batch) {
  const Geometry& g = parts.geometry;
  const Rows rows = MakeRows(parts, batch, g.num_mask_units);
  if (g.spec.task() != "mae") {
    const Tensor x = Encoder(parts, batch, rows, nullptr);
    return LayerNorm(x.view({rows.B, -1, x.size(2)}).mean(1), parts.norm);
  }
  std::vector<Tensor> stages;
  Encoder(parts, batch, rows, &stages);
  return Fused(parts, stages).view({rows.B, -1, g.encoder_dim_out}).mean(1);
}

}  // namespace hierad
