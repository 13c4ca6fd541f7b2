// The services over a real unix socket: what a client, an agent and a worker get from a running hierad.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <thread>

#include "absl/strings/str_cat.h"
#include "base/job_yaml.h"
#include "base/limits.h"
#include "server/await.h"
#include "server/rpc_server.h"
#include "server/web.h"

namespace hierad {
namespace {

using testing::HasSubstr;
using Deadline = std::chrono::steady_clock::time_point;

Deadline In(int seconds) { return std::chrono::steady_clock::now() + std::chrono::seconds(seconds); }

// An agent by hand, over the wire: node "n" with one slot. Ends its session well where the test has not.
class HandAgent {
 public:
  HandAgent(const std::shared_ptr<grpc::Channel>& channel, const v1::Slot& slot)
      : stub_(v1::AgentService::NewStub(channel)), stream_(stub_->Session(&context_)) {
    report.set_node("n");
    report.set_instance("i");
    *report.add_slots() = slot;
    EXPECT_TRUE(Say());
  }
  ~HandAgent() {
    stream_->WritesDone();
    EXPECT_TRUE(stream_->Finish().ok());
  }
  bool Say() { return stream_->Write(report); }
  // The first orders that are wanted, counted from the last ones heard.
  template <typename Wanted>
  bool Hear(const Wanted& wanted) {
    while (!wanted(orders)) {
      if (!stream_->Read(&orders)) return false;
    }
    return true;
  }

  v1::AgentReport report;
  v1::AgentOrders orders;

 private:
  grpc::ClientContext context_;
  const std::unique_ptr<v1::AgentService::Stub> stub_;
  const std::unique_ptr<grpc::ClientReaderWriter<v1::AgentReport, v1::AgentOrders>> stream_;
};

v1::Slot MakeSlot(const std::string& id, v1::Slot::Kind kind, int64_t memory_bytes) {
  v1::Slot slot;
  slot.set_id(id);
  slot.set_kind(kind);
  slot.set_memory_bytes(memory_bytes);
  return slot;
}

class ServiceTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string path = testing::TempDir() + "/hierad_service_XXXXXX";
    folder_ = std::filesystem::canonical(mkdtemp(path.data()));
    Start();
  }
  void TearDown() override {
    Stop();
    std::filesystem::remove_all(folder_);
  }
  void Start() {
    auto store = Store::Open(folder_ + "/hierad.db");
    ASSERT_TRUE(store.ok()) << store.status();
    CoordinatorOptions options;
    options.disk_reserve_bytes = 0;   // the machine of the test may have any disk
    options.runs_folder = folder_ + "/runs";
    auto history = History::Open(folder_ + "/history");
    ASSERT_TRUE(history.ok()) << history.status();
    history_ = *std::move(history);
    options.history = history_.get();
    auto coordinator = Coordinator::Create(options, *std::move(store), &Clock::System());
    ASSERT_TRUE(coordinator.ok()) << coordinator.status();
    coordinator_ = *std::move(coordinator);
    loop_ = std::thread([this] { coordinator_->Run(); });
    auto server = RpcServer::Start({Endpoint(), "", "1.2.3", "abc", history_.get(), "me"}, coordinator_.get(), &Clock::System());
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    channel_ = grpc::CreateChannel(Endpoint(), grpc::InsecureChannelCredentials());
    control_ = v1::ControlService::NewStub(channel_);
  }
  void Stop() {
    if (server_) server_->Stop();
    server_.reset();
    if (loop_.joinable()) {
      coordinator_->Stop();
      loop_.join();
    }
    coordinator_.reset();
  }
  std::string Endpoint() const { return "unix:" + folder_ + "/hierad.sock"; }
  static v1::JobSpec Spec() {
    v1::JobSpec spec;
    spec.set_name("job");
    spec.mutable_data()->set_source("synthetic");
    spec.mutable_schedule()->set_steps(100);
    return spec;
  }
  grpc::Status Submit(const std::string& key, const v1::JobSpec& spec, v1::SubmitReply* reply) {
    grpc::ClientContext context;
    v1::SubmitRequest request;
    request.set_client_key(key);
    *request.mutable_spec() = spec;
    return control_->Submit(&context, request, reply);
  }
  v1::Job Submit(const std::string& key) {
    v1::SubmitReply reply;
    const grpc::Status status = Submit(key, Spec(), &reply);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return reply.job();
  }
  v1::Job Get(uint64_t id) {
    grpc::ClientContext context;
    v1::GetRequest request;
    request.set_job_id(id);
    v1::Job job;
    EXPECT_TRUE(control_->Get(&context, request, &job).ok());
    return job;
  }
  bool WaitFor(uint64_t id, v1::JobState state) {
    for (const Deadline until = In(20); std::chrono::steady_clock::now() < until; std::this_thread::yield()) {
      if (Get(id).state() == state) return true;
    }
    return false;
  }
  v1::Job Cancel(uint64_t id) {
    grpc::ClientContext context;
    v1::CancelRequest request;
    request.set_job_id(id);
    v1::Job job;
    EXPECT_TRUE(control_->Cancel(&context, request, &job).ok());
    return job;
  }

