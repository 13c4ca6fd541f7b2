// The two losses with their gradients, and what stands before the classification head.
#include <type_traits>

#include "base/random.h"
#include "worker/kernels/device.cuh"
#include "worker/kernels/kernels.h"

namespace hierad::kernels {
namespace {

constexpr float kNormEpsilon = 1e-6f;

// What a sample's gradient is multiplied by.
__device__ inline double GradientWeight(const StepScalars* s, const StepRecord* record) {
  return record == nullptr ? s->loss_weight : s->loss_weight * record->scale.value;
}

constexpr int kLossThreads = 256;

// A block a part of a sample, a warp a token in turn: the numerator is summed in a fixed order without a second pass. kQuads times four
// neighbours of a token's target and prediction are in each lane, all of them asked for before the first is used: one after the other they
// would cost the memory's latency each, which took 0.3 ms whatever the batch. 0: tokens that are too large, or no multiple of four.
template <typename T, int kQuads, bool kRuns>
__global__ void __launch_bounds__(kLossThreads, sizeof(T) == 2 ? 2 : 1) Mae(const StepScalars* s, const StepRecord* record, MaeLossShape shape, const T* pred, const float* x,
                                                    const uint8_t* keep_mask, const int32_t* order, const int32_t* label_index, T* dpred,
                                                    double* partials) {
  __shared__ double sums[kLossThreads / 32];
  extern __shared__ int removed[];   // units, in order
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, dim = shape.pred_dim;
  const int64_t b = blockIdx.y;
  const float weight = float(2.0 * GradientWeight(s, record));
  const float* sample = x + b * shape.sample_size;
  if (warp == 0) {
    const uint8_t* mask = keep_mask + b * shape.mask_units;
    int count = 0;
    for (int first = 0; first < shape.mask_units; first += 32) {
      const bool gone = first + lane < shape.mask_units && mask[first + lane] == 0;
      const unsigned vote = __ballot_sync(~0u, gone);
      if (gone) removed[count + __popc(vote & ((1u << lane) - 1))] = first + lane;
      count += __popc(vote);
    }
  }
  __syncthreads();
  const int tokens = (shape.mask_units - shape.kept) * shape.finals, chunk = (tokens + int(gridDim.x) - 1) / int(gridDim.x);
  const int end = min(tokens, int(blockIdx.x + 1) * chunk);
  double numerator = 0;
  for (int i = int(blockIdx.x) * chunk + warp; i < end; i += kLossThreads / 32) {
    const int token = order[removed[i / shape.finals] * shape.finals + i % shape.finals];
    const int64_t row = (b * tokens + i) * dim;
    if (b >= s->real) {
      for (int e = lane; e < dim; e += 32) dpred[row + e] = FromFloat<T>(0.0f);
      continue;
    }
    const int32_t* index = label_index + int64_t(token) * dim;
    float mean = 0, deviation = 1, loss = 0;
    if constexpr (kQuads > 0) {
      float4 target[kQuads];
      Four<T> guess[kQuads];
#pragma unroll
      for (int k = 0; k < kQuads; ++k) {
        const int c = (k * 32 + lane) * 4;
        target[k] = make_float4(0, 0, 0, 0);
        guess[k] = Four<T>{};
        if (c >= dim) continue;
        guess[k] = LoadFour(pred + row + c);
        if constexpr (kRuns) {
          target[k] = Load4(sample + index[c]);
        } else {
          const int4 at = *reinterpret_cast<const int4*>(index + c);
          target[k] = make_float4(sample[at.x], sample[at.y], sample[at.z], sample[at.w]);
        }
      }
      if (shape.norm_target) {
        float sum = 0, squares = 0;
#pragma unroll
        for (int k = 0; k < kQuads; ++k) sum += (target[k].x + target[k].y) + (target[k].z + target[k].w);
        mean = WarpSum(sum) / float(dim);
#pragma unroll
        for (int k = 0; k < kQuads; ++k) {
          if ((k * 32 + lane) * 4 >= dim) continue;
          const float4 v = make_float4(target[k].x - mean, target[k].y - mean, target[k].z - mean, target[k].w - mean);
          squares += (v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w);
        }
        deviation = sqrtf(WarpSum(squares) / float(dim - 1) + kNormEpsilon);
      }
#pragma unroll
      for (int k = 0; k < kQuads; ++k) {
        const int c = (k * 32 + lane) * 4;
        if (c >= dim) continue;
        const float4 v = target[k], p = Widen<T>(guess[k]);
        const float4 d = make_float4(p.x - (v.x - mean) / deviation, p.y - (v.y - mean) / deviation, p.z - (v.z - mean) / deviation,
                                     p.w - (v.w - mean) / deviation);
        loss += (d.x * d.x + d.y * d.y) + (d.z * d.z + d.w * d.w);
        Store4(dpred + row + c, make_float4(d.x * weight, d.y * weight, d.z * weight, d.w * weight));
      }
    } else {
      if (shape.norm_target) {
        float sum = 0, squares = 0;
        for (int e = lane; e < dim; e += 32) sum += sample[index[e]];
        mean = WarpSum(sum) / float(dim);
        for (int e = lane; e < dim; e += 32) squares += (sample[index[e]] - mean) * (sample[index[e]] - mean);
        deviation = sqrtf(WarpSum(squares) / float(dim - 1) + kNormEpsilon);
      }
      for (int e = lane; e < dim; e += 32) {
        const float d = ToFloat(pred[row + e]) - (sample[index[e]] - mean) / deviation;
        loss += d * d;
        dpred[row + e] = FromFloat<T>(d * weight);
      }
    }
    numerator += double(WarpSum(loss));
  }
  if (lane == 0) sums[warp] = numerator;
  __syncthreads();
  if (threadIdx.x != 0) return;
  double* const to = partials + b * gridDim.x + blockIdx.x;
  double total = shape.accumulate ? *to : 0.0;
  for (int w = 0; w < kLossThreads / 32; ++w) total += sums[w];
  *to = total;
}

// A block a sample.
template <typename T>
__global__ void Entropy(const StepScalars* s, const StepRecord* record, const T* logits, const int64_t* labels, T* dlogits,
                        double* partials, int classes, bool accumulate) {
  __shared__ float shared[32];
  const int64_t b = blockIdx.x;
  const T* z = logits + b * classes;
  T* dz = dlogits + b * classes;
  if (b >= s->real) {
    for (int c = threadIdx.x; c < classes; c += blockDim.x) dz[c] = FromFloat<T>(0.0f);
    if (threadIdx.x == 0 && !accumulate) partials[b] = 0;
    return;
  }
  float most = -INFINITY;
  for (int c = threadIdx.x; c < classes; c += blockDim.x) {
    const float v = ToFloat(z[c]);
    if (v > most || v != v) most = v;
  }
#pragma unroll
  for (int m = 16; m > 0; m >>= 1) {
    const float v = __shfl_xor_sync(~0u, most, m);
    if (v > most || v != v) most = v;
  }
  if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = most;
  __syncthreads();
  for (unsigned w = 0; w < blockDim.x / 32; ++w) {
    if (shared[w] > most || shared[w] != shared[w]) most = shared[w];
  }
  float sum = 0;
  for (int c = threadIdx.x; c < classes; c += blockDim.x) sum += expf(ToFloat(z[c]) - most);
  const float total = BlockSum(sum, shared);
  const int64_t label = labels[b];
  const float weight = float(GradientWeight(s, record));
  for (int c = threadIdx.x; c < classes; c += blockDim.x) {
    dz[c] = FromFloat<T>((expf(ToFloat(z[c]) - most) / total - (c == label ? 1.0f : 0.0f)) * weight);
  }
  if (threadIdx.x == 0) partials[b] = double(most + logf(total) - ToFloat(z[label])) + (accumulate ? partials[b] : 0.0);
}

__global__ void Mean(const float* x, float* y, int batch, int tokens, int dim) {
  HIERAD_GRID_LOOP(i, int64_t(batch) * dim) {
    const int64_t b = i / dim, c = i % dim;
    float sum = 0;
    for (int n = 0; n < tokens; ++n) sum += x[(b * tokens + n) * dim + c];
    y[i] = sum / float(tokens);
  }
}

__global__ void Spread(const float* dy, float* dx, int batch, int tokens, int dim) {
  HIERAD_GRID_LOOP(i, int64_t(batch) * tokens * dim) dx[i] = dy[i / dim / tokens * dim + i % dim] / float(tokens);
}

template <typename T>
__global__ void Drop(const StepScalars* s, const int64_t* visit_ids, const T* x, T* y, int batch, int dim, double rate) {
  HIERAD_GRID_LOOP(i, int64_t(batch) * dim) {
    const RandomStream stream{s->seed, Draw::kDropout, s->epoch, uint64_t(visit_ids[i / dim])};
    const bool dropped = s->train != 0 && stream.Uniform(i % dim) < rate;
    const float factor = s->train == 0 ? 1.0f : float(1 / (1 - rate));
    y[i] = FromFloat<T>(dropped ? 0.0f : factor * ToFloat(x[i]));
  }
}

}  // namespace

template <typename T>
cudaError_t MaeLoss(const StepScalars* scalars, const StepRecord* record, const MaeLossShape& shape, const T* pred, const float* x,
                    const uint8_t* keep_mask, const int32_t* order, const int32_t* label_index, T* dpred, double* partials,
                    cudaStream_t stream) {
  const size_t bytes = size_t(shape.mask_units - shape.kept) * sizeof(int);
  auto of = [&](auto runs) {
    constexpr bool kRuns = decltype(runs)::value;
    if (shape.pred_dim % 4 != 0 || shape.pred_dim > 2048) return Mae<T, 0, false>;
    return shape.pred_dim <= 256 ? Mae<T, 2, kRuns> : shape.pred_dim <= 768 ? Mae<T, 6, kRuns> : Mae<T, 16, kRuns>;
  };
  const auto kernel = shape.runs ? of(std::true_type{}) : of(std::false_type{});
  if (bytes > 32 << 10) {
    if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)); e != cudaSuccess) return e;
  }
  Launch(kernel, dim3(unsigned(kLossParts), unsigned(shape.batch)), kLossThreads, bytes, stream, scalars, record, shape, pred, x, keep_mask, order, label_index, dpred, partials);
  return cudaGetLastError();
}

