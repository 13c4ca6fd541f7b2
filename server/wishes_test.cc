// What users ask of jobs and nodes, and what hierad sees by itself: hangs, full disks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "base/fs.h"
#include "server/coordinator_harness.h"

namespace hierad {
namespace {

using testing::AllOf;
using testing::HasSubstr;

class WishesTest : public CoordinatorTest {
 protected:
  v1::Job Pause(uint64_t id) {
    return Ask([&](auto reply) { coordinator_->Pause(id, reply); });
  }
  v1::Job Resume(uint64_t id) {
    return Ask([&](auto reply) { coordinator_->Resume(id, reply); });
  }
  absl::StatusOr<v1::Job> SetLr(uint64_t id, double lr) {
    return TryAsk([&](auto reply) { coordinator_->SetLr(id, lr, reply); });
  }
  void EndGang(FakeNode* node, uint64_t id, int attempt, const std::vector<FakeWorker*>& workers, v1::Reason reason) {
    for (FakeWorker* worker : workers) {
      worker->End(reason, "stopped");
      Settle();
      worker->Close();
    }
    for (size_t r = 0; r < workers.size(); ++r) node->End({id, attempt, static_cast<int>(r)}, v1::REASON_UNSPECIFIED, 52);
    node->Report();
    Settle();
  }
};

TEST_F(WishesTest, APausedJobSavesFreesItsSlotsAndComesBack) {
  FakeNode* node = AddNode("n", 2);
  const uint64_t id = Submit("k", Spec(2));
  auto workers = Train(node, id, 1, 2, 10);
  EXPECT_EQ(Pause(id).state(), v1::STOPPING);
  EXPECT_EQ(workers[0]->orders().want(), v1::WorkerOrders::WANT_PAUSE);
  // No signal: the last step and its checkpoint may take longer than a cancel's grace.
  EXPECT_EQ(node->running(), 2);
  Pass(60);
  EXPECT_EQ(Get(id).state(), v1::STOPPING);
  EXPECT_TRUE(node->killed.empty());
  EndGang(node, id, 1, workers, v1::REASON_PREEMPTED);
  EXPECT_EQ(Get(id).state(), v1::PAUSED);
  const uint64_t other = Submit("other", Spec(2));
  EXPECT_EQ(Get(other).state(), v1::STARTING);   // its slots are free
  Restart();
  node->Connect(coordinator_.get());
  Settle();
  EXPECT_EQ(Get(id).state(), v1::PAUSED);
  EXPECT_EQ(Resume(id).state(), v1::QUEUED);
  Cancel(other);
  Pass(1);
  EXPECT_EQ(Get(id).state(), v1::STARTING);
  EXPECT_EQ(Get(id).attempt(), 2);
}

TEST_F(WishesTest, APauseOutOfTimeIsAKill) {
  FakeNode* node = AddNode("n", 1);
  const uint64_t id = Submit("k");
  auto workers = Train(node, id, 1, 1, 10);
  node->stubborn = true;
  Pause(id);
  Pass(590);
  EXPECT_TRUE(node->killed.empty());
  Pass(15);
  EXPECT_THAT(node->killed, testing::Contains(RankKey{id, 1, 0}));
  workers[0]->Close();
  Pass(3);
  EXPECT_EQ(Get(id).state(), v1::PAUSED);
}

TEST_F(WishesTest, CancelDuringAPauseEndsItWithTheUsersGrace) {
  FakeNode* node = AddNode("n", 1);
  const uint64_t id = Submit("k");
  auto workers = Train(node, id, 1, 1, 10);
  node->stubborn = true;
  Pause(id);
  Cancel(id);
  EXPECT_EQ(node->link->sent.back().assignments_size(), 0);
  EXPECT_EQ(workers[0]->orders().want(), v1::WorkerOrders::WANT_CANCEL);
  EndGang(node, id, 1, workers, v1::REASON_CANCELLED);
  EXPECT_EQ(Get(id).state(), v1::CANCELLED);
}

TEST_F(WishesTest, CancelNowGivesNoGrace) {
  FakeNode* node = AddNode("n", 1);
  const uint64_t id = Submit("k");
  auto workers = Train(node, id, 1, 1, 10);
  node->stubborn = true;
  Cancel(id);
  EXPECT_TRUE(node->killed.empty());
  Cancel(id, true);
  EXPECT_THAT(node->killed, testing::ElementsAre(RankKey{id, 1, 0}));
  workers[0]->Close();
  Pass(3);
  EXPECT_EQ(Get(id).state(), v1::CANCELLED);
  EXPECT_TRUE(TryAsk([&](auto reply) { coordinator_->Cancel(id, true, reply); }).ok());   // again: nothing
}

TEST_F(WishesTest, WishesOfEndedAndUnknownJobsAreRefused) {
  const uint64_t id = Submit("k");
  Cancel(id);
  const auto pause = TryAsk([&](auto reply) { coordinator_->Pause(id, reply); });
  EXPECT_EQ(pause.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(pause.status().message()), HasSubstr("CANCELLED"));
  EXPECT_EQ(SetLr(id, 1e-3).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(SetLr(99, 1e-3).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(TryAsk([&](auto reply) { coordinator_->Checkpoint(id, reply); }).status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(WishesTest, ACheckpointIsAskedOfRankZeroEachTimeAnew) {
  FakeNode* node = AddNode("n", 2);
  const uint64_t id = Submit("k", Spec(2));
  auto workers = Train(node, id, 1, 2, 10);
  const auto ask = [&] { Ask([&](auto reply) { coordinator_->Checkpoint(id, reply); }); };
  EXPECT_EQ(workers[0]->orders().checkpoint_request(), 0);
  ask();
  const int64_t first = workers[0]->orders().checkpoint_request();
  EXPECT_GT(first, 0);
  EXPECT_EQ(workers[1]->orders().checkpoint_request(), 0);
  ask();
  const int64_t second = workers[0]->orders().checkpoint_request();
  EXPECT_GT(second, first);
  clock_.Advance(std::chrono::seconds(1));
  Restart();
  node->Connect(coordinator_.get());
  for (FakeWorker* worker : workers) worker->Connect(coordinator_.get());
  Settle();
  ask();
  EXPECT_GT(workers[0]->orders().checkpoint_request(), second);
}

TEST_F(WishesTest, AnotherRateIsKeptAndReachesRankZero) {
  FakeNode* node = AddNode("n", 1);
  const uint64_t id = Submit("k");
  auto workers = Train(node, id, 1, 1, 10);
  const double before = workers[0]->orders().peak_lr();
  EXPECT_GT(before, 0);
  EXPECT_EQ(SetLr(id, -1).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(SetLr(id, std::nan("")).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(workers[0]->orders().peak_lr(), before);
  ASSERT_TRUE(SetLr(id, 0.25).ok());
  EXPECT_EQ(workers[0]->orders().peak_lr(), 0.25);
  EXPECT_EQ(node->started.size(), 1u);   // no rank is started again for it
  Restart();
  node->Connect(coordinator_.get());
  Settle();
  EXPECT_EQ(Get(id).spec().optimizer().lr(), 0.25);
  workers[0]->Connect(coordinator_.get());
  Settle();
  EXPECT_EQ(workers[0]->orders().peak_lr(), 0.25);
}

TEST_F(WishesTest, AnotherLogLevelReachesEveryRankAndIsKept) {
  const auto set = [&](uint64_t id, const std::string& level) { return TryAsk([&](auto reply) { coordinator_->SetLogLevel(id, level, reply); }); };
  FakeNode* node = AddNode("n", 2);
  const uint64_t id = Submit("k", Spec(2));
  auto workers = Train(node, id, 1, 2, 10);
  for (FakeWorker* worker : workers) EXPECT_EQ(worker->orders().log_level(), "info");
  const auto wrong = set(id, "loud");
  EXPECT_EQ(wrong.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(wrong.status().message()), AllOf(HasSubstr("output.log_level"), HasSubstr("debug")));
  ASSERT_TRUE(set(id, "debug").ok());
  for (FakeWorker* worker : workers) EXPECT_EQ(worker->orders().log_level(), "debug");
  EXPECT_EQ(node->started.size(), 2u);   // no rank is started again for it
  Restart();
  node->Connect(coordinator_.get());
  for (FakeWorker* worker : workers) worker->Connect(coordinator_.get());
  Settle();
  EXPECT_EQ(Get(id).spec().output().log_level(), "debug");
  EXPECT_EQ(workers[1]->orders().log_level(), "debug");
  const uint64_t ended = Submit("ended");
  Cancel(ended);
  EXPECT_EQ(set(ended, "info").status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(WishesTest, ADrainedNodeGetsNothingAlsoAfterARestart) {
  FakeNode* node = AddNode("n", 2);
  const auto drain = [&](const std::string& name, bool drained) {
    std::optional<absl::StatusOr<v1::NodesReply>> answer;
    coordinator_->DrainNode(name, drained, [&](auto reply) { answer = std::move(reply); });
    coordinator_->Turn();
    Settle();
    return *std::move(answer);
  };
  const uint64_t running = Submit("a");
  ASSERT_TRUE(drain("n", true).ok());
  EXPECT_EQ(Get(running).state(), v1::STARTING);   // goes on
  const uint64_t id = Submit("b");
  EXPECT_EQ(Get(id).state(), v1::QUEUED);
  EXPECT_THAT(Get(id).message(), HasSubstr("1 node is drained"));
  const auto unknown = drain("nowhere", true);
  EXPECT_EQ(unknown.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(unknown.status().message()), HasSubstr("known are n"));
  Restart();
  node->Connect(coordinator_.get());
  Settle();
  EXPECT_EQ(Get(id).state(), v1::QUEUED);
  const auto nodes = drain("n", false);
  ASSERT_TRUE(nodes.ok());
  EXPECT_FALSE(nodes->nodes(0).drained());
  EXPECT_EQ(Get(id).state(), v1::STARTING);
}

TEST_F(WishesTest, AFrozenRankIsSeenNamedAndItsGangTriedAgain) {
  FakeNode* node = AddNode("n", 2);
  const uint64_t id = Submit("k", Spec(2));
  auto workers = Train(node, id, 1, 2, 10);
  workers[0]->report.set_waiting_in("all_reduce of 9 floats, step 11");
  workers[1]->frozen = true;
  Pass(5);
  v1::Job job = Get(id);
  EXPECT_EQ(job.state(), v1::RUNNING);
  EXPECT_THAT(job.note(), AllOf(HasSubstr("rank 1"), HasSubstr("no sign of life for 5 s")));
  EXPECT_EQ(job.ranks(1).silent_s(), 5);
  EXPECT_EQ(job.ranks(0).silent_s(), 0);
  node->stubborn = true;
  Pass(26);
  job = Get(id);
  EXPECT_EQ(job.state(), v1::STOPPING);
  EXPECT_EQ(job.reason(), v1::REASON_HANG);
  EXPECT_THAT(job.message(), AllOf(HasSubstr("rank 1"), HasSubstr("all_reduce of 9 floats, step 11")));
  Pass(6);
  EXPECT_THAT(node->killed, testing::IsSupersetOf({RankKey{id, 1, 0}, RankKey{id, 1, 1}}));
  for (FakeWorker* worker : workers) worker->Close();
  Pass(4);
  job = Get(id);
  EXPECT_EQ(job.attempt(), 2);
  ASSERT_EQ(job.attempts_size(), 1);
  EXPECT_EQ(job.attempts(0).reason(), v1::REASON_HANG);
  EXPECT_EQ(job.attempts(0).step(), 10);
}

TEST_F(WishesTest, AStepThatDoesNotFinishIsAHangAfterTenMedians) {
  FakeNode* node = AddNode("n", 1);
  const uint64_t id = Submit("k");
  FakeWorker* worker = Train(node, id, 1, 1, 1)[0];
  for (int64_t step = 2; step <= 20; ++step) {
    v1::StepMetrics& metrics = *worker->report.add_metrics();
    metrics.set_step(step);
    metrics.set_step_s(5);
  }
  worker->Train(20);
  Settle();
  Pass(49);
  EXPECT_EQ(Get(id).state(), v1::RUNNING);
  EXPECT_THAT(Get(id).note(), HasSubstr("no step has finished for 49 s"));
  Pass(2);
  ASSERT_EQ(Get(id).attempts_size(), 1);   // the next has begun
  EXPECT_EQ(Get(id).attempts(0).reason(), v1::REASON_HANG);
  EXPECT_THAT(Get(id).attempts(0).message(), HasSubstr("step 21 did not finish"));
}

TEST_F(WishesTest, AStallOfHieradIsNobodysHang) {
  FakeNode* node = AddNode("n", 1);
  const uint64_t id = Submit("k");
  Train(node, id, 1, 1, 10);
  clock_.Advance(std::chrono::hours(5));   // the machine was suspended
  coordinator_->Turn();
  EXPECT_EQ(Get(id).state(), v1::RUNNING);
  Pass(3);
  EXPECT_EQ(Get(id).state(), v1::RUNNING);
}

TEST_F(WishesTest, AFullDiskLetsNothingInAndSaysSo) {
  FakeNode* node = AddNode("n", 2);
  const uint64_t running = Submit("a");
  Train(node, running, 1, 1, 10);
  const uint64_t queued = Submit("b", Spec(2));
  EXPECT_EQ(Get(queued).state(), v1::QUEUED);
  free_bytes_ = 100 << 20;
  Pass(3);
  const auto refused = TrySubmit("c", Spec());
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.status().message()), AllOf(HasSubstr("0.10 GiB are free"), HasSubstr("disk_reserve_gib (1.00 GiB)"), HasSubstr("gc --dry-run")));
  EXPECT_THAT(Get(running).note(), AllOf(HasSubstr("nearly full"), HasSubstr("checkpoints that are there are kept")));
  Cancel(running, true);
  Pass(3);
  EXPECT_EQ(Get(queued).state(), v1::QUEUED);
  EXPECT_THAT(Get(queued).message(), HasSubstr("nearly full"));
  free_bytes_ = int64_t{1} << 40;
  Pass(3);
  EXPECT_EQ(Get(queued).state(), v1::STARTING);
  EXPECT_TRUE(TrySubmit("c", Spec()).ok());
}

}  // namespace
}  // namespace hierad
