// Ends a rank whose run folder has been given to a newer attempt (base/attempt_mark.h). A thread of its own, since the
// trainer may be waiting for a peer that is cut off as well.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

namespace hierad {

class AttemptWatch {
 public:
  // `superseded` is called at most once, from the watch's thread. A folder without a mark, or out of reach, says nothing.
  AttemptWatch(const std::string& run_folder, const std::string& credential, std::function<void()> superseded,
               std::chrono::milliseconds look_every = std::chrono::seconds(1));
  ~AttemptWatch();

 private:
  void Watch();

  const std::string path_, mark_;
  const std::function<void()> superseded_;
  const std::chrono::milliseconds look_every_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace hierad
