// Shapes of a Hiera model: token counts, windows, pooling, unroll order, legal sizes. Pure arithmetic: no torch, no
// CUDA, no allocation. The one place that knows them; model, step, kernels and `hierctl` all ask here.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "hierad/v1/job.pb.h"

namespace hierad {

// One encoder block.
struct BlockShape {
  int index;
  int stage;
  int64_t dim_in;
  int64_t dim_out;
  int64_t heads;
  int64_t q_stride;        // product of the pooling strides in this block's attention; 1: no pooling
  bool mask_unit_attn;     // attention inside windows (the *previous* stage's flag in a stage's first block)
  int64_t window_tokens;   // keys per window before pooling (per mask unit); meaningful with mask_unit_attn
  int64_t tokens_full_in;  // tokens of the whole input at this block's entry, nothing masked
  double drop_path;        // rate
};

struct Geometry {
  v1::ModelSpec spec;                       // every key resolved
  int dims;                                 // 1, 2 or 3
  std::vector<int64_t> input_size;          // per axis, as all vectors below
  std::vector<int64_t> patch_kernel, patch_stride, patch_padding;
  std::vector<int64_t> q_stride;
  std::vector<int64_t> tokens;              // input_size / patch_stride
  std::vector<int64_t> mask_unit_size;      // tokens
  std::vector<int64_t> mask_units;          // tokens / mask_unit_size
  std::vector<int64_t> mask_unit_final;     // mask_unit_size / q_stride^q_pool
  std::vector<int64_t> tokens_final;        // tokens / q_stride^q_pool
  int64_t num_tokens, num_mask_units, num_kept, mask_unit_tokens, mask_unit_final_tokens, num_tokens_final;
  int64_t flat_q_stride;                    // product of q_stride
  std::vector<BlockShape> blocks;
  std::vector<int> stage_ends;              // index of the last block of each stage
  std::vector<int> fusion_stages;           // stages whose output feeds a fusion head (the last one is the identity)
  std::vector<std::vector<int64_t>> fusion_kernels;   // one per head but the identity
  int64_t encoder_dim_out;
  // MAE
  int64_t decoder_dim, decoder_depth, decoder_heads, pred_stride, pred_dim;   // pred_dim: elements of one prediction
  bool separate_pos_embed;

  // The rule broken, with the numbers and the nearest legal sizes, as InvalidArgument; a key's path stands in front.
  static absl::StatusOr<Geometry> From(const v1::ModelSpec& spec);

  // Token order: position of unrolled token n in row-major [tokens] order; windows fastest (n = t * windows + w).
  std::vector<int64_t> UnrollOrder() const;
};

// Python's int(n * (1 - ratio)) in double arithmetic, as FAIR counts kept mask units.
int64_t KeptMaskUnits(int64_t num_mask_units, double mask_ratio);

}  // namespace hierad
