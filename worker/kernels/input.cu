// Staged batch to the step's static input, and the choice of kept mask units.
#include <cuda_fp16.h>

#include "base/random.h"
#include "worker/kernels/device.cuh"
#include "worker/kernels/kernels.h"

namespace hierad::kernels {
namespace {

template <typename V>
__device__ float Value(V v) { return float(v); }
__device__ float Value(__half v) { return __half2float(v); }

template <typename V>
__global__ void Convert(const StepScalars* s, const V* source, const int64_t* source_ids, const int64_t* source_labels,
                        const float* scale, const float* shift, float* x, int64_t* visit_ids, int64_t* labels, int64_t batch,
                        int64_t channels, int64_t samples) {
  const int64_t sample_size = channels * samples, size = batch * sample_size;
  const int64_t real = s->real, first = s->slot * batch;
  HIERAD_GRID_LOOP(i, size) {
    const int64_t b = i / sample_size, c = i % sample_size / samples;
    x[i] = b < real ? Value(source[first * sample_size + i]) * scale[c] + shift[c] : 0.0f;
  }
  HIERAD_GRID_LOOP(b, batch) {
    visit_ids[b] = b < real ? source_ids[first + b] : 0;
    labels[b] = b < real ? source_labels[first + b] : -1;
  }
}

// A block a sample. A unit is kept if fewer than `kept` others come before it in the order of (word, index).
__global__ void Mask(const StepScalars* s, const int64_t* visit_ids, uint8_t* keep_mask, int32_t* keep_idx, int units, int kept) {
  extern __shared__ uint32_t words[];
  uint8_t* keep = reinterpret_cast<uint8_t*>(words + units);
  const int b = blockIdx.x;
  const RandomStream stream{s->seed, Draw(s->mask_draw), s->epoch, uint64_t(visit_ids[b])};
  for (int u = threadIdx.x; u < units; u += blockDim.x) words[u] = stream.Word(u);
  __syncthreads();
  for (int u = threadIdx.x; u < units; u += blockDim.x) {
    int before = 0;
    for (int v = 0; v < units; ++v) before += words[v] < words[u] || (words[v] == words[u] && v < u);
    keep[u] = before < kept;
    keep_mask[int64_t(b) * units + u] = before < kept;
  }
  __syncthreads();
  for (int u = threadIdx.x; u < units; u += blockDim.x) {
    if (!keep[u]) continue;
    int place = 0;
    for (int v = 0; v < u; ++v) place += keep[v];
    keep_idx[int64_t(b) * kept + place] = u;
  }
}

}  // namespace

cudaError_t ConvertInput(const StepScalars* scalars, const void* source, Source type, const int64_t* source_ids,
                         const int64_t* source_labels, const float* scale, const float* shift, float* x_BCS, int64_t* visit_ids,
                         int64_t* labels, int64_t batch, int64_t channels, int64_t samples, cudaStream_t stream) {
  const unsigned blocks = Blocks(batch * channels * samples, 256);
  auto launch = [&](auto* typed) {
    Convert<<<blocks, 256, 0, stream>>>(scalars, typed, source_ids, source_labels, scale, shift, x_BCS, visit_ids, labels, batch,
                                        channels, samples);
  };
  switch (type) {
    case Source::kF32: launch(static_cast<const float*>(source)); break;
    case Source::kF16: launch(static_cast<const __half*>(source)); break;
    case Source::kI16: launch(static_cast<const int16_t*>(source)); break;
    case Source::kU8: launch(static_cast<const uint8_t*>(source)); break;
  }
  return cudaGetLastError();
}

cudaError_t DrawMask(const StepScalars* scalars, const int64_t* visit_ids, uint8_t* keep_mask, int32_t* keep_idx, int batch,
                     int mask_units, int kept, cudaStream_t stream) {
  const int bytes = mask_units * 5;
  if (bytes > 48 << 10) {
    if (cudaError_t e = cudaFuncSetAttribute(Mask, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes); e != cudaSuccess) return e;
  }
  Mask<<<unsigned(batch), mask_units > 64 ? 256 : 64, bytes, stream>>>(scalars, visit_ids, keep_mask, keep_idx, mask_units, kept);
  return cudaGetLastError();
}

}  // namespace hierad::kernels
