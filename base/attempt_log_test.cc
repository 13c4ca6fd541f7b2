#include "base/attempt_log.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <sstream>

#include "base/account.h"
#include "base/fs.h"
#include "base/limits.h"

namespace hierad {
namespace {

using testing::HasSubstr;

TEST(AttemptLine, SaysWhatItSays) {
  const std::string line = AttemptLineText(7, 2, 3, "GPU-1", 1'764'574'260'000, true);
  EXPECT_EQ(line, "---- job 7, attempt 2, rank 3, GPU-1, 2025-12-01 07:31:00 UTC, continued");
  const auto parsed = ParseAttemptLine(line);
  ASSERT_TRUE(parsed);
  EXPECT_EQ(parsed->job_id, 7u);
  EXPECT_EQ(parsed->attempt, 2);
  EXPECT_TRUE(parsed->continued);
  EXPECT_FALSE(ParseAttemptLine(AttemptLineText(7, 2, 3, "cpu-0", 0, false))->continued);
  for (const char* other : {"", "---- job", "---- job 7, attempt 2", "---- job x, attempt 2, rank 0, ", " ---- job 7, attempt 2, rank 0, cpu-0, now"}) {
    EXPECT_FALSE(ParseAttemptLine(other)) << other;
  }
}

class AttemptLogTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string path = testing::TempDir() + "/attempt_log_XXXXXX";
    folder_ = mkdtemp(path.data());
    path_ = RankLogPath(folder_, 0);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  void Write(const std::string& text) { std::ofstream(path_, std::ios::app) << text; }
  std::string Head(int attempt, bool continued = false, uint64_t job = 7) {
    return AttemptLineText(job, attempt, 0, "cpu-0", 1'000'000 * ++heads_, continued) + "\n";
  }
  // As a keeper does it.
  void Rotate(int attempt) {
    std::filesystem::copy_file(path_, path_ + ".1", std::filesystem::copy_options::overwrite_existing);
    std::filesystem::resize_file(path_, 0);
    Write(Head(attempt, true));
  }
  absl::StatusOr<LogSlice> Find(int attempt, uint64_t tail = 0, const LogCursor& from = {}) { return ReadAttemptLog(folder_, 0, {7, attempt, true, from, tail}); }
  static LogCursor After(const LogSlice& slice) { return {slice.at.head, slice.at.offset + int64_t(slice.bytes.size())}; }
  // What there is after `cursor`, which it moves on.
  std::string Rest(int attempt, LogCursor* cursor, bool* gap = nullptr) {
    std::string text;
    while (true) {
      auto slice = ReadAttemptLog(folder_, 0, {7, attempt, false, *cursor, 0});
      EXPECT_TRUE(slice.ok()) << slice.status();
      if (!slice.ok()) return text;
      if (gap != nullptr) *gap |= slice->gap;
      EXPECT_LE(slice->bytes.size(), size_t(limits::kLogChunkBytes));
      *cursor = After(*slice);
      if (slice->bytes.empty()) return text;
      text += slice->bytes;
    }
  }
  std::string Whole(int attempt, uint64_t tail = 0) {
    auto first = Find(attempt, tail);
    EXPECT_TRUE(first.ok()) << first.status();
    if (!first.ok()) return "";
    LogCursor cursor = After(*first);
    return first->bytes + Rest(attempt, &cursor);
  }
  int heads_ = 0;
  std::string folder_, path_;
};

TEST_F(AttemptLogTest, EachAttemptAloneAndNoOtherJobs) {
  EXPECT_TRUE(absl::IsNotFound(Find(1).status()));
  const std::string other = Head(1, false, 6) + "of an earlier job\n", one = Head(1) + "a\nb\n", two = Head(2) + "c\n", four = Head(4) + "d\nunfinished";
  Write(other + one + two + four);
  EXPECT_EQ(Whole(1), one);
  EXPECT_EQ(Whole(2), two);
  EXPECT_EQ(Whole(4), four);
  EXPECT_TRUE(Find(1)->ended);
  EXPECT_FALSE(Find(4)->ended);
  EXPECT_FALSE(Find(1)->gap);
  EXPECT_TRUE(absl::IsNotFound(Find(3).status()));
  EXPECT_EQ(Find(2, 0, After(*Find(1)))->bytes, two);
  EXPECT_EQ(Find(1, 0, After(*Find(2)))->bytes, one) << "a place after it does not hide it";
}

TEST_F(AttemptLogTest, WithoutAnyLineOfAnAttemptAllIsWhatIsAskedFor) {
  Write("");
  EXPECT_TRUE(absl::IsNotFound(Find(1).status()));
  Write("one\ntwo\n");
  EXPECT_EQ(Whole(1), "one\ntwo\n");
  EXPECT_EQ(Whole(1, 1), "two\n");
}

TEST_F(AttemptLogTest, TheRotatedPieceComesFirst) {
  const std::string one = Head(1) + "a\n", two = Head(2) + "b\nc";
  Write(one + two);
  Rotate(2);
  Write("d\n");
  const std::string continued = ReadFile(path_, 1000).value();
  EXPECT_EQ(Whole(1), one);
  EXPECT_EQ(Whole(2), two + continued);
  EXPECT_FALSE(Find(2)->gap);
  const std::string three = Head(3) + "e\n";
  Write(three);
  EXPECT_EQ(Whole(2), two + continued);
  EXPECT_EQ(Whole(3), three);
  Rotate(3);   // the first part of attempt 2 is gone, and attempt 1
  EXPECT_TRUE(absl::IsNotFound(Find(1).status()));
  EXPECT_TRUE(Find(2)->gap);
  EXPECT_EQ(Whole(2), continued);
  EXPECT_FALSE(Find(3)->gap);
  EXPECT_EQ(Find(2, 1)->bytes, "d\n");
  EXPECT_FALSE(Find(2, 1)->gap);
  EXPECT_TRUE(Find(2, 9)->gap);
}

TEST_F(AttemptLogTest, FollowedThroughGrowthAndRotation) {
  std::string all = Head(1) + "a\n";
  Write(all);
  auto first = Find(1);
  ASSERT_TRUE(first.ok());
  std::string read = first->bytes;
  LogCursor cursor = After(*first);
  bool gap = false;
  for (int i = 0; i < 50; ++i) {
    const std::string before = "before " + std::to_string(i) + "\n", after = "after " + std::to_string(i) + "\n";
    Write(before);
    if (i % 3 == 1) read += Rest(1, &cursor, &gap);
    Rotate(1);
    if (i % 3 == 0) read += Rest(1, &cursor, &gap);
    all += before + ReadFile(path_, 1000).value() + after;
    Write(after);
    read += Rest(1, &cursor, &gap);
  }
  EXPECT_EQ(read, all);
  EXPECT_FALSE(gap);
  Write("lost\n");
  Rotate(1);
  Write("kept\n");
  Rotate(1);
  EXPECT_THAT(Rest(1, &cursor, &gap), testing::AllOf(HasSubstr("kept\n"), testing::Not(HasSubstr("lost"))));
  EXPECT_TRUE(gap);
}

TEST_F(AttemptLogTest, ACopyInTheMakingIsNotReadTwice) {
  const std::string text = Head(1) + "a\nb\n";
  Write(text);
  std::ofstream(path_ + ".1") << text.substr(0, 80);
  EXPECT_EQ(Whole(1), text);
  std::filesystem::resize_file(path_ + ".1", 0);
  EXPECT_EQ(Whole(1), text);
}

TEST_F(AttemptLogTest, CutToNothingItGoesOnWithWhatComes) {
  Write(Head(1) + "a\n");
  LogCursor cursor = After(*Find(1));
  std::filesystem::resize_file(path_, 0);
  bool gap = false;
  EXPECT_EQ(Rest(1, &cursor, &gap), "");
  EXPECT_FALSE(gap);
  Write("b\n");
  EXPECT_EQ(Rest(1, &cursor, &gap), "b\n");
  EXPECT_TRUE(gap);
}

TEST_F(AttemptLogTest, TheLastLinesOfAnAttempt) {
  Write(Head(1) + "a\nb\nc\n" + Head(2) + "d\nunfinished");
  const auto tail = [&](int attempt, uint64_t lines) {
    const LogSlice slice = Find(attempt, lines).value();
    return slice.bytes + "|" + std::to_string(slice.lines);
  };
  EXPECT_EQ(tail(1, 2), "b\nc\n|2");
  EXPECT_EQ(tail(2, 1), "unfinished|1");
  EXPECT_EQ(tail(2, 2), "d\nunfinished|2");
  EXPECT_EQ(Find(1, 99)->lines, 4u);
  EXPECT_EQ(Find(1, 99)->bytes, Find(1)->bytes);
  Rotate(2);
  Write("e\n");
  EXPECT_EQ(Find(2, 4)->lines, 4u);
  EXPECT_EQ(Whole(2, 4).substr(0, 12), "d\nunfinished");
  const std::string line = std::string(200'000, 'x') + "\n";
  Write(line + line + line);
  EXPECT_EQ(Whole(2, 2), line + line);
}

// Pieces and blocks end anywhere in lines, heads included.
TEST_F(AttemptLogTest, NoByteIsLostOrDoubledWhereverPiecesEnd) {
  std::mt19937 random(5);
  std::map<int, std::string> want;
  std::string text;
  for (int attempt = 1; attempt <= 40; ++attempt) {
    std::string part = Head(attempt);
    for (int lines = int(random() % 40); lines > 0; --lines) part += std::string(random() % 3000, 'y') + (random() % 5 == 0 ? "---- job 7, attempt 1, rank 0, x" : "") + "\n";
    want[attempt] = part;
    text += part;
  }
  ASSERT_GT(text.size(), size_t(4 * limits::kLogChunkBytes));
  Write(text);
  for (const auto& [attempt, part] : want) {
    EXPECT_TRUE(Whole(attempt) == part) << attempt;
    std::string tail;
    std::istringstream lines(part);
    std::vector<std::string> all;
    for (std::string line; std::getline(lines, line);) all.push_back(line + "\n");
    for (size_t i = all.size() > 7 ? all.size() - 7 : 0; i < all.size(); ++i) tail += all[i];
    EXPECT_TRUE(Whole(attempt, 7) == tail) << attempt;
  }
}

// Whoever submits names the run's folder: it may be another user's.
// Bytes that this process has read so far; 0 where the system does not count them.
int64_t BytesRead() {
  std::ifstream io("/proc/self/io");
  std::string key;
  int64_t count = 0;
  return io >> key >> count && key == "rchar:" ? count : 0;
}

TEST_F(AttemptLogTest, EachByteIsReadAFewTimesOnlyWhateverTheRankWrites) {
  const std::string line = Head(1, true);   // a rank may print what it likes
  std::string text = Head(1);
  while (text.size() < (16u << 20)) text += line + "plain text\n";
  Write(text);
  const int64_t before = BytesRead();
  if (before == 0) GTEST_SKIP() << "no /proc/self/io";
  ASSERT_EQ(Whole(1), text);
  EXPECT_LT(BytesRead() - before, 4 * int64_t(text.size()));
  const int64_t whole = BytesRead();
  EXPECT_EQ(Whole(1, 1), "plain text\n");
  EXPECT_LT(BytesRead() - whole, 4 * int64_t(text.size()));
}

TEST_F(AttemptLogTest, IsReadWithTheRightsOfTheRanksAccount) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can read as another account";
  const Account nobody{65534, 65534, "nobody", "/"};
  const auto as_nobody = [&] {
    const FilesAs rights(nobody);
    return Find(1);
  };
  Write("secret\n");
  ASSERT_EQ(chmod(folder_.c_str(), 0700), 0);
  EXPECT_EQ(as_nobody().status().code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(Find(1)->bytes, "secret\n") << "the rights end with the reading";
  ASSERT_EQ(chmod(folder_.c_str(), 0755), 0);
  ASSERT_EQ(chmod(path_.c_str(), 0600), 0);
  EXPECT_FALSE(as_nobody().ok());
  ASSERT_EQ(chown(path_.c_str(), 65534, 65534), 0);
  EXPECT_EQ(as_nobody()->bytes, "secret\n");
  std::ofstream(path_ + ".1") << "secret too\n";
  ASSERT_EQ(chmod((path_ + ".1").c_str(), 0600), 0);
  EXPECT_FALSE(as_nobody().ok());
}

TEST_F(AttemptLogTest, ALogThatIsAllHoleIsRefused) {
  for (const char* end : {"", ".1"}) {
    Write("x\n");
    std::ofstream(path_ + end) << "x\n";
    std::filesystem::resize_file(path_ + end, uint64_t(limits::kLogReadBytes) + 1);
    EXPECT_NE(std::string(Find(1).status().message()).find("no more than 4294967296 (4 GiB) are read"), std::string::npos) << Find(1).status();
    std::filesystem::remove(path_ + end);
  }
}

TEST_F(AttemptLogTest, LinksAndPipesAreRefused) {
  std::ofstream(folder_ + "/secret") << "x";
  for (const char* end : {"", ".1"}) {
    std::filesystem::create_symlink(folder_ + "/secret", path_ + end);
    EXPECT_FALSE(Find(1).ok());
    EXPECT_FALSE(absl::IsNotFound(Find(1).status()));
    std::filesystem::remove(path_ + end);
    ASSERT_EQ(mkfifo((path_ + end).c_str(), 0600), 0);
    EXPECT_FALSE(Find(1).ok());   // and it does not hang
    std::filesystem::remove(path_ + end);
    Write("x\n");
  }
}

}  // namespace
}  // namespace hierad
