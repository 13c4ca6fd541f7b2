// The step's input: conversion of a staged batch, and the choice of kept mask units.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "base/plan/rows.h"
#include "base/random.h"
#include "worker/kernels/reference/types.h"

namespace hierad::reference {

template <typename S>
bool Finite(S v) { return v - v == 0; }

// One channel of one row. True: every stored value that was taken, and every one made of it, is finite.
template <typename S, typename V, typename Load>
bool ConvertChannel(const RowRules& rules, const RowDraws& draws, const V* from, Load load, float offset, float scale, S* out) {
  const S off = S(offset), by = S(scale), factor = S(draws.factor), clip = rules.clip > 0 ? S(rules.clip) : std::numeric_limits<S>::infinity();
  int bad = 0;
  auto convert = [&](V stored) {
    const S raw = S(load(stored));
    const S cut = raw > clip ? clip : raw < -clip ? -clip : raw;
    const S made = (cut - off) * by * factor;
    bad |= int(!Finite(raw)) | int(!Finite(made));
    return made;
  };
  if (!draws.flip && draws.shift == 0) {
    for (int64_t i = 0; i < rules.points; ++i) out[i] = convert(from[i]);
    std::fill(out + rules.points, out + rules.samples, S(0));
  } else {
    for (int64_t i = 0; i < rules.samples; ++i) {
      const int64_t place = SourcePlace(rules, draws, i);
      out[i] = place < 0 ? S(0) : convert(from[place]);
    }
  }
  return bad == 0;
}

template <typename S>
void ConvertInput(const RowBatch<S>& a) {
  const StepScalars& s = *a.scalars;
  const int64_t first = s.slot * a.batch, samples = a.rules.samples;
  for (int64_t b = 0; b < a.batch; ++b) {
    const bool real = b < s.real;
    const auto visit = uint64_t(real ? a.source_ids[first + b] : 0);
    if (a.visit_ids != nullptr) a.visit_ids[b] = int64_t(visit);
    if (a.labels != nullptr) a.labels[b] = real ? a.source_labels[first + b] : -1;
    const RowDraws draws = real && s.train != 0 ? DrawRow(a.rules, s.seed, s.epoch, visit) : NothingDrawn();
    std::vector<float> drawn;
    if (real && a.rules.synthetic > 0) {
      drawn.resize(size_t((a.rules.channels * samples + 3) / 4 * 4));
      const RandomStream stream = SyntheticStream(a.rules, s.seed, visit);
      for (size_t i = 0; i < drawn.size(); i += 4) {
        const Random4 words = stream.At(uint32_t(i >> 2));
        for (size_t k = 0; k < 4; ++k) drawn[i + k] = SyntheticValue(words.v[k]);
      }
    }
    for (int64_t c = 0; c < a.rules.channels; ++c) {
      S* out = a.x_BCS + (b * a.rules.channels + c) * samples;
      const int64_t at = ((first + b) * a.rules.channels + c) * samples;
      if (!real || (s.train != 0 && DropsChannel(a.rules, s.seed, s.epoch, visit, c))) {
        std::fill_n(out, samples, S(0));
        continue;
      }
      auto channel = [&](const auto* source, auto load) { return ConvertChannel<S>(a.rules, draws, source + at, load, a.offset[c], a.scale[c], out); };
      auto as_it_is = [](auto v) { return float(v); };
      bool good = true;
      if (a.rules.synthetic > 0) {
        good = ConvertChannel<S>(a.rules, draws, drawn.data() + c * samples, as_it_is, a.offset[c], a.scale[c], out);
      } else switch (a.type) {
        case DType::kU8: good = channel(static_cast<const uint8_t*>(a.source), as_it_is); break;
        case DType::kI16: good = channel(static_cast<const int16_t*>(a.source), as_it_is); break;
        case DType::kF16: good = channel(static_cast<const uint16_t*>(a.source), HalfToFloat); break;
        default: good = channel(static_cast<const float*>(a.source), as_it_is); break;
      }
      if (!good) *a.not_finite = std::max(*a.not_finite, visit + 1);
    }
  }
}

// Keeps the `kept` mask units with the least (word, index). keep_mask [B, units] of 0 and 1, keep_idx [B, kept] ascending.
inline void DrawMask(const StepScalars& scalars, const int64_t* visit_ids, uint8_t* keep_mask, int32_t* keep_idx,
                     int64_t batch, int64_t mask_units, int64_t kept) {
  std::vector<std::pair<uint32_t, int32_t>> order(mask_units);
  for (int64_t b = 0; b < batch; ++b) {
    const RandomStream stream{scalars.seed, Draw(scalars.mask_draw), scalars.epoch, uint64_t(visit_ids[b])};
    for (int64_t u = 0; u < mask_units; ++u) order[u] = {stream.Word(u), int32_t(u)};
    std::sort(order.begin(), order.end());
    uint8_t* mask = keep_mask + b * mask_units;
    std::memset(mask, 0, mask_units);
    for (int64_t j = 0; j < kept; ++j) mask[order[j].second] = 1;
    int32_t* next = keep_idx + b * kept;
    for (int64_t u = 0; u < mask_units; ++u) {
      if (mask[u] != 0) *next++ = int32_t(u);
    }
  }
}

}  // namespace hierad::reference
