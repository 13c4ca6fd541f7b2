#include "server/agent/rank_name.h"

#include "gtest/gtest.h"

namespace hierad {
namespace {

TEST(RankNameTest, ParsesWhatItPrints) {
  const RankName name{18446744073709551615u, 12, 3};
  EXPECT_EQ(name.ToString(), "18446744073709551615.12.3");
  EXPECT_EQ(RankName::Parse(name.ToString()), name);
}

TEST(RankNameTest, RefusesEverythingElse) {
  for (const char* text : {"", "1", "1.2", "1.2.", "1.2.3.4", "1.2.3x", "a.2.3", "1..3", " 1.2.3", "18446744073709551616.1.1",
                           "1.2.99999999999"}) {
    EXPECT_FALSE(RankName::Parse(text)) << text;
  }
}

}  // namespace
}  // namespace hierad