  std::string folder_;
  std::unique_ptr<History> history_;
  std::unique_ptr<Coordinator> coordinator_;
  std::thread loop_;
  std::unique_ptr<RpcServer> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::ControlService::Stub> control_;
};

TEST_F(ServiceTest, SubmitFillsDefaultsAndIsIdempotent) {
  v1::SubmitReply first, second;
  ASSERT_TRUE(Submit("k", Spec(), &first).ok());
  ASSERT_TRUE(Submit("k", Spec(), &second).ok());
  EXPECT_FALSE(first.existed());
  EXPECT_TRUE(second.existed());
  EXPECT_EQ(first.job().id(), second.job().id());
  EXPECT_EQ(first.job().spec().model().variant(), "base");
  EXPECT_EQ(first.job().submitter(), "me");
}

// Steps that are long gone from memory, of this hierad or the one before.
TEST_F(ServiceTest, MetricsAndWatchesBeginWithTheHistory) {
  const uint64_t id = Submit("k").id();
  std::vector<v1::StepMetrics> steps(20000);
  for (size_t i = 0; i < steps.size(); ++i) {
    steps[i].set_step(static_cast<int64_t>(i) + 1);
    steps[i].set_loss(1.0 / (static_cast<double>(i) + 3));
  }
  ASSERT_TRUE(history_->Append(id, steps).ok());
  Stop();
  Start();
  EXPECT_EQ(Get(id).last().step(), 20000);
  const auto ask = [&](int64_t from, int64_t to, int64_t every, uint32_t last) {
    grpc::ClientContext context;
    v1::MetricsRequest request;
    request.set_job_id(id);
    request.set_from_step(from);
    request.set_to_step(to);
    request.set_every(every);
    request.set_last(last);
    const auto reader = control_->Metrics(&context, request);
    std::vector<v1::StepMetrics> got;
    for (v1::MetricsReply reply; reader->Read(&reply);) got.insert(got.end(), reply.metrics().begin(), reply.metrics().end());
    EXPECT_TRUE(reader->Finish().ok());
    return got;
  };
  const auto all = ask(0, 0, 0, 0);
  ASSERT_EQ(all.size(), steps.size());
  for (size_t i = 0; i < all.size(); ++i) ASSERT_EQ(all[i].SerializeAsString(), steps[i].SerializeAsString());
  const auto few = ask(100, 400, 100, 2);
  ASSERT_EQ(few.size(), 2u);
  EXPECT_EQ(few[0].step(), 300);
  grpc::ClientContext context;
  v1::WatchRequest request;
  request.set_job_id(id);
  request.set_after_step(5000);
  const auto reader = control_->Watch(&context, request);
  int64_t next = 5001, dropped = 0;
  for (v1::WatchReply reply; next <= 20000 && reader->Read(&reply);) {
    for (const v1::StepMetrics& m : reply.metrics()) ASSERT_EQ(m.step(), next++);
    dropped += reply.metrics_dropped();
  }
  EXPECT_EQ(next, 20001);
  EXPECT_EQ(dropped, 0);
  context.TryCancel();
  (void)reader->Finish();
  grpc::ClientContext missing;
  request.set_job_id(4711);
  v1::MetricsRequest of_none;
  of_none.set_job_id(4711);
  const auto none = control_->Metrics(&missing, of_none);
  for (v1::MetricsReply reply; none->Read(&reply);) ADD_FAILURE();
  EXPECT_EQ(none->Finish().error_code(), grpc::NOT_FOUND);
}

