#include "base/gpu_cards.h"

#include <cstdlib>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace hierad {
namespace {

TEST(GpuCardsTest, NoLibraryMeansNoCards) {
  const GpuCards all = ReadGpuCards("libno-such-library.so.1");
  EXPECT_FALSE(all.library);
  EXPECT_TRUE(all.cards.empty());
  EXPECT_TRUE(all.problem.empty());
}

TEST(GpuCardsTest, WhatTheLibraryTells) {
  const GpuCards all = ReadGpuCards(HIERAD_FAKE_NVML);
  EXPECT_EQ(all.driver, "580.82.07");
  EXPECT_EQ(all.cuda, 13000);
  ASSERT_EQ(all.cards.size(), 2u);
  const GpuCard& first = all.cards[0];
  EXPECT_EQ(first.uuid, "GPU-aaaa-0");
  EXPECT_EQ(first.memory_bytes, int64_t{96} << 30);
  EXPECT_EQ(first.free_bytes, int64_t{95} << 30);
  EXPECT_EQ(first.sm_mhz, 345);
  EXPECT_EQ(first.most_sm_mhz, 1980);
  EXPECT_EQ(first.ecc, true);
  EXPECT_EQ(first.uncorrected_errors, 3u);
  EXPECT_FALSE(first.temperature_c.has_value());   // a function that this library lacks
  EXPECT_EQ(*all.cards[1].slowed & kSlowedByHeat, 0x20u);
  EXPECT_EQ(all.cards[1].ecc, false);
  EXPECT_FALSE(all.cards[1].uncorrected_errors.has_value());
}

TEST(GpuCardsTest, ACardThatDoesNotAnswerAndADriverThatDoesNotStart) {
  setenv("HIERAD_FAKE_NVML_BROKEN", "1", 1);
  const GpuCards one = ReadGpuCards(HIERAD_FAKE_NVML);
  unsetenv("HIERAD_FAKE_NVML_BROKEN");
  EXPECT_EQ(one.cards.size(), 1u);
  EXPECT_THAT(one.silent, testing::ElementsAre(1u));
  setenv("HIERAD_FAKE_NVML_NO_DRIVER", "1", 1);
  const GpuCards none = ReadGpuCards(HIERAD_FAKE_NVML);
  unsetenv("HIERAD_FAKE_NVML_NO_DRIVER");
  EXPECT_TRUE(none.library);
  EXPECT_TRUE(none.cards.empty());
  EXPECT_THAT(none.problem, testing::HasSubstr("error 9"));
}

TEST(GpuCardsTest, EntriesOfVisibleDevices) {
  EXPECT_TRUE(NamesCard("1", 1, "GPU-bbbb-1"));
  EXPECT_FALSE(NamesCard("1", 0, "GPU-bbbb-1"));
  EXPECT_TRUE(NamesCard("GPU-bb", 0, "GPU-bbbb-1"));
  EXPECT_FALSE(NamesCard("GPU-", 0, "GPU-bbbb-1"));
}

}  // namespace
}  // namespace hierad
