// Values that the host and the kernels of a step share: plain data, also for device code.
#pragma once

#include <cstdint>

#include "base/plan/loss_scale.h"

namespace hierad {

enum class DType : uint8_t { kF64, kF32, kBF16, kF16, kI64, kI32, kI16, kU8 };
inline constexpr int64_t SizeOf(DType dtype) {
  switch (dtype) {
    case DType::kF64:
    case DType::kI64: return 8;
    case DType::kF32:
    case DType::kI32: return 4;
    case DType::kBF16:
    case DType::kF16:
    case DType::kI16: return 2;
    case DType::kU8: return 1;
  }
  return 0;
}

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
  int32_t train;           // 0: no drop path, no dropout, nothing drawn for the input
  int32_t signals;         // of this rank: bit 0 stop, bit 1 checkpoint; they ride in the all-reduce
  int64_t nan_limit;       // steps that are not finite in a row after which nothing changes any more; 0: no limit
};

// What a step's time is booked under: the device's wait before it, and its parts. Communication: what backward did not hide.
enum class StepPhase : int32_t { kIdle, kForward, kBackward, kCommunication, kOptimizer };
inline constexpr int kNumStepPhases = 5;

// What the device tells after a step. One place on the device, never reset during a run; a copy of each step's is published.
struct StepRecord {
  int64_t step;
  int64_t updates;         // AdamW's t: skipped steps do not count
  int64_t nan_in_row;
  double loss_numerator;   // accumulated over the micro-batches of the step
  double loss, grad_norm, lr;
  int32_t skipped;
  int32_t signals;         // of all ranks; bit 2: one of them met a value that is not finite in its input
  int32_t halted;          // nan_limit was reached: no update from here on
  int32_t overflowed;      // left out because gradients overflowed under a scale that may fall: counts not among nan_in_row
  LossScale scale;         // of the next step
  double scaled_by;        // the gradients of this step are so many times too large; 1: they are not scaled
  uint64_t published;      // records published, this one included
  uint64_t marked_ns;      // the device's clock at the last mark
  uint64_t spent_ns[kNumStepPhases];
  uint64_t not_finite;     // 1 + the visit of this rank whose input is not finite (the largest, of several); 0: none. Of one step
};

// Records on their way to the host: record number n (from 1) in slot (n - 1) % kRecordSlots. A reader that is more than so
// many behind has lost the older ones.
struct RecordSlot {
  uint64_t number;         // of the record that is whole here; 0: none, or being written
  StepRecord record;
};
inline constexpr int64_t kRecordSlots = 64;

// How far a rank is with its collectives: the number (Announced of plan.h) of the newest that it has entered and of the
// newest that is over, and the step of the former. In the host's memory, each value written by itself.
struct CollectiveProgress {
  int64_t step, entered, left;
};

// How AdamW treats a group of elements: not at all (Muon's), with weight decay or without.
enum DecayGroup : uint8_t { kWithoutDecay = 0, kWithDecay = 1, kNotAdamW = 2 };
// Muon: parts of a matrix's squared norm, Newton-Schulz's coefficients and number of rounds.
inline constexpr int64_t kMuonParts = 64;
inline constexpr int kMuonRounds = 5;
// Its products in a round: the Gram matrix A = X X^T, the polynomial B = b A + c A A, the next X = a X + B X.
enum class MuonPhase : uint8_t { kGram, kPolynomial, kTurn };
inline constexpr double kMuonA = 3.4445, kMuonB = -4.7750, kMuonC = 2.0315, kMuonEpsilon = 1e-7, kMuonScale = 0.2;

// Parts that a two-step sum over rows has at most: as many blocks as fill a card twice.
inline constexpr int64_t kReduceParts = 256;
// Parts of a sum over so many rows; part p takes rows [p * chunk, (p + 1) * chunk), chunk the rows a part rounded up.
inline constexpr int64_t ReduceParts(int64_t rows) {
  const int64_t parts = rows / 16;
  return parts < 1 ? 1 : parts > kReduceParts ? kReduceParts : parts;
}
// Parts of a sample's loss, so that small batches fill a card too: part p takes its masked tokens [p * chunk, (p + 1) * chunk), chunk the
// tokens a part rounded up.
inline constexpr int64_t kLossParts = 8;
// Rows of a part where the sum is made by the product before it: those of its tiles.
inline constexpr int64_t kGeluPartRows = 128;
// Matrix products on a GPU: streams that run at once, and the workspace of each, for split-K and the like.
inline constexpr int kGemmLanes = 2;
inline constexpr int64_t kGemmWorkspaceBytes = int64_t{64} << 20;
// Partial sums of the gradient norm.
inline constexpr int64_t kNormParts = 1024;
// Elements behind the gradients in their arena, all-reduced with them: the loss numerator as two floats (high, low), and
// the step's signals. Not part of the norm or the update.
inline constexpr int64_t kGradientTail = 64;

}  // namespace hierad
