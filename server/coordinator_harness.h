// For tests: a coordinator on a state folder of its own, a clock that stands still, agents that do as they are told, and
// workers that say what the test wants.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/job_yaml.h"
#include "server/coordinator.h"

namespace hierad {

struct FakeAgentLink : AgentLink {
  void Send(const v1::AgentOrders& orders) override { sent.push_back(orders); }
  void Close(const absl::Status& status) override { closed = status; }
  std::vector<v1::AgentOrders> sent;
  std::optional<absl::Status> closed;
};
struct FakeWorkerLink : WorkerLink {
  void Send(const v1::WorkerOrders& orders) override { sent.push_back(orders); }
  void Close(const absl::Status& status) override { closed = status; }
  std::vector<v1::WorkerOrders> sent;
  std::optional<absl::Status> closed;
};

using RankKey = std::tuple<uint64_t, int, int>;   // job, attempt, rank

// An agent: starts what is ordered, ends what is not, forgets what is acknowledged.
class FakeNode {
 public:
  FakeNode(Coordinator* coordinator, std::string name, int slots, v1::Slot::Kind kind = v1::Slot::CPU, int64_t slot_bytes = 0)
      : coordinator_(coordinator), name_(std::move(name)) {
    for (int i = 0; i < slots; ++i) {
      v1::Slot& slot = slots_.emplace_back();
      slot.set_id(absl::StrCat(kind == v1::Slot::CPU ? "cpu-" : "gpu-", i));
      slot.set_kind(kind);
      slot.set_memory_bytes(slot_bytes);
    }
  }

  void Connect(Coordinator* coordinator = nullptr) {
    if (coordinator != nullptr) coordinator_ = coordinator;
    link = std::make_shared<FakeAgentLink>();
    session_ = coordinator_->OpenAgent(link);
    obeyed_ = 0;
    Report();
  }
  void Disconnect() {
    coordinator_->CloseAgent(session_);
    session_ = 0;
  }
  // hierad was killed; the next one is `coordinator`.
  void LoseHierad(Coordinator* coordinator) {
    coordinator_ = coordinator;
    session_ = 0;
  }
  void Report() {
    if (session_ == 0) return;
    v1::AgentReport report;
    report.set_node(name_);
    report.set_instance(instance);
    report.set_version("test");
    report.set_orders_seen(orders_seen_);
    for (const v1::Slot& slot : slots_) *report.add_slots() = slot;
    for (const auto& [key, process] : processes) *report.add_processes() = process;
    for (const v1::GpuFault& fault : gpu_faults) *report.add_gpu_faults() = fault;
    for (const v1::LogPiece& piece : log_pieces) *report.add_log_pieces() = piece;
    coordinator_->ReportAgent(session_, report, [] {});
  }
  // Carries out what came since; true: something changed.
  bool Obey() {
    if (session_ == 0 || obedient == false || link->sent.size() == obeyed_) return false;
    for (; obeyed_ < link->sent.size(); ++obeyed_) Apply(link->sent[obeyed_]);
    return true;
  }
  void End(RankKey key, v1::Reason reason, int code = 1, int signal = 0, const std::string& words = "") {
    v1::RankProcess& process = processes.at(key);
    process.set_ended(true);
    process.set_reason(reason);
    process.set_exit_code(code);
    process.set_signal(signal);
    process.set_last_words(words);
  }
  // As after a kill of the agent and its workers.
  void Die() {
    Disconnect();
    instance += "+";
    processes.clear();
    orders_seen_ = 0;
  }
  int running() const {
    int count = 0;
    for (const auto& [key, process] : processes) count += !process.ended();
    return count;
  }

  std::shared_ptr<FakeAgentLink> link;
  std::map<RankKey, v1::RankProcess> processes;
  std::map<RankKey, v1::Assignment> assigned;   // every assignment ever seen
  std::vector<RankKey> started, killed;
  std::vector<v1::GpuFault> gpu_faults;
  std::vector<v1::LogPiece> log_pieces;
  std::string instance = "i1";
  bool obedient = true;
  bool stubborn = false;   // workers ignore SIGTERM

