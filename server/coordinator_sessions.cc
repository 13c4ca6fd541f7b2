// The coordinator's side of agents and workers: their reports in, their orders out.
#include <spdlog/spdlog.h>

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "base/failpoint.h"
#include "base/gpu_faults.h"
#include "base/job_validate.h"
#include "base/limits.h"
#include "base/text.h"
#include "base/worker_exit.h"
#include "server/coordinator.h"
#include "server/credential.h"
#include "server/report_check.h"

namespace hierad {
namespace {

using RankKey = std::tuple<uint64_t, int, int>;   // job, attempt, rank

bool HasBegun(v1::Phase phase) {
  return phase == v1::PHASE_TRAINING || phase == v1::PHASE_EVALUATING || phase == v1::PHASE_CHECKPOINTING;
}

// The last few lines of a log, as part of a sentence. The whole is in rank-N.log.
std::string LastLines(const std::string& log) {
  constexpr size_t kLines = 3, kLineBytes = 300;
  std::vector<std::string> lines;
  for (const std::string& line : Split(log, '\n')) {
    if (line.find_first_not_of(" \t\r") != std::string::npos) lines.push_back(line);
  }
  std::string words;
  for (size_t i = lines.size() > kLines ? lines.size() - kLines : 0; i < lines.size(); ++i) {
    absl::StrAppend(&words, words.empty() ? "" : " | ", PrintableSentence(lines[i], kLineBytes));
  }
  return words;
}

// How an agent's word on an ended process is read.
RankEnded EndOf(const v1::RankProcess& process) {
  RankEnded end{process.rank(), process.reason(), "", true, process.signal()};
  std::string how = process.signal() != 0 ? absl::StrCat("the worker was killed by signal ", process.signal())
                                          : absl::StrCat("the worker ended with exit code ", process.exit_code());
  if (end.reason == v1::REASON_UNSPECIFIED) {
    // Without a class the agent means: ended by a signal of its own, or an exit code that the worker had to explain.
    if (process.signal() != 0) {
      end.reason = v1::REASON_PREEMPTED;
      how = "the worker was ended by its agent";
    } else {
      end.reason = ReasonOfWorkerExit(process.exit_code());
      if (end.reason == v1::REASON_UNSPECIFIED) end.reason = v1::REASON_CRASHED;
    }
  }
  if (end.reason == v1::REASON_HOST_OOM) absl::StrAppend(&how, " because the machine ran out of memory");
  if (end.reason == v1::REASON_NODE_LOST) how = "the worker was ended with its agent";
  const std::string words = LastLines(process.last_words());
  end.message = words.empty() ? how : absl::StrCat(how, "; its last words: ", words);
  return end;
}

}  // namespace

uint64_t Coordinator::OpenAgent(std::shared_ptr<AgentLink> link, std::string node) {
  uint64_t session;
  {
    std::lock_guard lock(mutex_);
    session = next_session_++;
  }
  Post(
      [this, session, link, node = std::move(node)] {
        agents_[session].link = link;
        agents_[session].only_node = node;
      },
       [link] { link->Close(absl::UnavailableError("hierad is stopping")); });
  return session;
}

void Coordinator::ReportAgent(uint64_t session, v1::AgentReport report, std::function<void()> done) {
  Post(
      [this, session, report = std::move(report), done] {
        OnAgentReport(session, report);
        AfterCommit([done](const absl::Status&) { done(); });
      },
      done);
}

void Coordinator::CloseAgent(uint64_t session) {
  Post([this, session] {
    const auto found = agents_.find(session);
    if (found == agents_.end()) return;
    const auto node = nodes_.find(found->second.node);
    if (node != nodes_.end() && node->second.session == session) {
      node->second.session = 0;
      place_ = true;
      spdlog::warn("the agent of node {} has left; its workers are given {} s", node->first,
                   std::chrono::duration_cast<std::chrono::seconds>(options_.node_lost_after).count());
    }
    agents_.erase(found);
  });
}

// The node this session speaks for, or nullptr when the session is refused.
Node* Coordinator::BindNode(AgentSession* session, const v1::AgentReport& report) {
  const absl::Status legal = CheckAgentReport(report);
  if (!legal.ok()) {
    session->link->Close(legal);
    return nullptr;
  }
  if (!session->only_node.empty() && session->only_node != report.node()) {
    session->link->Close(absl::PermissionDeniedError(absl::StrCat("this agent's certificate is for node \"", session->only_node, "\", not \"",
                                                                  Printable(report.node()), "\"; start it with --node ", session->only_node)));
    return nullptr;
  }
  if (!session->node.empty() && session->node != report.node()) {
    session->link->Close(absl::InvalidArgumentError("a session cannot change its node"));
    return nullptr;
  }
  if (nodes_.count(report.node()) == 0 && nodes_.size() >= kMaxNodes) {
    session->link->Close(absl::ResourceExhaustedError(absl::StrCat("at most ", kMaxNodes, " nodes")));
    return nullptr;
  }
  Node& node = nodes_[report.node()];
  node.drained = drained_.count(report.node()) != 0;
  if (const auto faults = faults_.find(report.node()); faults != faults_.end()) node.faults = faults->second;
  return &node;
}

void Coordinator::OnAgentReport(uint64_t session_id, const v1::AgentReport& report) {
  const auto found = agents_.find(session_id);
  if (found == agents_.end() || !Failpoint("hierad.agent_report").ok()) return;
  AgentSession& session = found->second;
  Node* node = BindNode(&session, report);
  if (node == nullptr) return;
  if (node->session != session_id) {
    if (node->session != 0 && node->instance != report.instance() && now_ - node->last_seen < std::chrono::seconds(3)) {
      session.link->Close(absl::AlreadyExistsError(absl::StrCat("another agent is connected as node \"", Printable(report.node()),
                                                                "\"; give this one another name with --node")));
      return;
    }
    if (const auto old = agents_.find(node->session); old != agents_.end()) {
      old->second.link->Close(absl::AbortedError("a newer session of the same node has taken over"));
    }
    node->session = session_id;
    node->orders_due = true;
    session.node = report.node();
    spdlog::info("node {}: agent {} connected with {} slots, {} processes", report.node(), report.version(), report.slots_size(),
                 report.processes_size());
  }
  const bool new_instance = !node->instance.empty() && node->instance != report.instance();
  node->name = report.node();
  node->instance = report.instance();
  node->version = report.version();
  node->orders_seen = report.orders_seen();
  node->last_seen = now_;
  node->last_seen_ms = unix_ms_;
  if (node->lost) {
    spdlog::info("node {} is back", node->name);
    node->lost = false;
    place_ = true;
  }

  const auto same = [](const auto& a, const auto& b) { return a.SerializeAsString() == b.SerializeAsString(); };
  if (!std::equal(node->slots.begin(), node->slots.end(), report.slots().begin(), report.slots().end(), same) ||
      !std::equal(node->processes.begin(), node->processes.end(), report.processes().begin(), report.processes().end(), same)) {
    node->slots.assign(report.slots().begin(), report.slots().end());
    node->processes.assign(report.processes().begin(), report.processes().end());
    place_ = true;
    node->orders_due = true;
  }
  TakeGpuFaults(node, report);
  TakeLogPieces(node, report);
  std::map<RankKey, const v1::RankProcess*> listed;
  for (const v1::RankProcess& process : node->processes) listed[{process.job_id(), process.attempt(), process.rank()}] = &process;
  const std::vector<uint64_t> active(active_.begin(), active_.end());
  for (uint64_t id : active) {
    LiveJob* job = Find(id);
    const int attempt = job->row.attempt;
    for (size_t r = 0; r < job->row.ranks.size(); ++r) {
      if (job->row.ranks[r].node != node->name || job->row.ranks[r].gone) continue;
      const auto process = listed.find({id, attempt, static_cast<int>(r)});
      CheckRank(job, static_cast<int>(r), *node, process == listed.end() ? nullptr : process->second, new_instance);
    }
    Settle(job);
  }
}

// A write that fails is no reason to use the card: it is out of use until a restart, at least.
void Coordinator::TakeSlotOut(Node* node, const std::string& slot, const std::string& fault) {
  const bool known = std::any_of(node->slots.begin(), node->slots.end(), [&slot](const v1::Slot& other) { return other.id() == slot; });
  if (!known || node->faults.count(slot) != 0) return;
  node->faults[slot] = faults_[node->name][slot] = fault;
  if (absl::Status stored = store_->AddFaultySlot({node->name, slot, fault}); !stored.ok()) spdlog::error("{}", std::string(stored.message()));
  spdlog::error("GPU {} on {} gets no more work (hierctl undrain {}, when it was mended): {}", slot, node->name, node->name, fault);
  place_ = true;
}

void Coordinator::TakeGpuFaults(Node* node, const v1::AgentReport& report) {
  for (const v1::GpuFault& fault : report.gpu_faults()) {
    // Reported for a minute: a card that fell before the attempt began is not held against it.
    const auto at = now_ - std::chrono::milliseconds(std::min<int64_t>(fault.age_ms(), 3'600'000));
    const std::string words = GpuFaultWords(fault.double_bit_ecc(), fault.xid());
    if (IsFaultOfCard(fault.double_bit_ecc(), fault.xid()) && at > node->mended_at) TakeSlotOut(node, fault.slot_id(), words);
    for (uint64_t id : active_) {
      LiveJob* job = Find(id);
      for (size_t r = 0; r < job->ranks.size(); ++r) {
        RankLive& live = job->ranks[r];
        const RankRow& row = job->row.ranks[r];
        if (row.node != node->name || row.slot.id() != fault.slot_id() || at < job->begun_at) continue;
        if (!live.gpu_fault.empty() && at <= live.gpu_fault_at + kGpuFaultBurst) continue;   // said again, or what followed from the first
        live.gpu_fault = absl::StrCat("GPU ", row.slot.id(), " on ", node->name, " had ", words);
        spdlog::error("job {} rank {}: {}", id, r, live.gpu_fault);
        live.gpu_fault_at = at;
        ++job->version;
        BlameGpu(job);
      }
    }
  }
}

void Coordinator::BlameGpu(LiveJob* job) {
  for (size_t r = 0; r < job->ranks.size(); ++r) {
    const RankLive& live = job->ranks[r];
    if (live.gpu_fault.empty() || now_ - live.gpu_fault_at > kGpuFaultCounts) continue;
    Change(job, GpuFaulted{static_cast<int>(r), live.gpu_fault});
    return;
  }
}

// One rank of a current attempt against what its node says.
void Coordinator::CheckRank(LiveJob* job, int rank, const Node& node, const v1::RankProcess* process, bool new_instance) {
  RankLive& live = job->ranks[rank];
  const RankRow& row = job->row.ranks[rank];
  if (process != nullptr && !process->ended()) {
    live.exit.reset();   // missed in an earlier report, but there
    live.pid = process->pid();
    if (live.heard_at.count() == 0) live.heard_at = now_;
    Change(job, ProcessSeen{rank, process->pid() > 0 ? process->pid() : -1});
    return;
  }
  if (live.exit) return;
  live.exit_wait = now_ + kLastWordWait;
  if (process != nullptr) {
    live.exit = EndOf(*process);
  } else if (row.pid != 0) {
    live.exit = new_instance ? RankEnded{rank, v1::REASON_NODE_LOST, absl::StrCat("the agent of node ", node.name, " was restarted and the worker is gone"), true, 0}
                             : RankEnded{rank, v1::REASON_CRASHED, absl::StrCat("the agent of node ", node.name, " no longer knows the worker"), true, 0};
  } else if (job->row.state == v1::STOPPING && node.orders_seen > job->stop_floor) {
    live.exit = RankEnded{rank, v1::REASON_CANCELLED, "ended before it began", true, 0};   // was never started
  }
}

uint64_t Coordinator::OpenWorker(std::shared_ptr<WorkerLink> link) {
  uint64_t session;
  {
    std::lock_guard lock(mutex_);
    session = next_session_++;
  }
  Post(
      [this, session, link] {
        if (workers_.size() >= kMaxWorkerSessions) {
          link->Close(absl::ResourceExhaustedError(absl::StrCat("at most ", kMaxWorkerSessions, " worker sessions")));
          return;
        }
        workers_[session].link = link;
      },
      [link] { link->Close(absl::UnavailableError("hierad is stopping")); });
  return session;
}

void Coordinator::ReportWorker(uint64_t session, v1::WorkerReport report, std::function<void()> done) {
  Post(
      [this, session, report = std::move(report), done] {
        OnWorkerReport(session, report);
        AfterCommit([this, session, done, last = report.has_end()](const absl::Status& status) {
          // A last word that was not stored is not confirmed: the worker says it again.
          const auto found = workers_.find(session);
          if (last && !status.ok() && found != workers_.end()) found->second.link->Close(absl::UnavailableError(status.message()));
          done();
        });
      },
      done);
}

void Coordinator::CloseWorker(uint64_t session_id) {
  Post([this, session_id] {
    const auto found = workers_.find(session_id);
    if (found == workers_.end()) return;
    const WorkerSession session = std::move(found->second);
    workers_.erase(found);
    LiveJob* job = Find(session.job_id);
    if (job == nullptr || session.rank >= static_cast<int>(job->ranks.size())) return;
    if (job->ranks[session.rank].session == session_id) job->ranks[session.rank].session = 0;
    Settle(job);   // a dead worker's last word can no longer come
  });
}

bool Coordinator::IsCurrent(const LiveJob& job, int attempt, int rank) const {
  return IsActive(job.row.state) && job.row.attempt == attempt && rank >= 0 && rank < static_cast<int>(job.row.ranks.size()) &&
         !job.row.ranks[rank].gone;
}

void Coordinator::OnWorkerReport(uint64_t session_id, const v1::WorkerReport& report) {
  const auto found = workers_.find(session_id);
  if (found == workers_.end()) return;
  if (absl::Status lost = Failpoint("hierad.worker_report"); !lost.ok()) return found->second.link->Close(lost);
  WorkerSession& session = found->second;
  if (absl::Status legal = CheckWorkerReport(report); !legal.ok()) {
    session.link->Close(legal);
    return;
  }
  LiveJob* job = Find(report.job_id());
  const bool ours = job != nullptr && IsCurrent(*job, report.attempt(), report.rank()) &&
                    SameSecret(job->row.credential, report.credential());
  if (!ours || (session.job_id != 0 && (session.job_id != report.job_id() || session.attempt != report.attempt() || session.rank != report.rank()))) {
    spdlog::warn("fenced: a worker that says it is job {} attempt {} rank {}", report.job_id(), report.attempt(), report.rank());
    v1::WorkerOrders orders;
    orders.set_fenced(true);
    session.link->Send(orders);
    session.link->Close(absl::FailedPreconditionError("this attempt is not, or no longer, hierad's: end at once"));
    return;
  }
  session.job_id = report.job_id();
  session.attempt = report.attempt();
  session.rank = report.rank();
  session.due = true;
  RankLive& live = job->ranks[report.rank()];
  if (live.session != session_id) {
    if (const auto old = workers_.find(live.session); old != workers_.end()) {
      old->second.link->Close(absl::AbortedError("a newer session of the same rank has taken over"));
    }
    live.session = session_id;
  }
  TakeReport(job, report);
  Settle(job);
}

void Coordinator::TakeReport(LiveJob* job, const v1::WorkerReport& report) {
  RankLive& live = job->ranks[report.rank()];
  if (live.phase != report.phase() || live.step != report.step() || job->moved_at.count() == 0) job->moved_at = now_;
  live.heard_at = now_;
  live.spoken = true;
  live.phase = report.phase();
  live.step = report.step();
  if (report.pid() > 0) live.pid = report.pid();
  live.last_seen_ms = unix_ms_;
  live.waiting_in = report.waiting_in();
  if (report.has_totals()) live.totals = report.totals();
  if (report.has_data()) live.data = report.data();
  live.trained = live.trained || HasBegun(report.phase());
  if (report.has_end() && !live.word) {
    live.word = RankEnded{report.rank(), report.end().reason(),
                          report.end().message().empty() ? "the worker gave no explanation" : report.end().message(), false, 0};
  }
  ++job->version;
  if (report.rank() == 0) {
    JobRow& row = job->row;
    if (report.total_steps() > 0) row.total_steps = report.total_steps();
    if (report.first_step() > 0) row.first_step = report.first_step();
    // Before it trains a later attempt has not found its place yet.
    if (live.trained || report.has_end()) row.step = std::max<int64_t>(report.step(), live.trained ? 0 : row.step);
    row.nan_steps = report.nan_steps();
    job->samples_per_s = report.samples_per_s();
    if (!report.rendezvous().empty() && report.rendezvous() != job->rendezvous) {
      job->rendezvous = report.rendezvous();
      MarkOrders(*job);
    }
    TakeMetrics(job, report);
    if (report.checkpoints_known()) {
      const auto same = [](const auto& a, const auto& b) { return a.SerializeAsString() == b.SerializeAsString(); };
      if (!std::equal(row.checkpoints.begin(), row.checkpoints.end(), report.checkpoints().begin(), report.checkpoints().end(), same)) {
        Touch(*job);
        row.checkpoints.assign(report.checkpoints().begin(), report.checkpoints().end());
      }
    }
  }
  if (job->row.state == v1::STARTING && std::all_of(job->ranks.begin(), job->ranks.end(), [](const RankLive& r) { return r.trained; })) {
    Change(job, AllTraining{});
  }
}

void Coordinator::TakeMetrics(LiveJob* job, const v1::WorkerReport& report) {
  std::vector<v1::StepMetrics> taken;
  for (const v1::StepMetrics& metrics : report.metrics()) {
    if (metrics.step() <= job->acknowledged_step) continue;   // sent again
    taken.push_back(metrics);
    job->ring.Push(metrics);
    job->acknowledged_step = metrics.step();
    if (metrics.step() > std::max<int64_t>(job->row.first_step, 1)) {   // the first one is like no other
      job->step_seconds.push_back(metrics.step_s());
      if (job->step_seconds.size() > kStepsForMedian) job->step_seconds.pop_front();
    }
    if (metrics.has_eval_loss() && std::isfinite(metrics.eval_loss()) &&
        (!job->row.best_eval_loss || metrics.eval_loss() < *job->row.best_eval_loss)) {
      job->row.best_eval_loss = metrics.eval_loss();
    }
  }
  if (options_.history == nullptr || taken.empty()) return;
  // Before the worker hears that they are stored. What the disk refuses is in metrics.jsonl; training does not wait for it.
  if (absl::Status kept = options_.history->Append(job->row.id, taken); !kept.ok()) {
    ++history_errors_;
    if (history_errors_ == 1 || now_ - history_said_ >= std::chrono::seconds(10)) {
      spdlog::error("steps of job {} are missing in the history: {}", job->row.id, std::string(kept.message()));
      history_said_ = now_;
    }
  }
}

// The agents and workers of this attempt are to be told anew.
void Coordinator::MarkOrders(const LiveJob& job) {
  for (const RankRow& rank : job.row.ranks) {
    if (const auto node = nodes_.find(rank.node); node != nodes_.end()) node->second.orders_due = true;
  }
  for (const RankLive& live : job.ranks) {
    if (const auto session = workers_.find(live.session); session != workers_.end()) session->second.due = true;
  }
}

void Coordinator::SendAll() {
  for (auto& [name, node] : nodes_) {
    if (!node.orders_due) continue;
    const auto session = agents_.find(node.session);
    if (session == agents_.end()) continue;   // told at its next report
    node.orders_due = false;
    v1::AgentOrders orders = OrdersFor(node);
    std::string content = orders.SerializeAsString();
    if (content == session->second.sent) continue;
    session->second.sent = std::move(content);
    orders.set_sequence(++sequence_);
    session->second.link->Send(orders);
  }
  for (auto& [id, session] : workers_) {
    if (session.due) SendWorker(&session);
  }
}

v1::AgentOrders Coordinator::OrdersFor(const Node& node) {
  v1::AgentOrders orders;
  orders.set_grace_ms(options_.stop_grace.count());
  const auto name_rank = [](v1::RankId* id, uint64_t job, int attempt, int rank) {
    id->set_job_id(job);
    id->set_attempt(attempt);
    id->set_rank(rank);
  };
  std::set<RankKey> ours;
  for (uint64_t id : active_) {
    const LiveJob& job = *Find(id);
    for (const RankRow& rank : job.row.ranks) {
      if (rank.node != node.name || rank.gone) continue;
      ours.insert({id, job.row.attempt, rank.rank});
      const bool out_of_time = job.kill_at && now_ >= *job.kill_at;
      if (job.row.state == v1::STOPPING && out_of_time) name_rank(orders.add_kill_now(), id, job.row.attempt, rank.rank);
      if (job.row.state == v1::STOPPING && (!job.gentle || out_of_time)) continue;
      v1::Assignment* a = orders.add_assignments();
      a->set_job_id(id);
      a->set_attempt(job.row.attempt);
      a->set_rank(rank.rank);
      a->set_world_size(static_cast<int>(job.row.ranks.size()));
      a->set_local_rank(rank.local_rank);
      a->set_local_world_size(rank.local_world_size);
      *a->mutable_spec() = job.row.spec;
      a->set_run_folder(job.row.run_folder);
      a->set_credential(job.row.credential);
      a->set_user(job.row.submitter);
      a->mutable_allowed_roots()->Assign(options_.allowed_roots.begin(), options_.allowed_roots.end());
      *a->mutable_slot() = rank.slot;
      for (const v1::CheckpointInfo& info : job.start_from) *a->add_checkpoints() = info;
    }
  }
  for (const v1::RankProcess& process : node.processes) {
    const bool current = ours.count({process.job_id(), process.attempt(), process.rank()}) != 0;
    if (current) continue;
    name_rank(process.ended() ? orders.add_acknowledged() : orders.add_kill_now(), process.job_id(), process.attempt(), process.rank());
  }
  AddLogsWanted(node, &orders);
  return orders;
}

void Coordinator::SendWorker(WorkerSession* session) {
  session->due = false;
  const LiveJob* job = Find(session->job_id);
  v1::WorkerOrders orders;
  if (job == nullptr || !IsCurrent(*job, session->attempt, session->rank)) {
    orders.set_fenced(true);
  } else {
    if (job->row.desired == v1::DESIRED_CANCEL) {
      orders.set_want(v1::WorkerOrders::WANT_CANCEL);
    } else {
      orders.set_want(job->row.state == v1::STOPPING ? v1::WorkerOrders::WANT_PAUSE : v1::WorkerOrders::WANT_RUN);
    }
    orders.set_log_level(job->row.spec.output().log_level());
    if (session->rank == 0) {
      orders.set_acknowledged_step(job->acknowledged_step);
      orders.set_checkpoint_request(job->checkpoint_request);
      orders.set_peak_lr(PeakLr(job->row.spec));
    } else {
      orders.set_rendezvous(job->rendezvous);
    }
  }
  std::string content = orders.SerializeAsString();
  if (content == session->sent) return;
  session->sent = std::move(content);
  session->link->Send(orders);
}

}  // namespace hierad
