#include "worker/step_watch.h"

#include <algorithm>
#include <utility>

#include "base/clock.h"

namespace hierad {
namespace {

constexpr size_t kRecent = 31;

}  // namespace

StepWatch::StepWatch(const Limits& limits, std::function<void(std::chrono::nanoseconds)> expired)
    : limits_(limits), expired_(std::move(expired)), thread_([this] { Watch(); }) {}

StepWatch::~StepWatch() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void StepWatch::Begin() {
  std::lock_guard lock(mutex_);
  began_ = Clock::System().Monotonic();
  running_ = true;
}

void StepWatch::End() {
  std::lock_guard lock(mutex_);
  running_ = false;
  const auto took = Clock::System().Monotonic() - began_;
  // The first one is like no other.
  if (steps_++ == 0) return;
  if (recent_.size() < kRecent) {
    recent_.push_back(took);
  } else {
    recent_[steps_ % kRecent] = took;
  }
}

std::chrono::nanoseconds StepWatch::limit() const {
  std::lock_guard lock(mutex_);
  return LimitLocked();
}

std::chrono::nanoseconds StepWatch::LimitLocked() const {
  if (recent_.empty()) return limits_.first;
  std::vector<std::chrono::nanoseconds> sorted = recent_;
  std::nth_element(sorted.begin(), sorted.begin() + std::ptrdiff_t(sorted.size() / 2), sorted.end());
  return std::max(limits_.least, limits_.medians * sorted[sorted.size() / 2]);
}

void StepWatch::Watch() {
  std::unique_lock lock(mutex_);
  // Looks now and then, so that Begin and End wake nobody.
  while (!changed_.wait_for(lock, limits_.look_every, [this] { return stop_; })) {
    const auto limit = LimitLocked();
    if (!running_ || Clock::System().Monotonic() - began_ < limit) continue;
    lock.unlock();
    expired_(limit);
    return;
  }
}

}  // namespace hierad
