// The agent's loop: joins what runs here (Ranks) with what hierad wants (AgentSession). While hierad is away the ranks go
// on, and the agent tries again for ever, with back-off. One thread, plus gRPC's.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/fs.h"
#include "base/gpu_faults.h"
#include "base/service_notify.h"
#include "hierad/v1/agent.pb.h"
#include "server/agent/agent_session.h"
#include "server/agent/log_reader.h"
#include "server/agent/ranks.h"

namespace hierad {

class Agent {
 public:
  struct Options {
    std::string server;        // unix:/path or host:port
    std::string certificates;  // folder, for host:port
    std::string node;
    std::string instance;
    std::vector<v1::Slot> slots;
    // What SIGTERM means: leave the ranks running for the next agent (service), or end them first (session).
    bool session_lifetime = false;
    const ServiceNotify* notify = nullptr;   // none: nobody is told
    int signals = -1;          // signalfd of SIGTERM, SIGINT and SIGCHLD
    RankRights rights;         // with which logs are read: the ranks'
    std::string nvml;          // library that tells of faults of GPUs; empty: they are not watched
  };
  Agent(Options options, std::unique_ptr<Ranks> ranks);
  ~Agent();

  // Until SIGTERM or SIGINT; OK then.
  absl::Status Run();

 private:
  using Time = std::chrono::nanoseconds;

  void Wait();
  void OnSignal(int number);
  void OnSession();
  void Connect();
  void ConnectLater(const absl::Status& why);
  void Report();
  void OnGpuFault(const GpuFault& fault);   // on a thread of GpuFaults
  void AddGpuFaults(v1::AgentReport* report);
  static Time Now();

  const Options options_;
  std::unique_ptr<Ranks> ranks_;
  UniqueFd wake_;
  std::unique_ptr<AgentSession> session_;
  uint64_t orders_seen_ = 0;
  std::chrono::milliseconds grace_;
  bool changed_ = true, heard_ = false, away_said_ = false;
  bool leaving_ = false, ending_ = false;
  Time next_report_{0}, next_connect_{0};
  std::chrono::milliseconds backoff_;
  struct SeenFault {
    GpuFault fault;
    Time at;
  };
  std::atomic<bool> log_ready_{false};
  std::unique_ptr<LogReader> logs_;
  std::mutex faults_mutex_;
  std::deque<SeenFault> faults_;   // newest last; guarded by faults_mutex_
  bool faults_new_ = false;        // the same
  std::unique_ptr<GpuFaults> gpu_faults_;   // last: it calls OnGpuFault
};

}  // namespace hierad
