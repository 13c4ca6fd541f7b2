#include "server/agent/agent.h"

#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>

#include "base/clock.h"
#include "base/failpoint.h"
#include "hierad/version.h"
#include "spdlog/spdlog.h"

namespace hierad {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kReportEvery{800};     // hierad expects a sign of life each second
constexpr milliseconds kBackoffLeast{100};
constexpr milliseconds kBackoffMost{2000};    // short: a restarted hierad waits for its agents
constexpr milliseconds kGraceDefault{10'000}; // until hierad has said another
constexpr std::chrono::seconds kFaultKept{60};
constexpr size_t kFaultsKept = 64;

}  // namespace

Agent::Agent(Options options, std::unique_ptr<Ranks> ranks)
    : options_(std::move(options)), ranks_(std::move(ranks)), wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      grace_(kGraceDefault), backoff_(kBackoffLeast) {
  logs_ = std::make_unique<LogReader>(options_.rights, [this] {
    log_ready_ = true;
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(wake_.get(), &one, sizeof one);
  });
}

Agent::~Agent() = default;

Agent::Time Agent::Now() { return Clock::System().Monotonic(); }

absl::Status Agent::Run() {
  if (!wake_) return absl::InternalError("cannot make an eventfd: the limit of open files is too low; see ulimit -n");
  if (!options_.nvml.empty()) gpu_faults_ = GpuFaults::Watch(options_.nvml, [this](const GpuFault& fault) { OnGpuFault(fault); });
  if (options_.notify != nullptr) options_.notify->Send("READY=1");   // ranks of a former agent are adopted
  while (true) {
    if (!session_ && Now() >= next_connect_) Connect();
    if (changed_ || Now() >= next_report_) Report();
    if (leaving_ && !ending_) {
      ranks_->SayGoodbye();
      return absl::OkStatus();
    }
    if (ending_ && ranks_->running() == 0) return absl::OkStatus();
    Wait();
    OnSession();
  }
}

void Agent::Wait() {
  std::vector<pollfd> fds = {{options_.signals, POLLIN, 0}, {wake_.get(), POLLIN, 0}};
  ranks_->AppendPollFds(&fds);
  Time until = next_report_;
  if (!session_) until = std::min(until, next_connect_);
  const auto wait = std::chrono::ceil<milliseconds>(std::max(Time{0}, until - Now()));
  if (poll(fds.data(), fds.size(), int(wait.count())) <= 0) return;
  if (fds[0].revents != 0) {
    signalfd_siginfo info;
    while (read(options_.signals, &info, sizeof info) == sizeof info) OnSignal(int(info.ssi_signo));
  }
  uint64_t count = 0;
  if (fds[1].revents != 0 && read(wake_.get(), &count, sizeof count) < 0) count = 0;
  if (log_ready_.exchange(false)) changed_ = true;
  {
    std::lock_guard lock(faults_mutex_);
    changed_ = changed_ || faults_new_;
    faults_new_ = false;
  }
  for (size_t i = 2; i < fds.size(); ++i) {
    if (fds[i].revents != 0 && ranks_->OnReady(fds[i].fd)) changed_ = true;
  }
}

void Agent::OnSignal(int number) {
  if (number == SIGCHLD) {
    // Keepers only: what they leave is on their sockets and in their records.
    while (waitpid(-1, nullptr, WNOHANG) > 0) {
    }
    return;
  }
  if (!options_.session_lifetime) {
    spdlog::info("leaving; {} ranks go on and wait for the next agent", ranks_->running());
    leaving_ = true;
    return;
  }
  if (options_.notify != nullptr) options_.notify->Send("STOPPING=1");
  // A second signal: without grace.
  spdlog::info("ending {} ranks{}", ranks_->running(), ending_ ? " at once" : "");
  ranks_->EndAll(ending_ ? milliseconds{0} : grace_);
  ending_ = true;
}

void Agent::OnSession() {
  if (!session_) return;
  while (std::optional<v1::AgentOrders> orders = session_->TakeOrders()) {
    if (!heard_) spdlog::info("connected to {}", options_.server);
    heard_ = true;
    away_said_ = false;
    backoff_ = kBackoffLeast;
    changed_ = true;
    orders_seen_ = orders->sequence();
    grace_ = milliseconds(std::max<int64_t>(0, orders->grace_ms()));
    if (!ending_) ranks_->Apply(*orders);
    logs_->Want(*orders);
  }
  if (const std::optional<absl::Status> closed = session_->Closed()) ConnectLater(*closed);
}

void Agent::ConnectLater(const absl::Status& why) {
  if (!away_said_) {
    spdlog::warn("no connection to hierad at {}: {}; {} ranks go on, trying again", options_.server,
                 std::string(why.message()), ranks_->running());
    away_said_ = true;
  }
  session_.reset();
  next_connect_ = Now() + backoff_;
  backoff_ = std::min(backoff_ * 2, kBackoffMost);
}

void Agent::Connect() {
  heard_ = false;
  // Captures the descriptor's number alone: wake_ outlives session_.
  auto session = OpenAgentSession(options_.server, options_.certificates, [fd = wake_.get()] {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(fd, &one, sizeof one);
  });
  if (!session.ok()) return ConnectLater(session.status());
  session_ = *std::move(session);
  changed_ = true;
}

void Agent::OnGpuFault(const GpuFault& fault) {
  spdlog::error("GPU {}: {}", fault.uuid, GpuFaultWords(fault.double_bit, fault.xid));
  std::lock_guard lock(faults_mutex_);
  faults_.push_back({fault, Now()});
  if (faults_.size() > kFaultsKept) faults_.pop_front();
  faults_new_ = true;
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(wake_.get(), &one, sizeof one);
}

void Agent::AddGpuFaults(v1::AgentReport* report) {
  std::lock_guard lock(faults_mutex_);
  while (!faults_.empty() && Now() - faults_.front().at > kFaultKept) faults_.pop_front();
  for (const SeenFault& seen : faults_) {
    v1::GpuFault* fault = report->add_gpu_faults();
    fault->set_slot_id(seen.fault.uuid);
    fault->set_xid(seen.fault.xid);
    fault->set_double_bit_ecc(seen.fault.double_bit);
    fault->set_age_ms(std::chrono::duration_cast<milliseconds>(Now() - seen.at).count());
  }
}

void Agent::Report() {
  next_report_ = Now() + kReportEvery;
  changed_ = false;
  if (options_.notify != nullptr && options_.notify->watchdog()) options_.notify->Send("WATCHDOG=1");
  if (!session_ || !Failpoint("agent.report").ok()) return;
  v1::AgentReport report;
  report.set_node(options_.node);
  report.set_instance(options_.instance);
  report.mutable_slots()->Add(options_.slots.begin(), options_.slots.end());
  for (v1::RankProcess& process : ranks_->Snapshot()) *report.add_processes() = std::move(process);
  report.set_orders_seen(orders_seen_);
  report.set_version(std::string(Version()));
  AddGpuFaults(&report);
  logs_->AddPieces(&report);
  session_->Offer(report);
}

}  // namespace hierad
