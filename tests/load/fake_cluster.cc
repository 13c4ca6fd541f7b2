// A node of fake ranks: it dials hierad as an agent with any number of slots, and plays the workers it is told to start over
// real sessions, with metrics at any rate and no training. For load, dashboards and alerts. A job's name says how its ranks
// behave: "nan..." has a loss that is not finite from step 50 on, "explode..." one that grows, "data..." waits for input, "comm..."
// for the all-reduce, "hang..." stops at step 100, "slow..." halves its speed at step 300, "oom..." loses its first attempt;
// any other name trains well.
#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <atomic>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/limits.h"
#include "base/random.h"
#include "hierad/v1/agent.grpc.pb.h"
#include "hierad/v1/control.grpc.pb.h"
#include "hierad/v1/worker.grpc.pb.h"

namespace hierad {
namespace {

std::atomic<bool> ending{false};

struct Options {
  std::string server, node = "fake", model = "NVIDIA H200", kind = "cuda";
  int slots = 8, faulty = 0;   // of them, the last: their cards have an Xid 79
  double rate = 10;       // steps a second and rank
  int64_t steps = 0;      // of each job; 0: as the job says
  double seconds = 0;     // then it goes; 0: until SIGTERM
  int submit = 0;         // jobs that it queues itself first, of one rank each
  std::string submit_name = "load";
};

// One bidirectional stream: the newest orders, and one report under way at a time.
template <typename Report, typename Orders>
class Stream : public grpc::ClientBidiReactor<Report, Orders> {
 public:
  template <typename Stub>
  explicit Stream(Stub* stub) {
    stub->async()->Session(&context_, this);
    this->AddHold();
    this->StartCall();
    this->StartRead(&incoming_);
  }
  // False: the one before is still under way.
  bool Send(Report report) {
    std::lock_guard lock(mutex_);
    if (writing_ || broken_) return false;
    report_ = std::move(report);
    writing_ = true;
    this->StartWrite(&report_);
    return true;
  }
  // After the last report was sent.
  void Finish() {
    std::lock_guard lock(mutex_);
    if (!held_) return;
    held_ = false;
    this->StartWritesDone();
    this->RemoveHold();
  }
  Orders orders() const {
    std::lock_guard lock(mutex_);
    return orders_;
  }
  bool idle() const {
    std::lock_guard lock(mutex_);
    return !writing_;
  }
  bool broken() const {
    std::lock_guard lock(mutex_);
    return broken_;
  }

  void OnReadDone(bool ok) override {
    {
      std::lock_guard lock(mutex_);
      if (ok) orders_ = incoming_;
      else broken_ = true;
    }
    if (ok) this->StartRead(&incoming_);
  }
  void OnWriteDone(bool ok) override {
    std::lock_guard lock(mutex_);
    writing_ = false;
    broken_ = broken_ || !ok;
  }
  void OnDone(const grpc::Status&) override {
    std::lock_guard lock(mutex_);
    broken_ = true;
  }

 private:
  grpc::ClientContext context_;
  mutable std::mutex mutex_;
  Report report_;
  Orders incoming_, orders_;
  bool writing_ = false, broken_ = false, held_ = true;
};

using WorkerStream = Stream<v1::WorkerReport, v1::WorkerOrders>;
using AgentStream = Stream<v1::AgentReport, v1::AgentOrders>;

class FakeRank {
 public:
  FakeRank(const Options& options, const v1::Assignment& assignment, v1::WorkerService::Stub* stub, int pid)
      : options_(options), assignment_(assignment), pid_(pid), stream_(new WorkerStream(stub)), started_(Now()) {
    const auto& schedule = assignment.spec().schedule();
    total_ = options.steps > 0 ? options.steps : schedule.has_steps() ? schedule.steps() : 1'000'000;
    for (const v1::CheckpointInfo& info : assignment.checkpoints()) first_ = std::max(first_, info.step());
    step_ = first_;
    report_.set_job_id(assignment.job_id());
    report_.set_attempt(assignment.attempt());
    report_.set_rank(assignment.rank());
    report_.set_credential(assignment.credential());
    report_.set_pid(pid);
    report_.set_total_steps(total_);
    report_.set_first_step(first_ + 1);
    report_.set_phase(v1::PHASE_TRAINING);
    if (assignment.rank() == 0) report_.set_rendezvous("fake");
    report_.set_checkpoints_known(assignment.rank() == 0);
    for (const v1::CheckpointInfo& info : assignment.checkpoints()) *report_.add_checkpoints() = info;
  }

