// The step's input: conversion of a staged batch, and the choice of kept mask units.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "base/plan/plan.h"
#include "base/random.h"

namespace hierad::reference {

// IEEE half precision to float.
inline float HalfToFloat(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 1023;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7F800000 | fraction << 13);
  if (exponent != 0) return std::bit_cast<float>(sign | (exponent + 112) << 23 | fraction << 13);
  const float magnitude = float(fraction) * (1.0f / 16777216.0f);
  return sign != 0 ? -magnitude : magnitude;
}

// One value of a source of type `dtype`.
inline double SourceValue(const void* source, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::kF64: return static_cast<const double*>(source)[i];
    case DType::kF32: return static_cast<const float*>(source)[i];
    case DType::kBF16: return std::bit_cast<float>(uint32_t{static_cast<const uint16_t*>(source)[i]} << 16);
    case DType::kF16: return HalfToFloat(static_cast<const uint16_t*>(source)[i]);
    case DType::kI64: return double(static_cast<const int64_t*>(source)[i]);
    case DType::kI32: return static_cast<const int32_t*>(source)[i];
    case DType::kI16: return static_cast<const int16_t*>(source)[i];
    case DType::kU8: return static_cast<const uint8_t*>(source)[i];
  }
  return 0;
}

// source, source_ids, source_labels: [2 slots, B, ...]. Rows at and beyond `real`: zeros, id 0, label -1.
template <typename S>
void ConvertInput(const StepScalars& scalars, const void* source, DType dtype, const int64_t* source_ids,
                  const int64_t* source_labels, const float* scale, const float* shift, S* x_BCS, int64_t* visit_ids,
                  int64_t* labels, int64_t batch, int64_t channels, int64_t samples) {
  const int64_t first = scalars.slot * batch;
  for (int64_t b = 0; b < batch; ++b) {
    const bool real = b < scalars.real;
    visit_ids[b] = real ? source_ids[first + b] : 0;
    labels[b] = real ? source_labels[first + b] : -1;
    for (int64_t c = 0; c < channels; ++c) {
      S* out = x_BCS + (b * channels + c) * samples;
      const int64_t from = ((first + b) * channels + c) * samples;
      for (int64_t i = 0; i < samples; ++i) {
        out[i] = real ? S(SourceValue(source, dtype, from + i)) * S(scale[c]) + S(shift[c]) : S(0);
      }
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
