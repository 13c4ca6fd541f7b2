// Logs of nodes that share no storage with hierad: each fake node has a folder of its own for what its ranks write.
#include "server/rank_log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <thread>

#include "base/fs.h"
#include "server/coordinator_harness.h"

namespace hierad {
namespace {

using testing::HasSubstr;

class RankLogTest : public CoordinatorTest {
 protected:
  std::string StorageOf(const std::string& name) const { return folder_ + "/storage-" + name; }
  // What a rank of an attempt writes on a node; on one that shares hierad's storage, into the run folder itself.
  void Write(const std::string& name, const std::string& text) {
    const std::string folder = name.empty() ? Get(id_).run_folder() : StorageOf(name);
    std::filesystem::create_directories(folder);
    std::ofstream(RankLogPath(folder, 0), std::ios::app) << text;
  }
  void Rotate(const std::string& name, int attempt) {
    const std::string path = RankLogPath(StorageOf(name), 0);
    std::filesystem::rename(path, path + ".1");
    Write(name, Head(attempt, true));
  }
  std::string Head(int attempt, bool continued = false) { return AttemptLineText(id_, attempt, 0, "cpu-0", 1'000'000 * ++heads_, continued) + "\n"; }

  FakeNode* Node(const std::string& name) {
    FakeNode* node = AddNode(name, 1);
    by_name_[name] = node;
    return node;
  }
  void Begin() { id_ = Submit("k"); }
  std::string NodeOf() { return Get(id_).ranks(0).node(); }
  // The attempt under way ends and the next one begins: elsewhere where the node dies.
  void Lose(const std::string& name, int attempt, bool node_dies) {
    if (node_dies) {
      by_name_[name]->Die();
      Pass(20);
    } else {
      by_name_[name]->End({id_, attempt, 0}, v1::REASON_CRASHED, 0, 11);
      Pass(3);
    }
    ASSERT_EQ(Get(id_).attempt(), attempt + 1);
  }
  // Everything that comes now, notices as lines in brackets. Meanwhile the coordinator turns and agents answer.
  std::string Read(RankLog* log) {
    std::atomic<bool> over{false};
    std::thread turning([&] {
      while (!over) {
        coordinator_->Turn();
        for (auto& [name, node] : by_name_) Answer(name, node);
        std::this_thread::yield();
      }
    });
    std::string text;
    while (true) {
      auto next = log->Read();
      EXPECT_TRUE(next.ok()) << next.status();
      if (!next.ok() || next->empty()) break;
      text += next->bytes;
      if (!next->notice.empty()) text += "[" + next->notice + "]\n";
    }
    over = true;
    turning.join();
    return text;
  }
  void Answer(const std::string& name, FakeNode* node) {
    node->log_pieces.clear();
    if (node->link->sent.empty() || mute_.count(name) != 0) return;
    for (const v1::LogWanted& wanted : node->link->sent.back().logs()) {
      v1::LogPiece& piece = node->log_pieces.emplace_back();
      piece.set_id(wanted.id());
      const auto slice = ReadAttemptLog(shared_.count(name) != 0 ? StorageOf(shared_[name]) : StorageOf(name), wanted.rank(),
                                        {wanted.job_id(), wanted.attempt(), wanted.find(), {wanted.head(), wanted.offset()}, wanted.tail_lines()});
      ++asked_[name];
      piece.set_missing(absl::IsNotFound(slice.status()));
      piece.set_problem(std::string(slice.status().message()));
      if (!slice.ok()) continue;
      piece.set_head(slice->at.head);
      piece.set_offset(slice->at.offset);
      piece.set_bytes(slice->bytes);
      piece.set_ended(slice->ended);
      piece.set_gap(slice->gap);
      piece.set_lines(slice->lines);
    }
    node->Report();
  }
  RankLog Log(RankLogOptions options = {}) { return RankLog(coordinator_.get(), Get(id_), options, std::nullopt); }
  std::string ReadAll(RankLogOptions options = {}) {
    RankLog log = Log(options);
    std::string text = Read(&log);
    missing_ = log.missing();
    return text;
  }

