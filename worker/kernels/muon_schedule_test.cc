#include "worker/kernels/muon_schedule.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <vector>

#include "gtest/gtest.h"

namespace hierad::kernels {
namespace {

const std::vector<MuonMatrices> kShapes = {{3, 96, 96}, {16, 384, 1536}, {1, 8, 8}, {2, 200, 328}, {8, 512, 2048}, {1, 768, 3072}, {5, 136, 264}};

// Every element of every matrix is in one tile, of symmetric results in one or by its mirror image.
TEST(MuonScheduleTest, TilesTakeEveryElementOnce) {
  for (MuonPhase phase : {MuonPhase::kGram, MuonPhase::kPolynomial, MuonPhase::kTurn}) {
    const bool symmetric = phase != MuonPhase::kTurn;
    for (int workers : {1, 7, 264}) {
      std::map<std::tuple<int, int, int, int>, int> taken;   // by group, matrix, square of 8
      for (const auto& of_worker : ScheduleMuon(phase, kShapes, workers)) {
        for (const MuonTile& tile : of_worker) {
          const MuonMatrices& m = kShapes[size_t(tile.group)];
          const int width = symmetric ? m.shorter : m.longer, depth = phase == MuonPhase::kGram ? m.longer : m.shorter;
          EXPECT_GE(tile.iterations * kMuonDepth, depth);
          EXPECT_LT((tile.iterations - 1) * kMuonDepth, depth);
          // The addend's iterations: columns of the polynomial's tile, rows of the last product's.
          EXPECT_EQ(tile.first * kMuonDepth, phase == MuonPhase::kGram ? 0 : symmetric ? tile.column : tile.row);
          EXPECT_LT(tile.first, tile.iterations);
          for (int r = tile.row; r < std::min(tile.row + kMuonTile, m.shorter); r += 8) {
            for (int c = tile.column; c < std::min(tile.column + kMuonTile, width); c += 8) {
              ++taken[{tile.group, tile.matrix, r / 8, c / 8}];
              if (symmetric && tile.row != tile.column) ++taken[{tile.group, tile.matrix, c / 8, r / 8}];
            }
          }
        }
      }
      size_t expected = 0;
      for (const MuonMatrices& m : kShapes) expected += size_t(m.count) * size_t(m.shorter / 8) * size_t((symmetric ? m.shorter : m.longer) / 8);
      EXPECT_EQ(taken.size(), expected);
      for (const auto& [place, times] : taken) ASSERT_EQ(times, 1);
    }
  }
}

TEST(MuonScheduleTest, WorkersHaveAboutAsMuchToDoAndBeginWithTheLongest) {
  const auto schedule = ScheduleMuon(MuonPhase::kTurn, kShapes, 264);
  std::vector<int> load;
  int longest = 0;
  for (const auto& tiles : schedule) {
    int sum = 0;
    for (size_t i = 0; i < tiles.size(); ++i) {
      sum += MuonCost(tiles[i]), longest = std::max(longest, MuonCost(tiles[i]));
      if (i > 0) { EXPECT_LE(MuonCost(tiles[i]), MuonCost(tiles[i - 1])); }
    }
    load.push_back(sum);
  }
  EXPECT_LE(*std::max_element(load.begin(), load.end()) - *std::min_element(load.begin(), load.end()), longest);
}

}  // namespace
}  // namespace hierad::kernels