  void Tick() {
    if (ended_) return;
    if (stream_->broken()) {
      ended_ = true;
      return;
    }
    if (!stream_->idle()) return;
    const v1::WorkerOrders orders = stream_->orders();
    if (report_.has_end()) {   // sent: the process ends
      stream_->Finish();
      ended_ = true;
      return;
    }
    v1::WorkerReport report = Work();
    const bool lost = Is("oom") && assignment_.attempt() == 1 && step_ >= 50;
    if (orders.want() == v1::WorkerOrders::WANT_CANCEL || orders.want() == v1::WorkerOrders::WANT_PAUSE) {
      End(orders.want() == v1::WorkerOrders::WANT_CANCEL ? v1::REASON_CANCELLED : v1::REASON_PREEMPTED, "stopped");
    } else if (lost) {
      End(v1::REASON_CUDA_OOM, "out of memory on the GPU, as the job's name asks");
    } else if (step_ >= total_) {
      End(v1::REASON_COMPLETED, "completed");
    }
    if (report_.has_end()) *report.mutable_end() = report_.end();
    stream_->Send(std::move(report));
  }

  bool ended() const { return ended_; }
  v1::RankProcess Process() const {
    v1::RankProcess process;
    process.set_job_id(assignment_.job_id());
    process.set_attempt(assignment_.attempt());
    process.set_rank(assignment_.rank());
    process.set_slot_id(assignment_.slot().id());
    process.set_pid(pid_);
    process.set_ended(ended_);
    const v1::Reason reason = report_.end().reason();
    if (ended_) process.set_exit_code(reason == v1::REASON_COMPLETED ? 0 : report_.has_end() ? 40 + reason : 1);
    return process;
  }
  void Stop() {
    if (!ended_ && !report_.has_end()) End(v1::REASON_PREEMPTED, "ended by its agent");
  }

 private:
  static std::chrono::nanoseconds Now() { return Clock::System().Monotonic(); }
  bool Is(const char* word) const { return assignment_.spec().name().rfind(word, 0) == 0; }
  void End(v1::Reason reason, const char* message) {
    report_.mutable_end()->set_reason(reason);
    report_.mutable_end()->set_message(message);
  }

