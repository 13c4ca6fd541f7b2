#include "base/gpu_faults.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <condition_variable>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <vector>

namespace hierad {
namespace {

using testing::HasSubstr;

TEST(GpuFaults, WordsSayWhatToDo) {
  EXPECT_THAT(GpuFaultWords(false, 79), testing::AllOf(HasSubstr("Xid 79 (the card has fallen off the bus)"), HasSubstr("restart the machine")));
  EXPECT_THAT(GpuFaultWords(true, 0), testing::AllOf(HasSubstr("double-bit ECC"), HasSubstr("reset the card")));
  EXPECT_THAT(GpuFaultWords(false, 9999), HasSubstr("Xid 9999: see"));
}

TEST(GpuFaults, NoLibraryTellsNothing) { EXPECT_EQ(GpuFaults::Watch("libno-such-library.so.1", [](const GpuFault&) {}), nullptr); }

TEST(GpuFaults, EventsComeFromTheLibraryAsTheyHappen) {
  const std::string path = testing::TempDir() + "/gpu_faults_events";
  std::ofstream(path) << "";
  setenv("HIERAD_FAKE_NVML_EVENTS", path.c_str(), 1);
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<GpuFault> heard;
  auto faults = GpuFaults::Watch(HIERAD_FAKE_NVML, [&](const GpuFault& fault) {
    std::lock_guard lock(mutex);
    heard.push_back(fault);
    changed.notify_all();
  });
  ASSERT_NE(faults, nullptr);
  const auto wait = [&](size_t count) {
    std::unique_lock lock(mutex);
    return changed.wait_for(lock, std::chrono::seconds(20), [&] { return heard.size() >= count; });
  };
  std::ofstream(path, std::ios::app) << "1 xid 79\n";
  ASSERT_TRUE(wait(1));
  std::ofstream(path, std::ios::app) << "0 ecc\n";
  ASSERT_TRUE(wait(2));
  EXPECT_EQ(heard[0].uuid, "GPU-bbbb-1");
  EXPECT_EQ(heard[0].xid, 79u);
  EXPECT_FALSE(heard[0].double_bit);
  EXPECT_EQ(heard[1].uuid, "GPU-aaaa-0");
  EXPECT_TRUE(heard[1].double_bit);
  faults.reset();
  unsetenv("HIERAD_FAKE_NVML_EVENTS");
}

}  // namespace
}  // namespace hierad
