// What flows over agents' and workers' sessions: metrics, checkpoints, rendezvous, and reports that are not legal.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "base/limits.h"
#include "server/coordinator_harness.h"

namespace hierad {
namespace {

using testing::HasSubstr;

class SessionTest : public CoordinatorTest {
 protected:
  static void AddMetrics(v1::WorkerReport* report, int64_t from, int64_t to) {
    for (int64_t step = from; step <= to; ++step) {
      v1::StepMetrics* metrics = report->add_metrics();
      metrics->set_step(step);
      metrics->set_loss(1.0 / static_cast<double>(step));
    }
  }
  std::optional<WatchView> TryWatch(const WatchPlace& place) {
    auto answer = std::make_shared<std::optional<WatchView>>();
    coordinator_->Watch(place, [answer](auto reply) {
      EXPECT_TRUE(reply.ok()) << reply.status();
      if (reply.ok()) *answer = *std::move(reply);
    });
    coordinator_->Turn();
    return *answer;
  }
  static std::vector<int64_t> Steps(const WatchView& view) {
    std::vector<int64_t> steps;
    for (const auto& metrics : view.reply.metrics()) steps.push_back(metrics.step());
    return steps;
  }
  static WatchPlace After(const WatchView& view, uint64_t id) { return {id, view.version, view.cursor, 0}; }
};

TEST_F(SessionTest, RendezvousOfRankZeroReachesTheOthers) {
  FakeNode* node = AddNode("n", 3);
  const uint64_t id = Submit("k", Spec(3));
  FakeWorker* one = Worker(node, id, 1, 1);
  EXPECT_EQ(one->orders().rendezvous(), "");
  FakeWorker* zero = Worker(node, id, 1, 0);
  zero->report.set_rendezvous(std::string("\0blob", 5));
  zero->Report();
  Settle();
  EXPECT_EQ(one->orders().rendezvous(), std::string("\0blob", 5));
  EXPECT_EQ(Worker(node, id, 1, 2)->orders().rendezvous(), std::string("\0blob", 5));   // a late one at once
}

TEST_F(SessionTest, ANewAttemptHasANewRendezvous) {
  FakeNode* node = AddNode("n", 2);
  const uint64_t id = Submit("k", Spec(2));
  auto workers = Train(node, id, 1, 2);
  workers[0]->report.set_rendezvous("old");
  workers[0]->Report();
  Settle();
  for (FakeWorker* worker : workers) worker->Close();
  node->End({id, 1, 0}, v1::REASON_CRASHED, 0, 11);
  Pass(3);
  ASSERT_EQ(Get(id).attempt(), 2);
  EXPECT_EQ(Worker(node, id, 2, 1)->orders().rendezvous(), "");
}

TEST_F(SessionTest, MetricsAreAcknowledgedAndTakenOnce) {
  FakeNode* node = AddNode("n", 1);
  const uint64_t id = Submit("k");
  FakeWorker* worker = Train(node, id, 1, 1)[0];
  AddMetrics(&worker->report, 1, 5);
  worker->Report();
  Settle();
  EXPECT_EQ(worker->orders().acknowledged_step(), 5);
  worker->report.clear_metrics();
  AddMetrics(&worker->report, 3, 8);   // sent again from 3 on
  worker->Report();
  Settle();
  EXPECT_EQ(worker->orders().acknowledged_step(), 8);
  auto view = TryWatch({id, std::nullopt, 0, 0});
  ASSERT_TRUE(view);
  EXPECT_THAT(Steps(*view), testing::ElementsAre(1, 2, 3, 4, 5, 6, 7, 8));
  EXPECT_EQ(view->reply.job().last().step(), 8);
  EXPECT_EQ(view->reply.metrics_dropped(), 0);
}

TEST_F(SessionTest, WatchBeginsAfterTheStepAskedForAndGoesOn) {
  FakeNode* node = AddNode("n", 1);
  const uint64_t id = Submit("k");
  FakeWorker* worker = Train(node, id, 1, 1)[0];
  AddMetrics(&worker->report, 1, 5);
  worker->Report();
  Settle();
  auto view = TryWatch({id, std::nullopt, 0, 3});
  EXPECT_THAT(Steps(*view), testing::ElementsAre(4, 5));
  EXPECT_FALSE(TryWatch(After(*view, id)));   // nothing new: waits
  worker->report.clear_metrics();
  AddMetrics(&worker->report, 6, 6);
  worker->Report();
  Settle();
  EXPECT_THAT(Steps(*TryWatch(After(*view, id))), testing::ElementsAre(6));
}

TEST_F(SessionTest, WatchersSayWhatIsGoneFromMemory) {
  FakeNode* node = AddNode("n", 1);
  const uint64_t id = Submit("k");
  FakeWorker* worker = Train(node, id, 1, 1)[0];
  auto early = TryWatch({id, std::nullopt, 0, 0});
  const int64_t total = limits::kMetricsInMemory + 100;
  for (int64_t from = 1; from <= total; from += limits::kMetricBatch) {
    worker->report.clear_metrics();
    AddMetrics(&worker->report, from, std::min<int64_t>(total, from + limits::kMetricBatch - 1));
    worker->Report();
    Settle();
  }
  auto late = TryWatch({id, std::nullopt, 0, 0});
  EXPECT_EQ(late->reply.metrics_dropped(), 100);
  EXPECT_EQ(late->reply.metrics(0).step(), 101);
  EXPECT_TRUE(late->more);
  EXPECT_LT(late->reply.ByteSizeLong(), static_cast<size_t>(limits::kGrpcMessageBytes));
  EXPECT_EQ(TryWatch(After(*early, id))->reply.metrics_dropped(), 100);
  int64_t told = late->reply.metrics_size();
  while (late->more) {
    late = TryWatch(After(*late, id));
    EXPECT_EQ(late->reply.metrics_dropped(), 0);
    told += late->reply.metrics_size();
  }
  EXPECT_EQ(told, limits::kMetricsInMemory);
}

TEST_F(SessionTest, WatchEndsWithTheJobAndStillGivesItsTail) {
  FakeNode* node = AddNode("n", 1);
  const uint64_t id = Submit("k");
  FakeWorker* worker = Train(node, id, 1, 1)[0];
  auto view = TryWatch({id, std::nullopt, 0, 0});
  AddMetrics(&worker->report, 1, 3);
  worker->End(v1::REASON_COMPLETED, "");
  node->End({id, 1, 0}, v1::REASON_COMPLETED, 0);
  Pass(1);
  view = TryWatch(After(*view, id));
  ASSERT_TRUE(view);
  EXPECT_TRUE(view->done);
  EXPECT_THAT(Steps(*view), testing::ElementsAre(1, 2, 3));
  view = TryWatch({id, std::nullopt, 0, 0});   // a late watcher
  EXPECT_THAT(Steps(*view), testing::ElementsAre(1, 2, 3));
  Pass(700);   // out of memory by now
  view = TryWatch({id, std::nullopt, 0, 0});
  EXPECT_TRUE(view->done);
  EXPECT_EQ(view->reply.job().state(), v1::SUCCEEDED);
}

TEST_F(SessionTest, AResumedAttemptReportsStepsAgain) {
  FakeNode* node = AddNode("n", 1);
  const uint64_t id = Submit("k");
  FakeWorker* worker = Train(node, id, 1, 1, 8)[0];
  AddMetrics(&worker->report, 1, 8);
  worker->Report();
  worker->Close();
  node->End({id, 1, 0}, v1::REASON_CRASHED, 0, 11);
  Pass(2);
  FakeWorker* second = Train(node, id, 2, 1, 6)[0];
  AddMetrics(&second->report, 5, 6);   // from the checkpoint at 4
  second->Report();
  Settle();
  EXPECT_EQ(second->orders().acknowledged_step(), 6);
  EXPECT_THAT(Steps(*TryWatch({id, std::nullopt, 0, 7})), testing::ElementsAre(8, 5, 6));
  EXPECT_EQ(Get(id).step(), 6);
}

TEST_F(SessionTest, CheckpointsAreKeptOverARestartAndGoToTheNextAttempt) {
  FakeNode* node = AddNode("n", 1);
  const uint64_t id = Submit("k");
  FakeWorker* worker = Train(node, id, 1, 1, 20)[0];
  for (int step : {20, 10}) {
    v1::CheckpointInfo* info = worker->report.add_checkpoints();
    info->set_step(step);
    info->set_path(absl::StrCat("/run/checkpoints/", step));
    info->set_damaged(step == 20);
  }
  worker->Report();   // not complete: not taken
  Settle();
  const auto list = [&] {
    std::vector<int64_t> steps;
    coordinator_->ListCheckpoints(id, [&](auto reply) {
      for (const auto& info : reply->checkpoints()) steps.push_back(info.step());
    });
    coordinator_->Turn();
    return steps;
  };
  EXPECT_TRUE(list().empty());
  worker->report.set_checkpoints_known(true);
  worker->Report();
  Settle();
  EXPECT_THAT(list(), testing::ElementsAre(20, 10));
  Restart();
  EXPECT_THAT(list(), testing::ElementsAre(20, 10));
  node->Die();
  node->Connect(coordinator_.get());
  Pass(2);
  const v1::Assignment& next = node->assigned.at({id, 2, 0});
  ASSERT_EQ(next.checkpoints_size(), 1);   // the damaged one is left out
  EXPECT_EQ(next.checkpoints(0).step(), 10);
}

TEST_F(SessionTest, ViewShowsRanksRateAndTimeLeft) {
  FakeNode* node = AddNode("n", 2);
  v1::JobSpec spec = Spec(2);
  spec.mutable_step()->set_batch_per_rank(5);
  const uint64_t id = Submit("k", spec);
  auto workers = Train(node, id, 1, 2, 40);
  workers[0]->report.set_samples_per_s(20);
  for (int r : {0, 1}) {   // rank 0 waits for the other
    v1::RankTotals* totals = workers[r]->report.mutable_totals();
    totals->set_step_count(40), totals->set_step_s(20), totals->set_communication_s(r == 0 ? 6 : 1);
  }
  workers[0]->Report();
  workers[1]->report.set_waiting_in("all_reduce of bucket 3");
  workers[1]->report.mutable_data()->set_skipped_samples(3);
  workers[1]->report.mutable_data()->set_slowest("/data/x.jpg");
  workers[1]->Report();
  Settle();
  const v1::Job job = Get(id);
  EXPECT_EQ(job.step(), 40);
  EXPECT_EQ(job.total_steps(), 100);
  EXPECT_DOUBLE_EQ(job.eta_s(), 60 * 10 / 20.0);
  EXPECT_EQ(job.ranks(1).waiting_in(), "all_reduce of bucket 3");
  EXPECT_EQ(job.ranks(1).data().slowest(), "/data/x.jpg");
  EXPECT_THAT(job.alerts(), testing::Contains("3 samples could not be read and left out; rank-N.log names them"));
  EXPECT_THAT(job.alerts(), testing::Contains("rank 1 comes late to all-reduces: the others wait at least 25% of a step for it"));
  EXPECT_EQ(job.ranks(1).phase(), v1::PHASE_TRAINING);
  EXPECT_EQ(job.ranks(1).node(), "n");
  EXPECT_GT(job.ranks(1).pid(), 0);
}

TEST_F(SessionTest, NonFiniteMetricsHarmNothing) {
  FakeNode* node = AddNode("n", 1);
  const uint64_t id = Submit("k");
  FakeWorker* worker = Train(node, id, 1, 1)[0];
  v1::StepMetrics* metrics = worker->report.add_metrics();
  metrics->set_step(1);
  metrics->set_loss(std::nan(""));
  metrics->set_eval_loss(std::nan(""));
  worker->report.set_samples_per_s(INFINITY);
  worker->Report();
  Settle();
  const v1::Job job = Get(id);
  EXPECT_TRUE(std::isnan(job.last().loss()));
  EXPECT_FALSE(job.has_best_eval_loss());
  EXPECT_EQ(job.eta_s(), 0);
}

TEST_F(SessionTest, IllegalReportsCloseTheSessionAndChangeNothing) {
  FakeNode* node = AddNode("n", 1);
  const uint64_t id = Submit("k");
  Train(node, id, 1, 1);
  const auto refused = [&](auto change) {
    FakeWorker other(coordinator_.get(), node->assigned.at({id, 1, 0}));
    change(&other.report);
    other.Connect();
    Settle();
    return other.link->closed && other.link->closed->code() == absl::StatusCode::kInvalidArgument;
  };
  EXPECT_TRUE(refused([](v1::WorkerReport* r) { r->set_rank(-1); }));
  EXPECT_TRUE(refused([](v1::WorkerReport* r) { r->set_step(-5); }));
  EXPECT_TRUE(refused([](v1::WorkerReport* r) { AddMetrics(r, 1, limits::kMetricBatch + 1); }));
  EXPECT_TRUE(refused([](v1::WorkerReport* r) { r->mutable_data()->set_skipped_samples(-1); }));
  EXPECT_TRUE(refused([](v1::WorkerReport* r) { r->mutable_data()->set_samples(std::numeric_limits<int64_t>::max()); }));
  EXPECT_TRUE(refused([](v1::WorkerReport* r) { r->mutable_data()->set_wait_s(std::nan("")); }));
  EXPECT_TRUE(refused([](v1::WorkerReport* r) { r->set_rendezvous(std::string(5000, 'x')); }));
  EXPECT_TRUE(refused([](v1::WorkerReport* r) { r->add_checkpoints()->set_path("relative"); }));
  EXPECT_TRUE(refused([](v1::WorkerReport* r) { r->set_phase(static_cast<v1::Phase>(99)); }));
  EXPECT_EQ(Get(id).state(), v1::RUNNING);
}

TEST_F(SessionTest, IllegalAgentsAreRefused) {
  const auto refused = [&](auto change) {
    auto link = std::make_shared<FakeAgentLink>();
    const uint64_t session = coordinator_->OpenAgent(link);
    v1::AgentReport report;
    report.set_node("x");
    report.set_instance("i");
    change(&report);
    coordinator_->ReportAgent(session, report, [] {});
    Settle();
    coordinator_->CloseAgent(session);
    return link->closed && !link->closed->ok();
  };
  const auto slot = [](v1::AgentReport* r, const std::string& id) {
    v1::Slot* slot = r->add_slots();
    slot->set_id(id);
    slot->set_kind(v1::Slot::CPU);
  };
  EXPECT_FALSE(refused([](v1::AgentReport*) {}));
  EXPECT_TRUE(refused([](v1::AgentReport* r) { r->set_node(""); }));
  EXPECT_TRUE(refused([](v1::AgentReport* r) { r->set_node("a b"); }));
  EXPECT_TRUE(refused([](v1::AgentReport* r) { r->set_node(std::string(300, 'n')); }));
  EXPECT_TRUE(refused([](v1::AgentReport* r) { r->set_node("\xff"); }));
  EXPECT_TRUE(refused([&](v1::AgentReport* r) { slot(r, "a"), slot(r, "a"); }));
  EXPECT_TRUE(refused([](v1::AgentReport* r) { r->add_slots(); }));
  EXPECT_TRUE(refused([](v1::AgentReport* r) { r->add_processes(); }));
}

TEST_F(SessionTest, TwoAgentsOfOneNameAreNotMixed) {
  FakeNode* first = AddNode("n", 1);
  FakeNode second(coordinator_.get(), "n", 8);
  second.instance = "other";
  second.Connect();
  Settle();
  ASSERT_TRUE(second.link->closed.has_value());
  EXPECT_EQ(second.link->closed->code(), absl::StatusCode::kAlreadyExists);
  EXPECT_FALSE(first->link->closed.has_value());
}

TEST_F(SessionTest, NodesShowWhatEachSlotDoes) {
  AddNode("n", 2);
  const uint64_t id = Submit("k");
  v1::NodesReply nodes;
  coordinator_->Nodes([&](auto reply) { nodes = *reply; });
  coordinator_->Turn();
  ASSERT_EQ(nodes.nodes_size(), 1);
  EXPECT_TRUE(nodes.nodes(0).connected());
  EXPECT_EQ(nodes.nodes(0).slots(0).job_id(), id);
  EXPECT_EQ(nodes.nodes(0).slots(1).job_id(), 0u);
}

class GpuFaultTest : public SessionTest {
 protected:
  void Begin() {
    node_ = AddNode("n", 2, v1::Slot::CUDA, int64_t{1} << 40);
    v1::JobSpec spec = Spec(2);
    spec.mutable_resources()->set_device("cuda");
    id_ = Submit("k", spec);
    workers_of_ = Train(node_, id_, 1, 2, 7);
    Pass(2);
  }
  // As an agent tells of it once; the next reports are older by as much as time has passed.
  void Fault(const std::string& slot, uint64_t xid, int64_t age_ms = 100) {
    v1::GpuFault& fault = node_->gpu_faults.emplace_back();
    fault.set_slot_id(slot);
    fault.set_xid(xid);
    fault.set_age_ms(age_ms);
    node_->Report();
    Settle();
    node_->gpu_faults.clear();
  }
  void Crash(int rank) {
    node_->End({id_, 1, rank}, v1::REASON_CRASHED, 0, 6, "terminate called");
    node_->Report();
    workers_of_[rank]->Close();
    Settle();
  }
  FakeNode* node_ = nullptr;
  uint64_t id_ = 0;
  std::vector<FakeWorker*> workers_of_;
};

TEST_F(GpuFaultTest, ADeathShortlyAfterIsOfItsClassAndSaysWhatToDo) {
  Begin();
  Fault("gpu-1", 79);
  EXPECT_EQ(Get(id_).state(), v1::RUNNING);
  Fault("gpu-1", 45);   // what follows from the first
  Crash(1);
  const v1::Job job = Get(id_);
  EXPECT_EQ(job.reason(), v1::REASON_GPU_FAULT);
  EXPECT_THAT(job.message(), testing::AllOf(HasSubstr("rank 1: GPU gpu-1 on n had Xid 79"), HasSubstr("restart the machine"), HasSubstr("terminate called")));
}

TEST_F(GpuFaultTest, APeerThatSpeaksFirstDoesNotHideIt) {
  Begin();
  workers_of_[0]->End(v1::REASON_PEER_LOST, "rank 1 is lost");
  Settle();
  EXPECT_EQ(Get(id_).reason(), v1::REASON_PEER_LOST);
  Fault("gpu-1", 31);   // the agent's word comes after the peer's
  EXPECT_EQ(Get(id_).reason(), v1::REASON_GPU_FAULT);
  EXPECT_THAT(Get(id_).message(), HasSubstr("Xid 31"));
}

TEST_F(GpuFaultTest, FaultsOfOtherTimesAndCardsExplainNothing) {
  Begin();
  Fault("gpu-7", 79);
  Fault("gpu-1", 79, 3'000'000);   // before the attempt began
  Fault("gpu-1", 63);
  Pass(40);
  Crash(1);
  EXPECT_EQ(Get(id_).reason(), v1::REASON_CRASHED);
}

TEST_F(GpuFaultTest, TheCardGetsNoMoreWorkUntilItsNodeIsUndrained) {
  Begin();
  const auto drain = [&](const std::string& name, bool drained) {
    std::optional<absl::StatusOr<v1::NodesReply>> answer;
    coordinator_->DrainNode(name, drained, [&](auto reply) { answer = std::move(reply); });
    coordinator_->Turn();
    Settle();
    return *std::move(answer);
  };
  const auto fault_of = [&](int slot) {
    std::optional<absl::StatusOr<v1::NodesReply>> answer;
    coordinator_->Nodes([&](auto reply) { answer = std::move(reply); });
    Settle();
    return (*answer)->nodes(0).slots(slot).fault();
  };
  for (const uint64_t xid : {13, 31, 43, 45, 109}) Fault("gpu-1", xid);   // programs cause these too
  Fault("gpu-7", 79);                                                     // no slot of the node
  EXPECT_EQ(fault_of(1), "");
  Fault("gpu-1", 79);
  EXPECT_EQ(Get(id_).state(), v1::RUNNING) << "what runs there goes on";
  std::optional<absl::StatusOr<Overview>> seen;
  coordinator_->Look([&](auto reply) { seen = std::move(reply); });
  Settle();
  EXPECT_EQ((*seen)->slots_faulty, 1);   // each slot is one thing: its rank does not make it busy
  EXPECT_EQ((*seen)->slots_busy, 1);
  EXPECT_EQ((*seen)->nodes.at(0).slots[1][3], 1);
  EXPECT_EQ(fault_of(0), "");
  EXPECT_THAT(fault_of(1), testing::AllOf(HasSubstr("Xid 79"), HasSubstr("restart the machine")));
  Crash(1);
  Pass(60);
  EXPECT_EQ(Get(id_).state(), v1::QUEUED);
  EXPECT_THAT(Get(id_).message(), HasSubstr("have 1; 1 more is out of use for a fault of its card"));
  v1::JobSpec one = Spec(1);
  one.mutable_resources()->set_device("cuda");
  const uint64_t small = Submit("small", one);
  EXPECT_EQ(Get(small).state(), v1::STARTING) << "it is not held up by one that wants the card";
  EXPECT_EQ(Get(small).ranks(0).slot_id(), "gpu-0");
  Cancel(small);
  Pass(20);

  Restart();
  EXPECT_FALSE(drain("other", false).ok());
  node_->Connect(coordinator_.get());
  Settle();
  EXPECT_THAT(fault_of(1), HasSubstr("Xid 79"));
  EXPECT_EQ(Get(id_).state(), v1::QUEUED);
  ASSERT_TRUE(drain("n", true).ok());
  EXPECT_THAT(fault_of(1), HasSubstr("Xid 79")) << "only undrain puts it back";
  ASSERT_TRUE(drain("n", false).ok());
  EXPECT_EQ(fault_of(1), "");
  EXPECT_EQ(Get(id_).state(), v1::STARTING);
  Fault("gpu-1", 79, 5000);   // reported for a minute
  EXPECT_EQ(fault_of(1), "") << "it was before the card was mended";
  Pass(20);
  Fault("gpu-1", 79);
  EXPECT_THAT(fault_of(1), HasSubstr("Xid 79"));
  Restart();   // a node that has not come back yet can be undrained too
  ASSERT_TRUE(drain("n", false).ok());
  node_->Connect(coordinator_.get());
  Settle();
  EXPECT_EQ(fault_of(1), "");
}

TEST_F(SessionTest, PiecesOfLogsComeFromTheirNode) {
  FakeNode* node = AddNode("n", 1);
  const uint64_t id = Submit("k");
  std::optional<absl::StatusOr<v1::LogPiece>> answer;
  const auto ask = [&](const std::string& name) {
    answer.reset();
    v1::LogWanted wanted;
    wanted.set_job_id(id);
    wanted.set_attempt(1);
    wanted.set_offset(100);
    wanted.set_head("head");
    coordinator_->ReadLog(name, wanted, [&](auto reply) { answer = std::move(reply); });
    Settle();
  };
  ask("n");
  ASSERT_FALSE(answer.has_value());
  v1::LogWanted wanted = node->link->sent.back().logs(0);
  EXPECT_EQ(wanted.job_id(), id);
  EXPECT_EQ(wanted.offset(), 100);
  EXPECT_EQ(wanted.head(), "head");
  v1::LogPiece& piece = node->log_pieces.emplace_back();
  piece.set_id(wanted.id());
  piece.set_bytes("words");
  node->Report();
  node->Report();   // said again: nobody asks any more
  Settle();
  ASSERT_TRUE(answer.has_value() && answer->ok());
  EXPECT_EQ((*answer)->bytes(), "words");
  EXPECT_EQ(node->link->sent.back().logs_size(), 0);
  node->log_pieces.clear();

  ask("n");
  Pass(11);
  ASSERT_TRUE(answer.has_value());
  EXPECT_TRUE(absl::IsUnavailable(answer->status())) << "an agent that does not know of logs";
  EXPECT_EQ(node->link->sent.back().logs_size(), 0);

  ask("nowhere");
  ASSERT_TRUE(answer.has_value());
  EXPECT_THAT(std::string(answer->status().message()), HasSubstr("node nowhere is not connected"));
  ask("n");
  node->Disconnect();
  Settle();
  ASSERT_TRUE(answer.has_value());
  EXPECT_THAT(std::string(answer->status().message()), HasSubstr("node n"));
  ask("n");
  ASSERT_TRUE(answer.has_value());
  EXPECT_THAT(std::string(answer->status().message()), HasSubstr("not connected"));
}

TEST_F(SessionTest, OrdersAreSentWhenTheyChangeOnly) {
  FakeNode* node = AddNode("n", 1);
  const uint64_t id = Submit("k");
  FakeWorker* worker = Train(node, id, 1, 1)[0];
  Pass(1);
  const size_t agent = node->link->sent.size(), told = worker->link->sent.size();
  for (int i = 0; i < 10; ++i) {
    worker->Train(i);
    Pass(1);
  }
  EXPECT_EQ(node->link->sent.size(), agent);
  EXPECT_EQ(worker->link->sent.size(), told);
}

TEST_F(SessionTest, SequencesGrowOverRestarts) {
  FakeNode* node = AddNode("n", 1);
  Submit("k");
  const uint64_t before = node->link->sent.back().sequence();
  Restart();
  node->Connect(coordinator_.get());
  Settle();
  EXPECT_GT(node->link->sent.front().sequence(), before);
}

}  // namespace
}  // namespace hierad
