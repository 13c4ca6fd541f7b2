// What the coordinator knows beside the stored rows: sessions, nodes, and the moving parts of a running job. Lost at a
// restart and told again by agents and workers. Loop thread only.
#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "hierad/v1/agent.pb.h"
#include "hierad/v1/worker.pb.h"
#include "server/job_machine.h"
#include "server/job_row.h"
#include "server/metric_ring.h"
#include "server/scheduler.h"

namespace hierad {

// The way to one agent. Send: never blocks; a newer message may replace one not yet sent. Close: after what was sent.
class AgentLink {
 public:
  virtual ~AgentLink() = default;
  virtual void Send(const v1::AgentOrders& orders) = 0;
  virtual void Close(const absl::Status& status) = 0;
};
class WorkerLink {
 public:
  virtual ~WorkerLink() = default;
  virtual void Send(const v1::WorkerOrders& orders) = 0;
  virtual void Close(const absl::Status& status) = 0;
};

struct RankLive {
  v1::Phase phase = v1::PHASE_UNSPECIFIED;
  int64_t step = 0;
  int pid = 0;
  int64_t last_seen_ms = 0;
  std::string waiting_in;
  v1::RankTotals totals;
  v1::DataCounters data;
  bool trained = false;                  // has begun to train in this attempt
  uint64_t session = 0;                  // 0: none
  std::optional<RankEnded> word;         // the worker's own last word
  std::optional<RankEnded> exit;         // its process is no more; taken when the word is there or cannot come
  std::chrono::nanoseconds exit_wait{0};
  std::chrono::nanoseconds heard_at{0};  // of its last report; before the first: since its process is known; 0: neither
  std::string gpu_fault;                 // what the driver said of its GPU in this attempt; empty: nothing
  std::chrono::nanoseconds gpu_fault_at{0};
  bool spoken = false;                   // has reported in this attempt, or did before hierad started
};

struct LiveJob {
  JobRow row;
  std::vector<RankLive> ranks;           // as many as row.ranks
  MetricRing ring;
  int64_t acknowledged_step = 0;         // newest step taken in this attempt
  std::string rendezvous;                // rank 0's, of this attempt
  std::vector<v1::CheckpointInfo> start_from;   // the few newest good ones when the attempt began: orders stay as they are
  double samples_per_s = 0;
  uint64_t version = 1;                  // counts changes that a watcher may see
  uint64_t stop_floor = 0;               // orders with a higher sequence no longer list it
  std::optional<std::chrono::nanoseconds> kill_at;   // stopping: no more grace
  bool kill_sent = false;
  std::chrono::nanoseconds begun_at{0};         // the attempt, since hierad is up
  std::chrono::nanoseconds retry_due{0};
  std::optional<int64_t> rank_bytes;     // LeastMemory of its spec, once asked for; 0: it has none
  std::chrono::nanoseconds moved_at{0};         // when any rank's step or phase last changed
  std::deque<double> step_seconds;              // of this attempt's newest steps, for their median
  int64_t checkpoint_request = 0;               // of this attempt
  bool gentle = false;                          // it ends for a pause: its ranks are not signalled, but end by themselves
  std::map<v1::Reason, int64_t> restarts;   // attempts that another one followed

  void ResetAttempt() {
    ranks.assign(row.ranks.size(), RankLive());
    acknowledged_step = 0;
    rendezvous.clear();
    samples_per_s = 0;
    kill_at.reset();
    kill_sent = false;
    moved_at = std::chrono::nanoseconds(0);
    step_seconds.clear();
    checkpoint_request = 0;
    gentle = false;
    start_from.clear();
    for (const v1::CheckpointInfo& info : row.checkpoints) {
      if (!info.damaged() && start_from.size() < 16) start_from.push_back(info);
    }
  }
};

// A piece of a log that somebody waits for.
struct LogRead {
  v1::LogWanted wanted;
  std::chrono::nanoseconds until{0};
  std::function<void(absl::StatusOr<v1::LogPiece>)> reply;
};

struct Node {
  std::string name, instance, version;
  std::vector<v1::Slot> slots;
  std::vector<v1::RankProcess> processes;   // as last reported
  uint64_t orders_seen = 0;
  uint64_t session = 0;                     // 0: not connected
  std::chrono::nanoseconds last_seen{0};
  int64_t last_seen_ms = 0;                 // 0: not since hierad started
  bool lost = false;
  bool orders_due = false;
  bool drained = false;                     // gets no more work
  std::map<std::string, std::string> faults;   // by slot: what its card had; it gets no more work
  std::chrono::nanoseconds mended_at = std::chrono::nanoseconds::min();   // faults before it are over
  std::map<uint64_t, LogRead> log_reads;    // by id, oldest first
};

struct AgentSession {
  std::shared_ptr<AgentLink> link;
  std::string node;                         // empty: has not reported yet
  std::string only_node;                    // may speak for this one only; empty: for any
  std::string sent;                         // the last orders, without their sequence
};

struct WorkerSession {
  std::shared_ptr<WorkerLink> link;
  uint64_t job_id = 0;                      // 0: has not reported yet
  int attempt = 0;
  int rank = 0;
  std::string sent;
  bool due = false;
};

}  // namespace hierad
