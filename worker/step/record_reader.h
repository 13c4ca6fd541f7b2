// Reads the ring that a step's last operation fills: records in order, those that were overwritten unread counted. One
// thread reads while the device, or another thread, writes.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/plan/step_values.h"

namespace hierad {

class RecordReader {
 public:
  explicit RecordReader(RecordSlot* ring) : ring_(ring) {}

  // False: the next record is not there yet.
  bool Next(StepRecord* record) {
    for (;;) {
      RecordSlot& slot = ring_[taken_ % kRecordSlots];
      const std::atomic_ref<uint64_t> published(slot.number);
      const uint64_t number = published.load(std::memory_order_acquire);
      if (number <= taken_) return false;   // being written (0), or of the round before
      if (number > taken_ + 1) {            // overwritten; the oldest that may be left is that of the next slot
        lost_ += int64_t(number - kRecordSlots - taken_);
        taken_ = number - kRecordSlots;
        continue;
      }
      *record = slot.record;
      std::atomic_thread_fence(std::memory_order_acquire);
      if (published.load(std::memory_order_relaxed) != number) continue;
      taken_ = number;
      return true;
    }
  }
  // Goes on after record number `number`; what lies before counts as read.
  void SkipTo(uint64_t number) { taken_ = number; }

  uint64_t taken() const { return taken_; }
  int64_t lost() const { return lost_; }

 private:
  RecordSlot* const ring_;
  uint64_t taken_ = 0;
  int64_t lost_ = 0;
};

}  // namespace hierad