 private:
  void Apply(const v1::AgentOrders& orders) {
    orders_seen_ = orders.sequence();
    for (const v1::RankId& id : orders.acknowledged()) processes.erase({id.job_id(), id.attempt(), id.rank()});
    for (const v1::RankId& id : orders.kill_now()) {
      const RankKey key{id.job_id(), id.attempt(), id.rank()};
      killed.push_back(key);
      if (processes.count(key) && !processes[key].ended()) End(key, v1::REASON_UNSPECIFIED, 0, 9);
    }
    std::set<RankKey> wanted;
    for (const v1::Assignment& a : orders.assignments()) {
      const RankKey key{a.job_id(), a.attempt(), a.rank()};
      wanted.insert(key);
      assigned[key] = a;
      if (processes.count(key)) continue;
      v1::RankProcess& process = processes[key];
      process.set_job_id(a.job_id());
      process.set_attempt(a.attempt());
      process.set_rank(a.rank());
      process.set_slot_id(a.slot().id());
      process.set_pid(++next_pid_);
      started.push_back(key);
    }
    for (auto& [key, process] : processes) {
      if (!wanted.count(key) && !process.ended() && !stubborn) End(key, v1::REASON_UNSPECIFIED, 0, 15);
    }
  }

  Coordinator* coordinator_;
  const std::string name_;
  std::vector<v1::Slot> slots_;
  uint64_t session_ = 0, orders_seen_ = 0;
  size_t obeyed_ = 0;
  static inline int next_pid_ = 1000;
};

class FakeWorker {
 public:
  FakeWorker(Coordinator* coordinator, const v1::Assignment& assignment) : coordinator_(coordinator) {
    report.set_job_id(assignment.job_id());
    report.set_attempt(assignment.attempt());
    report.set_rank(assignment.rank());
    report.set_credential(assignment.credential());
    report.set_phase(v1::PHASE_STARTING);
  }
  void Connect(Coordinator* coordinator = nullptr) {
    if (coordinator != nullptr) coordinator_ = coordinator;
    link = std::make_shared<FakeWorkerLink>();
    session = coordinator_->OpenWorker(link);
    Report();
  }
  void Report() { coordinator_->ReportWorker(session, report, [] {}); }
  void Train(int64_t step) {
    report.set_phase(v1::PHASE_TRAINING);
    report.set_step(step);
    report.set_total_steps(100);
    Report();
  }
  void End(v1::Reason reason, const std::string& message) {
    report.set_phase(v1::PHASE_DONE);
    report.mutable_end()->set_reason(reason);
    report.mutable_end()->set_message(message);
    Report();
  }
  void Close() {
    coordinator_->CloseWorker(session);
    session = 0;
  }
  // As each second, unless it is frozen.
  void SignOfLife() {
    if (session != 0 && !frozen && !report.has_end() && !link->closed) Report();
  }
  void LoseHierad(Coordinator* coordinator) {
    coordinator_ = coordinator;
    session = 0;
  }
  const v1::WorkerOrders& orders() const { return link->sent.back(); }

  v1::WorkerReport report;
  std::shared_ptr<FakeWorkerLink> link;
  uint64_t session = 0;
  bool frozen = false;

