#include "base/clock.h"

#include <thread>

namespace hierad {
namespace {

class SystemClock : public Clock {
 public:
  std::chrono::nanoseconds Monotonic() const override {
    return std::chrono::steady_clock::now().time_since_epoch();
  }
  int64_t UnixMs() const override {
    return std::chrono::duration_cast<std::chrono::milliseconds>(
               std::chrono::system_clock::now().time_since_epoch()).count();
  }
};

}  // namespace

const Clock& Clock::System() {
  static const SystemClock& clock = *new SystemClock;   // never destroyed: threads read it until the process is gone
  return clock;
}

void SleepFor(std::chrono::nanoseconds time) { std::this_thread::sleep_for(time); }

std::chrono::nanoseconds FakeClock::Monotonic() const {
  std::lock_guard lock(mutex_);
  return now_;
}

int64_t FakeClock::UnixMs() const {
  std::lock_guard lock(mutex_);
  return unix_offset_ms_ + std::chrono::duration_cast<std::chrono::milliseconds>(now_).count();
}

void FakeClock::Advance(std::chrono::nanoseconds by) {
  std::lock_guard lock(mutex_);
  now_ += by;
}

void FakeClock::StepWallClock(int64_t by_ms) {
  std::lock_guard lock(mutex_);
  unix_offset_ms_ += by_ms;
}

}  // namespace hierad
