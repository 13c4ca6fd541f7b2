#include "server/coordinator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sqlite3.h>

#include "base/fs.h"
#include "base/worker_exit.h"
#include "server/coordinator_harness.h"

namespace hierad {
namespace {

using testing::HasSubstr;

TEST_F(CoordinatorTest, AJobRunsFromSubmitToSuccess) {
  FakeNode* node = AddNode("n", 2);
  const uint64_t id = Submit("k", Spec(2));
  EXPECT_EQ(Get(id).state(), v1::STARTING);
  ASSERT_EQ(node->started.size(), 2u);
  const v1::Assignment& a = node->assigned.at({id, 1, 1});
  EXPECT_EQ(a.world_size(), 2);
  EXPECT_EQ(a.local_rank(), 1);
  EXPECT_EQ(a.local_world_size(), 2);
  EXPECT_EQ(a.user(), "me");
  EXPECT_EQ(a.credential().size(), 64u);
  EXPECT_EQ(a.run_folder(), absl::StrCat(folder_, "/runs/", id, "-job"));
  auto yaml = ReadJobYaml(a.run_folder() + "/job.yaml");
  ASSERT_TRUE(yaml.ok()) << yaml.status();
  EXPECT_EQ(yaml->SerializeAsString(), a.spec().SerializeAsString());

  auto workers = Train(node, id, 1, 2);
  EXPECT_EQ(Get(id).state(), v1::RUNNING);
  EXPECT_EQ(workers[0]->orders().want(), v1::WorkerOrders::WANT_RUN);
  for (FakeWorker* worker : workers) worker->End(v1::REASON_COMPLETED, "");
  Settle();
  EXPECT_EQ(Get(id).state(), v1::RUNNING);   // their processes still live
  for (int r : {0, 1}) node->End({id, 1, r}, v1::REASON_COMPLETED, 0);
  node->Report();
  Settle();
  const v1::Job job = Get(id);
  EXPECT_EQ(job.state(), v1::SUCCEEDED);
  EXPECT_EQ(job.reason(), v1::REASON_COMPLETED);
  EXPECT_TRUE(node->processes.empty());   // acknowledged
  EXPECT_EQ(node->started.size(), 2u);    // and not started again
}

// Hiera-Base in bf16 with 128 samples: 9 GiB by its plan.
TEST_F(CoordinatorTest, AJobThatCannotFitIsNeverStartedAndSaysWhy) {
  FakeNode* small = AddNode("small", 1, v1::Slot::CUDA, int64_t{8} << 30);
  Pass(20);   // every node that may come back has come
  v1::JobSpec large = Spec();
  large.mutable_model()->set_in_chans(8);
  large.mutable_step()->set_batch_per_rank(128);
  large.mutable_step()->set_precision("bf16");
  const uint64_t id = Submit("large", large);
  EXPECT_EQ(Get(id).state(), v1::QUEUED);
  EXPECT_THAT(Get(id).message(), testing::ContainsRegex("needs [89]\\.[0-9] GiB of device memory by its plan; the largest card has 8\\.0 GiB"));
  v1::JobSpec fits = large;
  fits.mutable_step()->set_batch_per_rank(8);
  const uint64_t other = Submit("fits", fits);   // is not held up
  EXPECT_EQ(Get(other).state(), v1::STARTING);
  ASSERT_EQ(small->started.size(), 1u);
  FakeNode* big = AddNode("big", 1, v1::Slot::CUDA, int64_t{80} << 30);
  EXPECT_EQ(Get(id).state(), v1::STARTING);
  EXPECT_EQ(big->started.size(), 1u);
  EXPECT_EQ(small->started.size(), 1u);
}

TEST_F(CoordinatorTest, RunningNeedsEveryRankToTrain) {
  FakeNode* node = AddNode("n", 2);
  const uint64_t id = Submit("k", Spec(2));
  Worker(node, id, 1, 0)->Train(1);
  FakeWorker* other = Worker(node, id, 1, 1);
  Settle();
  EXPECT_EQ(Get(id).state(), v1::STARTING);
  other->Train(1);
  Settle();
  EXPECT_EQ(Get(id).state(), v1::RUNNING);
}

TEST_F(CoordinatorTest, TheSameKeyIsTheSameJobAlsoAfterItsEndAndARestart) {
  const auto first = TrySubmit("k", Spec());
  const auto second = TrySubmit("k", Spec(4));
  EXPECT_FALSE(first->existed());
  EXPECT_TRUE(second->existed());
  EXPECT_EQ(first->job().id(), second->job().id());
  Cancel(first->job().id());
  Restart();
  const auto third = TrySubmit("k", Spec());
  EXPECT_TRUE(third->existed());
  EXPECT_EQ(third->job().id(), first->job().id());
  EXPECT_EQ(third->job().state(), v1::CANCELLED);
  EXPECT_NE(Submit("other"), first->job().id());
}

TEST_F(CoordinatorTest, TwoSubmitsOfOneKeyInOneTurnAreOneJob) {
  std::vector<v1::SubmitReply> replies;
  for (int i = 0; i < 2; ++i) {
    v1::SubmitRequest request;
    request.set_client_key("k");
    *request.mutable_spec() = Spec();
    coordinator_->Submit(request, "me", absl::OkStatus(), [&](auto reply) { replies.push_back(*reply); });
  }
  coordinator_->Turn();
  ASSERT_EQ(replies.size(), 2u);
  EXPECT_EQ(replies[0].job().id(), replies[1].job().id());
  EXPECT_TRUE(replies[1].existed());
}

TEST_F(CoordinatorTest, NothingIsAcknowledgedThatWasNotStored) {
  sqlite3* other = nullptr;
  ASSERT_EQ(sqlite3_open((folder_ + "/hierad.db").c_str(), &other), SQLITE_OK);
  ASSERT_EQ(sqlite3_exec(other, "BEGIN EXCLUSIVE", nullptr, nullptr, nullptr), SQLITE_OK);
  const auto refused = TrySubmit("k", Spec());
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kUnavailable);
  sqlite3_close(other);
  FakeNode* node = AddNode("n", 1);
  Pass(2);
  EXPECT_TRUE(node->started.empty());   // it is not there in part
  const auto stored = TrySubmit("k", Spec());
  ASSERT_TRUE(stored.ok());
  EXPECT_FALSE(stored->existed());
  Settle();
  EXPECT_EQ(node->started.size(), 1u);
}

// While the store refuses commits nothing is ordered; once it takes them, what happened meanwhile happens.
TEST_F(CoordinatorTest, AWorkersEndDuringAStoreFaultIsNotLost) {
  FakeNode* node = AddNode("n", 1);
  const uint64_t id = Submit("k");
  auto workers = Train(node, id, 1, 1, 10);
  sqlite3* other = nullptr;
  ASSERT_EQ(sqlite3_open((folder_ + "/hierad.db").c_str(), &other), SQLITE_OK);
  ASSERT_EQ(sqlite3_exec(other, "BEGIN EXCLUSIVE", nullptr, nullptr, nullptr), SQLITE_OK);
  workers[0]->End(v1::REASON_DATA_ERROR, "bad sample 7");
  Settle();
  ASSERT_TRUE(workers[0]->link->closed.has_value());
  EXPECT_EQ(workers[0]->link->closed->code(), absl::StatusCode::kUnavailable);   // so that it says it again
  workers[0]->Close();
  node->End({id, 1, 0}, v1::REASON_UNSPECIFIED, 1);
  node->Report();
  Settle();
  EXPECT_EQ(node->processes.size(), 1u);   // not acknowledged
  sqlite3_close(other);
  Pass(2);
  EXPECT_EQ(Get(id).state(), v1::FAILED);
  EXPECT_EQ(Get(id).reason(), v1::REASON_DATA_ERROR);
  EXPECT_TRUE(node->processes.empty());
}

TEST_F(CoordinatorTest, ACrashIsRetriedWithBackoffAndItsLastWords) {
  FakeNode* node = AddNode("n", 1);
  const uint64_t id = Submit("k");
  auto workers = Train(node, id, 1, 1, 10);
  workers[0]->Close();
  node->End({id, 1, 0}, v1::REASON_CRASHED, 0, 11, "something broke\n");
  node->Report();
  Settle();
  v1::Job job = Get(id);
  EXPECT_EQ(job.state(), v1::QUEUED);
  EXPECT_EQ(job.reason(), v1::REASON_CRASHED);
  EXPECT_THAT(job.message(), testing::AllOf(HasSubstr("tried again in 1 s"), HasSubstr("signal 11"), HasSubstr("something broke")));
  Pass(1);
  job = Get(id);
  EXPECT_EQ(job.state(), v1::STARTING);
  EXPECT_EQ(job.attempt(), 2);
  ASSERT_EQ(node->started.size(), 2u);
  EXPECT_NE(node->assigned.at({id, 1, 0}).credential(), node->assigned.at({id, 2, 0}).credential());
}

TEST_F(CoordinatorTest, TheWorkersOwnWordBeatsItsExitCode) {
  FakeNode* node = AddNode("n", 1);
  const uint64_t id = Submit("k");
  auto workers = Train(node, id, 1, 1);
  // The agent is first, the word comes while the stream is still open.
  node->End({id, 1, 0}, v1::REASON_UNSPECIFIED, 3);
  node->Report();
  Settle();
  EXPECT_EQ(Get(id).state(), v1::RUNNING);
  workers[0]->End(v1::REASON_DATA_ERROR, "data.path: gone");
  Settle();
  EXPECT_EQ(Get(id).state(), v1::FAILED);
  EXPECT_EQ(Get(id).reason(), v1::REASON_DATA_ERROR);
  EXPECT_THAT(Get(id).message(), HasSubstr("data.path: gone"));
}

TEST_F(CoordinatorTest, AWorkersExitCodeSaysItsReason) {
  FakeNode* node = AddNode("n", 1);
  const uint64_t id = Submit("k");   // never heard of: hierad was away
  node->End({id, 1, 0}, v1::REASON_UNSPECIFIED, WorkerExitCode(v1::REASON_DATA_ERROR));
  Pass(1);
  EXPECT_EQ(Get(id).state(), v1::FAILED);
  EXPECT_EQ(Get(id).reason(), v1::REASON_DATA_ERROR);
}

TEST_F(CoordinatorTest, AnExitWithoutAWordIsTakenAfterAMoment) {
  FakeNode* node = AddNode("n", 1);
  const uint64_t id = Submit("k");
  Train(node, id, 1, 1);
  node->End({id, 1, 0}, v1::REASON_UNSPECIFIED, 3, 0, "cannot find it");
  Pass(3);   // the stream hangs, but not for ever
  EXPECT_EQ(Get(id).reason(), v1::REASON_CRASHED);
  EXPECT_THAT(Get(id).message(), HasSubstr("cannot find it"));
}

TEST_F(CoordinatorTest, ABrokenGangIsEndedAndItsSlotsHeldUntilAllAreGone) {
  FakeNode* node = AddNode("n", 2);
  const uint64_t id = Submit("k", Spec(2));
  auto workers = Train(node, id, 1, 2);
  node->stubborn = true;
  workers[1]->Close();
  node->End({id, 1, 1}, v1::REASON_CRASHED, 0, 11);
  node->Report();
  Settle();
  EXPECT_EQ(Get(id).state(), v1::STOPPING);
  EXPECT_EQ(workers[0]->orders().want(), v1::WorkerOrders::WANT_PAUSE);
  EXPECT_EQ(node->link->sent.back().assignments_size(), 0);
  EXPECT_TRUE(node->killed.empty());
  Pass(3);
  EXPECT_EQ(Get(id).attempt(), 1);   // rank 0 still lives
  EXPECT_TRUE(node->killed.empty());
  Pass(3);
  EXPECT_THAT(node->killed, testing::Contains(RankKey{id, 1, 0}));   // no more grace
  workers[0]->Close();
  Pass(2);   // the back-off
  EXPECT_EQ(Get(id).attempt(), 2);
  EXPECT_EQ(Get(id).state(), v1::STARTING);
}

TEST_F(CoordinatorTest, StaleAndForgedWorkersAreFenced) {
  FakeNode* node = AddNode("n", 1);
  const uint64_t id = Submit("k");
  FakeWorker* worker = Train(node, id, 1, 1)[0];
  const auto fenced = [&](auto change) {
    FakeWorker other(coordinator_.get(), node->assigned.at({id, 1, 0}));
    change(&other.report);
    other.Connect();
    Settle();
    return !other.link->sent.empty() && other.orders().fenced() && other.link->closed.has_value();
  };
  EXPECT_TRUE(fenced([](v1::WorkerReport* r) { r->set_credential("wrong"); }));
  EXPECT_TRUE(fenced([](v1::WorkerReport* r) { r->set_credential(""); }));
  EXPECT_TRUE(fenced([](v1::WorkerReport* r) { r->set_attempt(2); }));
  EXPECT_TRUE(fenced([](v1::WorkerReport* r) { r->set_rank(1); }));
  EXPECT_TRUE(fenced([](v1::WorkerReport* r) { r->set_job_id(999); }));
  EXPECT_FALSE(worker->link->closed.has_value());   // the true one is not disturbed
  // Its attempt over, so is it.
  worker->Close();
  node->End({id, 1, 0}, v1::REASON_CRASHED, 0, 11);
  Pass(2);
  EXPECT_EQ(Get(id).attempt(), 2);
  EXPECT_TRUE(fenced([](v1::WorkerReport*) {}));
}

TEST_F(CoordinatorTest, ANewSessionOfARankReplacesTheOld) {
  FakeNode* node = AddNode("n", 1);
  const uint64_t id = Submit("k");
  FakeWorker* first = Train(node, id, 1, 1)[0];
  FakeWorker* second = Worker(node, id, 1, 0);
  EXPECT_TRUE(first->link->closed.has_value());
  EXPECT_FALSE(second->link->closed.has_value());
  first->Close();
  second->Train(5);
  Settle();
  EXPECT_EQ(Get(id).step(), 5);
}

TEST_F(CoordinatorTest, ALostNodesJobGoesToAnother) {
  FakeNode* lost = AddNode("lost", 1);
  const uint64_t id = Submit("k");
  FakeWorker* worker = Train(lost, id, 1, 1)[0];
  FakeNode* other = AddNode("other", 1);
  lost->Disconnect();
  Pass(13);
  EXPECT_EQ(Get(id).state(), v1::RUNNING);
  Pass(4);
  EXPECT_EQ(Get(id).attempt(), 2);
  EXPECT_EQ(other->started.size(), 1u);
  worker->Report();   // its worker was not dead
  Settle();
  EXPECT_TRUE(worker->orders().fenced());
  // Nor was the node: what it still runs is killed at once, and its slot is not used meanwhile.
  const uint64_t next = Submit("k2");
  lost->stubborn = true;
  lost->obedient = false;
  lost->Connect();
  Settle();
  EXPECT_EQ(Get(next).state(), v1::QUEUED);
  lost->obedient = true;
  Settle();
  EXPECT_THAT(lost->killed, testing::Contains(RankKey{id, 1, 0}));
  EXPECT_EQ(Get(next).state(), v1::STARTING);
}

TEST_F(CoordinatorTest, AShortAbsenceOfTheAgentChangesNothing) {
  FakeNode* node = AddNode("n", 1);
  const uint64_t id = Submit("k");
  Train(node, id, 1, 1);
  node->Disconnect();
  Pass(10);
  node->Connect();
  Pass(20);
  EXPECT_EQ(Get(id).state(), v1::RUNNING);
  EXPECT_EQ(Get(id).attempt(), 1);
  EXPECT_EQ(node->started.size(), 1u);
}

TEST_F(CoordinatorTest, NeitherAClockStepNorAStallOfOursLosesANode) {
  FakeNode* node = AddNode("n", 1);
  const uint64_t id = Submit("k");
  Train(node, id, 1, 1);
  for (int64_t step_ms : {int64_t{3'600'000}, int64_t{-7'200'000}, int64_t{-1'600'000'000'000}}) {
    clock_.StepWallClock(step_ms);
    Pass(1);
    EXPECT_EQ(Get(id).state(), v1::RUNNING);
  }
  clock_.Advance(std::chrono::minutes(5));   // suspended: no turn meanwhile
  Settle();
  EXPECT_EQ(Get(id).state(), v1::RUNNING);
  node->Disconnect();
  Pass(20);   // and the dead are still found
  EXPECT_EQ(Get(id).state(), v1::QUEUED);
  EXPECT_EQ(Get(id).reason(), v1::REASON_NODE_LOST);
}

TEST_F(CoordinatorTest, AnAgentThatCameBackWithoutItsWorkers) {
  FakeNode* node = AddNode("n", 1);
  const uint64_t id = Submit("k");
  FakeWorker* worker = Train(node, id, 1, 1)[0];
  worker->Close();
  node->Die();
  node->Connect();
  Pass(2);
  EXPECT_EQ(Get(id).attempt(), 2);
  EXPECT_EQ(node->started.back(), (RankKey{id, 2, 0}));   // never attempt 1 a second time
  EXPECT_EQ(node->started.size(), 2u);
}

TEST_F(CoordinatorTest, LiveWorkersAreTakenBackAfterARestart) {
  FakeNode* node = AddNode("n", 2);
  const uint64_t id = Submit("k", Spec(2));
  const uint64_t waiting = Submit("k2", Spec(1));
  auto workers = Train(node, id, 1, 2, 7);
  Restart();
  node->Connect(coordinator_.get());
  for (FakeWorker* worker : workers) worker->Connect(coordinator_.get());
  Settle();
  Pass(20);
  EXPECT_EQ(Get(id).state(), v1::RUNNING);
  EXPECT_EQ(Get(id).attempt(), 1);
  EXPECT_EQ(Get(id).step(), 7);
  EXPECT_EQ(node->started.size(), 2u);
  EXPECT_FALSE(workers[0]->orders().fenced());
  EXPECT_EQ(Get(waiting).state(), v1::QUEUED);
  for (FakeWorker* worker : workers) worker->End(v1::REASON_COMPLETED, "");
  for (int r : {0, 1}) node->End({id, 1, r}, v1::REASON_COMPLETED, 0);
  Pass(1);
  EXPECT_EQ(Get(id).state(), v1::SUCCEEDED);
  EXPECT_EQ(Get(waiting).state(), v1::STARTING);
}

TEST_F(CoordinatorTest, WhatEndedWhileHieradWasAwayIsSeen) {
  FakeNode* node = AddNode("n", 2);
  const uint64_t crashed = Submit("k1"), completed = Submit("k2");
  Train(node, crashed, 1, 1);
  Train(node, completed, 1, 1);
  Restart();
  node->End({crashed, 1, 0}, v1::REASON_CRASHED, 0, 11);
  node->End({completed, 1, 0}, v1::REASON_COMPLETED, 0);
  node->Connect(coordinator_.get());
  Settle();
  EXPECT_EQ(Get(crashed).reason(), v1::REASON_CRASHED);
  EXPECT_EQ(Get(completed).state(), v1::SUCCEEDED);
}

TEST_F(CoordinatorTest, AfterARestartANodeThatStaysAwayIsLost) {
  FakeNode* node = AddNode("n", 1);
  const uint64_t id = Submit("k");
  Train(node, id, 1, 1);
  Restart();
  nodes_.clear();
  Pass(14);
  EXPECT_EQ(Get(id).state(), v1::RUNNING);
  Pass(3);
  EXPECT_EQ(Get(id).state(), v1::QUEUED);
  EXPECT_EQ(Get(id).reason(), v1::REASON_NODE_LOST);
}

TEST_F(CoordinatorTest, AnOrderNotYetCarriedOutIsGivenAgainAfterARestart) {
  FakeNode* node = AddNode("n", 1);
  node->obedient = false;
  const uint64_t id = Submit("k");
  EXPECT_EQ(Get(id).state(), v1::STARTING);
  Restart();
  node->obedient = true;
  node->Connect(coordinator_.get());
  Settle();
  EXPECT_THAT(node->started, testing::ElementsAre(RankKey{id, 1, 0}));
}

TEST_F(CoordinatorTest, CancelOfAQueuedJob) {
  const uint64_t id = Submit("k");
  EXPECT_EQ(Cancel(id).state(), v1::CANCELLED);
  FakeNode* node = AddNode("n", 1);
  EXPECT_TRUE(node->started.empty());
  EXPECT_EQ(Cancel(id).state(), v1::CANCELLED);   // again: unchanged, no error
}

TEST_F(CoordinatorTest, CancelOfAStartingJobThatNobodyBegan) {
  FakeNode* node = AddNode("n", 1);
  node->obedient = false;
  const uint64_t id = Submit("k");
  Cancel(id);
  EXPECT_EQ(Get(id).state(), v1::STOPPING);   // its agent may have started it
  node->obedient = true;
  Settle();
  Pass(1);
  EXPECT_EQ(Get(id).state(), v1::CANCELLED);
}

TEST_F(CoordinatorTest, CancelOfARunningJob) {
  FakeNode* node = AddNode("n", 1);
  const uint64_t id = Submit("k");
  FakeWorker* worker = Train(node, id, 1, 1)[0];
  node->stubborn = true;
  Cancel(id);
  EXPECT_EQ(Get(id).state(), v1::STOPPING);
  EXPECT_EQ(worker->orders().want(), v1::WorkerOrders::WANT_CANCEL);
  EXPECT_EQ(node->link->sent.back().grace_ms(), 30000);
  EXPECT_EQ(node->link->sent.back().assignments_size(), 0);
  worker->End(v1::REASON_CANCELLED, "saved at step 9");
  worker->Close();
  node->End({id, 1, 0}, v1::REASON_UNSPECIFIED, 0);
  Pass(1);
  EXPECT_EQ(Get(id).state(), v1::CANCELLED);
  EXPECT_EQ(Get(id).reason(), v1::REASON_CANCELLED);
}

TEST_F(CoordinatorTest, CancelSurvivesARestart) {
  FakeNode* node = AddNode("n", 1);
  const uint64_t id = Submit("k");
  FakeWorker* worker = Train(node, id, 1, 1)[0];
  node->stubborn = true;
  Cancel(id);
  Restart();
  node->stubborn = false;
  worker->Connect(coordinator_.get());
  coordinator_->Turn();
  EXPECT_EQ(worker->orders().want(), v1::WorkerOrders::WANT_CANCEL);
  worker->Close();
  node->Connect(coordinator_.get());
  Pass(3);
  EXPECT_EQ(Get(id).state(), v1::CANCELLED);
}

TEST_F(CoordinatorTest, CancelOfAnEndedOrUnknownJob) {
  FakeNode* node = AddNode("n", 1);
  const uint64_t id = Submit("k");
  node->End({id, 1, 0}, v1::REASON_COMPLETED, 0);
  Pass(1);
  EXPECT_EQ(Cancel(id).state(), v1::SUCCEEDED);
  EXPECT_EQ(TryGet(12345).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(CoordinatorTest, FirstComeFirstServedAndARetryKeepsItsPlace) {
  FakeNode* node = AddNode("n", 2);
  const uint64_t first = Submit("1", Spec(2)), second = Submit("2", Spec(2)), third = Submit("3", Spec(1));
  EXPECT_EQ(Get(first).state(), v1::STARTING);
  EXPECT_THAT(Get(second).message(), testing::AllOf(HasSubstr("waits for free slots"), HasSubstr("wants 2 CPU slots"), HasSubstr("free are 0 of 2")));
  EXPECT_THAT(Get(third).message(), HasSubstr(absl::StrCat("behind job ", second)));
  node->End({first, 1, 0}, v1::REASON_CRASHED, 0, 11);
  Pass(1);   // both ranks end, the first job is in back-off
  EXPECT_EQ(Get(second).state(), v1::QUEUED);   // it does not overtake
  EXPECT_EQ(Get(third).state(), v1::QUEUED);
  Pass(2);
  EXPECT_EQ(Get(first).attempt(), 2);
  EXPECT_EQ(Get(first).state(), v1::STARTING);
}

TEST_F(CoordinatorTest, AJobLargerThanEverythingWaitsWithTheReasonAndStepsAside) {
  AddNode("n", 2);
  Pass(16);   // all nodes have had time to come
  const uint64_t large = Submit("1", Spec(64)), small = Submit("2", Spec(1));
  EXPECT_EQ(Get(large).state(), v1::QUEUED);
  EXPECT_THAT(Get(large).message(), testing::AllOf(HasSubstr("wants 64 CPU slots"), HasSubstr("have 2")));
  EXPECT_EQ(Get(small).state(), v1::STARTING);
  AddNode("huge", 64);
  EXPECT_EQ(Get(large).state(), v1::STARTING);
}

TEST_F(CoordinatorTest, WithoutAnAgentItSaysSo) {
  EXPECT_THAT(Get(Submit("k")).message(), HasSubstr("none has connected"));
}

TEST_F(CoordinatorTest, ARunFolderInUseIsRefused) {
  v1::JobSpec spec = Spec();
  spec.mutable_output()->set_folder(folder_ + "/mine");
  const uint64_t id = Submit("1", spec);
  const auto second = TrySubmit("2", spec);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr(absl::StrCat("job ", id)));
  Cancel(id);
  EXPECT_TRUE(TrySubmit("3", spec).ok());
}

TEST_F(CoordinatorTest, ARunFolderThatCannotBeMadeFailsTheJobWithASentence) {
  AddNode("n", 1);
  ASSERT_TRUE(WriteFileAtomic(folder_ + "/file", "x").ok());
  v1::JobSpec spec = Spec();
  spec.mutable_output()->set_folder(folder_ + "/file/below");
  const v1::Job job = Get(Submit("1", spec));
  EXPECT_NE(job.state(), v1::STARTING);
  EXPECT_THAT(job.message(), HasSubstr("file"));
}

TEST_F(CoordinatorTest, DrainingPlacesAndAcceptsNothing) {
  FakeNode* node = AddNode("n", 1);
  coordinator_->BeginDrain();
  EXPECT_EQ(TrySubmit("k", Spec()).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(node->started.empty());
}

TEST_F(CoordinatorTest, AfterStopEveryQuestionIsAnswered) {
  coordinator_->Stop();
  coordinator_->Run();
  absl::Status answer;
  coordinator_->Get(1, [&](auto reply) { answer = reply.status(); });
  EXPECT_EQ(answer.code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace hierad
