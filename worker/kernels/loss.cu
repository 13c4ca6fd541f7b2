// The two losses with their gradients, and what stands before the classification head.
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

// A block a sample, a warp a token in turn: the sample's numerator is summed in a fixed order without a second pass. kValues of a
// token's target stay in each lane, so that they are looked up once, all at a time; 0: tokens too large for that.
template <typename T, int kValues>
__global__ void __launch_bounds__(512) Mae(const StepScalars* s, const StepRecord* record, MaeLossShape shape, const T* pred, const float* x,
                                           const uint8_t* keep_mask, const int32_t* order, const int32_t* label_index, T* dpred,
                                           double* partials) {
  BeginKernel();
  __shared__ double sums[16];
  extern __shared__ int removed[];   // units, in order
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5, masked = shape.mask_units - shape.kept, dim = shape.pred_dim;
  const int64_t b = blockIdx.x;
  const float weight = float(2.0 * GradientWeight(s, record));
  const float* sample = x + b * shape.sample_size;
  double numerator = 0;
  for (int unit = threadIdx.x; unit < shape.mask_units; unit += blockDim.x) {
    const uint8_t* mask = keep_mask + b * shape.mask_units;
    if (mask[unit]) continue;
    int place = 0;
    for (int u = 0; u < unit; ++u) place += mask[u] == 0;
    removed[place] = unit;
  }
  __syncthreads();
  for (int i = warp; i < masked * shape.finals; i += warps) {
    const int token = order[removed[i / shape.finals] * shape.finals + i % shape.finals];
    const int64_t row = (b * masked * shape.finals + i) * dim;
    if (b >= s->real) {
      for (int e = lane; e < dim; e += 32) dpred[row + e] = FromFloat<T>(0.0f);
      continue;
    }
    const int32_t* index = label_index + int64_t(token) * dim;
    // each(body): body(e, target) for this lane's elements.
    float held[kValues > 0 ? kValues : 1];
    if constexpr (kValues > 0) {
#pragma unroll
      for (int k = 0; k < kValues; ++k) held[k] = k * 32 + lane < dim ? sample[index[k * 32 + lane]] : 0.0f;
    }
    auto each = [&](auto body) {
      if constexpr (kValues > 0) {
#pragma unroll
        for (int k = 0; k < kValues; ++k) {
          if (k * 32 + lane < dim) body(k * 32 + lane, held[k]);
        }
      } else {
        for (int e = lane; e < dim; e += 32) body(e, sample[index[e]]);
      }
    };
    float mean = 0, deviation = 1;
    if (shape.norm_target) {
      float sum = 0, squares = 0;
      each([&](int, float v) { sum += v; });
      mean = WarpSum(sum) / float(dim);
      each([&](int, float v) { squares += (v - mean) * (v - mean); });
      deviation = sqrtf(WarpSum(squares) / float(dim - 1) + kNormEpsilon);
    }
    float loss = 0;
    each([&](int e, float v) {
      const float d = ToFloat(pred[row + e]) - (v - mean) / deviation;
      loss += d * d;
      dpred[row + e] = FromFloat<T>(d * weight);
    });
    numerator += double(WarpSum(loss));
  }
  if (lane == 0) sums[warp] = numerator;
  __syncthreads();
  if (threadIdx.x != 0) return;
  double total = shape.accumulate ? partials[b] : 0.0;
  for (int w = 0; w < warps; ++w) total += sums[w];
  partials[b] = total;
}

// A block a sample.
template <typename T>
__global__ void Entropy(const StepScalars* s, const StepRecord* record, const T* logits, const int64_t* labels, T* dlogits,
                        double* partials, int classes, bool accumulate) {
  BeginKernel();
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
  BeginKernel();
  HIERAD_GRID_LOOP(i, int64_t(batch) * dim) {
    const int64_t b = i / dim, c = i % dim;
    float sum = 0;
    for (int n = 0; n < tokens; ++n) sum += x[(b * tokens + n) * dim + c];
    y[i] = sum / float(tokens);
  }
}

__global__ void Spread(const float* dy, float* dx, int batch, int tokens, int dim) {
  BeginKernel();
  HIERAD_GRID_LOOP(i, int64_t(batch) * tokens * dim) dx[i] = dy[i / dim / tokens * dim + i % dim] / float(tokens);
}

template <typename T>
__global__ void Drop(const StepScalars* s, const int64_t* visit_ids, const T* x, T* y, int batch, int dim, double rate) {
  BeginKernel();
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
  const auto kernel = shape.pred_dim <= 256 ? Mae<T, 8> : shape.pred_dim <= 768 ? Mae<T, 24> : shape.pred_dim <= 2048 ? Mae<T, 64> : Mae<T, 0>;
  if (bytes > 32 << 10) {
    if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)); e != cudaSuccess) return e;
  }
  Launch(kernel, unsigned(shape.batch), 512, bytes, stream, scalars, record, shape, pred, x, keep_mask, order, label_index, dpred, partials);
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