  uint64_t id_ = 0;
  int heads_ = 0;
  std::map<std::string, FakeNode*> by_name_;
  std::map<std::string, std::string> shared_;   // whose storage a node has
  std::map<std::string, int> asked_;
  std::set<std::string> mute_;
  std::string missing_;
};

TEST_F(RankLogTest, EachAttemptComesFromItsNodeInOrder) {
  Node("a");
  Begin();
  const std::string one = Head(1) + "a1\n", two = Head(2) + "a2\n", three = Head(3) + "b3\n", four = Head(4) + "a4\nend";
  Write("a", one);
  Lose("a", 1, false);
  Write("a", two);
  Node("b");
  Lose("a", 2, true);
  ASSERT_EQ(NodeOf(), "b");
  Write("b", three);
  by_name_["a"]->Connect();
  Lose("b", 3, true);
  ASSERT_EQ(NodeOf(), "a");
  Write("a", four);
  by_name_["b"]->Connect();
  Settle();
  EXPECT_EQ(ReadAll(), one + two + three + four);
  EXPECT_EQ(missing_, "");
  EXPECT_EQ(ReadAll({.attempt = 3}), three);
  EXPECT_EQ(ReadAll({.tail_lines = 1}), "end");
  EXPECT_EQ(ReadAll({.tail_lines = 4}), "b3\n" + four) << "over the border of nodes";
  EXPECT_EQ(ReadAll({.tail_lines = 100}), one + two + three + four);
  Restart();   // which node ran what is stored
  for (auto& [name, node] : by_name_) node->Connect(coordinator_.get());
  Settle();
  EXPECT_EQ(ReadAll(), one + two + three + four);
}

TEST_F(RankLogTest, WhatANodeThatIsGoneHasIsNamedAtItsPlace) {
  Node("a");
  Begin();
  Write("a", Head(1) + "a1\n");
  Node("b");
  Lose("a", 1, true);
  const std::string two = Head(2) + "b2\n";
  Write("b", two);
  const std::string notice = "attempt 1 of rank 0, which ran on node a, is missing: node a is not connected";
  EXPECT_EQ(ReadAll(), "[---- " + notice + "]\n" + two);
  EXPECT_EQ(missing_, notice);
  EXPECT_EQ(ReadAll({.tail_lines = 2}), two);
  EXPECT_EQ(missing_, "") << "nothing of it was asked for";
  EXPECT_EQ(ReadAll({.tail_lines = 3}), "[---- " + notice + "]\n" + two);
  EXPECT_EQ(ReadAll({.attempt = 2}), two);
  EXPECT_EQ(missing_, "");
  // Whoever shares its storage can say it too.
  shared_["b"] = "a";
  const std::string both = Head(1) + "shared\n" + Head(2) + "x\n";
  std::ofstream(RankLogPath(StorageOf("a"), 0)) << both;
  EXPECT_EQ(ReadAll(), both);
  EXPECT_EQ(missing_, "");
}

TEST_F(RankLogTest, RotatedPiecesComeFirstAndWhatIsGoneIsSaid) {
  Node("a");
  Begin();
  const std::string one = Head(1) + "early\n";
  Write("a", one);
  Rotate("a", 1);
  Write("a", "late\n");
  Lose("a", 1, false);
  Write("a", Head(2) + "x\n");
  EXPECT_THAT(ReadAll(), testing::AllOf(testing::StartsWith(one), HasSubstr(", continued\nlate\n"), testing::EndsWith("x\n"), testing::Not(HasSubstr("gone"))));
  Rotate("a", 2);
  EXPECT_THAT(ReadAll(), testing::AllOf(testing::StartsWith("[---- first lines of attempt 1 of rank 0 are gone"), testing::Not(HasSubstr("early")), HasSubstr("late\n")));
  Rotate("a", 2);
  EXPECT_THAT(ReadAll(), testing::StartsWith("[---- attempt 1 of rank 0 has no log on node a"));
  EXPECT_EQ(missing_, "");
}

TEST_F(RankLogTest, FollowedFromNodeToNode) {
  Node("a");
  Begin();
  RankLog log = Log({.follow = true});
  EXPECT_EQ(Read(&log), "") << "not begun";
  const std::string one = Head(1) + "a1\n";
  Write("a", one);
  EXPECT_EQ(Read(&log), one);
  Write("a", "more\n");
  Rotate("a", 1);
  EXPECT_THAT(Read(&log), testing::AllOf(testing::StartsWith("more\n"), testing::EndsWith(", continued\n")));
  Node("b");
  Write("a", "unread\n");
  Lose("a", 1, true);
  Write("b", Head(2) + "b2\n");
  EXPECT_EQ(Read(&log), "[---- the rest of attempt 1 of rank 0 is missing: node a is not connected]\n" + ReadFile(RankLogPath(StorageOf("b"), 0), 1000).value());
  EXPECT_FALSE(log.ended());
  // A node that is away for a while is waited for, which is said once.
  by_name_["b"]->Disconnect();
  Settle();
  EXPECT_EQ(Read(&log), "[---- the rest of attempt 2 of rank 0 is missing: node b is not connected; waiting for it]\n");
  EXPECT_EQ(Read(&log), "");
  by_name_["b"]->Connect();
  Write("b", "back\n");
  Settle();
  EXPECT_EQ(Read(&log), "back\n");
  Cancel(id_, true);
  Pass(3);
  ASSERT_EQ(Get(id_).state(), v1::CANCELLED);
  Write("b", "last\n");
  EXPECT_EQ(Read(&log), "last\n");
  EXPECT_TRUE(log.ended());
}

TEST_F(RankLogTest, SharedStorageIsReadWithoutAgents) {
  Node("a");
  Begin();
  const std::string one = Head(1) + "a1\n", two = Head(2) + "b2\n";
  Write("", one);
  Node("b");
  Lose("a", 1, true);
  Write("", two);
  EXPECT_EQ(ReadAll(), one + two);
  EXPECT_TRUE(asked_.empty());
  EXPECT_EQ(ReadAll({.tail_lines = 3}), "a1\n" + two);
}

TEST_F(RankLogTest, AnAgentThatDoesNotAnswerIsAskedOnce) {
  Node("a");
  Begin();
  Write("a", Head(1) + "a1\n");
  Lose("a", 1, false);
  mute_.insert("a");
  RankLog log = Log();
  std::atomic<bool> over{false};
  std::thread turning([&] {
    while (!over) {
      clock_.Advance(std::chrono::milliseconds(100));
      by_name_["a"]->Report();
      coordinator_->Turn();
    }
  });
  for (int attempt = 1; attempt <= 2; ++attempt) {
    const auto next = log.Read();
    EXPECT_EQ(next->notice, absl::StrCat("---- attempt ", attempt, " of rank 0, which ran on node a, is missing: the agent of node a does not answer"));
  }
  EXPECT_TRUE(log.Read()->empty());
  over = true;
  turning.join();
  EXPECT_FALSE(log.found());
}

}  // namespace
}  // namespace hierad
