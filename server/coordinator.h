// The coordinator: one thread owns all state. Everyone else posts; a turn of the loop takes what was posted, lets the
// job machine and the scheduler decide, writes all of it in one transaction, and only then answers and sends orders.
// What agents and workers send is whole state, so a turn whose commit failed is undone and simply happens again.
//
// Threads: Create and Run/Turn on one thread; every other public method from any thread. Callbacks (`Reply`, links) are
// called on the loop's thread and must not block. Limits: limits.h, and kMaxNodes, kMaxWorkerSessions below.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/account.h"
#include "base/clock.h"
#include "base/fs.h"
#include "hierad/v1/agent.pb.h"
#include "hierad/v1/control.pb.h"
#include "hierad/v1/worker.pb.h"
#include "server/disk_watch.h"
#include "server/health.h"
#include "server/job_machine.h"
#include "server/history.h"
#include "server/job_row.h"
#include "server/latency.h"
#include "server/live_state.h"
#include "server/store.h"

namespace hierad {

struct CoordinatorOptions {
  std::string runs_folder;                             // absolute
  // Whose account a submitter's ranks run as, and so run folders are made as; see AccountFor. By default hierad's own.
  std::function<absl::StatusOr<std::optional<Account>>(const std::string& submitter)> account_for = [](const std::string&) { return std::nullopt; };
  std::vector<std::string> allowed_roots;              // beneath which ranks open what jobs name; none: anywhere
  History* history = nullptr;                          // outlives the coordinator; none: no steps are kept (tests)
  std::chrono::nanoseconds node_lost_after = std::chrono::seconds(15);
  std::chrono::milliseconds stop_grace = std::chrono::seconds(30);   // from SIGTERM to SIGKILL of a cancelled worker
  std::chrono::nanoseconds pause_grace = std::chrono::minutes(10);   // for the last step and checkpoint of a paused job
  std::chrono::nanoseconds hang_after = std::chrono::seconds(30);    // or 10 median steps, if more: see health.h
  int64_t disk_reserve_bytes = int64_t{1} << 30;                     // less free: no job is let in, see disk_watch.h
  DiskWatch::Measure free_bytes = FreeBytes;
};

template <typename T>
using Reply = std::function<void(absl::StatusOr<T>)>;

// One message of a watch.
struct WatchView {
  v1::WatchReply reply;
  uint64_t version = 0;   // give back to wait for the next change
  uint64_t cursor = 0;
  bool more = false;      // further metrics are already there
  bool done = false;      // the job is terminal and everything was told
};
struct WatchPlace {
  uint64_t job_id = 0;
  std::optional<uint64_t> version;   // none: answer at once
  uint64_t cursor = 0;
  int64_t after_step = 0;            // of the first message
};

// Which node a rank of a job was on, attempt by attempt.
struct LogAttempt {
  int attempt = 0;
  std::string node;   // empty: not known, or it never began
};
struct LogAttempts {
  std::vector<LogAttempt> attempts;   // oldest first
  bool terminal = false;              // the job has ended: there will be no others
};

// For the exporter: jobs (live ones first, then recently ended ones, kMetricJobs in all), nodes and totals.
struct Overview {
  struct JobLook {
    v1::Job job;
    std::string card;   // model of rank 0's slot; empty: not placed
  };
  struct NodeLook {
    std::string name;
    bool connected = false;
    int64_t last_seen_ms = 0;
    int64_t slots[2][4] = {};   // by kind (CPU, CUDA) and state (free, busy, lost, faulty)
  };
  std::vector<std::pair<v1::JobState, int64_t>> jobs_by_state;
  std::vector<JobLook> jobs;
  std::vector<NodeLook> nodes;
  int64_t slots_busy = 0, slots_free = 0, slots_lost = 0, slots_faulty = 0;
  int64_t nodes_connected = 0, nodes_lost = 0;
  int64_t agent_sessions = 0, worker_sessions = 0;
  int64_t store_errors = 0, history_errors = 0;
  int64_t queue_waits_since_ms = 0;   // submission of the first in the queue, Unix time; 0: nobody waits
  int64_t now_ms = 0;
  Latency decisions, commits;
};

class Coordinator {
 public:
  static constexpr size_t kMaxNodes = 1024;
  static constexpr size_t kMaxWorkerSessions = 8192;
  static constexpr size_t kMetricJobs = 1000;
  static constexpr std::chrono::nanoseconds kEndedShown = std::chrono::minutes(5);      // an ended job in the exporter
  static constexpr std::chrono::nanoseconds kPeersGrace = std::chrono::seconds(5);      // for the rest of a broken gang
  static constexpr std::chrono::nanoseconds kLastWordWait = std::chrono::seconds(2);    // for a dead worker's last message
  static constexpr std::chrono::nanoseconds kGpuFaultCounts = std::chrono::seconds(30);  // from a fault of a GPU to an end that it explains
  static constexpr std::chrono::nanoseconds kGpuFaultBurst = std::chrono::seconds(2);    // of which the first fault is the cause
  static constexpr std::chrono::nanoseconds kRecentJobs = std::chrono::minutes(10);     // an ended job stays in memory
  static constexpr size_t kRecentJobsMax = 64;
  static constexpr std::chrono::nanoseconds kLogWait = std::chrono::seconds(10);        // for a piece of a log
  static constexpr size_t kLogReads = 1024;                                             // at a time, of one node
  static constexpr std::chrono::nanoseconds kWatchPoll = std::chrono::seconds(1);       // a watch is answered at least so often

