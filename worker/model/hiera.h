// Hiera in LibTorch: encoder, masked auto-encoder, classifier, in two rewrites over the same weights.
//   eager       FAIR's operations in FAIR's order: tokens in unrolled order, 5-D attention, boolean indexing.
//   optimized   tokens of a mask unit side by side ("window-major"), so that attention is 4-D and its fused kernels
//               apply, kept units are selected by index, and the decoder predicts removed units only.
// graph_safe is `optimized` on buffers that never move, captured by worker/step: it has no shape that depends on data,
// and a short batch weighs its missing samples with 0.
// Shapes: B samples, n mask units of which K are kept, T tokens a unit at first and F at last, C channels.
// Functions throw c10::Error; worker/step turns that into Status. One thread.
#pragma once

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "base/plan/geometry.h"
#include "worker/model/weights.h"

namespace hierad {

enum class Rewrite { kEager, kOptimized };

// One batch on the model's device.
struct BatchTensors {
  at::Tensor x;           // [B, in_chans, input_size...] fp32
  at::Tensor units;       // [B, n] int64: kept mask units ascending, then removed ones ascending
  at::Tensor rank;        // [B, n] int64: place of each unit in `units`
  at::Tensor labels;      // [B] int64 (classify)
  at::Tensor weight;      // [B] fp32: of each sample in the loss
  at::Tensor drop_path;   // [2 * blocks, B] fp32 factors; undefined: no drop path
  at::Tensor dropout;     // [B, encoder_dim_out] fp32 factors; undefined: no dropout
};

// `units` and `rank` of a boolean mask [B, n], true = kept, with `kept` true in each row.
void SetUnits(const at::Tensor& keep_mask, int64_t kept, BatchTensors* batch);

struct ForwardOptions {
  Rewrite rewrite = Rewrite::kOptimized;
  bool keep_outputs = false;   // fill pred, label and intermediates
};

// By final token, row-major.
struct ReconstructResult {
  at::Tensor pred;      // [B, tokens, pred_dim] fp32, 0 where the token was kept
  at::Tensor removed;   // [B, tokens] bool
};

struct ForwardResult {
  at::Tensor loss;       // [] fp32: sum over samples of weight * (sum of squared errors | cross-entropy)
  at::Tensor pred;       // MAE: [B * (n - K) * F, pred_dim], removed tokens in FAIR's order; classify: logits
  at::Tensor label;      // MAE: alike
  std::vector<at::Tensor> intermediates;   // of each stage that feeds the fusion, as FAIR: [B, K, unit..., C]
};

class Hiera {
 public:
  // `weights` outlives the model.
  Hiera(const Geometry& geometry, Weights* weights);
  ~Hiera();

  ForwardResult Forward(const BatchTensors& batch, const ForwardOptions& options) const;
  // MAE.
  ReconstructResult Reconstruct(const BatchTensors& batch, Rewrite rewrite) const;
  // [B, encoder_dim_out] fp32. MAE: fused encoder output after encoder_norm, mean over tokens, `batch.units` all kept.
  // Classify: what the head sees, norm(mean over tokens).
  at::Tensor Features(const BatchTensors& batch, Rewrite rewrite) const;
  // Elements of the loss per sample: removed elements (MAE), or 1.
  int64_t loss_elements() const;

  const Geometry& geometry() const;
  struct Parts;   // weights by place, index tables; shared by the rewrites

 private:
  std::unique_ptr<Parts> parts_;
};

}  // namespace hierad