TEST_F(ServiceTest, AListHasTheLossOfJobsThatEndedLongAgo) {
  const uint64_t id = Submit("k").id();
  std::vector<v1::StepMetrics> steps(3);
  for (size_t i = 0; i < steps.size(); ++i) {
    steps[i].set_step(static_cast<int64_t>(i) + 1);
    steps[i].set_loss(0.25 * static_cast<double>(i));
  }
  ASSERT_TRUE(history_->Append(id, steps).ok());
  Cancel(id);
  Stop();
  Start();   // which holds no ended jobs in memory
  v1::ListReply reply;
  grpc::ClientContext context;
  ASSERT_TRUE(control_->List(&context, {}, &reply).ok());
  ASSERT_EQ(reply.jobs_size(), 1);
  EXPECT_EQ(reply.jobs(0).last().step(), 3);
  EXPECT_EQ(reply.jobs(0).last().loss(), 0.5);
}

TEST_F(ServiceTest, IllegalSubmissionsAreRefusedWithSentences) {
  v1::SubmitReply reply;
  EXPECT_EQ(Submit("", Spec(), &reply).error_code(), grpc::INVALID_ARGUMENT);
  EXPECT_EQ(Submit(std::string(129, 'k'), Spec(), &reply).error_code(), grpc::INVALID_ARGUMENT);
  EXPECT_EQ(Submit("two words", Spec(), &reply).error_code(), grpc::INVALID_ARGUMENT);
  v1::JobSpec spec = Spec();
  spec.mutable_model()->set_mask_ratio(1.5);
  grpc::Status status = Submit("k", spec, &reply);
  EXPECT_EQ(status.error_code(), grpc::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("mask_ratio"));
  for (const std::string& path : {std::string("relative/path"), std::string("/a/../b")}) {
    spec = Spec();
    spec.mutable_output()->set_folder(path);
    status = Submit("k", spec, &reply);
    EXPECT_EQ(status.error_code(), grpc::INVALID_ARGUMENT) << path;
    EXPECT_THAT(status.error_message(), HasSubstr("output.folder"));
  }
}

TEST_F(ServiceTest, AnOutputFolderWithCheckpointsIsRefusedButARetriedSubmitIsNot) {
  v1::JobSpec spec = Spec();
  spec.mutable_output()->set_folder(folder_ + "/mine/");
  v1::SubmitReply reply;
  ASSERT_TRUE(Submit("k", spec, &reply).ok());
  EXPECT_EQ(reply.job().run_folder(), folder_ + "/mine");
  std::filesystem::create_directories(folder_ + "/mine/checkpoints/step-000000010");
  ASSERT_TRUE(Submit("k", spec, &reply).ok());   // the same submission, sent again
  EXPECT_TRUE(reply.existed());
  Cancel(reply.job().id());
  const grpc::Status status = Submit("k2", spec, &reply);
  EXPECT_EQ(status.error_code(), grpc::FAILED_PRECONDITION);
  EXPECT_THAT(status.error_message(), HasSubstr("step-000000010"));
}