  // Loads what lives; nothing is sent until agents and workers dial in.
  static absl::StatusOr<std::unique_ptr<Coordinator>> Create(CoordinatorOptions options, std::unique_ptr<Store> store, const Clock* clock);
  ~Coordinator();

  void Run();     // turns, until Stop
  void Stop();    // after the turn under way; what is posted later is answered UNAVAILABLE
  void Turn();    // one turn without waiting (tests; Run is a loop of it)
  void BeginDrain();   // places no more jobs, takes no more submissions
  void EndSessions();  // agents and workers are told to dial again later

  // For clients. Replies come after the commit. `submitter`: who will own the job; a known key of someone else's is refused.
  void Submit(v1::SubmitRequest request, std::string submitter, absl::Status folder_check, Reply<v1::SubmitReply> reply);
  void FindByClientKey(std::string key, std::string submitter, Reply<v1::SubmitReply> reply);   // NotFound: no such job yet
  void Get(uint64_t job_id, Reply<v1::Job> reply);
  // Whose rights a submitter's ranks have, and with whose their run folders are read; nullopt: hierad's own. Any thread.
  absl::StatusOr<std::optional<Account>> AccountOf(const std::string& submitter) const { return options_.account_for(submitter); }
  // `submitter`: only this one's jobs; empty: all.
  void List(v1::ListRequest request, std::string submitter, Reply<v1::ListReply> reply);
  void Cancel(uint64_t job_id, bool now, Reply<v1::Job> reply);
  void Pause(uint64_t job_id, Reply<v1::Job> reply);
  void Resume(uint64_t job_id, Reply<v1::Job> reply);
  void Checkpoint(uint64_t job_id, Reply<v1::Job> reply);
  void SetLr(uint64_t job_id, double lr, Reply<v1::Job> reply);
  void SetLogLevel(uint64_t job_id, std::string level, Reply<v1::Job> reply);
  void DrainNode(std::string node, bool drained, Reply<v1::NodesReply> reply);
  // Of an ended job, whose folders are about to go. FailedPrecondition: a job that has not ended writes there.
  void ForgetCheckpoints(uint64_t job_id, Reply<v1::Job> reply);
  void ListCheckpoints(uint64_t job_id, Reply<v1::ListCheckpointsReply> reply);
  void Nodes(Reply<v1::NodesReply> reply);
  // Those that began after the attempt `known`.
  void AttemptsOf(uint64_t job_id, int rank, int known, Reply<LogAttempts> reply);
  // From the agent of `node`; hierad gives the number. Unavailable: it does not answer. A piece may say that there is no log.
  void ReadLog(std::string node, v1::LogWanted wanted, Reply<v1::LogPiece> reply);
  void Watch(WatchPlace place, Reply<WatchView> reply);
  void Look(Reply<Overview> reply);