template <typename T>
cudaError_t CrossEntropy(const StepScalars* scalars, const StepRecord* record, const T* logits, const int64_t* labels, T* dlogits,
                         double* partials, int batch, int classes, bool accumulate, cudaStream_t stream) {
  Launch(Entropy<T>, unsigned(batch), 256, 0, stream, scalars, record, logits, labels, dlogits, partials, classes, accumulate);
  return cudaGetLastError();
}

cudaError_t MeanTokens(const float* x, float* y, int batch, int tokens, int dim, cudaStream_t stream) {
  Launch(Mean, Blocks(int64_t(batch) * dim, 128), 128, 0, stream, x, y, batch, tokens, dim);
  return cudaGetLastError();
}

cudaError_t MeanTokensBackward(const float* dy, float* dx, int batch, int tokens, int dim, cudaStream_t stream) {
  Launch(Spread, Blocks(int64_t(batch) * tokens * dim, 256), 256, 0, stream, dy, dx, batch, tokens, dim);
  return cudaGetLastError();
}

template <typename T>
cudaError_t Dropout(const StepScalars* scalars, const int64_t* visit_ids, const T* x, T* y, int batch, int dim, double rate,
                    cudaStream_t stream) {
  Launch(Drop<T>, Blocks(int64_t(batch) * dim, 256), 256, 0, stream, scalars, visit_ids, x, y, batch, dim, rate);
  return cudaGetLastError();
}

#define HIERAD_INSTANTIATE(T)                                                                                                        \
  template cudaError_t MaeLoss<T>(const StepScalars*, const StepRecord*, const MaeLossShape&, const T*, const float*, const uint8_t*, \
                                  const int32_t*, const int32_t*, T*, double*, cudaStream_t);                                                        \
  template cudaError_t CrossEntropy<T>(const StepScalars*, const StepRecord*, const T*, const int64_t*, T*, double*, int, int, bool,  \
                                       cudaStream_t);                                                                                \
  template cudaError_t Dropout<T>(const StepScalars*, const int64_t*, const T*, T*, int, int, double, cudaStream_t);
HIERAD_INSTANTIATE(bf16)
HIERAD_INSTANTIATE(half)
HIERAD_INSTANTIATE(float)
#undef HIERAD_INSTANTIATE

}  // namespace hierad::kernels
