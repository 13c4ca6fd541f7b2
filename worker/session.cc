#include "worker/session.h"

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <mutex>
#include <thread>
#include <unistd.h>
#include <utility>

#include <grpcpp/grpcpp.h>
#include <spdlog/spdlog.h>

#include "absl/strings/str_cat.h"
#include "base/channel/channel.h"
#include "base/clock.h"
#include "base/failpoint.h"
#include "base/fs.h"
#include "base/limits.h"
#include "base/log_format.h"
#include "base/random.h"
#include "base/status.h"
#include "base/text.h"
#include "base/worker_exit.h"
#include "hierad/v1/worker.grpc.pb.h"
#include "worker/metrics/metrics_queue.h"

namespace hierad {
namespace {

constexpr std::chrono::milliseconds kReportEvery{1000};
constexpr std::chrono::milliseconds kReportAtMostEvery{50};   // a job may make a thousand steps a second
constexpr std::chrono::milliseconds kLookEvery{200};          // for SIGTERM
constexpr std::chrono::milliseconds kFirstBackoff{100};
constexpr std::chrono::milliseconds kLongestBackoff{2000};   // short: a restarted hierad waits for its ranks
constexpr std::chrono::milliseconds kChannelBackoff{500};    // of the channel: when to try is this session's business
constexpr size_t kNameBytes = 1000;   // of a file, or of what is waited for

std::chrono::nanoseconds Now() { return Clock::System().Monotonic(); }

class GrpcSession : public Session {
 public:
  GrpcSession(const v1::Assignment& assignment, const std::atomic<bool>* terminate)
      : endpoint_(assignment.endpoint()), terminate_(terminate) {
    report_.set_job_id(assignment.job_id());
    report_.set_attempt(assignment.attempt());
    report_.set_rank(assignment.rank());
    report_.set_credential(assignment.credential());
    report_.set_phase(v1::PHASE_STARTING);
    report_.set_pid(getpid());
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(int(limits::kGrpcMessageBytes));
    arguments.SetMaxSendMessageSize(int(limits::kGrpcMessageBytes));
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 20'000);
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10'000);
    arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, int(kFirstBackoff.count()));
    arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, int(kFirstBackoff.count()));
    arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, int(kChannelBackoff.count()));
    arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
    const auto credentials = CredentialsFor(endpoint_, assignment.certificates()).value();   // main has checked the assignment
    stub_ = v1::WorkerService::NewStub(grpc::CreateCustomChannel(endpoint_, credentials, arguments));
    thread_ = std::thread([this] { Run(); });
  }

  ~GrpcSession() override {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
      if (context_ != nullptr) context_->TryCancel();
    }
    changed_.notify_all();
    thread_.join();
  }

  void SetPhase(v1::Phase phase) override {
    Change(/*urgent=*/true, [&] { report_.set_phase(phase); });
  }
  void SetProgress(int64_t step, int64_t total_steps, int64_t first_step) override {
    Change(/*urgent=*/false, [&] {
      report_.set_step(step);
      report_.set_total_steps(total_steps);
      report_.set_first_step(first_step);
    });
  }
  void SetCounters(int64_t nan_steps, double samples_per_s) override {
    Change(/*urgent=*/false, [&] {
      report_.set_nan_steps(nan_steps);
      report_.set_samples_per_s(samples_per_s);
    });
  }
  void SetTotals(const v1::RankTotals& totals) override {
    Change(/*urgent=*/false, [&] { *report_.mutable_totals() = totals; });
  }
  void SetDataCounters(const v1::DataCounters& counters) override {
    Change(/*urgent=*/false, [&] {
      *report_.mutable_data() = counters;
      report_.mutable_data()->set_slowest(Printable(counters.slowest(), kNameBytes));
    });
  }
  void SetWaitingIn(std::function<std::string()> ask) override {
    std::lock_guard lock(ask_mutex_);
    ask_ = std::move(ask);
  }
  void AddMetrics(const v1::StepMetrics& metrics) override {
    queue_.Add(metrics);
    Change(/*urgent=*/false, [] {});
  }
  void SetCheckpoints(const std::vector<v1::CheckpointInfo>& checkpoints) override {
    Change(/*urgent=*/true, [&] {
      report_.mutable_checkpoints()->Assign(checkpoints.begin(), checkpoints.end());
      report_.set_checkpoints_known(true);
    });
  }
  void OfferRendezvous(const std::string& rendezvous) override {
    Change(/*urgent=*/true, [&] { report_.set_rendezvous(rendezvous); });
  }

  absl::StatusOr<std::string> AwaitRendezvous(std::chrono::milliseconds timeout) override {
    const auto deadline = Now() + timeout;
    std::unique_lock lock(mutex_);
    while (orders_.rendezvous().empty()) {
      if (StopWantedLocked()) return ErrorOf(v1::REASON_CANCELLED, "stopped while waiting for rank 0's rendezvous");
      if (Now() >= deadline) {
        return ErrorOf(v1::REASON_PEER_LOST, absl::StrCat("rank ", report_.rank(), " waited ", timeout.count() / 1000,
                                                          " s for rank 0's rendezvous; see rank-0.log"));
      }
      changed_.wait_for(lock, kLookEvery);
    }
    return orders_.rendezvous();
  }

  Want want() const override {
    std::lock_guard lock(mutex_);
    return WantLocked();
  }
  int64_t checkpoint_request() const override {
    std::lock_guard lock(mutex_);
    return orders_.checkpoint_request();
  }
  double peak_lr() const override {
    std::lock_guard lock(mutex_);
    return orders_.peak_lr();
  }
  void AbandonOnStop(std::atomic<bool>* flag) override {
    std::lock_guard lock(mutex_);
    abandon_ = flag;
    AbandonLocked();
  }

  // The stream ends well only after hierad has taken the report in and stored what it says.
  bool End(v1::Reason reason, const std::string& message, std::chrono::milliseconds timeout) override {
    Change(/*urgent=*/true, [&] {
      report_.mutable_end()->set_reason(reason);
      report_.mutable_end()->set_message(PrintableSentence(message, size_t(limits::kMessageBytes)));
      report_.set_phase(v1::PHASE_DONE);
    });
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, timeout, [this] { return ended_; });
  }

 private:
  using Stream = grpc::ClientReaderWriter<v1::WorkerReport, v1::WorkerOrders>;

  template <typename F>
  void Change(bool urgent, F change) {
    {
      std::lock_guard lock(mutex_);
      change();
      dirty_ = true;
      urgent_ = urgent_ || urgent;
    }
    changed_.notify_all();
  }

  Want WantLocked() const {
    switch (orders_.want()) {
      case v1::WorkerOrders::WANT_PAUSE: return Want::kPause;
      case v1::WorkerOrders::WANT_CANCEL: return Want::kCancel;
      default: return Want::kRun;
    }
  }
  bool StopWantedLocked() const { return WantLocked() != Want::kRun || (terminate_ != nullptr && terminate_->load()); }
  void AbandonLocked() {
    if (abandon_ != nullptr && StopWantedLocked()) abandon_->store(true);
  }

  void Run() {
    auto backoff = kFirstBackoff;
    for (uint32_t tries = 0;; ++tries) {
      const bool heard = RunStream();
      std::unique_lock lock(mutex_);
      if (stop_ || ended_) return;
      backoff = heard ? kFirstBackoff : std::min(2 * backoff, kLongestBackoff);
      // Spread, so that all ranks do not come back in the same instant.
      const RandomStream spread{report_.job_id(), Draw::kOrder, tries, uint64_t(report_.rank())};
      const auto until = Now() + std::chrono::nanoseconds(int64_t(double(backoff.count()) * 1e6 * (0.75 + 0.5 * spread.Uniform(0))));
      while (!stop_ && Now() < until) {
        changed_.wait_for(lock, std::min<std::chrono::nanoseconds>(kLookEvery, until - Now()));
        AbandonLocked();
      }
      if (stop_) return;
    }
  }

  // One connection; true: orders came.
  bool RunStream() {
    grpc::ClientContext context;
    {
      std::lock_guard lock(mutex_);
      if (stop_) return false;
      context_ = &context;
      broken_ = heard_ = false;
      dirty_ = urgent_ = true;   // everything is sent again
    }
    const std::unique_ptr<Stream> stream = stub_->Session(&context);
    std::thread reader([&] { ReadOrders(stream.get()); });
    const bool said_all = WriteReports(stream.get());
    if (!said_all) context.TryCancel();
    reader.join();
    const grpc::Status status = stream->Finish();
    {
      std::lock_guard lock(mutex_);
      context_ = nullptr;
      ended_ = ended_ || (said_all && status.ok());
    }
    changed_.notify_all();
    if (status.error_code() == grpc::StatusCode::FAILED_PRECONDITION) Fenced();
    if (!status.ok() && status.error_code() != grpc::StatusCode::CANCELLED && !away_said_) {
      spdlog::warn("hierad at {} is away ({}); training goes on", endpoint_, status.error_message());
      away_said_ = true;
    }
    if (heard_) away_said_ = false;
    return heard_;
  }

  void ReadOrders(Stream* stream) {
    v1::WorkerOrders orders;
    while (stream->Read(&orders)) {
      if (orders.fenced()) Fenced();
      std::lock_guard lock(mutex_);
      if (orders.log_level() != orders_.log_level()) SetLogLevel(orders.log_level());
      orders_ = orders;
      heard_ = true;
      queue_.Acknowledge(orders.acknowledged_step());
      AbandonLocked();
      changed_.notify_all();
    }
    std::lock_guard lock(mutex_);
    broken_ = true;
    changed_.notify_all();
  }

  // True: the end was said, and the server may finish.
  bool WriteReports(Stream* stream) {
    int64_t sent_step = 0;
    auto sent_at = Now() - std::chrono::nanoseconds(kReportEvery);
    while (WaitForNext(sent_at)) {
      const v1::WorkerReport report = NextReport(&sent_step);
      sent_at = Now();
      if (!Failpoint("worker.report").ok() || !stream->Write(report)) return false;
      // Metrics first: the end closes the stream.
      if (report.has_end()) return stream->WritesDone();
    }
    return false;
  }

  // False: the stream is broken, or the session ends.
  bool WaitForNext(std::chrono::nanoseconds sent_at) {
    std::unique_lock lock(mutex_);
    while (!stop_ && !broken_) {
      AbandonLocked();
      const auto since = Now() - sent_at;
      if (urgent_ || since >= kReportEvery || (dirty_ && since >= kReportAtMostEvery)) {
        urgent_ = dirty_ = false;
        return true;
      }
      const std::chrono::nanoseconds due = dirty_ ? kReportAtMostEvery : kReportEvery;
      changed_.wait_for(lock, std::min<std::chrono::nanoseconds>(due - since, kLookEvery));
    }
    return false;
  }

  v1::WorkerReport NextReport(int64_t* sent_step) {
    std::string waiting_in;
    {
      std::lock_guard lock(ask_mutex_);
      if (ask_) waiting_in = Printable(ask_(), kNameBytes);
    }
    const auto metrics = queue_.After(*sent_step, size_t(limits::kMetricBatch));
    std::lock_guard lock(mutex_);
    v1::WorkerReport report = report_;
    report.set_waiting_in(waiting_in);
    for (const v1::StepMetrics& m : metrics) *report.add_metrics() = m;
    if (!metrics.empty()) *sent_step = metrics.back().step();
    if (int(metrics.size()) == limits::kMetricBatch) {   // there may be more: they go before the end
      report.clear_end();
      urgent_ = true;
    }
    return report;
  }

  [[noreturn]] void Fenced() {
    std::fprintf(stderr, "hierad says that this attempt is no longer its own: ending at once\n");
    _exit(kWorkerExitFenced);
  }

  const std::string endpoint_;
  const std::atomic<bool>* const terminate_;
  std::unique_ptr<v1::WorkerService::Stub> stub_;
  MetricsQueue queue_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  v1::WorkerReport report_;        // all but metrics and waiting_in
  v1::WorkerOrders orders_;
  grpc::ClientContext* context_ = nullptr;
  std::atomic<bool>* abandon_ = nullptr;
  bool dirty_ = false, urgent_ = false, broken_ = false, heard_ = false, stop_ = false, ended_ = false;

  std::mutex ask_mutex_;
  std::function<std::string()> ask_;

  bool away_said_ = false;         // of the thread
  std::thread thread_;
};

}  // namespace

std::unique_ptr<Session> ConnectSession(const v1::Assignment& assignment, const std::atomic<bool>* terminate) {
  return std::make_unique<GrpcSession>(assignment, terminate);
}

}  // namespace hierad