  // The steps that are due by now, as a report.
  v1::WorkerReport Work() {
    std::vector<v1::StepMetrics> metrics;
    const double elapsed = std::chrono::duration<double>(Now() - started_).count();
    int64_t due = first_ + int64_t(elapsed * options_.rate);
    if (Is("slow") && due > 300) due = 300 + (due - 300) / 2;
    if (Is("hang")) due = std::min<int64_t>(due, 100);
    due = std::min({due, total_, step_ + limits::kMetricBatch});
    const double step_s = 1 / options_.rate * (Is("slow") && due > 300 ? 2 : 1);
    v1::RankTotals& totals = *report_.mutable_totals();
    while (step_ < due) {
      const v1::StepMetrics m = Step(++step_, step_s);
      totals.set_step_count(totals.step_count() + 1);
      totals.set_samples(totals.samples() + assignment_.spec().step().batch_per_rank());
      totals.set_step_s(totals.step_s() + step_s);
      totals.set_data_wait_s(totals.data_wait_s() + m.data_wait_s());
      totals.set_forward_s(totals.forward_s() + m.forward_s());
      totals.set_backward_s(totals.backward_s() + m.backward_s());
      totals.set_communication_s(totals.communication_s() + m.communication_s());
      totals.set_optimizer_s(totals.optimizer_s() + m.optimizer_s());
      totals.set_memory_bytes(int64_t{9} << 30);
      v1::DataCounters& data = *report_.mutable_data();
      data.set_wait_s(data.wait_s() + m.data_wait_s());
      data.set_bytes(data.bytes() + 100'000 * int64_t{assignment_.spec().step().batch_per_rank()});
      data.set_samples(totals.samples());
      data.set_threads(Is("data") ? 8 : 1);
      data.set_slowest("/data/images/n01440764/img_4711.jpg (sample 4711)");
      data.set_slowest_s(Is("data") ? 0.8 : 0.02);
      data.set_skipped_samples(Is("data") ? 3 : 0);
      report_.set_nan_steps(report_.nan_steps() + (m.skipped() ? 1 : 0));
      if (assignment_.rank() == 0) metrics.push_back(m);
      if (step_ % assignment_.spec().checkpoint().every_steps() == 0) Save(&totals);
    }
    report_.set_step(step_);
    report_.set_samples_per_s(assignment_.spec().step().batch_per_rank() * double(assignment_.world_size()) / step_s);
    v1::WorkerReport report = report_;
    report.mutable_metrics()->Assign(metrics.begin(), metrics.end());
    return report;
  }

  v1::StepMetrics Step(int64_t step, double step_s) const {
    const RandomStream random{assignment_.job_id(), Draw::kSynthetic, 0, uint64_t(step)};
    v1::StepMetrics m;
    m.set_step(step);
    m.set_epoch(double(step) / 100);
    m.set_loss(0.3 + 0.8 * std::exp(-double(step) / 200) + 0.02 * random.Uniform(0));
    if (Is("explode")) m.set_loss(m.loss() * std::exp2(double(step) / 20));
    m.set_grad_norm(1 + random.Uniform(1));
    m.set_lr(1e-3 * std::min(1.0, double(step) / 100));
    m.set_samples(int64_t(assignment_.spec().step().batch_per_rank()) * assignment_.world_size());
    if (Is("nan") && step >= 50) {
      m.set_loss(std::numeric_limits<double>::quiet_NaN());
      m.set_skipped(true);
    }
    m.set_step_s(step_s);
    m.set_data_wait_s(step_s * (Is("data") ? 0.40 : 0.02));
    m.set_communication_s(step_s * (Is("comm") ? 0.20 : 0.02));
    const double rest = step_s - m.data_wait_s() - m.communication_s();
    m.set_forward_s(0.30 * rest);
    m.set_backward_s(0.60 * rest);
    m.set_optimizer_s(0.06 * rest);
    m.set_time_ms(Clock::System().UnixMs());
    if (step % 100 == 0) m.set_eval_loss(m.loss() * 1.1);
    return m;
  }

  void Save(v1::RankTotals* totals) {
    if (assignment_.rank() != 0) return;
    v1::CheckpointInfo info;
    info.set_step(step_);
    info.set_path(assignment_.run_folder() + "/checkpoints/step-" + std::to_string(step_));
    info.set_bytes(123'000'000);
    info.set_sha256(std::string(64, 'a'));
    info.set_created_ms(Clock::System().UnixMs());
    report_.clear_checkpoints();
    *report_.add_checkpoints() = info;
    totals->set_checkpoint_count(totals->checkpoint_count() + 1);
    totals->set_checkpoint_s(0.4);
  }

  const Options& options_;
  const v1::Assignment assignment_;
  const int pid_;
  WorkerStream* const stream_;   // never freed: the library may still hold it
  const std::chrono::nanoseconds started_;
  int64_t total_ = 0, first_ = 0, step_ = 0;
  v1::WorkerReport report_;      // without metrics
  bool ended_ = false;
};

using RankKey = std::tuple<uint64_t, int, int>;
RankKey KeyOf(const v1::Assignment& a) { return {a.job_id(), a.attempt(), a.rank()}; }

bool SubmitJobs(const Options& options, const std::shared_ptr<grpc::Channel>& channel) {
  const auto control = v1::ControlService::NewStub(channel);
  for (int i = 0; i < options.submit; ++i) {
    grpc::ClientContext context;
    v1::SubmitRequest request;
    request.set_client_key(options.submit_name + "-" + std::to_string(getpid()) + "-" + std::to_string(i));
    request.mutable_spec()->set_name(options.submit_name + "-" + std::to_string(i));
    request.mutable_spec()->mutable_data()->set_source("synthetic");
    request.mutable_spec()->mutable_schedule()->set_steps(options.steps > 0 ? options.steps : 1'000'000);
    request.mutable_spec()->mutable_resources()->set_device(options.kind);
    v1::SubmitReply reply;
    if (const grpc::Status status = control->Submit(&context, request, &reply); !status.ok()) {
      std::fprintf(stderr, "fake_cluster: %s\n", status.error_message().c_str());
      return false;
    }
  }
  return true;
}

int Run(const Options& options) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(int(limits::kGrpcMessageBytes));
  const auto channel = grpc::CreateCustomChannel(options.server, grpc::InsecureChannelCredentials(), arguments);
  const auto agent_stub = v1::AgentService::NewStub(channel);
  const auto worker_stub = v1::WorkerService::NewStub(channel);
  if (!SubmitJobs(options, channel)) return 1;
  auto* agent = new AgentStream(agent_stub.get());
  std::map<RankKey, std::unique_ptr<FakeRank>> ranks;
  v1::AgentReport report;
  report.set_node(options.node);
  report.set_instance("fake-" + std::to_string(getpid()));
  report.set_version("fake");
  for (int i = 0; i < options.slots; ++i) {
    v1::Slot* slot = report.add_slots();
    slot->set_id((options.kind == "cuda" ? "GPU-fake-" : "cpu-") + std::to_string(i));
    slot->set_kind(options.kind == "cuda" ? v1::Slot::CUDA : v1::Slot::CPU);
    slot->set_model(options.model);
    slot->set_memory_bytes(int64_t{139} << 30);
    if (i < options.slots - options.faulty) continue;
    v1::GpuFault* fault = report.add_gpu_faults();
    fault->set_slot_id(slot->id());
    fault->set_xid(79);
  }
  const auto begin = Clock::System().Monotonic();
  int next_pid = 100000;
  for (int64_t tick = 0; !ending; ++tick) {
    if (options.seconds > 0 && std::chrono::duration<double>(Clock::System().Monotonic() - begin).count() > options.seconds) break;
    if (agent->broken()) {
      std::fprintf(stderr, "fake_cluster: hierad ended the agent's session\n");
      return 1;
    }
    const v1::AgentOrders orders = agent->orders();
    std::set<RankKey> wanted;
    for (const v1::Assignment& a : orders.assignments()) {
      wanted.insert(KeyOf(a));
      auto& rank = ranks[KeyOf(a)];
      if (rank == nullptr) rank = std::make_unique<FakeRank>(options, a, worker_stub.get(), next_pid++);
    }
    for (const v1::RankId& id : orders.acknowledged()) {
      const auto found = ranks.find({id.job_id(), id.attempt(), id.rank()});
      if (found != ranks.end() && found->second->ended()) ranks.erase(found);
    }
    // Once a second each, spread over it.
    size_t place = 0;
    for (auto& [key, rank] : ranks) {
      if (wanted.count(key) == 0) rank->Stop();
      if (place++ % 10 == size_t(tick % 10)) rank->Tick();
    }
    report.set_orders_seen(orders.sequence());
    report.clear_log_pieces();
    for (const v1::LogWanted& log : orders.logs()) {   // fake ranks write none
      v1::LogPiece* piece = report.add_log_pieces();
      piece->set_id(log.id());
      piece->set_missing(true);
    }
    report.clear_processes();
    for (const auto& [key, rank] : ranks) *report.add_processes() = rank->Process();
    if (tick % 5 == 0) agent->Send(report);
    SleepFor(std::chrono::milliseconds(100));
  }
  return 0;
}

}  // namespace
}  // namespace hierad

