#include "worker/kernels/muon_schedule.h"

#include <algorithm>
#include <queue>
#include <utility>

namespace hierad::kernels {

int MuonCost(const MuonTile& tile) {
  constexpr int kBesideTheSum = 3;   // filling the pipeline, storing
  return tile.iterations + kBesideTheSum;
}

std::vector<std::vector<MuonTile>> ScheduleMuon(MuonPhase phase, const std::vector<MuonMatrices>& groups, int workers) {
  const bool symmetric = phase != MuonPhase::kTurn;
  std::vector<MuonTile> tiles;
  for (size_t g = 0; g < groups.size(); ++g) {
    const MuonMatrices& m = groups[g];
    const int width = symmetric ? m.shorter : m.longer, depth = phase == MuonPhase::kGram ? m.longer : m.shorter;
    const int iterations = (depth + kMuonDepth - 1) / kMuonDepth;
    for (int matrix = 0; matrix < m.count; ++matrix) {
      for (int column = 0; column < width; column += kMuonTile) {
        for (int row = 0; row < m.shorter && (!symmetric || row <= column); row += kMuonTile) {
          const int first = phase == MuonPhase::kGram ? 0 : (symmetric ? column : row) / kMuonDepth;
          tiles.push_back({int(g), matrix, row, column, iterations, first, {}});
        }
      }
    }
  }
  std::stable_sort(tiles.begin(), tiles.end(), [](const MuonTile& a, const MuonTile& b) { return MuonCost(a) > MuonCost(b); });
  using Load = std::pair<int64_t, int>;   // and who has it
  std::priority_queue<Load, std::vector<Load>, std::greater<>> least;
  for (int w = 0; w < workers; ++w) least.push({0, w});
  std::vector<std::vector<MuonTile>> schedule(workers);
  for (const MuonTile& tile : tiles) {
    const auto [load, worker] = least.top();
    least.pop();
    schedule[worker].push_back(tile);
    least.push({load + MuonCost(tile), worker});
  }
  return schedule;
}

}  // namespace hierad::kernels
