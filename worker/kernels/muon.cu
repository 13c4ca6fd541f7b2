// Muon's two elementwise halves; the products between them are cuBLASLt's. A matrix's norm is summed in a fixed order.
#include "worker/kernels/device.cuh"
#include "worker/kernels/kernels.h"

namespace hierad::kernels {
namespace {

constexpr int kTile = 32, kTileRows = 8;   // a block of threads walks a tile of kTile x kTile

__device__ inline float Direction(float g, float m, float momentum, bool nesterov) { return nesterov ? g + (m - g) * momentum : m; }

__device__ inline float Clip(const StepRecord* record, double clip_norm) {
  return float((clip_norm > 0 ? fmin(1.0, clip_norm / (record->grad_norm + 1e-6)) : 1.0) / record->scaled_by);
}

// A block a part of a matrix: the momentum, and the part's share of the squared norm.
__global__ void Momentum(const StepRecord* record, MuonShape shape, float momentum, double clip_norm, bool nesterov, const float* gradients,
                         float* moments, const int64_t* places, double* scratch) {
  __shared__ double shared[32];
  if (record->skipped) return;
  const int64_t size = int64_t(shape.rows) * shape.cols, chunk = (size + kMuonParts - 1) / kMuonParts;
  const int64_t first = blockIdx.x * chunk, end = min(first + chunk, size), at = places[blockIdx.y];
  const float clip = Clip(record, clip_norm);
  double squares = 0;
  for (int64_t i = first + threadIdx.x; i < end; i += blockDim.x) {
    const float g = gradients[at + i] * clip;
    float m = moments[at + i];
    m += (g - m) * (1 - momentum);
    moments[at + i] = m;
    const float u = Direction(g, m, momentum, nesterov);
    squares += double(u) * u;
  }
  squares = BlockSum(squares, shared);
  if (threadIdx.x == 0) scratch[blockIdx.y * kMuonParts + blockIdx.x] = squares;
}

// A block a tile: the direction over its norm, in T, the longer axis last.
template <typename T>
__global__ void Normalized(const StepRecord* record, MuonShape shape, float momentum, double clip_norm, bool nesterov, const float* gradients,
                           const float* moments, const int64_t* places, T* x, const double* scratch) {
  __shared__ float tile[kTile][kTile + 1];
  if (record->skipped) return;
  const int64_t size = int64_t(shape.rows) * shape.cols, at = places[blockIdx.z];
  double squares = 0;
  for (int p = 0; p < kMuonParts; ++p) squares += scratch[blockIdx.z * kMuonParts + p];
  const float norm = float(fmax(sqrt(squares), kMuonEpsilon)), clip = Clip(record, clip_norm);
  const bool transposed = shape.rows > shape.cols;
  const int row0 = blockIdx.y * kTile, col0 = blockIdx.x * kTile;
  for (int r = threadIdx.y; r < kTile; r += kTileRows) {
    const int row = row0 + r, col = col0 + threadIdx.x;
    if (row >= shape.rows || col >= shape.cols) continue;
    const int64_t i = at + int64_t(row) * shape.cols + col;
    const float u = Direction(gradients[i] * clip, moments[i], momentum, nesterov) / norm;
    if (transposed) {
      tile[r][threadIdx.x] = u;
    } else {
      x[blockIdx.z * size + int64_t(row) * shape.cols + col] = FromFloat<T>(u);
    }
  }
  if (!transposed) return;
  __syncthreads();
  for (int c = threadIdx.y; c < kTile; c += kTileRows) {
    const int row = row0 + threadIdx.x, col = col0 + c;
    if (row >= shape.rows || col >= shape.cols) continue;
    x[blockIdx.z * size + int64_t(col) * shape.rows + row] = FromFloat<T>(tile[threadIdx.x][c]);
  }
}

template <typename T>
__global__ void Update(const StepScalars* s, const StepRecord* record, MuonShape shape, double weight_decay, const T* x, const int64_t* places,
                       const float* scale, float* master, T* compute) {
  __shared__ float tile[kTile][kTile + 1];
  if (record->skipped) return;
  const int64_t size = int64_t(shape.rows) * shape.cols, at = places[blockIdx.z];
  const double lr = scale == nullptr ? s->lr : s->lr * double(scale[at / 64]);   // a factor per 64 elements
  const float shrink = float(1 - lr * weight_decay), step = float(lr * kMuonScale * sqrt(double(max(shape.rows, shape.cols))));
  const bool transposed = shape.rows > shape.cols;
  const int row0 = blockIdx.y * kTile, col0 = blockIdx.x * kTile;
  if (transposed) {
    for (int c = threadIdx.y; c < kTile; c += kTileRows) {
      const int row = row0 + threadIdx.x, col = col0 + c;
      if (row < shape.rows && col < shape.cols) tile[threadIdx.x][c] = ToFloat(x[blockIdx.z * size + int64_t(col) * shape.rows + row]);
    }
    __syncthreads();
  }
  for (int r = threadIdx.y; r < kTile; r += kTileRows) {
    const int row = row0 + r, col = col0 + threadIdx.x;
    if (row >= shape.rows || col >= shape.cols) continue;
    const int64_t in = int64_t(row) * shape.cols + col;
    const float direction = transposed ? tile[r][threadIdx.x] : ToFloat(x[blockIdx.z * size + in]);
    const float w = master[at + in] * shrink - step * direction;
    master[at + in] = w;
    if (compute != nullptr) compute[at + in] = FromFloat<T>(w);
  }
}

dim3 Tiles(const MuonShape& shape) {
  return dim3(unsigned((shape.cols + kTile - 1) / kTile), unsigned((shape.rows + kTile - 1) / kTile), unsigned(shape.count));
}

}  // namespace

template <typename T>
cudaError_t MuonMomentum(const StepRecord* record, const MuonShape& shape, int first, int own, double momentum, double clip_norm, bool nesterov,
                         const float* gradients, float* moments, const int64_t* places, T* x, double* scratch, cudaStream_t stream) {
  Launch(Momentum, dim3(unsigned(kMuonParts), unsigned(shape.count)), 256, 0, stream, record, shape, float(momentum), clip_norm, nesterov, gradients,
                                                                                 moments, places, scratch);
  if (own == 0) return cudaGetLastError();
  Launch(Normalized<T>, Tiles({own, shape.rows, shape.cols}), dim3(kTile, kTileRows), 0, stream, record, shape, float(momentum), clip_norm, nesterov, gradients, moments, places + first, x, scratch + first * kMuonParts);
  return cudaGetLastError();
}

template <typename T>
cudaError_t MuonUpdate(const StepScalars* scalars, const StepRecord* record, const MuonShape& shape, double weight_decay, const T* x,
                       const int64_t* places, const float* scale, float* master, T* compute, cudaStream_t stream) {
  Launch(Update<T>, Tiles(shape), dim3(kTile, kTileRows), 0, stream, scalars, record, shape, weight_decay, x, places, scale, master, compute);
  return cudaGetLastError();
}

#define HIERAD_INSTANTIATE(T)                                                                                                              \
  template cudaError_t MuonMomentum<T>(const StepRecord*, const MuonShape&, int, int, double, double, bool, const float*, float*,          \
                                       const int64_t*, T*, double*, cudaStream_t);                                                         \
  template cudaError_t MuonUpdate<T>(const StepScalars*, const StepRecord*, const MuonShape&, double, const T*, const int64_t*,            \
                                     const float*, float*, T*, cudaStream_t);
HIERAD_INSTANTIATE(bf16)
HIERAD_INSTANTIATE(half)
HIERAD_INSTANTIATE(float)
#undef HIERAD_INSTANTIATE

}  // namespace hierad::kernels
