#include "worker/model/draws.h"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

namespace hierad {

void DrawMaskUnits(const RandomStream& stream, int64_t count, int64_t kept, int64_t* units, int64_t* rank) {
  std::vector<std::pair<uint32_t, int64_t>> noise(count);
  for (int64_t i = 0; i < count; ++i) noise[i] = {stream.Word(i), i};
  std::nth_element(noise.begin(), noise.begin() + kept, noise.end());
  for (int64_t i = 0; i < count; ++i) rank[noise[i].second] = i < kept ? 0 : 1;
  int64_t next_kept = 0, next_removed = kept;
  for (int64_t unit = 0; unit < count; ++unit) {
    int64_t& next = rank[unit] == 0 ? next_kept : next_removed;
    units[next] = unit;
    rank[unit] = next++;
  }
}

void KeepAllMaskUnits(int64_t count, int64_t* units, int64_t* rank) {
  std::iota(units, units + count, 0);
  std::iota(rank, rank + count, 0);
}

void DrawDropPath(uint64_t seed, uint32_t epoch, uint64_t visit, const Geometry& geometry, float* factors,
                  int64_t stride) {
  const RandomStream stream{seed, Draw::kDropPath, epoch, visit};
  for (const BlockShape& block : geometry.blocks) {
    for (int branch = 0; branch < 2; ++branch) {
      const int64_t draw = 2 * block.index + branch;
      const double p = block.drop_path;
      factors[draw * stride] = p > 0 && stream.Uniform(draw) < p ? 0.0f : float(1 / (1 - p));
    }
  }
}

void DrawDropout(uint64_t seed, uint32_t epoch, uint64_t visit, double rate, int64_t count, float* factors) {
  const RandomStream stream{seed, Draw::kDropout, epoch, visit};
  for (int64_t i = 0; i < count; ++i) factors[i] = stream.Uniform(i) < rate ? 0.0f : float(1 / (1 - rate));
}

}  // namespace hierad