TEST_F(ServiceTest, ValidateQueuesNothing) {
  grpc::ClientContext context, context2, context3;
  v1::ValidateRequest request;
  *request.mutable_spec() = Spec();
  v1::ValidateReply reply;
  ASSERT_TRUE(control_->Validate(&context, request, &reply).ok());
  EXPECT_EQ(reply.problems_size(), 0);
  ASSERT_EQ(reply.warnings_size(), 1);
  EXPECT_THAT(reply.warnings(0), HasSubstr("waits for an agent"));
  request.mutable_spec()->mutable_model()->set_mask_ratio(0);
  v1::ValidateReply bad;
  ASSERT_TRUE(control_->Validate(&context2, request, &bad).ok());
  EXPECT_GT(bad.problems_size(), 0);
  v1::ListReply list;
  ASSERT_TRUE(control_->List(&context3, v1::ListRequest(), &list).ok());
  EXPECT_EQ(list.jobs_size(), 0);
}

// An agent that says 8 GiB.
TEST_F(ServiceTest, ValidateSaysWhatNoNodeCanHold) {
  grpc::ClientContext context;
  HandAgent agent(channel_, MakeSlot("GPU-0", v1::Slot::CUDA, int64_t{8} << 30));
  ASSERT_TRUE(agent.Hear([](const v1::AgentOrders& orders) { return orders.sequence() > 0; }));   // it is known
  v1::ValidateRequest request;
  *request.mutable_spec() = Spec();
  request.mutable_spec()->mutable_step()->set_batch_per_rank(512);
  v1::ValidateReply reply;
  ASSERT_TRUE(control_->Validate(&context, request, &reply).ok());
  ASSERT_EQ(reply.warnings_size(), 1);
  EXPECT_THAT(reply.warnings(0), testing::AllOf(HasSubstr("resources: it needs "), HasSubstr("the largest card has 8.0 GiB")));
}

TEST_F(ServiceTest, ListIsNewestFirstAndFiltered) {
  std::vector<uint64_t> ids;
  for (int i = 0; i < 5; ++i) ids.push_back(Submit(absl::StrCat("k", i)).id());
  Cancel(ids[2]);
  const auto list = [&](v1::ListRequest request) {
    grpc::ClientContext context;
    v1::ListReply reply;
    EXPECT_TRUE(control_->List(&context, request, &reply).ok());
    std::vector<uint64_t> out;
    for (const v1::Job& job : reply.jobs()) out.push_back(job.id());
    return out;
  };
  v1::ListRequest request;
  EXPECT_THAT(list(request), testing::ElementsAre(ids[4], ids[3], ids[2], ids[1], ids[0]));
  request.add_states(v1::QUEUED);
  request.set_limit(2);
  request.set_before_id(ids[4]);
  EXPECT_THAT(list(request), testing::ElementsAre(ids[3], ids[1]));
  grpc::ClientContext context;
  request.add_states(static_cast<v1::JobState>(77));
  v1::ListReply reply;
  EXPECT_EQ(control_->List(&context, request, &reply).error_code(), grpc::INVALID_ARGUMENT);
}

TEST_F(ServiceTest, UnknownJobsAreNotFound) {
  grpc::ClientContext c1, c2, c3, c4, c5;
  v1::GetRequest get;
  get.set_job_id(99);
  v1::Job job;
  EXPECT_EQ(control_->Get(&c1, get, &job).error_code(), grpc::NOT_FOUND);
  v1::WatchRequest watch;
  watch.set_job_id(99);
  EXPECT_EQ(control_->Watch(&c2, watch)->Finish().error_code(), grpc::NOT_FOUND);
  v1::LogsRequest logs;
  logs.set_job_id(99);
  EXPECT_EQ(control_->Logs(&c3, logs)->Finish().error_code(), grpc::NOT_FOUND);
  v1::CancelRequest cancel;
  cancel.set_job_id(99);
  EXPECT_EQ(control_->Cancel(&c4, cancel, &job).error_code(), grpc::NOT_FOUND);
  v1::ListCheckpointsRequest checkpoints;
  checkpoints.set_job_id(99);
  v1::ListCheckpointsReply reply;
  EXPECT_EQ(control_->ListCheckpoints(&c5, checkpoints, &reply).error_code(), grpc::NOT_FOUND);
}

