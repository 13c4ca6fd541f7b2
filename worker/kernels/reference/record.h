// What goes around a step: the tail of the gradients, the times, the record's way to the host, the snapshot.
#pragma once

#include <atomic>
#include <bit>
#include <cstdint>
#include <cstring>

#include "base/clock.h"
#include "base/plan/step_values.h"

namespace hierad::reference {

// Places in the tail of the gradients. The high part of the loss numerator has 12 bits, so that its sum over ranks is exact.
enum TailPlace { kTailLossHigh, kTailLossLow, kTailStop, kTailCheckpoint, kTailNotFinite };

template <typename S>
void PackTail(const StepScalars& scalars, const double* loss_partials, uint64_t not_finite, S* tail, int64_t batch) {
  double numerator = 0;
  for (int64_t b = 0; b < batch; ++b) numerator += loss_partials[b];
  const float high = std::bit_cast<float>(std::bit_cast<uint32_t>(float(numerator)) & ~uint32_t{0xFFF});
  tail[kTailLossHigh] = S(high);
  tail[kTailLossLow] = S(numerator - double(high));
  tail[kTailStop] = S((scalars.signals & 1) != 0 ? 1 : 0);
  tail[kTailCheckpoint] = S((scalars.signals & 2) != 0 ? 1 : 0);
  tail[kTailNotFinite] = S(not_finite != 0 ? 1 : 0);
}

template <typename S>
void UnpackTail(const S* tail, double* loss_partials, StepRecord* record, int64_t batch) {
  for (int64_t b = 0; b < batch; ++b) loss_partials[b] = b == 0 ? double(tail[kTailLossHigh]) + double(tail[kTailLossLow]) : 0.0;
  record->signals = (tail[kTailStop] > 0 ? 1 : 0) | (tail[kTailCheckpoint] > 0 ? 2 : 0) | (tail[kTailNotFinite] > 0 ? 4 : 0);
}

inline void Mark(const StepScalars& scalars, StepRecord* record, StepPhase phase) {
  if (scalars.train == 0) return;
  const auto now = uint64_t(Clock::System().Monotonic().count());
  if (record->marked_ns != 0) record->spent_ns[int(phase)] += now - record->marked_ns;
  record->marked_ns = now;
}

inline void PublishRecord(StepRecord* record, uint64_t* not_finite, RecordSlot* ring) {
  record->not_finite = *not_finite;
  *not_finite = 0;
  const uint64_t number = ++record->published;
  RecordSlot& slot = ring[(number - 1) % kRecordSlots];
  const std::atomic_ref<uint64_t> published(slot.number);
  published.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  std::memcpy(&slot.record, record, sizeof *record);
  published.store(number, std::memory_order_release);
  for (uint64_t& spent : record->spent_ns) spent = 0;
}

template <typename S>
void SnapshotState(const S* master, const S* moments, const StepRecord& record, int64_t size, int num_moments, char* snapshot) {
  const int64_t bytes = size * int64_t(sizeof(S));
  std::memcpy(snapshot, master, bytes);
  if (moments != nullptr) std::memcpy(snapshot + bytes, moments, num_moments * bytes);
  std::memcpy(snapshot + (1 + num_moments) * bytes, &record, sizeof record);
}

}  // namespace hierad::reference
