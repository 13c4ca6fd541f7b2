// Sums over rows, the norm of the gradients with the step's verdict, and AdamW.
#include "worker/kernels/columns.cuh"
#include "worker/kernels/device.cuh"
#include "worker/kernels/kernels.h"

namespace hierad::kernels {
namespace {

// A block the rows of part blockIdx.y, 32 x kWidth columns, 8 rows at a time.
template <typename T, int kWidth>
__global__ void ColumnParts(const T* dy, float* parts, int64_t rows, int cols) {
  __shared__ float sums[8][32 * kWidth];
  const int64_t chunk = (rows + gridDim.y - 1) / gridDim.y, first = blockIdx.y * chunk, end = min(first + chunk, rows);
  const int c = (blockIdx.x * 32 + threadIdx.x) * kWidth;
  float sum[kWidth] = {};
  if (c < cols) {
#pragma unroll 4
    for (int64_t row = first + threadIdx.y; row < end; row += 8) {
      float v[kWidth];
      LoadN<kWidth>(dy + row * cols + c, v);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) sum[k] += v[k];
    }
  }
  StoreColumnSums<kWidth>(sum, sums, parts, cols);
}

constexpr int kMostSums = 16;   // of one launch
struct SumList {
  PartsSum sum[kMostSums];
  int first_block[kMostSums + 1];
  int count;
};

// A block 32 columns of one sum, its 16 warps' shares in order.
__global__ void __launch_bounds__(512) Sum(const SumList list, bool accumulate) {
  __shared__ float sums[16][32];
  int which = 0;
  while (int(blockIdx.x) >= list.first_block[which + 1]) ++which;
  const PartsSum s = list.sum[which];
  const int c = (blockIdx.x - list.first_block[which]) * 32 + threadIdx.x;
  float sum = 0;
  if (c < s.cols) {
#pragma unroll 8
    for (int p = threadIdx.y; p < s.num_parts; p += 16) sum += s.parts[p * int64_t(s.cols) + c];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || c >= s.cols) return;
  float total = accumulate ? s.grad[c] : 0.0f;
#pragma unroll
  for (int r = 0; r < 16; ++r) total += sums[r][threadIdx.x];
  s.grad[c] = total;
}

__global__ void Squares(const float* gradients, double* partials, int64_t size) {
  __shared__ double shared[32];
  // Flat sizes are multiples of kParameterAlign.
  const int64_t vectors = size / 4, chunk = (vectors + kNormParts - 1) / kNormParts, first = blockIdx.x * chunk, end = min(first + chunk, vectors);
  double sum = 0;
  for (int64_t i = first + threadIdx.x; i < end; i += blockDim.x) {
    const float4 v = Load4(gradients + i * 4);
    sum += double(v.x) * v.x + double(v.y) * v.y + (double(v.z) * v.z + double(v.w) * v.w);
  }
  sum = BlockSum(sum, shared);
  if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

__global__ void SumPartials(const double* partials, double* sum) {
  __shared__ double shared[32];
  double squares = 0;
  for (int i = threadIdx.x; i < kNormParts; i += blockDim.x) squares += partials[i];
  squares = BlockSum(squares, shared);
  if (threadIdx.x == 0) *sum = squares;
}

__global__ void Verdict(const StepScalars* s, const double* partials, int num_partials, const double* loss_partials, StepRecord* record,
                        int batch, bool own_signals, int64_t scale_growth_steps) {
  __shared__ double shared[32];
  double squares = 0, numerator = 0;
  for (int i = threadIdx.x; i < num_partials; i += blockDim.x) squares += partials[i];
  for (int b = threadIdx.x; b < batch; b += blockDim.x) numerator += loss_partials[b];
  squares = BlockSum(squares, shared);
  numerator = BlockSum(numerator, shared);
  if (threadIdx.x != 0) return;
  record->step = s->step;
  record->loss_numerator = numerator;
  record->loss = numerator * s->loss_weight;
  record->scaled_by = scale_growth_steps > 0 ? record->scale.value : 1;
  record->grad_norm = sqrt(squares) / record->scaled_by;
  record->lr = s->lr;
  const bool finite = isfinite(record->loss) && isfinite(record->grad_norm);
  record->skipped = finite && !record->halted ? 0 : 1;
  record->overflowed = 0;
  if (!record->halted) {
    // A smaller scale may help where the loss is finite and its gradients are not.
    record->overflowed = isfinite(record->loss) && !finite && record->scaled_by > kLeastLossScale ? 1 : 0;
    if (!record->overflowed) record->nan_in_row = finite ? 0 : record->nan_in_row + 1;
    record->halted = s->nan_limit > 0 && record->nan_in_row >= s->nan_limit ? 1 : 0;
    if (scale_growth_steps > 0) record->scale = NextLossScale(record->scale, isfinite(record->grad_norm), scale_growth_steps);
  }
  record->updates += record->skipped ? 0 : 1;
  if (own_signals) record->signals = s->signals;
}

// torch.optim.AdamW's order of operations.
template <typename T>
__global__ void Adam(const StepScalars* s, const StepRecord* record, AdamWOptions o, float* master, const float* gradients,
                     float* moments, const uint8_t* decay, const float* scale, T* compute, int64_t size) {
  __shared__ float shared[4];
  if (record->skipped) return;
  if (threadIdx.x == 0) {
    const double t = double(record->updates);
    shared[0] = float((o.clip_norm > 0 ? fmin(1.0, o.clip_norm / (record->grad_norm + 1e-6)) : 1.0) / record->scaled_by);
    shared[1] = float(sqrt(1 - pow(o.beta2, t)));
    shared[2] = float(s->lr / (1 - pow(o.beta1, t)));
    shared[3] = float(s->lr * o.weight_decay);
  }
  __syncthreads();
  const float clip = shared[0], root2 = shared[1], whole_step = shared[2], whole_decay = shared[3];
  const float beta2 = float(o.beta2), rest1 = float(1 - o.beta1), rest2 = float(1 - o.beta2), eps = float(o.eps);
  HIERAD_GRID_LOOP(i, size / 4) {
    const uint8_t group = decay[i / 16];   // one per 64 elements
    if (group == kNotAdamW) continue;
    const float factor = scale == nullptr ? 1.0f : scale[i / 16], step_size = whole_step * factor, shrink = 1 - whole_decay * factor;
    float4 g4 = Load4(gradients + i * 4), p4 = Load4(master + i * 4), m4 = Load4(moments + i * 4), v4 = Load4(moments + size + i * 4);
    float *g = &g4.x, *p = &p4.x, *m = &m4.x, *v = &v4.x;
    const bool decays = group == kWithDecay;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      g[k] *= clip;
      if (decays) p[k] *= shrink;
      m[k] += (g[k] - m[k]) * rest1;
      v[k] = v[k] * beta2 + g[k] * g[k] * rest2;
      p[k] -= step_size * (m[k] / (sqrtf(v[k]) / root2 + eps));
    }
    Store4(master + i * 4, p4);
    Store4(moments + i * 4, m4);
    Store4(moments + size + i * 4, v4);
    if (compute != nullptr) Store4(compute + i * 4, p4);
  }
}

__global__ void Average(const StepRecord* record, float rest, const float* master, float* average, int64_t size) {
  if (record->skipped) return;
  HIERAD_GRID_LOOP(i, size / 4) {
    const float4 w = Load4(master + i * 4);
    float4 a = Load4(average + i * 4);
    a = make_float4(a.x + (w.x - a.x) * rest, a.y + (w.y - a.y) * rest, a.z + (w.z - a.z) * rest, a.w + (w.w - a.w) * rest);
    Store4(average + i * 4, a);
  }
}

}  // namespace

