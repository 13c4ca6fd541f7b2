// A sample's row on its way into the model: what is stored, what is drawn for a visit, and where each of the model's values
// comes from. Rows keep the type of their file until the step converts them. Plain data, also for device code: all modes on
// all devices draw and place alike.
#pragma once

#include <cstdint>

#include "base/plan/step_values.h"
#include "base/random.h"

namespace hierad {

// The same for all samples of a run. A model's value is (clipped stored value - offset[channel]) * scale[channel] * factor, or
// 0: in dropped channels, and where a shift or padding leaves nothing.
struct RowRules {
  int64_t channels = 1;
  int64_t samples = 0;      // values of a channel, in the row and in the model
  int64_t points = 0;       // of them hold something; those behind are padding
  int64_t width = 1;        // of the last axis, which a flip mirrors
  float clip = 0;           // stored values beyond it, either side of 0, are cut to it; 0: none are
  // Drawn in training for each visit.
  int64_t shift = 0;        // most points, either way
  double flip = 0;          // probability
  double channel_drop = 0;  // probability of each channel
  double amplitude_least = 1, amplitude_most = 1;
  // Samples of a synthetic set: no rows are stored, the step draws their values (SyntheticStream) where it runs. 0: rows are stored.
  int64_t synthetic = 0;

  bool operator==(const RowRules&) const = default;
};

// What a visit draws for its whole row.
struct RowDraws {
  bool flip;
  int64_t shift;    // points by which the signal comes later
  float factor;
};
HIERAD_HOST_DEVICE inline RowDraws NothingDrawn() { return {false, 0, 1.0f}; }

HIERAD_HOST_DEVICE inline RowDraws DrawRow(const RowRules& rules, uint64_t seed, uint32_t epoch, uint64_t visit) {
  RowDraws draws = NothingDrawn();
  if (rules.flip > 0) draws.flip = double(RandomStream{seed, Draw::kFlip, epoch, visit}.Uniform(0)) < rules.flip;
  if (rules.shift > 0) {
    const int64_t places = 2 * rules.shift + 1;
    const int64_t place = int64_t(double(RandomStream{seed, Draw::kShift, epoch, visit}.Uniform(0)) * double(places));
    draws.shift = (place < places ? place : places - 1) - rules.shift;
  }
  if (rules.amplitude_least != 1 || rules.amplitude_most != 1) {
    const double drawn = double(RandomStream{seed, Draw::kAmplitude, epoch, visit}.Uniform(0)), range = rules.amplitude_most - rules.amplitude_least;
#if defined(__CUDA_ARCH__)
    draws.factor = float(__dadd_rn(rules.amplitude_least, __dmul_rn(range, drawn)));   // not contracted: the host's bits
#else
    draws.factor = float(rules.amplitude_least + range * drawn);
#endif
  }
  return draws;
}

HIERAD_HOST_DEVICE inline bool DropsChannel(const RowRules& rules, uint64_t seed, uint32_t epoch, uint64_t visit, int64_t channel) {
  return rules.channel_drop > 0 &&
         double(RandomStream{seed, Draw::kChannelDrop, epoch, visit}.Uniform(uint64_t(channel))) < rules.channel_drop;
}

// Word i of it makes value i of a synthetic set's sample, counted through its channels.
HIERAD_HOST_DEVICE inline RandomStream SyntheticStream(const RowRules& rules, uint64_t seed, uint64_t visit) {
  return {seed, Draw::kSynthetic, 1, visit % uint64_t(rules.synthetic)};
}
// The sum of four bytes is close to normal; brought to mean 0 and variance 1. Whole numbers up to one product: the same bits on all devices.
HIERAD_HOST_DEVICE inline float SyntheticValue(uint32_t word) {
  const int sum = int(word & 255) + int(word >> 8 & 255) + int(word >> 16 & 255) + int(word >> 24);
  return float(sum - 510) * 0.0067658648f;   // 1 / sqrt(4 (256^2 - 1) / 12)
}

// Where in the row's channel value `i` of the model's channel comes from; -1: nowhere, it is 0.
HIERAD_HOST_DEVICE inline int64_t SourcePlace(const RowRules& rules, const RowDraws& draws, int64_t i) {
  if (draws.flip) i += rules.width - 1 - 2 * (i % rules.width);
  i -= draws.shift;
  return i >= 0 && i < rules.points ? i : -1;
}

// One conversion: rows of the slot that `scalars` names into x. Rows at and beyond scalars->real: zeros, id 0, label -1. Draws
// only where scalars->train says so. S: the type of x.
template <typename S>
struct RowBatch {
  const StepScalars* scalars;
  const void* source;              // [slots, batch, channels, samples] of `type`; null of a synthetic set
  DType type;                      // kU8, kI16, kF16 or kF32
  const int64_t* source_ids;       // [slots, batch]
  const int64_t* source_labels;    // the same; null with `labels`
  const float *offset, *scale;     // [channels]
  S* x_BCS;
  int64_t *visit_ids, *labels;     // [batch]; may be null
  // Becomes 1 + the id of a visit with a value that is not finite, stored or made: the largest such visit so far.
  uint64_t* not_finite;
  int64_t batch;
  RowRules rules;
};

}  // namespace hierad