  // For sessions. A link is told to send whole states and may drop older ones it has not sent yet.
  // `node`: the only one that the agent may speak for; empty: any.
  uint64_t OpenAgent(std::shared_ptr<AgentLink> link, std::string node = "");
  void ReportAgent(uint64_t session, v1::AgentReport report, std::function<void()> done);
  void CloseAgent(uint64_t session);
  uint64_t OpenWorker(std::shared_ptr<WorkerLink> link);
  void ReportWorker(uint64_t session, v1::WorkerReport report, std::function<void()> done);
  void CloseWorker(uint64_t session);

 private:
  Coordinator(CoordinatorOptions options, std::unique_ptr<Store> store, const Clock* clock);
  absl::Status Recover();
  void Post(std::function<void()> work, std::function<void()> refuse = nullptr);
  static absl::Status StoppedError() { return absl::UnavailableError("hierad is stopping; try again when it is back"); }
  // Answers after the commit of the turn.
  template <typename T>
  void Ask(Reply<T> reply, std::function<absl::StatusOr<T>()> answer) {
    Post([this, reply, answer] { AfterCommit([reply, answer](const absl::Status&) { reply(answer()); }); }, [reply] { reply(StoppedError()); });
  }
  void AfterCommit(std::function<void(const absl::Status&)> work) { after_commit_.push_back(std::move(work)); }

  // coordinator.cc: the turn.
  void ReadClock();
  void CommitTurn();
  void Undo();
  void ReloadUnsure();
  void TakeBack(uint64_t job_id, std::optional<JobRow> row);
  void Touch(const LiveJob& job);
  void Change(LiveJob* job, const JobEvent& event);
  void SetKillTime(LiveJob* job);
  void Index(LiveJob* job);          // queued_, active_, by its state
  void Forget(uint64_t job_id);
  LiveJob* Find(uint64_t job_id);
  std::chrono::nanoseconds NextWake() const;

  // coordinator_wishes.cc: what users ask of a job.
  void Act(uint64_t job_id, std::function<absl::Status(LiveJob*)> act, Reply<v1::Job> reply);

  // coordinator_health.cc: signs of life.
  void WatchHealth(LiveJob* job);
  std::vector<RankSign> SignsOf(const LiveJob& job) const;
  std::string NoteOn(const LiveJob& job);

  // coordinator_place.cc: time and placement.
  void Tick();
  void LoseNodes();
  void WatchDisk();
  void DropOld();
  void Place();
  std::vector<NodeSlots> SlotsNow() const;
  void Begin(LiveJob* job, const std::vector<struct Place>& places);
  void Settle(LiveJob* job);         // turns what is known of dead ranks into events

  // coordinator_sessions.cc: agents and workers.
  void OnAgentReport(uint64_t session, const v1::AgentReport& report);
  Node* BindNode(AgentSession* session, const v1::AgentReport& report);
  void TakeGpuFaults(Node* node, const v1::AgentReport& report);
  void TakeSlotOut(Node* node, const std::string& slot, const std::string& fault);
  void BlameGpu(LiveJob* job);       // for an end shortly after a fault
  void CheckRank(LiveJob* job, int rank, const Node& node, const v1::RankProcess* process, bool new_instance);
  void OnWorkerReport(uint64_t session, const v1::WorkerReport& report);
  bool IsCurrent(const LiveJob& job, int attempt, int rank) const;
  void TakeReport(LiveJob* job, const v1::WorkerReport& report);
  void TakeMetrics(LiveJob* job, const v1::WorkerReport& report);
  void AlterSpec(uint64_t job_id, std::function<void(v1::JobSpec*)> alter, std::string news, Reply<v1::Job> reply);
  void MarkOrders(const LiveJob& job);
  void SendAll();
  v1::AgentOrders OrdersFor(const Node& node);
  void SendWorker(WorkerSession* session);

