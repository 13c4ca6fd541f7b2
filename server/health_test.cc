#include "server/health.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace hierad {
namespace {

using std::chrono::seconds;
using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;

// Two ranks at step 17; rank 0 waits for the other.
std::vector<RankSign> Gang() {
  std::vector<RankSign> ranks(2);
  for (int r : {0, 1}) {
    ranks[r].rank = r;
    ranks[r].pid = 100 + r;
    ranks[r].node = "n";
    ranks[r].phase = v1::PHASE_TRAINING;
    ranks[r].step = 16;
    ranks[r].spoken = true;
    ranks[r].silent = std::chrono::milliseconds(400);
  }
  ranks[0].waiting_in = "all_reduce of 100 floats, step 17";
  return ranks;
}

std::optional<Hang> Find(const std::vector<RankSign>& ranks, seconds still, seconds limit = seconds(30)) {
  return FindHang(ranks, still, limit, seconds(30));
}

TEST(Health, TheLimitIsThirtySecondsOrTenMedians) {
  EXPECT_EQ(HangLimit(seconds(30), {}), kFirstStep);
  EXPECT_EQ(HangLimit(seconds(30), {0.1, 0.2, 50}), seconds(30));
  EXPECT_EQ(HangLimit(seconds(30), {9, 10, 100}), seconds(100));
  EXPECT_EQ(HangLimit(seconds(30), {-5, 1e300, 1e300}), seconds(86400));
}

TEST(Health, AStoppedRankIsNamedWithWhatTheOthersWaitIn) {
  std::vector<RankSign> ranks = Gang();
  ranks[1].silent = seconds(29);
  EXPECT_FALSE(Find(ranks, seconds(29)).has_value());
  EXPECT_THAT(SlowNote(ranks, seconds(29), seconds(30), {}, {}, {}), AllOf(HasSubstr("rank 1 (pid 101 on n)"), HasSubstr("29 s")));
  ranks[1].silent = seconds(31);
  // Also where no step is due: the others may be at an evaluation, or at a checkpoint.
  ranks[0].phase = v1::PHASE_CHECKPOINTING;
  const auto hang = Find(ranks, seconds(0));
  ASSERT_TRUE(hang.has_value());
  EXPECT_EQ(hang->rank, 1);
  EXPECT_THAT(hang->message, AllOf(HasSubstr("rank 1 (pid 101 on n)"), HasSubstr("no sign of life for 31 s"), HasSubstr("all_reduce of 100 floats, step 17")));
}

// Its hierad was away: the rank waits between two tries, and is no hang however short the limit.
TEST(Health, ARankWithoutASessionIsGivenTimeToComeBack) {
  std::vector<RankSign> ranks = Gang();
  ranks[1].silent = seconds(7);
  EXPECT_TRUE(FindHang(ranks, seconds(0), seconds(5), seconds(5)).has_value());
  ranks[1].connected = false;
  EXPECT_FALSE(FindHang(ranks, seconds(0), seconds(5), seconds(5)).has_value());
  ranks[1].silent = kReconnect;
  const auto hang = FindHang(ranks, seconds(0), seconds(5), seconds(5));
  ASSERT_TRUE(hang.has_value());
  EXPECT_EQ(hang->rank, 1);
  EXPECT_THAT(hang->message, AllOf(HasSubstr("rank 1"), HasSubstr("not been connected to hierad for 20 s")));
  EXPECT_FALSE(Find(ranks, seconds(0)).has_value()) << "the longer limit counts";
}

TEST(Health, AStepThatDoesNotFinishNamesTheRankThatHoldsItUp) {
  std::vector<RankSign> ranks = Gang();
  EXPECT_FALSE(Find(ranks, seconds(29)).has_value());
  auto hang = Find(ranks, seconds(31));
  ASSERT_TRUE(hang.has_value());
  EXPECT_EQ(hang->rank, 1);
  EXPECT_THAT(hang->message, AllOf(HasSubstr("step 17"), HasSubstr("rank 1"), HasSubstr("still computing"), HasSubstr("all_reduce")));
  EXPECT_FALSE(Find(ranks, seconds(31), seconds(100)).has_value());   // its steps are long
  ranks[1].waiting_in = "all_reduce of 100 floats, step 17";
  ranks[0].step = 15;
  hang = Find(ranks, seconds(31));
  EXPECT_EQ(hang->rank, 0);
  EXPECT_THAT(hang->message, HasSubstr("all ranks wait"));
}

TEST(Health, ASlowReaderIsNoDeadPeer) {
  std::vector<RankSign> ranks = Gang();
  ranks[1].waiting_in = "reading sample 7 of /data/x.npy";
  const auto hang = Find(ranks, seconds(31));
  ASSERT_TRUE(hang.has_value());
  EXPECT_EQ(hang->rank, 1);
  EXPECT_THAT(hang->message, AllOf(HasSubstr("reading sample 7 of /data/x.npy"), HasSubstr("data comes too slowly")));
}

TEST(Health, EvaluationsAndCheckpointsAreNoStep) {
  for (v1::Phase phase : {v1::PHASE_EVALUATING, v1::PHASE_CHECKPOINTING, v1::PHASE_LOADING, v1::PHASE_STOPPING}) {
    std::vector<RankSign> ranks = Gang();
    ranks[0].phase = phase;
    EXPECT_FALSE(Find(ranks, seconds(3600)).has_value()) << v1::Phase_Name(phase);
  }
}

TEST(Health, AProcessThatNeverReportsIsGivenUp) {
  std::vector<RankSign> ranks = Gang();
  ranks[1].spoken = false;
  ranks[1].phase = v1::PHASE_UNSPECIFIED;
  ranks[1].silent = seconds(100);
  EXPECT_FALSE(Find(ranks, seconds(100)).has_value());
  ranks[1].silent = kFirstReport;
  EXPECT_EQ(Find(ranks, seconds(180))->rank, 1);
}

TEST(Health, NotesSayWhySlow) {
  const auto ranks = Gang();
  const std::deque<double> steps(20, 0.5), fast(20, 0.2), waits(20, 0.4), few(20, 0.01);
  EXPECT_THAT(SlowNote(ranks, seconds(0), seconds(30), steps, few, steps), IsEmpty());
  EXPECT_THAT(SlowNote(ranks, seconds(0), seconds(30), steps, waits, steps), AllOf(HasSubstr("80%"), HasSubstr("0.4 of 0.5 s"), HasSubstr("data.workers")));
  EXPECT_THAT(SlowNote(ranks, seconds(0), seconds(30), steps, few, fast), AllOf(HasSubstr("2.5 times"), HasSubstr("0.2 s")));
  EXPECT_THAT(SlowNote(ranks, seconds(12), seconds(30), steps, few, steps), AllOf(HasSubstr("for 12 s"), HasSubstr("rank 1"), HasSubstr("after 30 s")));
  EXPECT_THAT(SlowNote({}, seconds(12), seconds(30), steps, few, steps), IsEmpty());
}

TEST(Health, ASlowRankIsTheOneThatTheOthersWaitFor) {
  std::vector<v1::RankTotals> totals(4);
  for (v1::RankTotals& t : totals) t.set_step_count(100), t.set_step_s(50), t.set_communication_s(20);
  EXPECT_THAT(LateRank(totals), IsEmpty()) << "all wait as long: the network";
  totals[2].set_communication_s(1);
  EXPECT_THAT(LateRank(totals), AllOf(HasSubstr("rank 2 comes late"), HasSubstr("38%")));
  totals[3].set_communication_s(2);
  EXPECT_THAT(LateRank(totals), IsEmpty()) << "no one rank";
  totals[0].set_step_s(0);
  EXPECT_THAT(LateRank(totals), IsEmpty());
  EXPECT_THAT(LateRank({totals[1]}), IsEmpty());
}

}  // namespace
}  // namespace hierad