cudaError_t AverageWeights(const StepRecord* record, double decay, const float* master, float* average, int64_t size, cudaStream_t stream) {
  Launch(Average, Blocks(size, 1024), 256, 0, stream, record, float(1 - decay), master, average, size);
  return cudaGetLastError();
}

template <typename T>
cudaError_t ColumnSum(const T* dy, float* parts, int64_t rows, int cols, int num_parts, cudaStream_t stream) {
  WithColumnWidth(cols, [&](auto width) {
    constexpr int kWidth = decltype(width)::value;
    Launch(ColumnParts<T, kWidth>, ColumnGrid<kWidth>(cols, num_parts), dim3(32, 8), 0, stream, dy, parts, rows, cols);
  });
  return cudaGetLastError();
}

cudaError_t SumParts(const PartsSum* sums, int count, bool accumulate, cudaStream_t stream) {
  for (int first = 0; first < count; first += kMostSums) {
    SumList list{};
    list.count = std::min(kMostSums, count - first);
    for (int i = 0; i < list.count; ++i) {
      list.sum[i] = sums[first + i];
      list.first_block[i + 1] = list.first_block[i] + (list.sum[i].cols + 31) / 32;
    }
    Launch(Sum, unsigned(list.first_block[list.count]), dim3(32, 16), 0, stream, list, accumulate);
  }
  return cudaGetLastError();
}

cudaError_t GradientNorm(const StepScalars* scalars, const float* gradients, double* partials, const double* loss_partials,
                         StepRecord* record, int64_t size, int batch, bool own_signals, int64_t scale_growth_steps, cudaStream_t stream) {
  if (gradients != nullptr) Launch(Squares, unsigned(kNormParts), 256, 0, stream, gradients, partials, size);
  Launch(Verdict, 1, 1024, 0, stream, scalars, partials, gradients != nullptr ? int(kNormParts) : int(size), loss_partials, record, batch, own_signals,
         scale_growth_steps);
  return cudaGetLastError();
}

cudaError_t SumOfSquares(const float* values, double* partials, double* sum, int64_t size, cudaStream_t stream) {
  Launch(Squares, unsigned(kNormParts), 256, 0, stream, values, partials, size);
  Launch(SumPartials, 1, 1024, 0, stream, partials, sum);
  return cudaGetLastError();
}

template <typename T>
cudaError_t AdamW(const StepScalars* scalars, const StepRecord* record, const AdamWOptions& options, float* master,
                  const float* gradients, float* moments, const uint8_t* decay, const float* scale, T* compute, int64_t size,
                  cudaStream_t stream) {
  Launch(Adam<T>, Blocks(size, 1024), 256, 0, stream, scalars, record, options, master, gradients, moments, decay, scale, compute, size);
  return cudaGetLastError();
}

template cudaError_t ColumnSum<bf16>(const bf16*, float*, int64_t, int, int, cudaStream_t);
template cudaError_t ColumnSum<half>(const half*, float*, int64_t, int, int, cudaStream_t);
template cudaError_t ColumnSum<float>(const float*, float*, int64_t, int, int, cudaStream_t);
template cudaError_t AdamW<bf16>(const StepScalars*, const StepRecord*, const AdamWOptions&, float*, const float*, float*,
                                 const uint8_t*, const float*, bf16*, int64_t, cudaStream_t);
template cudaError_t AdamW<half>(const StepScalars*, const StepRecord*, const AdamWOptions&, float*, const float*, float*,
                                 const uint8_t*, const float*, half*, int64_t, cudaStream_t);
template cudaError_t AdamW<float>(const StepScalars*, const StepRecord*, const AdamWOptions&, float*, const float*, float*,
                                  const uint8_t*, const float*, float*, int64_t, cudaStream_t);

}  // namespace hierad::kernels
