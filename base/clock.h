// The only source of time. Deadlines and ages use the monotonic clock (a step of the wall clock kills nothing);
// the wall clock is for showing and storing.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>

namespace hierad {

class Clock {
 public:
  virtual ~Clock() = default;
  virtual std::chrono::nanoseconds Monotonic() const = 0;   // since an arbitrary start
  virtual int64_t UnixMs() const = 0;
  static const Clock& System();
};

// Between two tries of something that nothing announces. Never to wait for an event that can be waited for.
void SleepFor(std::chrono::nanoseconds time);

// For tests: stands still until advanced. Thread-safe.
class FakeClock : public Clock {
 public:
  std::chrono::nanoseconds Monotonic() const override;
  int64_t UnixMs() const override;
  void Advance(std::chrono::nanoseconds by);
  void StepWallClock(int64_t by_ms);

 private:
  mutable std::mutex mutex_;
  std::chrono::nanoseconds now_{1'000'000'000};
  int64_t unix_offset_ms_ = 1'700'000'000'000;
};

}  // namespace hierad
