// What a masked auto-encoder predicted, put back to where it belongs. Host memory, no torch.
#pragma once

#include <cstdint>
#include <vector>

#include "base/plan/geometry.h"
#include "worker/metrics/reconstruction.h"

namespace hierad {

// [samples, tokens of the final grid, row-major]: 1 where keep_mask [samples, mask units] says removed.
std::vector<uint8_t> RemovedTokens(const Geometry& geometry, int64_t samples, const uint8_t* keep_mask);

// What was predicted for removed tokens alone, `rows` as TakeMasked of base/plan gives them, at the places that PutBack reads:
// [samples, tokens of the final grid, pred_dim], 0 at visible tokens.
std::vector<float> AtRemovedTokens(const Geometry& geometry, int64_t samples, const uint8_t* keep_mask, const std::vector<float>& rows);

// x [samples, in_chans, input_size...]; `pred` [samples, tokens of the final grid, pred_dim], read where `removed` is 1. With
// model.norm_target a prediction gets its patch's own mean and variance back. Of a video the frames that are predicted, the
// first of each token, become images: samples * frames of them, one after the other.
Reconstruction PutBack(const Geometry& geometry, int64_t samples, const float* x, const std::vector<uint8_t>& removed, const std::vector<float>& pred);

}  // namespace hierad