 private:
  Coordinator* coordinator_;
};

class CoordinatorTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string path = testing::TempDir() + "/hierad_coordinator_XXXXXX";
    folder_ = mkdtemp(path.data());
    Open();
  }
  void TearDown() override {
    coordinator_.reset();
    std::filesystem::remove_all(folder_);
  }
  void Open() {
    auto store = Store::Open(folder_ + "/hierad.db", 50);
    ASSERT_TRUE(store.ok()) << store.status();
    CoordinatorOptions options;
    options.runs_folder = folder_ + "/runs";
    options.free_bytes = [this](const std::string&) -> absl::StatusOr<int64_t> { return free_bytes_; };
    auto coordinator = Coordinator::Create(options, *std::move(store), &clock_);
    ASSERT_TRUE(coordinator.ok()) << coordinator.status();
    coordinator_ = *std::move(coordinator);
  }
  // As after a kill of hierad: nothing is said to anyone.
  void Restart() {
    coordinator_.reset();
    Open();
    for (auto& node : nodes_) node->LoseHierad(coordinator_.get());
    for (auto& worker : workers_) worker->LoseHierad(coordinator_.get());
  }
  FakeNode* AddNode(const std::string& name, int slots, v1::Slot::Kind kind = v1::Slot::CPU, int64_t slot_bytes = 0) {
    nodes_.push_back(std::make_unique<FakeNode>(coordinator_.get(), name, slots, kind, slot_bytes));
    nodes_.back()->Connect();
    Settle();
    return nodes_.back().get();
  }
  // Turns until nobody has anything to say.
  void Settle() {
    for (int i = 0; i < 20; ++i) {
      coordinator_->Turn();
      bool more = false;
      for (auto& node : nodes_) {
        if (!node->Obey()) continue;
        more = true;
        node->Report();
      }
      if (!more && i > 0) return;
    }
    FAIL() << "orders and reports go round in circles";
  }
  void Pass(int seconds) {
    for (int s = 0; s < seconds; ++s) {
      clock_.Advance(std::chrono::seconds(1));
      for (auto& node : nodes_) node->Report();
      for (auto& worker : workers_) worker->SignOfLife();
      Settle();
    }
  }
  static v1::JobSpec Spec(int ranks = 1) {
    v1::JobSpec spec;
    spec.set_name("job");
    spec.mutable_data()->set_source("synthetic");
    spec.mutable_schedule()->set_steps(100);
    spec.mutable_resources()->set_ranks(ranks);
    FillDefaults(&spec);
    return spec;
  }
  absl::StatusOr<v1::SubmitReply> TrySubmit(const std::string& key, const v1::JobSpec& spec) {
    v1::SubmitRequest request;
    request.set_client_key(key);
    *request.mutable_spec() = spec;
    std::optional<absl::StatusOr<v1::SubmitReply>> answer;
    coordinator_->Submit(request, "me", absl::OkStatus(), [&](auto reply) { answer = std::move(reply); });
    coordinator_->Turn();
    EXPECT_TRUE(answer.has_value());
    return *std::move(answer);
  }
  uint64_t Submit(const std::string& key, const v1::JobSpec& spec = Spec()) {
    auto reply = TrySubmit(key, spec);
    EXPECT_TRUE(reply.ok()) << reply.status();
    Settle();
    return reply.ok() ? reply->job().id() : 0;
  }
  absl::StatusOr<v1::Job> TryGet(uint64_t id) {
    std::optional<absl::StatusOr<v1::Job>> answer;
    coordinator_->Get(id, [&](auto reply) { answer = std::move(reply); });
    coordinator_->Turn();
    return *std::move(answer);
  }
  v1::Job Get(uint64_t id) {
    auto job = TryGet(id);
    EXPECT_TRUE(job.ok()) << job.status();
    return job.ok() ? *job : v1::Job();
  }
  // `ask`: (reply) -> void, of a Coordinator's method.
  template <typename AskFunction>
  absl::StatusOr<v1::Job> TryAsk(const AskFunction& ask) {
    std::optional<absl::StatusOr<v1::Job>> answer;
    ask([&](absl::StatusOr<v1::Job> reply) { answer = std::move(reply); });
    coordinator_->Turn();
    Settle();
    return *std::move(answer);
  }
  template <typename AskFunction>
  v1::Job Ask(const AskFunction& ask) {
    auto job = TryAsk(ask);
    EXPECT_TRUE(job.ok()) << job.status();
    return job.ok() ? *job : v1::Job();
  }
  v1::Job Cancel(uint64_t id, bool now = false) {
    return Ask([&](auto reply) { coordinator_->Cancel(id, now, reply); });
  }
  // The worker of a rank that a node was told to run.
  FakeWorker* Worker(FakeNode* node, uint64_t job, int attempt, int rank) {
    workers_.push_back(std::make_unique<FakeWorker>(coordinator_.get(), node->assigned.at({job, attempt, rank})));
    workers_.back()->Connect();
    Settle();
    return workers_.back().get();
  }
  // All ranks of a job's attempt on one node, training at `step`.
  std::vector<FakeWorker*> Train(FakeNode* node, uint64_t job, int attempt, int ranks, int64_t step = 1) {
    std::vector<FakeWorker*> workers;
    for (int r = 0; r < ranks; ++r) workers.push_back(Worker(node, job, attempt, r));
    for (FakeWorker* worker : workers) worker->Train(step);
    Settle();
    return workers;
  }

  FakeClock clock_;
  int64_t free_bytes_ = int64_t{1} << 40;
  std::string folder_;
  std::unique_ptr<Coordinator> coordinator_;
  std::vector<std::unique_ptr<FakeNode>> nodes_;
  std::vector<std::unique_ptr<FakeWorker>> workers_;
};

}  // namespace hierad
