#include "worker/attempt_watch.h"

#include <utility>

#include "base/attempt_mark.h"
#include "base/fs.h"

namespace hierad {

AttemptWatch::AttemptWatch(const std::string& run_folder, const std::string& credential, std::function<void()> superseded,
                           std::chrono::milliseconds look_every)
    : path_(JoinPath(run_folder, kAttemptMarkFile)), mark_(AttemptMark(credential)), superseded_(std::move(superseded)),
      look_every_(look_every), thread_([this] { Watch(); }) {}

AttemptWatch::~AttemptWatch() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void AttemptWatch::Watch() {
  std::unique_lock lock(mutex_);
  do {
    // Opened anew each time: a network file system then asks its server.
    const auto now = ReadFile(path_, 256);
    if (!now.ok() || *now == mark_) continue;
    lock.unlock();
    superseded_();
    return;
  } while (!changed_.wait_for(lock, look_every_, [this] { return stop_; }));
}

}  // namespace hierad
