#include "server/agent/slots.h"

#include <cstdlib>

#include "gtest/gtest.h"

namespace hierad {
namespace {

SlotOptions WithFakeNvml() {
  SlotOptions options;
  options.nvml = HIERAD_FAKE_NVML;
  return options;
}

TEST(SlotsTest, OneCpuSlotPerCoreWhereThereIsNoGpu) {
  SlotOptions options;
  options.nvml = "libno-such-library.so.1";
  const auto slots = DetectSlots(options);
  ASSERT_TRUE(slots.ok());
  ASSERT_EQ(int(slots->size()), UsableCores());
  EXPECT_EQ(slots->front().id(), "cpu-0");
  EXPECT_EQ(slots->front().kind(), v1::Slot::CPU);
  EXPECT_EQ(slots->front().threads(), 1);
  EXPECT_GT(slots->front().memory_bytes(), 0);
  EXPECT_FALSE(slots->front().model().empty());
}

TEST(SlotsTest, ThreadsAreSharedOut) {
  SlotOptions options;
  options.detect_gpus = false;
  options.cpu_slots = 1;
  EXPECT_EQ(DetectSlots(options)->front().threads(), UsableCores());
  options.cpu_slots = UsableCores() * 4;
  EXPECT_EQ(DetectSlots(options)->back().threads(), 1);
}

TEST(SlotsTest, GpusByUuidAndCpuSlotsToo) {
  SlotOptions options = WithFakeNvml();
  options.cpu_slots = 1;
  const auto slots = DetectSlots(options);
  ASSERT_TRUE(slots.ok());
  ASSERT_EQ(slots->size(), 3u);
  EXPECT_EQ((*slots)[0].id(), "GPU-aaaa-0");
  EXPECT_EQ((*slots)[1].id(), "GPU-bbbb-1");
  EXPECT_EQ((*slots)[1].kind(), v1::Slot::CUDA);
  EXPECT_EQ((*slots)[1].model(), "Imaginary 9000");
  EXPECT_EQ((*slots)[1].memory_bytes(), int64_t{96} << 30);
  EXPECT_EQ((*slots)[2].id(), "cpu-0");
}

TEST(SlotsTest, CudaVisibleDevicesIsHonoured) {
  SlotOptions options = WithFakeNvml();
  options.cpu_slots = 0;
  for (const char* visible : {"1", "GPU-bbbb-1", "GPU-bbbb", "7,1"}) {
    options.cuda_visible_devices = visible;
    const auto slots = DetectSlots(options);
    ASSERT_TRUE(slots.ok()) << visible;
    ASSERT_EQ(slots->size(), 1u) << visible;
    EXPECT_EQ(slots->front().id(), "GPU-bbbb-1");
  }
  options.cuda_visible_devices = "";
  const auto none = DetectSlots(options);
  EXPECT_EQ(none.status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST(SlotsTest, CardThatDoesNotAnswerIsLeftOut) {
  SlotOptions options = WithFakeNvml();
  options.cpu_slots = 0;
  setenv("HIERAD_FAKE_NVML_BROKEN", "0", 1);
  const auto slots = DetectSlots(options);
  unsetenv("HIERAD_FAKE_NVML_BROKEN");
  ASSERT_TRUE(slots.ok());
  ASSERT_EQ(slots->size(), 1u);
  EXPECT_EQ(slots->front().id(), "GPU-bbbb-1");
}

TEST(SlotsTest, LibraryWithoutDriverMeansNoGpus) {
  SlotOptions options = WithFakeNvml();
  options.cpu_slots = 2;
  setenv("HIERAD_FAKE_NVML_NO_DRIVER", "1", 1);
  const auto slots = DetectSlots(options);
  unsetenv("HIERAD_FAKE_NVML_NO_DRIVER");
  ASSERT_TRUE(slots.ok());
  EXPECT_EQ(slots->size(), 2u);
}

}  // namespace
}  // namespace hierad
