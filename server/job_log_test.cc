#include "server/job_log.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "base/limits.h"

namespace hierad {
namespace {

class JobLogTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string path = testing::TempDir() + "/hierad_log_XXXXXX";
    folder_ = mkdtemp(path.data());
    path_ = folder_ + "/rank-0.log";
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  void Write(const std::string& text, std::ios::openmode mode = std::ios::app) { std::ofstream(path_, mode) << text; }
  static std::string All(JobLog* log) {
    std::string text;
    for (;;) {
      auto chunk = log->Read();
      EXPECT_TRUE(chunk.ok()) << chunk.status();
      if (!chunk.ok() || chunk->empty()) return text;
      EXPECT_LE(chunk->size(), static_cast<size_t>(limits::kLogChunkBytes));
      text += *chunk;
    }
  }
  std::string Tail(uint64_t lines) {
    JobLog log(path_, lines);
    return All(&log);
  }
  std::string folder_, path_;
};

TEST_F(JobLogTest, Tail) {
  Write("one\ntwo\nthree\n");
  EXPECT_EQ(Tail(0), "one\ntwo\nthree\n");
  EXPECT_EQ(Tail(1), "three\n");
  EXPECT_EQ(Tail(2), "two\nthree\n");
  EXPECT_EQ(Tail(3), "one\ntwo\nthree\n");
  EXPECT_EQ(Tail(99), "one\ntwo\nthree\n");
  Write("unfinished");
  EXPECT_EQ(Tail(1), "unfinished");
  EXPECT_EQ(Tail(2), "three\nunfinished");
}

TEST_F(JobLogTest, TailOfLongLinesAndOfNothing) {
  Write("");
  EXPECT_EQ(Tail(5), "");
  const std::string line = std::string(200'000, 'x') + "\n";
  Write(line + line + line);
  EXPECT_EQ(Tail(2), line + line);
  EXPECT_EQ(Tail(0), line + line + line);   // several chunks
}

TEST_F(JobLogTest, FollowsGrowthRotationAndTruncation) {
  JobLog log(path_, 0);
  EXPECT_EQ(log.Read().status().code(), absl::StatusCode::kNotFound);   // not yet
  Write("a\n");
  EXPECT_EQ(All(&log), "a\n");
  Write("b\n");
  EXPECT_EQ(All(&log), "b\n");
  std::filesystem::rename(path_, path_ + ".1");
  Write("c\n");
  EXPECT_EQ(All(&log), "c\n");
  Write("d\n", std::ios::trunc);
  Write("e\n", std::ios::trunc);
  EXPECT_EQ(All(&log), "");   // as long as before: cannot be told apart
  Write("", std::ios::trunc);
  EXPECT_EQ(All(&log), "");
  Write("f\n");
  EXPECT_EQ(All(&log), "f\n");
}

// Whoever submits names the run's folder: it may be another user's.
TEST_F(JobLogTest, IsReadWithTheRightsOfTheRanksAccount) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can read as another account";
  const Account nobody{65534, 65534, "nobody", "/"};
  Write("secret\n");
  ASSERT_EQ(chmod(folder_.c_str(), 0700), 0);
  EXPECT_EQ(JobLog(path_, 0, nobody).Read().status().code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(*JobLog(path_, 0).Read(), "secret\n") << "the rights end with the reading";
  ASSERT_EQ(chmod(folder_.c_str(), 0755), 0);
  ASSERT_EQ(chmod(path_.c_str(), 0600), 0);
  EXPECT_FALSE(JobLog(path_, 0, nobody).Read().ok());
  ASSERT_EQ(chown(path_.c_str(), 65534, 65534), 0);
  EXPECT_EQ(*JobLog(path_, 0, nobody).Read(), "secret\n");
}

TEST_F(JobLogTest, LinksAndPipesAreRefused) {
  std::ofstream(folder_ + "/secret") << "x";
  std::filesystem::create_symlink(folder_ + "/secret", path_);
  EXPECT_FALSE(JobLog(path_, 0).Read().ok());
  std::filesystem::remove(path_);
  ASSERT_EQ(mkfifo(path_.c_str(), 0600), 0);
  EXPECT_FALSE(JobLog(path_, 0).Read().ok());   // and it does not hang
}

}  // namespace
}  // namespace hierad