TEST_F(ServiceTest, WatchTellsAtOnceAndEndsWithTheJob) {
  const uint64_t id = Submit("k").id();
  grpc::ClientContext context;
  v1::WatchRequest request;
  request.set_job_id(id);
  auto reader = control_->Watch(&context, request);
  v1::WatchReply reply;
  ASSERT_TRUE(reader->Read(&reply));
  EXPECT_EQ(reply.job().state(), v1::QUEUED);
  Cancel(id);
  v1::JobState last = v1::QUEUED;
  while (reader->Read(&reply)) last = reply.job().state();
  EXPECT_EQ(last, v1::CANCELLED);
  EXPECT_TRUE(reader->Finish().ok());
}

// A line saying that nothing has happened needs something to print it by.
TEST_F(ServiceTest, WatchOfAJobThatDoesNotMoveIsToldAgain) {
  const uint64_t id = Submit("k").id();
  grpc::ClientContext context;
  v1::WatchRequest request;
  request.set_job_id(id);
  auto reader = control_->Watch(&context, request);
  v1::WatchReply reply;
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(reader->Read(&reply));
    EXPECT_EQ(reply.job().id(), id);
    EXPECT_EQ(reply.job().state(), v1::QUEUED);
  }
  context.TryCancel();
  (void)reader->Finish();
}

// An agent and a worker by hand, over the wire.
TEST_F(ServiceTest, AJobRunsOverTheWire) {
  grpc::ClientContext worker_context;
  HandAgent agent(channel_, MakeSlot("cpu-0", v1::Slot::CPU, 0));
  const uint64_t id = Submit("k").id();
  ASSERT_TRUE(agent.Hear([](const v1::AgentOrders& orders) { return orders.assignments_size() > 0; }));
  const v1::Assignment assignment = agent.orders.assignments(0);
  EXPECT_EQ(assignment.endpoint(), "");   // its agent knows better
  v1::RankProcess* process = agent.report.add_processes();
  process->set_job_id(id);
  process->set_attempt(1);
  process->set_slot_id("cpu-0");
  process->set_pid(4242);
  agent.report.set_orders_seen(agent.orders.sequence());
  ASSERT_TRUE(agent.Say());

  auto workers = v1::WorkerService::NewStub(channel_);
  auto worker = workers->Session(&worker_context);
  v1::WorkerReport work;
  work.set_job_id(id);
  work.set_attempt(1);
  work.set_credential(assignment.credential());
  work.set_phase(v1::PHASE_TRAINING);
  work.set_step(3);
  for (int step : {1, 2, 3}) work.add_metrics()->set_step(step);
  ASSERT_TRUE(worker->Write(work));
  v1::WorkerOrders told;
  do ASSERT_TRUE(worker->Read(&told));
  while (told.acknowledged_step() < 3);
  EXPECT_TRUE(WaitFor(id, v1::RUNNING));

  // Its log, followed to its end.
  std::ofstream(assignment.run_folder() + "/rank-0.log") << "one\ntwo\n";
  grpc::ClientContext logs_context;
  v1::LogsRequest logs_request;
  logs_request.set_job_id(id);
  logs_request.set_follow(true);
  auto logs = control_->Logs(&logs_context, logs_request);
  v1::LogsReply chunk;
  ASSERT_TRUE(logs->Read(&chunk));
  std::string text = chunk.chunk();
  std::ofstream(assignment.run_folder() + "/rank-0.log", std::ios::app) << "three\n";

  work.mutable_end()->set_reason(v1::REASON_COMPLETED);
  work.clear_metrics();
  ASSERT_TRUE(worker->Write(work));
  worker->WritesDone();
  while (worker->Read(&told)) EXPECT_FALSE(told.fenced());
  EXPECT_TRUE(worker->Finish().ok());
  process->set_ended(true);
  process->set_reason(v1::REASON_COMPLETED);
  ASSERT_TRUE(agent.Say());
  EXPECT_TRUE(WaitFor(id, v1::SUCCEEDED));
  while (logs->Read(&chunk)) text += chunk.chunk();
  EXPECT_TRUE(logs->Finish().ok());
  EXPECT_EQ(text, "one\ntwo\nthree\n");
  EXPECT_TRUE(agent.Hear([](const v1::AgentOrders& orders) { return orders.acknowledged_size() > 0; }));
}

