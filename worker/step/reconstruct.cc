#include "worker/step/reconstruct.h"

#include <algorithm>
#include <cmath>

#include "base/plan/plan_builder.h"
#include "worker/kernels/reference/types.h"

namespace hierad {
namespace {

// What undoes the target's normalisation: mean and deviation of a patch.
struct Spread {
  double mean = 0, deviation = 1;
};

Spread SpreadOf(const float* x, const int32_t* place, int64_t size) {
  double sum = 0, squares = 0;
  for (int64_t e = 0; e < size; ++e) sum += x[place[e]];
  const double mean = sum / double(size);
  for (int64_t e = 0; e < size; ++e) squares += (x[place[e]] - mean) * (x[place[e]] - mean);
  return {mean, std::sqrt(squares / double(size - 1) + reference::kNormEpsilon)};
}

// Of videos [samples, channels, T, H, W] every `stride`-th frame: [samples * frames, channels, H, W].
template <typename V>
std::vector<V> Frames(const std::vector<V>& videos, const Reconstruction& r, int64_t stride) {
  const int64_t length = r.size[0], frame = r.size[1] * r.size[2];
  std::vector<V> images;
  for (int64_t s = 0; s < r.samples; ++s)
    for (int64_t t = 0; t < length; t += stride)
      for (int64_t c = 0; c < r.channels; ++c) {
        const auto from = videos.begin() + ((s * r.channels + c) * length + t) * frame;
        images.insert(images.end(), from, from + frame);
      }
  return images;
}

}  // namespace

std::vector<uint8_t> RemovedTokens(const Geometry& g, int64_t samples, const uint8_t* keep_mask) {
  const std::vector<int32_t> order = FinalOrder(g);
  std::vector<uint8_t> removed(samples * g.num_tokens_final, 0);
  for (int64_t b = 0; b < samples; ++b)
    for (int64_t i = 0; i < g.num_tokens_final; ++i)
      removed[b * g.num_tokens_final + order[i]] = keep_mask[b * g.num_mask_units + i / g.mask_unit_final_tokens] == 0;
  return removed;
}

std::vector<float> AtRemovedTokens(const Geometry& g, int64_t samples, const uint8_t* keep_mask, const std::vector<float>& rows) {
  const std::vector<int32_t> order = FinalOrder(g);
  std::vector<float> pred(samples * g.num_tokens_final * g.pred_dim, 0.0f);
  auto row = rows.begin();
  for (int64_t b = 0; b < samples; ++b)
    for (int64_t i = 0; i < g.num_tokens_final; ++i) {
      if (keep_mask[b * g.num_mask_units + i / g.mask_unit_final_tokens] != 0) continue;
      std::copy(row, row + g.pred_dim, pred.begin() + (b * g.num_tokens_final + order[i]) * g.pred_dim);
      row += g.pred_dim;
    }
  return pred;
}

Reconstruction PutBack(const Geometry& g, int64_t samples, const float* x, const std::vector<uint8_t>& removed, const std::vector<float>& pred) {
  Reconstruction r;
  r.samples = samples;
  r.channels = g.spec.in_chans();
  r.size = g.input_size;
  int64_t size = r.channels;
  for (const int64_t extent : g.input_size) size *= extent;
  r.input.assign(x, x + samples * size);
  r.predicted = r.input;
  r.masked.assign(samples * size, 0);
  const std::vector<int32_t> index = LabelIndex(g);
  for (int64_t b = 0; b < samples; ++b) {
    for (int64_t token = 0; token < g.num_tokens_final; ++token) {
      if (removed[b * g.num_tokens_final + token] == 0) continue;
      const int32_t* place = index.data() + token * g.pred_dim;
      const Spread spread = g.spec.norm_target() ? SpreadOf(x + b * size, place, g.pred_dim) : Spread{};
      for (int64_t e = 0; e < g.pred_dim; ++e) {
        r.predicted[b * size + place[e]] = float(pred[(b * g.num_tokens_final + token) * g.pred_dim + e] * spread.deviation + spread.mean);
        r.masked[b * size + place[e]] = 1;
      }
    }
  }
  if (g.dims < 3) return r;
  const int64_t stride = g.patch_stride[0];
  Reconstruction frames;
  frames.input = Frames(r.input, r, stride);
  frames.predicted = Frames(r.predicted, r, stride);
  frames.masked = Frames(r.masked, r, stride);
  frames.channels = r.channels;
  frames.size = {g.input_size[1], g.input_size[2]};
  frames.samples = int64_t(frames.input.size()) / (frames.channels * frames.size[0] * frames.size[1]);
  return frames;
}

}  // namespace hierad
