// Values that the host and the kernels of a step share: plain data, also for device code.
#pragma once

#include <cstdint>

namespace hierad {

// Values that change from step to step and live on the device, so that they are not baked into a graph. Written by the
// host into kStaging before the step.
struct StepScalars {
  uint64_t seed;
  int64_t step;            // 1-based
  double loss_weight;      // 1 / (global real masked elements of the whole step)
  double lr;
  uint32_t epoch;
  uint32_t mask_draw;      // Draw::kMask, or Draw::kEvalMask
  int32_t real;            // rows of this micro-batch that are samples
  int32_t slot;            // staging slot, 0 or 1
  int32_t train;           // 0: no drop path, no dropout
  int32_t signals;         // of this rank: bit 0 stop, bit 1 checkpoint (GPU; they ride in the all-reduce)
};

// What the device tells after a step; one per step, never reset during a run.
struct StepRecord {
  int64_t step;
  int64_t updates;         // AdamW's t: skipped steps do not count
  int64_t nan_in_row;
  double loss_numerator;   // accumulated over the micro-batches of the step
  double loss, grad_norm, lr;
  int32_t skipped;
  int32_t signals;         // of all ranks (GPU)
};

// Parts that a two-step sum over rows has at most: as many blocks as fill a card twice.
inline constexpr int64_t kReduceParts = 256;
// Parts of a sum over so many rows; part p takes rows [p * chunk, (p + 1) * chunk), chunk the rows a part rounded up.
inline constexpr int64_t ReduceParts(int64_t rows) {
  const int64_t parts = rows / 16;
  return parts < 1 ? 1 : parts > kReduceParts ? kReduceParts : parts;
}
// Matrix products on a GPU: streams that run at once, and the workspace of each, for split-K and the like.
inline constexpr int kGemmLanes = 2;
inline constexpr int64_t kGemmWorkspaceBytes = int64_t{64} << 20;
// Partial sums of the gradient norm.
inline constexpr int64_t kNormParts = 1024;
// Elements behind the gradients in their arena, all-reduced with them: the loss numerator as two floats (high, low), and
// the step's signals. Not part of the norm or the update.
inline constexpr int64_t kGradientTail = 64;

}  // namespace hierad
