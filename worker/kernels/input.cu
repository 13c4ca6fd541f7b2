// Staged batch to the step's static input, and the choice of kept mask units.
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "base/random.h"
#include "worker/kernels/device.cuh"
#include "worker/kernels/kernels.h"

namespace hierad::kernels {
namespace {

// Four neighbours as floats.
__device__ float4 LoadRow4(const float* p) { return *reinterpret_cast<const float4*>(p); }
__device__ float4 LoadRow4(const __half* p) {
  const uint2 v = *reinterpret_cast<const uint2*>(p);
  const float2 a = __half22float2(*reinterpret_cast<const __half2*>(&v.x)), b = __half22float2(*reinterpret_cast<const __half2*>(&v.y));
  return make_float4(a.x, a.y, b.x, b.y);
}
__device__ float4 LoadRow4(const int16_t* p) {
  const short4 v = *reinterpret_cast<const short4*>(p);
  return make_float4(v.x, v.y, v.z, v.w);
}
__device__ float4 LoadRow4(const uint8_t* p) {
  const uchar4 v = *reinterpret_cast<const uchar4*>(p);
  return make_float4(v.x, v.y, v.z, v.w);
}
__device__ float LoadRow(__half v) { return __half2float(v); }
template <typename V>
__device__ float LoadRow(V v) { return float(v); }

// How a channel's values are made; `bad` once one was not finite.
struct Maker {
  float offset, scale, factor, clip;
  bool bad;
  __device__ float operator()(float raw) {
    const float cut = clip > 0 ? (raw > clip ? clip : raw < -clip ? -clip : raw) : raw;
    const float made = (cut - offset) * scale * factor;   // nothing here to contract: the plain kernel's bits
    bad |= !isfinite(raw) | !isfinite(made);
    return made;
  }
  __device__ float4 operator()(float4 v) { return make_float4((*this)(v.x), (*this)(v.y), (*this)(v.z), (*this)(v.w)); }
};

// A channel of a row: as it is stored, and as it is drawn.
template <typename V>
struct Channel {
  const V* values;
  __device__ float4 Four(int place) const { return LoadRow4(values + place); }
  __device__ float One(int64_t place) const { return LoadRow(values[place]); }
};
struct Drawn {};
template <>
struct Channel<Drawn> {
  RandomStream stream;
  uint32_t first;   // word of the channel's first value; where Four is asked for, a multiple of four
  __device__ float4 Four(int place) const {
    const Random4 words = stream.At((first + uint32_t(place)) >> 2);
    return make_float4(SyntheticValue(words.v[0]), SyntheticValue(words.v[1]), SyntheticValue(words.v[2]), SyntheticValue(words.v[3]));
  }
  __device__ float One(int64_t place) const { return SyntheticValue(stream.Word(first + uint32_t(place))); }
};

constexpr int kConvertThreads = 256, kQuads = 4;                  // a thread: kQuads times four neighbours
constexpr int kChunk = 4 * kConvertThreads * kQuads;              // values of a block

// A block takes a chunk of one channel of one sample. Where nothing is drawn but a flip, and widths divide by four, threads move four
// values at once.
template <typename V>
__global__ void __launch_bounds__(kConvertThreads) Convert(RowBatch<float> a, int chunks) {
  __shared__ RowDraws draws;
  __shared__ bool empty;
  const StepScalars& s = *a.scalars;
  const int channels = int(a.rules.channels), samples = int(a.rules.samples), points = int(a.rules.points), width = int(a.rules.width);
  const int64_t row = blockIdx.x / unsigned(chunks), b = row / channels;
  const int c = int(row - b * channels), first = int(blockIdx.x % unsigned(chunks)) * kChunk, last = min(samples, first + kChunk);
  const bool real = b < s.real;
  const int64_t from = s.slot * a.batch + b;
  const uint64_t visit = real ? uint64_t(a.source_ids[from]) : 0;
  if (threadIdx.x == 0) {
    if (c == 0 && first == 0) {
      if (a.visit_ids != nullptr) a.visit_ids[b] = int64_t(visit);
      if (a.labels != nullptr) a.labels[b] = real ? a.source_labels[from] : -1;
    }
    draws = real && s.train != 0 ? DrawRow(a.rules, s.seed, s.epoch, visit) : NothingDrawn();
    empty = !real || (s.train != 0 && DropsChannel(a.rules, s.seed, s.epoch, visit, c));
  }
  __syncthreads();
  float* const out = a.x_BCS + row * samples;
  if (empty) {
    for (int i = first + int(threadIdx.x); i < last; i += kConvertThreads) out[i] = 0.0f;
    return;
  }
  Channel<V> source;
  if constexpr (std::is_same_v<V, Drawn>) {
    source = {SyntheticStream(a.rules, s.seed, visit), uint32_t(c) * uint32_t(samples)};
  } else {
    source = {static_cast<const V*>(a.source) + (from * channels + c) * samples};
  }
  const bool flip = draws.flip;
  Maker make{a.offset[c], a.scale[c], draws.factor, a.rules.clip, false};
  if (draws.shift == 0 && samples % 4 == 0 && points % 4 == 0 && (!flip || width % 4 == 0)) {
    float4 v[kQuads];
#pragma unroll
    for (int k = 0; k < kQuads; ++k) {
      const int i = first + 4 * (k * kConvertThreads + int(threadIdx.x));
      if (i >= last) continue;
      int place = i;
      if (flip) place += width - 4 - 2 * (i % width);
      v[k] = place < points ? source.Four(place) : make_float4(0, 0, 0, 0);
    }
#pragma unroll
    for (int k = 0; k < kQuads; ++k) {
      const int i = first + 4 * (k * kConvertThreads + int(threadIdx.x));
      if (i >= last) continue;
      int place = i;
      if (flip) place += width - 4 - 2 * (i % width);
      float4 made = place < points ? make(v[k]) : make_float4(0, 0, 0, 0);
      if (flip) made = make_float4(made.w, made.z, made.y, made.x);
      *reinterpret_cast<float4*>(out + i) = made;
    }
  } else {
    const RowDraws mine = draws;
    for (int i = first + int(threadIdx.x); i < last; i += kConvertThreads) {
      const int64_t place = SourcePlace(a.rules, mine, i);
      out[i] = place < 0 ? 0.0f : make(source.One(place));
    }
  }
  if (__syncthreads_or(make.bad) && threadIdx.x == 0) atomicMax(reinterpret_cast<unsigned long long*>(a.not_finite), visit + 1);
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

cudaError_t ConvertInput(const RowBatch<float>& batch, cudaStream_t stream) {
  const int64_t chunks = (batch.rules.samples + kChunk - 1) / kChunk, blocks = batch.batch * batch.rules.channels * chunks;
  if (batch.rules.samples > INT32_MAX - kChunk || blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  auto launch = [&](auto* typed) { Launch(Convert<std::remove_pointer_t<decltype(typed)>>, unsigned(blocks), kConvertThreads, 0, stream, batch, int(chunks)); };
  if (batch.rules.synthetic > 0) {
    launch(static_cast<Drawn*>(nullptr));
    return cudaGetLastError();
  }
  switch (batch.type) {
    case DType::kU8: launch(static_cast<uint8_t*>(nullptr)); break;
    case DType::kI16: launch(static_cast<int16_t*>(nullptr)); break;
    case DType::kF16: launch(static_cast<__half*>(nullptr)); break;
    default: launch(static_cast<float*>(nullptr)); break;
  }
  return cudaGetLastError();
}

cudaError_t DrawMask(const StepScalars* scalars, const int64_t* visit_ids, uint8_t* keep_mask, int32_t* keep_idx, int batch,
                     int mask_units, int kept, cudaStream_t stream) {
  const int bytes = mask_units * 5;
  if (bytes > 48 << 10) {
    if (cudaError_t e = cudaFuncSetAttribute(Mask, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes); e != cudaSuccess) return e;
  }
  Launch(Mask, unsigned(batch), mask_units > 64 ? 256 : 64, bytes, stream, scalars, visit_ids, keep_mask, keep_idx, mask_units, kept);
  return cudaGetLastError();
}

}  // namespace hierad::kernels
