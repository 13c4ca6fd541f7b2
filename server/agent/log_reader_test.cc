#include "server/agent/log_reader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "base/limits.h"

namespace hierad {
namespace {

using testing::HasSubstr;

class LogReaderTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string path = testing::TempDir() + "/log_reader_XXXXXX";
    folder_ = mkdtemp(path.data());
    wanted_.set_id(1);
    wanted_.set_run_folder(folder_);
    wanted_.set_user("root");
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  void Write(const std::string& text) { std::ofstream(folder_ + "/rank-0.log") << text; }
  v1::LogPiece Read() { return ReadLogPiece(wanted_, rights_); }

  std::string folder_;
  v1::LogWanted wanted_;
  const RankRights rights_{"", true};
};

TEST_F(LogReaderTest, PiecesFollowEachOtherAndARotatedLogBeginsAnew) {
  EXPECT_TRUE(Read().missing());
  const std::string text(size_t(limits::kLogChunkBytes) + 10, 'x');
  Write(text);
  v1::LogPiece piece = Read();
  EXPECT_EQ(piece.bytes().size(), size_t(limits::kLogChunkBytes));
  wanted_.set_offset(piece.offset() + int64_t(piece.bytes().size()));
  EXPECT_EQ(Read().bytes(), std::string(10, 'x'));
  wanted_.set_offset(int64_t(text.size()));
  EXPECT_EQ(Read().bytes(), "");
  EXPECT_EQ(Read().problem(), "");
  Write("anew\n");
  piece = Read();
  EXPECT_EQ(piece.offset(), 0);
  EXPECT_EQ(piece.bytes(), "anew\n");
}

TEST_F(LogReaderTest, TheLastLinesAndNoLinks) {
  Write("one\ntwo\nthree\n");
  wanted_.set_tail_lines(2);
  const v1::LogPiece piece = Read();
  EXPECT_EQ(piece.bytes(), "two\nthree\n");
  EXPECT_EQ(piece.offset(), 4);
  std::filesystem::remove(folder_ + "/rank-0.log");
  std::filesystem::create_symlink("/etc/passwd", folder_ + "/rank-0.log");
  EXPECT_THAT(Read().problem(), HasSubstr("rank-0.log"));
  EXPECT_FALSE(Read().missing());
  EXPECT_EQ(Read().bytes(), "");
}

TEST_F(LogReaderTest, PiecesAreReportedUntilTheyAreNoLongerWanted) {
  Write("words\n");
  std::mutex mutex;
  std::condition_variable changed;
  int ready = 0;
  LogReader reader(rights_, [&] {
    std::lock_guard lock(mutex);
    ++ready;
    changed.notify_all();
  });
  v1::AgentOrders orders;
  *orders.add_logs() = wanted_;
  reader.Want(orders);
  {
    std::unique_lock lock(mutex);
    ASSERT_TRUE(changed.wait_for(lock, std::chrono::seconds(20), [&] { return ready == 1; }));
  }
  for (int i = 0; i < 2; ++i) {
    v1::AgentReport report;
    reader.AddPieces(&report);
    ASSERT_EQ(report.log_pieces_size(), 1);
    EXPECT_EQ(report.log_pieces(0).bytes(), "words\n");
    EXPECT_EQ(report.log_pieces(0).id(), 1u);
  }
  reader.Want(v1::AgentOrders());
  v1::AgentReport report;
  reader.AddPieces(&report);
  EXPECT_EQ(report.log_pieces_size(), 0);
}

}  // namespace
}  // namespace hierad
