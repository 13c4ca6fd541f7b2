#include "base/random.h"

#include <gtest/gtest.h>

#include <set>
#include <vector>

namespace hierad {
namespace {

std::vector<uint32_t> Words(Random4 r) { return {r.v[0], r.v[1], r.v[2], r.v[3]}; }

// The known answers published with Random123 (kat_vectors, philox4x32 10).
TEST(Random, PhiloxKnownAnswers) {
  EXPECT_EQ(Words(Philox4x32({{0, 0, 0, 0}}, 0, 0)),
            (std::vector<uint32_t>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(Words(Philox4x32({{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}}, 0xffffffff, 0xffffffff)),
            (std::vector<uint32_t>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(Words(Philox4x32({{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, 0xa4093822, 0x299f31d0)),
            (std::vector<uint32_t>{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Random, EveryPartOfTheKeyMatters) {
  const RandomStream base{7, Draw::kMask, 3, 11};
  std::set<uint32_t> words = {base.Word(0)};
  std::vector<RandomStream> others(7, base);
  others[0].seed = 8;
  others[1].seed = 7 | (uint64_t{1} << 32);
  others[2].purpose = Draw::kCrop;
  others[3].epoch = 4;
  others[4].sample = 12;
  others[5].sample = 11 | (uint64_t{1} << 32);
  others[6].sample = 11 | (uint64_t{1} << 47);
  for (const RandomStream& other : others) words.insert(other.Word(0));
  EXPECT_EQ(words.size(), others.size() + 1);
}

TEST(Random, WordsAreTheBlocksInOrder) {
  const RandomStream stream{1, Draw::kInit, 0, 5};
  for (uint32_t i = 0; i < 16; ++i) EXPECT_EQ(stream.Word(i), stream.At(i / 4).v[i % 4]);
}

TEST(Random, UniformIsInTheUnitIntervalWithTheRightMean) {
  const RandomStream stream{1, Draw::kSynthetic, 0, 0};
  double sum = 0;
  for (int i = 0; i < 20000; ++i) {
    const float u = stream.Uniform(i);
    ASSERT_GE(u, 0.0f);
    ASSERT_LT(u, 1.0f);
    sum += u;
  }
  EXPECT_NEAR(sum / 20000, 0.5, 0.01);   // five standard errors
}

}  // namespace
}  // namespace hierad
