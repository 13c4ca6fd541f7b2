// What goes around a step: the times by the device's clock, the record's way to the host, the tail of the gradients.
#include "worker/kernels/device.cuh"
#include "worker/kernels/kernels.h"

namespace hierad::kernels {
namespace {

__global__ void Book(const StepScalars* s, StepRecord* record, int phase) {
  if (s->train == 0) return;
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  if (record->marked_ns != 0) record->spent_ns[phase] += now - record->marked_ns;
  record->marked_ns = now;
}

// The ring is the host's memory: what a reader must see in order is fenced for the whole system.
__global__ void Publish(StepRecord* record, uint64_t* not_finite, RecordSlot* ring) {
  const uint64_t number = record->published + 1;
  RecordSlot* slot = ring + (number - 1) % kRecordSlots;
  volatile uint64_t* published = &slot->number;
  if (threadIdx.x == 0) {
    record->published = number;
    record->not_finite = *not_finite;
    *not_finite = 0;
    *published = 0;
    __threadfence_system();
  }
  __syncthreads();
  static_assert(sizeof(StepRecord) % sizeof(uint64_t) == 0);
  const auto* from = reinterpret_cast<const uint64_t*>(record);
  auto* to = reinterpret_cast<volatile uint64_t*>(&slot->record);
  for (unsigned i = threadIdx.x; i < sizeof(StepRecord) / sizeof(uint64_t); i += blockDim.x) to[i] = from[i];
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x < kNumStepPhases) record->spent_ns[threadIdx.x] = 0;
  if (threadIdx.x == 0) *published = number;
}

// The high part of the numerator has 12 bits, so that its sum over ranks is exact.
__global__ void Pack(const StepScalars* s, const double* loss_partials, const uint64_t* not_finite, float* tail, int batch) {
  __shared__ double shared[32];
  double numerator = 0;
  for (int b = threadIdx.x; b < batch; b += blockDim.x) numerator += loss_partials[b];
  numerator = BlockSum(numerator, shared);
  if (threadIdx.x != 0) return;
  const float high = __uint_as_float(__float_as_uint(float(numerator)) & ~0xFFFu);
  tail[0] = high;
  tail[1] = float(numerator - double(high));
  tail[2] = s->signals & 1 ? 1.0f : 0.0f;
  tail[3] = s->signals & 2 ? 1.0f : 0.0f;
  tail[4] = *not_finite != 0 ? 1.0f : 0.0f;
}

__global__ void Unpack(const float* tail, double* loss_partials, StepRecord* record, int batch) {
  for (int b = threadIdx.x; b < batch; b += blockDim.x) loss_partials[b] = b == 0 ? double(tail[0]) + double(tail[1]) : 0.0;
  if (threadIdx.x == 0) record->signals = (tail[2] > 0 ? 1 : 0) | (tail[3] > 0 ? 2 : 0) | (tail[4] > 0 ? 4 : 0);
}

// The host's memory, looked at by its threads while the step runs.
__global__ void Announce(const StepScalars* s, CollectiveProgress* progress, int64_t number, bool entered) {
  auto* p = reinterpret_cast<volatile int64_t*>(progress);
  if (entered) p[0] = s->step;
  p[entered ? 1 : 2] = number;
  __threadfence_system();
}

}  // namespace

cudaError_t AnnounceCollective(const StepScalars* scalars, CollectiveProgress* progress, int number, bool entered, cudaStream_t stream) {
  Launch(Announce, 1, 1, 0, stream, scalars, progress, number, entered);
  return cudaGetLastError();
}

cudaError_t Mark(const StepScalars* scalars, StepRecord* record, StepPhase phase, cudaStream_t stream) {
  Launch(Book, 1, 1, 0, stream, scalars, record, int(phase));
  return cudaGetLastError();
}

cudaError_t PublishRecord(StepRecord* record, uint64_t* not_finite, RecordSlot* ring, cudaStream_t stream) {
  Launch(Publish, 1, 32, 0, stream, record, not_finite, ring);
  return cudaGetLastError();
}

cudaError_t PackTail(const StepScalars* scalars, const double* loss_partials, const uint64_t* not_finite, float* tail, int batch, cudaStream_t stream) {
  Launch(Pack, 1, 256, 0, stream, scalars, loss_partials, not_finite, tail, batch);
  return cudaGetLastError();
}

cudaError_t UnpackTail(const float* tail, double* loss_partials, StepRecord* record, int batch, cudaStream_t stream) {
  Launch(Unpack, 1, 256, 0, stream, tail, loss_partials, record, batch);
  return cudaGetLastError();
}

}  // namespace hierad::kernels