int main(int argc, char** argv) {
  hierad::Options options;
  CLI::App app{"Plays a node of fake ranks for load and dashboards."};
  app.add_option("--server", options.server, "hierad's endpoint")->required();
  app.add_option("--node", options.node, "Name of the node")->capture_default_str();
  app.add_option("--slots", options.slots, "Its slots")->capture_default_str();
  app.add_option("--faulty", options.faulty, "Of them, with a fault of their card")->capture_default_str();
  app.add_option("--kind", options.kind, "Of the slots")->check(CLI::IsMember({"cpu", "cuda"}))->capture_default_str();
  app.add_option("--model", options.model, "Their card")->capture_default_str();
  app.add_option("--rate", options.rate, "Steps a second and rank")->capture_default_str();
  app.add_option("--steps", options.steps, "Steps of each job; 0: as the job says")->capture_default_str();
  app.add_option("--seconds", options.seconds, "Ends after so long; 0: at SIGTERM")->capture_default_str();
  app.add_option("--submit", options.submit, "Jobs of one rank that it queues itself first")->capture_default_str();
  app.add_option("--submit-name", options.submit_name, "Their names begin so")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  std::signal(SIGTERM, [](int) { hierad::ending = true; });
  std::signal(SIGINT, [](int) { hierad::ending = true; });
  const int code = hierad::Run(options);
  std::fflush(nullptr);
  _exit(code);   // streams may still be open
}
