#include "server/agent/log_reader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "base/attempt_log.h"
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
    wanted_.set_job_id(7);
    wanted_.set_attempt(2);
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

TEST_F(LogReaderTest, PiecesFollowEachOther) {
  wanted_.set_find(true);
  EXPECT_TRUE(Read().missing());
  std::string text = "---- job 7, attempt 2, rank 0, cpu-0, now\n";
  while (text.size() <= size_t(limits::kLogChunkBytes)) text += std::string(99, 'x') + "\n";
  Write(text + "---- job 7, attempt 3, rank 0, cpu-0, now\n");
  std::string read;
  for (int pieces = 0; pieces < 3; ++pieces) {
    const v1::LogPiece piece = Read();
    EXPECT_EQ(piece.problem(), "");
    EXPECT_EQ(piece.offset(), int64_t(read.size()));
    EXPECT_EQ(piece.head(), text.substr(0, kLogHeadBytes));
    EXPECT_EQ(piece.ended(), pieces > 0);
    read += piece.bytes();
    wanted_.set_find(false);
    wanted_.set_head(piece.head());
    wanted_.set_offset(piece.offset() + int64_t(piece.bytes().size()));
  }
  EXPECT_EQ(read, text);
  wanted_.set_head("another file");
  EXPECT_TRUE(Read().gap());
}

TEST_F(LogReaderTest, TheLastLinesAndNoLinks) {
  Write("one\ntwo\nthree\n");
  wanted_.set_find(true);
  wanted_.set_tail_lines(2);
  const v1::LogPiece piece = Read();
  EXPECT_EQ(piece.bytes(), "two\nthree\n");
  EXPECT_EQ(piece.offset(), 4);
  EXPECT_EQ(piece.lines(), 2u);
  std::filesystem::remove(folder_ + "/rank-0.log");
  std::filesystem::create_symlink("/etc/passwd", folder_ + "/rank-0.log");
  EXPECT_THAT(Read().problem(), HasSubstr("rank-0.log"));
  EXPECT_FALSE(Read().missing());
  EXPECT_EQ(Read().bytes(), "");
}

TEST_F(LogReaderTest, PiecesAreReportedUntilTheyAreNoLongerWanted) {
  Write("words\n");
  wanted_.set_find(true);
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
