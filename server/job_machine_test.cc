#include "server/job_machine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

namespace hierad {
namespace {

constexpr int64_t kNow = 1'700'000'000'000;

JobRow Queued(int ranks = 2, int max_attempts = 5) {
  JobRow row;
  row.id = 7;
  row.spec.set_name("job");
  row.spec.mutable_resources()->set_ranks(ranks);
  row.spec.mutable_retry()->set_max_attempts(max_attempts);
  row.spec.mutable_retry()->set_backoff_s(1.0);
  return row;
}

Placed PlacedOn(int ranks) {
  Placed placed;
  placed.credential = "secret";
  for (int r = 0; r < ranks; ++r) {
    RankRow& rank = placed.ranks.emplace_back();
    rank.rank = r;
    rank.node = "n";
  }
  return placed;
}

JobRow Do(const JobRow& row, const JobEvent& event, int64_t now = kNow) { return Apply(row, event, now).row; }
RankEnded Ended(int rank, v1::Reason reason, const std::string& message = "why") { return {rank, reason, message, false, 0}; }

JobRow Starting(int ranks = 2, int max_attempts = 5) { return Do(Queued(ranks, max_attempts), PlacedOn(ranks)); }
JobRow Running(int ranks = 2, int max_attempts = 5) { return Do(Starting(ranks, max_attempts), AllTraining{}); }

// The attempt ends: rank 0 with `reason`, all gone.
JobRow FailAttempt(JobRow row, v1::Reason reason, int64_t step, int64_t now = kNow) {
  if (row.state == v1::QUEUED) row = Do(row, PlacedOn(row.spec.resources().ranks()), now);
  row.step = step;
  row = Do(row, Ended(0, reason), now);
  for (size_t r = 0; r < row.ranks.size(); ++r) row = Do(row, RankGone{static_cast<int>(r)}, now);
  return row;
}

// Written out by hand, so that a changed table must be changed here too.
TEST(JobMachine, EveryPairOfStateAndEvent) {
  using A = JobAction;
  // Placed, PlacementFailed, ProcessSeen, AllTraining, RankEnded, RankGone, CancelAsked, PauseAsked, ResumeAsked, GpuFaulted
  const std::map<v1::JobState, std::vector<A>> expected = {
      {v1::QUEUED, {A::kStart, A::kFailPlacement, A::kIgnore, A::kIgnore, A::kIgnore, A::kIgnore, A::kCancelAtRest, A::kPauseAtRest, A::kIgnore, A::kIgnore}},
      {v1::STARTING, {A::kIgnore, A::kIgnore, A::kNoteProcess, A::kRun, A::kNoteEnd, A::kNoteGone, A::kStop, A::kPause, A::kIgnore, A::kIgnore}},
      {v1::RUNNING, {A::kIgnore, A::kIgnore, A::kNoteProcess, A::kIgnore, A::kNoteEnd, A::kNoteGone, A::kStop, A::kPause, A::kIgnore, A::kIgnore}},
      {v1::STOPPING, {A::kIgnore, A::kIgnore, A::kNoteProcess, A::kIgnore, A::kNoteEnd, A::kNoteGone, A::kStop, A::kPause, A::kUnpause, A::kBlameGpu}},
      {v1::PAUSED, {A::kIgnore, A::kIgnore, A::kIgnore, A::kIgnore, A::kIgnore, A::kIgnore, A::kCancelAtRest, A::kIgnore, A::kResume, A::kIgnore}},
      {v1::SUCCEEDED, std::vector<A>(10, A::kIgnore)},
      {v1::FAILED, std::vector<A>(10, A::kIgnore)},
      {v1::CANCELLED, std::vector<A>(10, A::kIgnore)},
  };
  const std::vector<JobEvent> events = {PlacedOn(2), PlacementFailed{v1::REASON_USER_ERROR, "x"}, ProcessSeen{0, 42}, AllTraining{},
                                        Ended(0, v1::REASON_CRASHED), RankGone{0}, CancelAsked{}, PauseAsked{}, ResumeAsked{}, GpuFaulted{0, "Xid 79"}};
  ASSERT_EQ(events.size(), static_cast<size_t>(kJobEventKinds));
  for (const auto& [state, actions] : expected) {
    for (size_t e = 0; e < events.size(); ++e) {
      ASSERT_EQ(events[e].index(), e);
      EXPECT_EQ(ActionFor(state, e), actions[e]) << v1::JobState_Name(state) << " event " << e;
      JobRow row = Running();
      row.state = state;
      if (events[e].index() == 8) row.desired = v1::DESIRED_PAUSE;
      if (events[e].index() == 9) row.reason = v1::REASON_CRASHED;
      const JobStep step = Apply(row, events[e], kNow);
      EXPECT_EQ(step.changed, actions[e] != A::kIgnore) << v1::JobState_Name(state) << " event " << e;
      if (actions[e] == A::kIgnore) {
        EXPECT_EQ(step.row.state, state);
      }
    }
  }
}

TEST(JobMachine, StartsAndRunsAndSucceeds) {
  JobRow row = Starting();
  EXPECT_EQ(row.state, v1::STARTING);
  EXPECT_EQ(row.attempt, 1);
  EXPECT_EQ(row.credential, "secret");
  EXPECT_EQ(row.started_ms, kNow);
  row = Do(row, ProcessSeen{1, 42});
  EXPECT_EQ(row.ranks[1].pid, 42);
  row = Do(row, AllTraining{});
  EXPECT_EQ(row.state, v1::RUNNING);
  row = Do(row, Ended(0, v1::REASON_COMPLETED));
  EXPECT_EQ(row.state, v1::RUNNING);   // the others may still be at work
  row = Do(row, RankGone{0});
  row = Do(row, Ended(1, v1::REASON_COMPLETED));
  EXPECT_EQ(row.state, v1::RUNNING);
  const JobStep step = Apply(row, RankGone{1}, kNow + 5);
  EXPECT_TRUE(step.attempt_over);
  EXPECT_EQ(step.row.state, v1::SUCCEEDED);
  EXPECT_EQ(step.row.reason, v1::REASON_COMPLETED);
  EXPECT_EQ(step.row.finished_ms, kNow + 5);
  EXPECT_TRUE(step.row.credential.empty());
}

TEST(JobMachine, FirstErrorEndsTheGangAndSlotsAreHeldUntilAllAreGone) {
  JobRow row = Running(3);
  JobStep step = Apply(row, Ended(1, v1::REASON_CUDA_OOM, "out of memory"), kNow);
  EXPECT_TRUE(step.stopping_began);
  EXPECT_EQ(step.row.state, v1::STOPPING);
  step = Apply(step.row, RankGone{1}, kNow);
  EXPECT_FALSE(step.attempt_over);
  step = Apply(step.row, RankGone{0}, kNow);
  EXPECT_FALSE(step.attempt_over);
  EXPECT_EQ(step.row.state, v1::STOPPING);
  step = Apply(step.row, RankGone{2}, kNow);
  EXPECT_TRUE(step.attempt_over);
  EXPECT_EQ(step.attempt_reason, v1::REASON_CUDA_OOM);
  EXPECT_EQ(step.row.state, v1::QUEUED);
  EXPECT_THAT(step.row.message, testing::HasSubstr("rank 1: out of memory"));
  EXPECT_EQ(step.row.retry_at_ms, kNow + 1000);
}

TEST(JobMachine, AnOwnErrorBeatsThePeersLoss) {
  JobRow row = Do(Running(), Ended(0, v1::REASON_PEER_LOST, "peer lost"));
  row = Do(row, Ended(1, v1::REASON_GPU_FAULT, "Xid 79"));
  EXPECT_EQ(row.reason, v1::REASON_GPU_FAULT);
  EXPECT_THAT(row.message, testing::HasSubstr("Xid 79"));
  // The other way round the loss does not replace the error.
  row = Do(Do(Running(), Ended(1, v1::REASON_GPU_FAULT, "Xid 79")), Ended(0, v1::REASON_PEER_LOST, "peer lost"));
  EXPECT_EQ(row.reason, v1::REASON_GPU_FAULT);
}

TEST(JobMachine, AFaultOfAGpuExplainsWhatItMayHaveCaused) {
  for (v1::Reason reason : {v1::REASON_CRASHED, v1::REASON_PEER_LOST, v1::REASON_HANG, v1::REASON_INTERNAL, v1::REASON_GPU_FAULT}) {
    JobRow row = Do(Do(Running(), RankEnded{1, reason, "words", true, 9}), GpuFaulted{1, "Xid 79"});
    EXPECT_EQ(row.reason, v1::REASON_GPU_FAULT) << v1::Reason_Name(reason);
    EXPECT_THAT(row.message, testing::AllOf(testing::StartsWith("rank 1: Xid 79"), testing::HasSubstr("words")));
    EXPECT_FALSE(row.killed_outside);
    EXPECT_EQ(Do(row, GpuFaulted{1, "Xid 79"}).message, row.message) << "said twice";
  }
  for (v1::Reason reason : {v1::REASON_USER_ERROR, v1::REASON_DATA_ERROR, v1::REASON_NUMERICS, v1::REASON_HOST_OOM, v1::REASON_PREEMPTED}) {
    EXPECT_EQ(Do(Do(Running(), Ended(1, reason)), GpuFaulted{1, "Xid 79"}).reason, reason);
  }
  EXPECT_EQ(Do(Running(), GpuFaulted{1, "Xid 79"}).state, v1::RUNNING) << "a fault alone ends nothing";
}

TEST(JobMachine, DeathsThatFollowFromOurKillExplainNothing) {
  for (const JobEvent& death : std::vector<JobEvent>{RankEnded{1, v1::REASON_PREEMPTED, "ended by its agent", true, 9},
                                                     Ended(1, v1::REASON_PREEMPTED), Ended(1, v1::REASON_CANCELLED), RankGone{1}}) {
    const JobRow row = Do(Do(Running(), Ended(0, v1::REASON_PEER_LOST, "peer lost")), death);
    EXPECT_EQ(row.reason, v1::REASON_PEER_LOST);
  }
  // A kill that was not ours is the cause, also when the peer noticed it before the agent did.
  const JobRow row = Do(Do(Running(), Ended(0, v1::REASON_PEER_LOST, "peer lost")), RankEnded{1, v1::REASON_CRASHED, "signal 9", true, 9});
  EXPECT_EQ(row.reason, v1::REASON_CRASHED);
  EXPECT_TRUE(row.killed_outside);
}

TEST(JobMachine, FinalReasonsAreNotRetried) {
  for (v1::Reason reason : {v1::REASON_USER_ERROR, v1::REASON_DATA_ERROR, v1::REASON_NUMERICS}) {
    const JobRow row = FailAttempt(Running(), reason, 3);
    EXPECT_EQ(row.state, v1::FAILED) << v1::Reason_Name(reason);
    EXPECT_EQ(row.reason, reason);
    EXPECT_EQ(row.attempt, 1);
  }
  EXPECT_EQ(FailAttempt(Running(), v1::REASON_CANCELLED, 3).state, v1::CANCELLED);
}

TEST(JobMachine, OtherReasonsAreRetriedUntilMaxAttempts) {
  for (v1::Reason reason : {v1::REASON_CHECKPOINT, v1::REASON_HOST_OOM, v1::REASON_CUDA_OOM, v1::REASON_PEER_LOST, v1::REASON_GPU_FAULT,
                            v1::REASON_HANG, v1::REASON_NODE_LOST, v1::REASON_CRASHED, v1::REASON_INTERNAL}) {
    JobRow row = FailAttempt(Running(2, 3), reason, 10);
    EXPECT_EQ(row.state, v1::QUEUED) << v1::Reason_Name(reason);
    EXPECT_EQ(row.reason, reason);   // what the user sees while it waits
    row = FailAttempt(row, reason, 20);
    EXPECT_EQ(row.state, v1::QUEUED) << v1::Reason_Name(reason);
    row = FailAttempt(row, reason, 30);
    EXPECT_EQ(row.state, v1::FAILED) << v1::Reason_Name(reason);
    EXPECT_EQ(row.attempt, 3);
    EXPECT_THAT(row.message, testing::AllOf(testing::HasSubstr("3 times"), testing::HasSubstr("why")));
  }
}

TEST(JobMachine, PreemptionCountsNoFailureAndWaitsNot) {
  JobRow row = Running(1, 1);
  for (int i = 0; i < 20; ++i) {
    row = FailAttempt(row, v1::REASON_PREEMPTED, 5);
    ASSERT_EQ(row.state, v1::QUEUED);
    EXPECT_EQ(row.retry_at_ms, 0);
  }
  EXPECT_EQ(row.attempt, 20);
  EXPECT_EQ(FailAttempt(row, v1::REASON_CRASHED, 5).state, v1::FAILED);
}

TEST(JobMachine, TheSameFailureTwiceAtTheSameStepEndsIt) {
  JobRow row = FailAttempt(FailAttempt(Running(), v1::REASON_CUDA_OOM, 10), v1::REASON_CUDA_OOM, 10);
  EXPECT_EQ(row.state, v1::FAILED);
  EXPECT_THAT(row.message, testing::HasSubstr("twice at step 10"));
  // Another step, another class, or a loss that is nobody's fault: tried again.
  EXPECT_EQ(FailAttempt(FailAttempt(Running(), v1::REASON_CUDA_OOM, 10), v1::REASON_CUDA_OOM, 11).state, v1::QUEUED);
  EXPECT_EQ(FailAttempt(FailAttempt(Running(), v1::REASON_CUDA_OOM, 10), v1::REASON_CRASHED, 10).state, v1::QUEUED);
  EXPECT_EQ(FailAttempt(FailAttempt(Running(), v1::REASON_NODE_LOST, 10), v1::REASON_NODE_LOST, 10).state, v1::QUEUED);
}

TEST(JobMachine, KilledFromOutsideTwiceAtTheSameStepIsTriedAgain) {
  JobRow row = Running(1);
  for (int i = 0; i < 2; ++i) {
    if (row.state == v1::QUEUED) row = Do(row, PlacedOn(1));
    row.step = 0;
    row = Do(Do(row, RankEnded{0, v1::REASON_CRASHED, "killed by signal 9", true, 9}), RankGone{0});
    EXPECT_EQ(row.state, v1::QUEUED);
  }
}

TEST(JobMachine, BackoffDoublesUpToAMinuteOrItsFirst) {
  EXPECT_EQ(BackoffMs(1.5, 1), 1500);
  EXPECT_EQ(BackoffMs(1.5, 2), 3000);
  EXPECT_EQ(BackoffMs(1.5, 3), 6000);
  EXPECT_EQ(BackoffMs(1.5, 7), 60000);
  EXPECT_EQ(BackoffMs(1.5, 1000), 60000);
  EXPECT_EQ(BackoffMs(0, 5), 0);
  EXPECT_EQ(BackoffMs(600, 3), 600000);
}

TEST(JobMachine, EachClassHasItsOwnCountAndWait) {
  JobRow row = Running(2, 100);
  row.spec.mutable_retry()->set_hang_retries(2);
  row.spec.mutable_retry()->set_gpu_fault_retries(1);
  row.spec.mutable_retry()->set_gpu_fault_backoff_s(30);
  row = FailAttempt(row, v1::REASON_HANG, 10);
  EXPECT_EQ(row.retry_at_ms, kNow + 1000);   // retry.backoff_s
  row = FailAttempt(row, v1::REASON_GPU_FAULT, 20);
  EXPECT_EQ(row.state, v1::QUEUED);
  EXPECT_EQ(row.retry_at_ms, kNow + 30000);  // its own, and the first of its class
  row = FailAttempt(row, v1::REASON_HANG, 30);
  EXPECT_EQ(row.state, v1::QUEUED);
  EXPECT_EQ(row.retry_at_ms, kNow + 2000);
  row = FailAttempt(row, v1::REASON_HANG, 40);
  EXPECT_EQ(row.state, v1::FAILED);
  EXPECT_THAT(row.message, testing::AllOf(testing::HasSubstr("3 times"), testing::HasSubstr("retry.hang_retries"), testing::HasSubstr("why")));
  EXPECT_EQ(row.failures_of.at(v1::REASON_HANG), 3);
  EXPECT_EQ(row.failures_of.at(v1::REASON_GPU_FAULT), 1);
}

TEST(JobMachine, AUserErrorIsRetriedWhereTheJobSaysSo) {
  JobRow row = Running();
  row.spec.mutable_retry()->set_data_error_retries(1);
  row = FailAttempt(row, v1::REASON_DATA_ERROR, 1);
  EXPECT_EQ(row.state, v1::QUEUED);
  EXPECT_EQ(FailAttempt(row, v1::REASON_DATA_ERROR, 2).state, v1::FAILED);
}

TEST(JobMachine, PauseSavesReleasesAndResumes) {
  EXPECT_EQ(Do(Queued(), PauseAsked{}).state, v1::PAUSED);
  JobStep step = Apply(Running(), PauseAsked{}, kNow);
  EXPECT_TRUE(step.stopping_began);
  EXPECT_EQ(step.row.state, v1::STOPPING);
  EXPECT_FALSE(Apply(step.row, PauseAsked{}, kNow).changed);
  JobRow row = step.row;
  row.step = 17;
  for (int r : {0, 1}) row = Do(Do(row, Ended(r, v1::REASON_PREEMPTED)), RankGone{r});
  EXPECT_EQ(row.state, v1::PAUSED);
  EXPECT_THAT(row.message, testing::HasSubstr("at step 17"));
  EXPECT_EQ(row.failures, 0);
  EXPECT_EQ(row.finished_ms, 0);
  row = Do(row, ResumeAsked{});
  EXPECT_EQ(row.state, v1::QUEUED);
  EXPECT_EQ(row.desired, v1::DESIRED_RUN);
  EXPECT_TRUE(row.message.empty());
  EXPECT_EQ(Do(Do(row, PlacedOn(2)), CancelAsked{}).desired, v1::DESIRED_CANCEL);
}

TEST(JobMachine, APauseThatIsTakenBackOrOvertaken) {
  const JobRow pausing = Do(Running(1), PauseAsked{});
  JobRow row = Do(pausing, ResumeAsked{});
  EXPECT_EQ(row.state, v1::STOPPING);
  EXPECT_EQ(Do(Do(row, Ended(0, v1::REASON_PREEMPTED)), RankGone{0}).state, v1::QUEUED);
  EXPECT_EQ(Do(Do(pausing, Ended(0, v1::REASON_COMPLETED)), RankGone{0}).state, v1::SUCCEEDED);
  EXPECT_EQ(Do(Do(pausing, Ended(0, v1::REASON_DATA_ERROR)), RankGone{0}).state, v1::FAILED);
  row = Do(Do(pausing, Ended(0, v1::REASON_CRASHED, "broke")), RankGone{0});
  EXPECT_EQ(row.state, v1::PAUSED);
  EXPECT_THAT(row.message, testing::HasSubstr("broke"));
  row = Do(pausing, CancelAsked{});
  EXPECT_EQ(Do(row, PauseAsked{}).desired, v1::DESIRED_CANCEL);
  EXPECT_EQ(Do(Do(row, Ended(0, v1::REASON_PREEMPTED)), RankGone{0}).state, v1::CANCELLED);
}

TEST(JobMachine, CancelInEachState) {
  EXPECT_EQ(Do(Queued(), CancelAsked{}).state, v1::CANCELLED);
  for (JobRow row : {Starting(), Running(), Do(Running(), Ended(0, v1::REASON_CRASHED))}) {
    row = Do(row, CancelAsked{});
    EXPECT_EQ(row.state, v1::STOPPING);
    EXPECT_EQ(row.desired, v1::DESIRED_CANCEL);
    EXPECT_FALSE(Apply(row, CancelAsked{}, kNow).changed);   // again: nothing
    row = Do(Do(row, Ended(0, v1::REASON_CANCELLED)), RankGone{0});
    row = Do(row, RankGone{1});   // killed without a word
    EXPECT_EQ(row.state, v1::CANCELLED);
    EXPECT_EQ(row.reason, v1::REASON_CANCELLED);
    EXPECT_THAT(row.message, testing::HasSubstr("cancelled by the user"));
  }
  JobRow paused = Queued();
  paused.state = v1::PAUSED;
  EXPECT_EQ(Do(paused, CancelAsked{}).state, v1::CANCELLED);
}

TEST(JobMachine, AJobThatCompletedBeforeTheCancelReachedItSucceeded) {
  JobRow row = Do(Running(1), CancelAsked{});
  row = Do(Do(row, Ended(0, v1::REASON_COMPLETED)), RankGone{0});
  EXPECT_EQ(row.state, v1::SUCCEEDED);
}

TEST(JobMachine, AWorkerGoneWithoutAWordHasCrashed) {
  const JobRow row = Do(Running(1), RankGone{0});
  EXPECT_EQ(row.state, v1::QUEUED);
  EXPECT_EQ(row.reason, v1::REASON_CRASHED);
}

TEST(JobMachine, APlacementThatCannotBeginCountsAsAnAttempt) {
  EXPECT_EQ(Do(Queued(), PlacementFailed{v1::REASON_USER_ERROR, "no right"}).state, v1::FAILED);
  JobRow row = Do(Queued(2, 2), PlacementFailed{v1::REASON_CHECKPOINT, "disk full"});
  EXPECT_EQ(row.state, v1::QUEUED);
  EXPECT_EQ(row.attempt, 1);
  row.step = 1;   // so that it is not the same failure at the same step
  EXPECT_EQ(Do(row, PlacementFailed{v1::REASON_CHECKPOINT, "disk full"}).state, v1::FAILED);
}

TEST(JobMachine, RanksOutOfRangeAreIgnored) {
  for (int rank : {-1, 2, 1000}) {
    EXPECT_FALSE(Apply(Running(), Ended(rank, v1::REASON_CRASHED), kNow).changed);
    EXPECT_FALSE(Apply(Running(), RankGone{rank}, kNow).changed);
    EXPECT_FALSE(Apply(Running(), ProcessSeen{rank, 1}, kNow).changed);
  }
}

TEST(JobMachine, MessagesAreBoundedAndPrintable) {
  const JobRow row = Do(Running(1), Ended(0, v1::REASON_CRASHED, std::string(1 << 20, 'x') + "\xff\x01"));
  EXPECT_LE(row.message.size(), 2100u);
}

}  // namespace
}  // namespace hierad
