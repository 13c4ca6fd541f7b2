// Ends a process whose step does not come back: a GPU that hangs, or a collective on the device whose peer is gone, cannot
// be waited for with a limit from the thread that waits. CPU ranks need none (their collectives have limits).
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace hierad {

class StepWatch {
 public:
  struct Limits {
    std::chrono::nanoseconds first{std::chrono::minutes(15)};   // loads kernels, warms up, captures
    std::chrono::nanoseconds least{std::chrono::seconds(60)};
    int medians = 20;                                           // or so many median steps, if more
    std::chrono::nanoseconds look_every{std::chrono::seconds(1)};
  };
  // `expired` is called once, from the watch's thread, with the limit that was passed.
  StepWatch(const Limits& limits, std::function<void(std::chrono::nanoseconds limit)> expired);
  ~StepWatch();

  void Begin();
  void End();
  std::chrono::nanoseconds limit() const;   // of the next step

 private:
  std::chrono::nanoseconds LimitLocked() const;
  void Watch();

  const Limits limits_;
  const std::function<void(std::chrono::nanoseconds)> expired_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool stop_ = false, running_ = false;
  std::chrono::nanoseconds began_{0};
  std::vector<std::chrono::nanoseconds> recent_;   // of the last steps, a ring
  size_t steps_ = 0;
  std::thread thread_;
};

}  // namespace hierad