TEST_F(ServiceTest, AForgedWorkerIsFencedOverTheWire) {
  grpc::ClientContext context;
  auto workers = v1::WorkerService::NewStub(channel_);
  auto worker = workers->Session(&context);
  v1::WorkerReport work;
  work.set_job_id(1);
  work.set_attempt(1);
  work.set_credential("guess");
  ASSERT_TRUE(worker->Write(work));
  v1::WorkerOrders told;
  ASSERT_TRUE(worker->Read(&told));   // the order comes before the end
  EXPECT_TRUE(told.fenced());
  EXPECT_FALSE(worker->Read(&told));
  EXPECT_EQ(worker->Finish().error_code(), grpc::FAILED_PRECONDITION);
}

TEST_F(ServiceTest, LogsOfALogThatIsNotThere) {
  const uint64_t id = Submit("k").id();
  grpc::ClientContext context, context2;
  v1::LogsRequest request;
  request.set_job_id(id);
  grpc::Status status = control_->Logs(&context, request)->Finish();
  EXPECT_EQ(status.error_code(), grpc::NOT_FOUND);
  request.set_rank(5);
  status = control_->Logs(&context2, request)->Finish();
  EXPECT_EQ(status.error_code(), grpc::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("ranks 0 to 0"));
}

TEST_F(ServiceTest, MessagesOverTheLimitAreRefused) {
  v1::JobSpec spec = Spec();
  spec.mutable_data()->set_path("/" + std::string(5 << 20, 'x'));
  v1::SubmitReply reply;
  EXPECT_EQ(Submit("k", spec, &reply).error_code(), grpc::RESOURCE_EXHAUSTED);
  spec.mutable_data()->set_path("/" + std::string(1 << 20, 'x'));
  EXPECT_EQ(Submit("k", spec, &reply).error_code(), grpc::INVALID_ARGUMENT);
}

