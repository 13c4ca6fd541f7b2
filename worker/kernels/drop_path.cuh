// The factor of a residual branch: 0 or 1 / (1 - rate) by the draw of its visit; 1 without drop path.
#pragma once

#include "base/random.h"
#include "worker/kernels/kernels.h"

namespace hierad::kernels {

__device__ inline float BranchFactor(const StepScalars* s, const int64_t* visit_ids, int64_t b, const DropPath& drop) {
  if (drop.rate <= 0 || s->train == 0) return 1.0f;
  const RandomStream stream{s->seed, Draw::kDropPath, s->epoch, uint64_t(visit_ids[b])};
  return stream.Uniform(2 * drop.block + drop.which) < drop.rate ? 0.0f : float(1 / (1 - drop.rate));
}

}  // namespace hierad::kernels
