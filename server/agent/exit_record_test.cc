#include "server/agent/exit_record.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <cstdlib>

#include "base/fs.h"
#include "base/limits.h"
#include "gtest/gtest.h"

namespace hierad {
namespace {

class ExitRecordTest : public testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/hierad-exit-XXXXXX";
    folder_ = mkdtemp(name);
  }
  void TearDown() override { ASSERT_TRUE(RemoveTree(folder_).ok()); }
  void Write(const std::string& name, const std::string& text) {
    ASSERT_TRUE(MakeFolders(FolderOf(JoinPath(folder_, name))).ok());
    ASSERT_TRUE(WriteFileAtomic(JoinPath(folder_, name), text).ok());
  }
  std::string folder_;
};

TEST_F(ExitRecordTest, OomKillOfTheLastSecondsIsSeenInEveryPlaceTheKernelCounts) {
  for (const char* file : {"proc/vmstat", "cgroup/a/b/memory.events", "cgroup/memory/m/memory.oom_control"}) {
    SCOPED_TRACE(file);
    Write("proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/m\n0::/a/b\n");
    Write("proc/vmstat", "nr_free_pages 5\noom_kill 3\n");
    Write("cgroup/a/b/memory.events", "low 0\noom 2\noom_kill 1\n");
    Write("cgroup/memory/m/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n");
    OomWatch watch(JoinPath(folder_, "proc"), JoinPath(folder_, "cgroup"));
    watch.Sample();
    EXPECT_FALSE(watch.KilledRecently());
    Write(file, "oom_kill 9\n");
    watch.Sample();
    EXPECT_TRUE(watch.KilledRecently());
  }
}

TEST_F(ExitRecordTest, OldOomKillIsForgotten) {
  Write("proc/self/cgroup", "0::/\n");
  Write("proc/vmstat", "oom_kill 0\n");
  OomWatch watch(JoinPath(folder_, "proc"), JoinPath(folder_, "none"));
  Write("proc/vmstat", "oom_kill 1\n");
  for (int i = 0; i < 10; ++i) watch.Sample();
  EXPECT_FALSE(watch.KilledRecently());
}

int Exited(int code) { return code << 8; }

TEST_F(ExitRecordTest, Classes) {
  EXPECT_EQ(ClassifyExit(Exited(0), false, false), v1::REASON_COMPLETED);
  EXPECT_EQ(ClassifyExit(Exited(3), false, true), v1::REASON_UNSPECIFIED);
  EXPECT_EQ(ClassifyExit(SIGKILL, false, true), v1::REASON_HOST_OOM);
  EXPECT_EQ(ClassifyExit(SIGKILL, false, false), v1::REASON_CRASHED);
  EXPECT_EQ(ClassifyExit(SIGSEGV, false, true), v1::REASON_CRASHED);
  EXPECT_EQ(ClassifyExit(SIGKILL, true, true), v1::REASON_UNSPECIFIED);
}

TEST_F(ExitRecordTest, LastWordsAreTheNewestWholeLinesOfThisAttempt) {
  const std::string path = JoinPath(folder_, "log");
  const auto last_words = [&](int64_t from) {
    const UniqueFd log(open(path.c_str(), O_RDONLY));
    return LastWords(log.get(), from);
  };
  Write("log", "old attempt\nnew\n");
  EXPECT_EQ(last_words(12), "new\n");
  EXPECT_EQ(last_words(1000), "old attempt\nnew\n") << "a rotated log";

  std::string lines;
  for (int i = 0; lines.size() < 3 * size_t(limits::kLastWordsBytes); ++i) lines += "line " + std::to_string(i) + "\n";
  Write("log", lines);
  const std::string words = last_words(0);
  EXPECT_LE(words.size(), size_t(limits::kLastWordsBytes));
  EXPECT_GT(words.size(), size_t(limits::kLastWordsBytes) - 20);
  EXPECT_EQ(words.rfind("line ", 0), 0u);
  EXPECT_TRUE(lines.ends_with(words));

  Write("log", std::string(2 * limits::kLastWordsBytes, 'x'));
  EXPECT_EQ(last_words(0), std::string(limits::kLastWordsBytes, 'x')) << "one endless line";
}

TEST_F(ExitRecordTest, ValidUtf8) {
  EXPECT_EQ(ValidUtf8("a\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80\n"), "a\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80\n");
  EXPECT_EQ(ValidUtf8("a\xFF" "b"), "a?b");
  EXPECT_EQ(ValidUtf8("\xC3"), "?");
  EXPECT_EQ(ValidUtf8("\xC0\x80"), "??") << "overlong";
  EXPECT_EQ(ValidUtf8("\xED\xA0\x80"), "???") << "surrogate";
  EXPECT_EQ(ValidUtf8("\xF4\x90\x80\x80"), "????") << "beyond Unicode";
  EXPECT_EQ(ValidUtf8(std::string_view("a\0b", 3)), "a?b");
}

}  // namespace
}  // namespace hierad
