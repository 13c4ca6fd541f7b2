#include "worker/attempt_watch.h"

#include <gtest/gtest.h>

#include <future>

#include "base/attempt_mark.h"
#include "base/fs.h"

namespace hierad {
namespace {

TEST(AttemptWatch, SpeaksWhenTheFolderIsGivenToAnother) {
  std::string folder = testing::TempDir() + "/hierad_watch_XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  const std::string path = JoinPath(folder, kAttemptMarkFile);
  std::promise<void> superseded;
  auto heard = superseded.get_future();
  AttemptWatch watch(folder, "mine", [&] { superseded.set_value(); }, std::chrono::milliseconds(5));
  // No mark; then its own: it stays silent for many looks.
  EXPECT_EQ(heard.wait_for(std::chrono::milliseconds(100)), std::future_status::timeout);
  ASSERT_TRUE(WriteFileAtomic(path, AttemptMark("mine")).ok());
  EXPECT_EQ(heard.wait_for(std::chrono::milliseconds(100)), std::future_status::timeout);
  ASSERT_TRUE(WriteFileAtomic(path, AttemptMark("next")).ok());
  EXPECT_EQ(heard.wait_for(std::chrono::seconds(30)), std::future_status::ready);
  EXPECT_TRUE(RemoveTree(folder).ok());
}

}  // namespace
}  // namespace hierad
