// Small random jobs over the whole space of legal models, for tests of what is made from a job. Deterministic per seed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "base/job_yaml.h"
#include "base/plan/geometry.h"
#include "hierad/v1/job.pb.h"

namespace hierad {

class RandomJobs {
 public:
  explicit RandomJobs(uint32_t seed) : random_(seed) {}

  // 1 to 3 axes, both tasks, every q_pool, drop path, separate position embedding, accumulation; defaults filled in.
  v1::JobSpec Next() {
    for (;;) {
      v1::JobSpec job;
      job.set_name("random");
      job.set_seed(random_());
      job.mutable_data()->set_source("synthetic");
      FillModel(job.mutable_model());
      job.mutable_step()->set_batch_per_rank(Pick(1, 3));
      job.mutable_step()->set_accumulation(Pick(1, 2));
      FillDefaults(&job);
      if (Geometry::From(job.model()).ok()) return job;
    }
  }

  int Pick(int least, int most) { return least + int(random_() % uint32_t(most - least + 1)); }

 private:
  void FillModel(v1::ModelSpec* m) {
    const bool mae = Pick(0, 2) > 0;
    const int dims = Pick(1, 3), stages = dims == 1 ? Pick(2, 4) : Pick(2, 3);
    m->set_task(mae ? "mae" : "classify");
    m->set_in_chans(Pick(1, 3));
    m->set_num_heads(Pick(1, 2));
    m->set_embed_dim(m->num_heads() * Pick(4, 6));   // a norm over two or three channels is all but a step function
    for (int s = 0; s < stages; ++s) {
      m->add_stages(Pick(1, 2));
      m->add_mask_unit_attn(Pick(0, 1) == 1);
    }
    m->set_q_pool(Pick(0, stages - 1));
    for (int d = 0; d < dims; ++d) {
      const bool like_the_last = mae && dims >= 2 && d == dims - 1;
      const int stride = like_the_last ? m->patch_stride(d - 1) : Pick(1, 3);
      const int pool = dims == 1 ? Pick(2, 3) : dims == 3 && d == 0 ? (mae ? 1 : Pick(1, 2)) : like_the_last ? 2 : mae ? 2 : Pick(1, 2);
      const int padding = Pick(0, 2);
      m->add_patch_stride(stride);
      m->add_patch_padding(padding);
      m->add_patch_kernel(2 * padding + Pick(1, stride));
      m->add_q_stride(pool);
      int unit = 1;
      for (int s = 1; s < stages; ++s) unit *= pool;
      m->add_input_size(stride * unit * Pick(dims == 1 ? 2 : 1, dims == 1 ? 5 : 3));
    }
    m->set_mlp_ratio(std::vector<double>{1, 1.5, 2, 4}[Pick(0, 3)]);
    m->set_drop_path_rate(Pick(0, 1) == 1 ? 0.3 : 0.0);
    m->set_head_dropout(Pick(0, 1) == 1 ? 0.4 : 0.0);
    m->set_sep_pos_embed(dims == 3 && Pick(0, 1) == 1);
    m->set_decoder_num_heads(Pick(1, 2));
    m->set_decoder_embed_dim(m->decoder_num_heads() * Pick(4, 6));
    m->set_decoder_depth(Pick(1, 2));
    m->set_num_classes(Pick(2, 5));
    m->set_mask_ratio(Pick(2, 8) / 10.0);
    m->set_norm_target(Pick(0, 1) == 1);
  }

  std::mt19937 random_;
};

}  // namespace hierad
