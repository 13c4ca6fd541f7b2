// The random draws of one visit, on the host: which mask units are kept, drop path, dropout. Pure functions of (seed,
// epoch, visit), so the same on CPU and GPU, at any world size and after any resume. Free of torch.
#pragma once

#include <cstdint>

#include "base/plan/geometry.h"
#include "base/random.h"

namespace hierad {

// The `kept` of `count` mask units with the smallest (Word(i), i) of stream (seed, purpose, epoch, visit).
// units[0..kept): kept ones ascending, units[kept..count): removed ones ascending; rank[unit]: its place in `units`.
void DrawMaskUnits(const RandomStream& stream, int64_t count, int64_t kept, int64_t* units, int64_t* rank);

// Nothing masked, nothing drawn: units and rank are 0, 1, 2, ...
void KeepAllMaskUnits(int64_t count, int64_t* units, int64_t* rank);

// Factors of a visit's residual branches: draw 2 * block + {0: attention, 1: MLP}; 0 with the block's probability, else
// 1 / (1 - probability). factors[draw * stride].
void DrawDropPath(uint64_t seed, uint32_t epoch, uint64_t visit, const Geometry& geometry, float* factors,
                  int64_t stride);

// Factors of a visit's pooled features: 0 with probability `rate`, else 1 / (1 - rate).
void DrawDropout(uint64_t seed, uint32_t epoch, uint64_t visit, double rate, int64_t count, float* factors);

}  // namespace hierad
