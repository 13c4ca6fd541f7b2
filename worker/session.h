// What the trainer tells hierad and hears from it. The trainer never waits for hierad but in AwaitRendezvous and End: while
// hierad is away, training goes on. Thread-safe.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "hierad/v1/job.pb.h"

namespace hierad {

namespace v1 {
class Assignment;
}

class Session {
 public:
  enum class Want { kRun, kPause, kCancel };

  virtual ~Session() = default;

  virtual void SetPhase(v1::Phase phase) = 0;
  // Optimizer steps done and to do, of the whole run; the first (1-based) this attempt runs.
  virtual void SetProgress(int64_t step, int64_t total_steps, int64_t first_step) = 0;
  virtual void SetCounters(int64_t nan_steps, double samples_per_s) = 0;
  virtual void SetTotals(const v1::RankTotals& totals) = 0;
  virtual void SetDataCounters(const v1::DataCounters& counters) = 0;
  // Asked by the session's thread at each report; nullptr before what it asks goes away.
  virtual void SetWaitingIn(std::function<std::string()> ask) = 0;
  virtual void AddMetrics(const v1::StepMetrics& metrics) = 0;
  virtual void SetCheckpoints(const std::vector<v1::CheckpointInfo>& checkpoints) = 0;

  virtual void OfferRendezvous(const std::string& rendezvous) = 0;
  // Rank 0's. DeadlineExceeded (REASON_PEER_LOST), or Cancelled when a stop is wanted first.
  virtual absl::StatusOr<std::string> AwaitRendezvous(std::chrono::milliseconds timeout) = 0;

  virtual Want want() const = 0;
  virtual int64_t checkpoint_request() const = 0;
  virtual double peak_lr() const = 0;   // as hierad has it now; 0: it has not said
  // Sets `flag` as soon as a stop is wanted (by hierad or SIGTERM), for waits that only it can end; nullptr: no more.
  virtual void AbandonOnStop(std::atomic<bool>* flag) = 0;

  // The last report. True: hierad has stored it.
  virtual bool End(v1::Reason reason, const std::string& message, std::chrono::milliseconds timeout) = 0;
};

// Without hierad: wants nothing, keeps nothing.
std::unique_ptr<Session> MakeLocalSession();

// A stream to the assignment's endpoint, in a thread of its own; broken, it is tried again for ever, with back-off. An
// attempt that hierad does not (or no longer) know ends the process at once with kWorkerExitFenced: another attempt may already
// write to the same folder. `terminate`: set by SIGTERM.
std::unique_ptr<Session> ConnectSession(const v1::Assignment& assignment, const std::atomic<bool>* terminate);

}  // namespace hierad
