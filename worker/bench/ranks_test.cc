#include "worker/bench/ranks.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "gtest/gtest.h"

namespace hierad {
namespace {

std::string Rank(const std::string& difference, double ms, const std::string& hash = "1") {
  return absl::StrCat(R"({"weight_difference": )", difference, R"(, "parameter_hash": ")", hash, R"(", "full_step_median_ms": )", ms,
                      R"(, "communication_median_ms": 0, "backward_median_ms": 0})");
}

TEST(BenchRanks, TellTheLargestDifferenceAndTheSlowestRank) {
  const auto all = JoinRanks({Rank("0", 3), Rank("2e-7", 5), Rank("1e-7", 4)});
  ASSERT_TRUE(all.ok()) << all.status();
  EXPECT_EQ((*all)["weight_difference"], 2e-7);
  EXPECT_EQ((*all)["full_step_median_ms"], 5);
  EXPECT_EQ((*all)["hashes_equal"], true);
  EXPECT_EQ((*JoinRanks({Rank("0", 3, "1"), Rank("0", 3, "2")}))["hashes_equal"], false);
}

// Weights that are no numbers are not equal ones, whichever rank has them.
TEST(BenchRanks, ADifferenceThatIsNoNumberStays) {
  for (const auto& texts : {std::vector<std::string>{Rank("\"NaN\"", 3), Rank("0", 3)}, {Rank("0", 3), Rank("\"NaN\"", 3), Rank("0.5", 3)}}) {
    const auto all = JoinRanks(texts);
    ASSERT_TRUE(all.ok()) << all.status();
    EXPECT_EQ((*all)["weight_difference"], "NaN");
  }
  EXPECT_EQ(ReasonOf(JoinRanks({Rank("0", 3), "no GPU"}).status()), v1::REASON_PEER_LOST);
}

}  // namespace
}  // namespace hierad