  // coordinator_logs.cc: logs that only agents can read.
  void AskForLog(const std::string& name, const v1::LogWanted& wanted, const Reply<v1::LogPiece>& reply);
  void TakeLogPieces(Node* node, const v1::AgentReport& report);
  void GiveUpLogs();
  static void AddLogsWanted(const Node& node, v1::AgentOrders* orders);

  // coordinator_view.cc: answers.
  std::vector<std::string> AlertsOf(const LiveJob& job) const;
  v1::Job View(const LiveJob& job) const;
  v1::Job DetailedView(const LiveJob& job);   // with its note and its attempts
  v1::NodesReply NodesNow();
  std::string WaitWords(const LiveJob& job) const;
  absl::StatusOr<v1::Job> ViewOf(uint64_t job_id);
  std::optional<absl::StatusOr<WatchView>> ViewWatch(const WatchPlace& place, bool answer_anyway);
  void AnswerWatches();
  Overview LookNow();

  const CoordinatorOptions options_;
  const std::unique_ptr<Store> store_;
  const Clock* const clock_;

  std::mutex mutex_;
  std::condition_variable wake_;
  struct Posted {
    std::function<void()> work, refuse;
  };
  std::vector<Posted> inbox_;        // guarded by mutex_; bounded: a session posts one report at a time, a handler waits
  bool stopped_ = false;             // guarded by mutex_
  uint64_t next_session_ = 1;        // guarded by mutex_

  // Below: the loop's own.
  std::chrono::nanoseconds now_{0};  // monotonic, of this turn
  std::chrono::nanoseconds last_turn_{0};
  std::chrono::nanoseconds started_{0};
  int64_t unix_ms_ = 0;
  bool draining_ = false;
  uint64_t next_job_id_ = 1;
  uint64_t sequence_ = 0;            // of the newest orders sent to any agent
  uint64_t log_reads_ = 0;           // so many so far
  std::unordered_map<uint64_t, std::unique_ptr<LiveJob>> jobs_;   // live, and recently ended
  std::set<uint64_t> queued_, active_;   // ids, so in order of submission
  std::map<uint64_t, std::chrono::nanoseconds> ended_;            // recently ended, and when
  std::unordered_map<std::string, uint64_t> by_key_;              // of jobs_
  std::map<std::string, Node> nodes_;
  DiskWatch disks_;
  bool disk_waits_ = false;          // a queued job waits for room on its disk
  std::chrono::nanoseconds disk_looked_{0};
  std::string disk_said_;            // the problem that the log last spoke of
  std::set<std::string> drained_;    // as stored; also nodes that are not known yet
  std::map<std::string, std::map<std::string, std::string>> faults_;   // as stored, likewise: by node and slot, what its card had
  std::unordered_map<uint64_t, AgentSession> agents_;
  std::unordered_map<uint64_t, WorkerSession> workers_;

  std::unordered_map<uint64_t, std::optional<JobRow>> undo_;      // rows as they were before this turn; none: new
  std::set<uint64_t> unsure_;        // whether their last change is stored is not known
  std::vector<AttemptRow> attempts_;                              // ended in this turn
  std::vector<std::function<void(const absl::Status&)>> after_commit_;
  bool place_ = true;                // something changed that a placement depends on
  std::chrono::nanoseconds store_rest_{0};   // after a failed commit: no placement before
  int64_t store_errors_ = 0, history_errors_ = 0;
  std::chrono::nanoseconds history_said_{0};
  Latency decisions_, commits_;
  std::chrono::nanoseconds store_said_{0};   // when the log last spoke of one
  uint64_t head_ = 0;                // the job that waits first, and why
  std::string head_why_;
  std::map<uint64_t, std::string> aside_;    // jobs larger than everything, and why
  struct Parked {
    WatchPlace place;
    std::chrono::nanoseconds until;
    Reply<WatchView> reply;
  };
  std::vector<Parked> parked_;
};

}  // namespace hierad
