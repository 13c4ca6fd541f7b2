// Small models of one, two and three axes, for tests.
#pragma once

#include <string>
#include <vector>

#include "base/plan/geometry.h"

namespace hierad {

inline v1::ModelSpec SmallModel(int dims, const std::string& task = "mae") {
  v1::ModelSpec spec;
  spec.set_task(task);
  const std::vector<std::vector<int>> sizes{{96}, {48, 32}, {4, 32, 16}};
  for (int size : sizes[dims - 1]) spec.add_input_size(size);
  spec.set_in_chans(dims == 1 ? 5 : 2);
  spec.set_embed_dim(8);
  spec.set_num_heads(1);
  for (int blocks : {1, 2, 2}) spec.add_stages(blocks);   // global attention in the last stage, from its second block
  spec.set_q_pool(dims == 2 ? 1 : 2);
  if (task == "classify") spec.set_q_pool(2);
  spec.set_num_classes(3);
  spec.set_decoder_embed_dim(16);
  spec.set_decoder_depth(2);
  spec.set_decoder_num_heads(4);
  spec.set_mask_ratio(0.6);
  return spec;
}

}  // namespace hierad
