#include "worker/step_watch.h"

#include <gtest/gtest.h>

#include <condition_variable>
#include <mutex>

namespace hierad {
namespace {

using std::chrono::milliseconds;

TEST(StepWatch, CallsOnceForAStepThatDoesNotEnd) {
  std::mutex mutex;
  std::condition_variable changed;
  int calls = 0;
  std::chrono::nanoseconds passed{0};
  StepWatch::Limits limits;
  limits.first = limits.least = milliseconds(30);
  limits.look_every = milliseconds(5);
  StepWatch watch(limits, [&](std::chrono::nanoseconds limit) {
    std::lock_guard lock(mutex);
    ++calls;
    passed = limit;
    changed.notify_all();
  });
  // Between steps nothing is watched: the first call comes after Begin, whenever that is.
  watch.Begin();
  std::unique_lock lock(mutex);
  ASSERT_TRUE(changed.wait_for(lock, std::chrono::seconds(30), [&] { return calls > 0; }));
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(passed, milliseconds(30));
}

TEST(StepWatch, LearnsFromTheStepsAfterTheFirst) {
  StepWatch::Limits limits;
  limits.first = std::chrono::hours(2);
  limits.least = std::chrono::hours(1);
  StepWatch watch(limits, [](std::chrono::nanoseconds) { FAIL(); });
  EXPECT_EQ(watch.limit(), limits.first);
  watch.Begin();
  watch.End();
  EXPECT_EQ(watch.limit(), limits.first);   // the first is like no other
  for (int i = 0; i < 100; ++i) {
    watch.Begin();
    watch.End();
  }
  EXPECT_EQ(watch.limit(), limits.least);
}

}  // namespace
}  // namespace hierad
