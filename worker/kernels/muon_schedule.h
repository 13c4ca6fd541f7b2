// Which tiles of Newton-Schulz's products are made, and by which block of threads: all matrices of all shapes of one phase
// in one launch. Plain data, made once where the step is prepared.
#pragma once

#include <cstdint>
#include <vector>

#include "base/plan/step_values.h"

namespace hierad::kernels {

// `count` matrices [shorter, longer], or of their squares [shorter, shorter].
struct MuonMatrices {
  int count, shorter, longer;
};

inline constexpr int kMuonTile = 128;    // rows and columns of a tile
inline constexpr int kMuonDepth = 64;    // of the sum, taken at once: an iteration
inline constexpr int kMuonBox = 64;      // of a tile and of an iteration: what is copied at once, in rows and columns

// As the kernel reads it.
struct MuonTile {
  int32_t group, matrix;    // which of the phase's shapes, which of its matrices
  int32_t row, column;      // the tile's first elements
  int32_t iterations;       // kMuonDepth of the sum each, the last one with what is left
  int32_t first;            // the iteration to begin with: it goes on from there, and around
  int32_t unused[2];
};

// Tiles by worker, in the order in which each takes them: the longest first, each to who has least to do. The results of kGram and kPolynomial are symmetric: of them only tiles on and above the diagonal.
// The polynomial begins with the iterations whose columns, the last product with those whose rows, are the tile's own: those of
// the addend.
std::vector<std::vector<MuonTile>> ScheduleMuon(MuonPhase phase, const std::vector<MuonMatrices>& groups, int workers);

// What a tile is reckoned to take, in iterations.
int MuonCost(const MuonTile& tile);

}  // namespace hierad::kernels