TEST_F(ServiceTest, ASecondServerOnTheSocketIsRefusedAndAnOldSocketIsNot) {
  auto second = RpcServer::Start({Endpoint(), "", "", ""}, coordinator_.get(), &Clock::System());
  ASSERT_FALSE(second.ok());
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("in use"));
  struct stat info;
  ASSERT_EQ(stat((folder_ + "/hierad.sock").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  std::ofstream(folder_ + "/file") << "precious";
  auto on_file = RpcServer::Start({"unix:" + folder_ + "/file", "", "", ""}, coordinator_.get(), &Clock::System());
  EXPECT_FALSE(on_file.ok());
  EXPECT_TRUE(std::filesystem::exists(folder_ + "/file"));
}

TEST_F(ServiceTest, JobsSurviveARestart) {
  const uint64_t id = Submit("k").id();
  Stop();
  Start();
  EXPECT_EQ(Get(id).state(), v1::QUEUED);
}

TEST_F(ServiceTest, StopEndsWatches) {
  const uint64_t id = Submit("k").id();
  grpc::ClientContext context;
  v1::WatchRequest request;
  request.set_job_id(id);
  auto reader = control_->Watch(&context, request);
  v1::WatchReply reply;
  ASSERT_TRUE(reader->Read(&reply));
  const Deadline before = std::chrono::steady_clock::now();
  Stop();
  EXPECT_LT(std::chrono::steady_clock::now() - before, std::chrono::seconds(5));
  while (reader->Read(&reply)) {
  }
  EXPECT_EQ(reader->Finish().error_code(), grpc::UNAVAILABLE);
}

TEST_F(ServiceTest, VersionIsTold) {
  grpc::ClientContext context;
  v1::VersionReply reply;
  ASSERT_TRUE(control_->Version(&context, v1::VersionRequest(), &reply).ok());
  EXPECT_EQ(reply.version(), "1.2.3");
  EXPECT_GT(reply.started_ms(), 0);
}

// The page shows each user what the socket would: a submitter its own jobs, and of others not even that they failed.
TEST_F(ServiceTest, ThePageKeepsToRoles) {
  uint64_t ids[2];
  const char* submitters[] = {"alice", "bob"};
  for (int i = 0; i < 2; ++i) {
    v1::SubmitRequest request;
    request.set_client_key(absl::StrCat("key-", i));
    *request.mutable_spec() = Spec();
    request.mutable_spec()->set_name(absl::StrCat("of-", submitters[i]));
    FillDefaults(request.mutable_spec());
    const auto reply = Await<v1::SubmitReply>([&](auto done) { coordinator_->Submit(request, submitters[i], absl::OkStatus(), done); });
    ASSERT_TRUE(reply.ok()) << reply.status();
    ids[i] = reply->job().id();
  }
  const WebSources sources{coordinator_.get(), history_.get(), [this](uid_t uid) { return server_->CallerOfUser(uid); }};
  const Caller alice{kSubmitter | kWorker, "alice", false}, admin{kAdmin, "root", false}, viewer{kViewer, "guest", false};
  for (const Caller& all : {admin, viewer}) {
    const WebAnswer overview = AnswerWeb(sources, all, "/api/overview", "");
    EXPECT_THAT(overview.body, testing::AllOf(HasSubstr("of-alice"), HasSubstr("of-bob")));
    for (const uint64_t id : ids) EXPECT_EQ(AnswerWeb(sources, all, absl::StrCat("/api/jobs/", id), "").code, 200);
  }
  const WebAnswer overview = AnswerWeb(sources, alice, "/api/overview", "");
  EXPECT_THAT(overview.body, testing::AllOf(HasSubstr("of-alice"), testing::Not(HasSubstr("of-bob"))));
  EXPECT_EQ(AnswerWeb(sources, alice, absl::StrCat("/api/jobs/", ids[0]), "").code, 200);
  for (const char* what : {"", "/metrics", "/log"}) {
    const WebAnswer refused = AnswerWeb(sources, alice, absl::StrCat("/api/jobs/", ids[1], what), "");
    EXPECT_EQ(refused.code, 403) << what;
    EXPECT_THAT(refused.body, testing::Not(HasSubstr("bob")));
  }
  // The socket of this test is private.
  EXPECT_TRUE(server_->CallerOfUser(geteuid()).AllJobs());
  EXPECT_EQ(server_->CallerOfUser(geteuid() + 1).roles, 0u);
}

// Many clients at once, each with its own key: no answer is lost, no job doubled.
TEST_F(ServiceTest, ManyClientsAtOnce) {
  constexpr int kThreads = 8, kJobs = 25;
  std::vector<std::thread> threads;
  std::vector<std::set<uint64_t>> ids(kThreads);
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int j = 0; j < kJobs; ++j) ids[t].insert(Submit(absl::StrCat("k", t, "-", j)).id());
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::set<uint64_t> all;
  for (const auto& some : ids) all.insert(some.begin(), some.end());
  EXPECT_EQ(all.size(), static_cast<size_t>(kThreads * kJobs));
}

}  // namespace
}  // namespace hierad
