#include "base/clock.h"

#include <gtest/gtest.h>

namespace hierad {
namespace {

using std::chrono::milliseconds;

TEST(Clock, SystemClockDoesNotRunBackwards) {
  const auto before = Clock::System().Monotonic();
  EXPECT_GE(Clock::System().Monotonic(), before);
  EXPECT_GT(Clock::System().UnixMs(), 1'600'000'000'000);
}

TEST(Clock, FakeStandsStillUntilAdvanced) {
  FakeClock clock;
  const auto start = clock.Monotonic();
  const int64_t unix_ms = clock.UnixMs();
  EXPECT_EQ(clock.Monotonic(), start);
  clock.Advance(milliseconds(1500));
  EXPECT_EQ(clock.Monotonic() - start, milliseconds(1500));
  EXPECT_EQ(clock.UnixMs() - unix_ms, 1500);
}

TEST(Clock, AStepOfTheWallClockLeavesMonotonicAlone) {
  FakeClock clock;
  const auto start = clock.Monotonic();
  const int64_t unix_ms = clock.UnixMs();
  clock.StepWallClock(-3'600'000);
  EXPECT_EQ(clock.Monotonic(), start);
  EXPECT_EQ(clock.UnixMs(), unix_ms - 3'600'000);
}

}  // namespace
}  // namespace hierad
