// The agent of this machine, when hierad sees to it (agent: auto): a process in a session of its own, so that it and the
// workers live on when hierad is killed. While any living agent holds the agent's lock none is started; when none does
// (it died, or never was), one is, with back-off. One thread of its own.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "base/clock.h"

namespace hierad {

struct LocalAgentOptions {
  std::string program;         // path of hierad-agent
  std::string endpoint;        // what it dials
  std::string state_folder;    // its own: holds agent.lock and agent.log
  std::string lifetime;        // service or session
  int cpu_slots = -1;
  std::string worker_user, root_ranks;   // as the agent's options; empty: its defaults
};

class LocalAgent {
 public:
  LocalAgent(LocalAgentOptions options, const Clock* clock);
  ~LocalAgent();   // stops looking; leaves the agent running

  absl::Status Start();
  // Ends the agent, whoever started it, and waits until it is gone: at most `most`.
  void End(std::chrono::milliseconds most);

 private:
  void Watch();
  void LookAfter();
  bool ChildLives();
  absl::Status Spawn();

  const LocalAgentOptions options_;
  const Clock* const clock_;
  const std::string lock_path_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stopping_ = false;
  std::thread thread_;
  // Under mutex_.
  int child_ = 0;                               // 0: none of ours
  std::chrono::nanoseconds next_start_{0};
  std::chrono::milliseconds backoff_{500};
  std::chrono::nanoseconds started_at_{0};
};

}  // namespace hierad
