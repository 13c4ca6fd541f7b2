// Launchers of the step's kernels on a GPU, one for each operation of base/plan/plan.h, where the operations are defined;
// the plain CPU references are in worker/kernels/reference. T: __nv_bfloat16, __half or float. Device pointers; every launcher
// enqueues on `stream` and returns the launch's error. Sums run in a fixed order: no atomics on floating point.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "base/plan/rows.h"
#include "base/plan/step_values.h"

namespace hierad::kernels {

cudaError_t ConvertInput(const RowBatch<float>& batch, cudaStream_t stream);
cudaError_t DrawMask(const StepScalars* scalars, const int64_t* visit_ids, uint8_t* keep_mask, int32_t* keep_idx, int batch,
                     int mask_units, int kept, cudaStream_t stream);

// Missing axes (in front) have size 1, stride 1, kernel 1, padding 0.
struct PatchShape {
  int batch, channels, kept, mask_units, unit_tokens;
  int input[3], tokens[3], kernel[3], stride[3], padding[3], unit_samples[3], units[3];
};
template <typename T>
cudaError_t PatchGather(const PatchShape& shape, const float* x, const uint8_t* keep_mask, const int32_t* keep_idx,
                        const int32_t* unroll_order, T* rows, cudaStream_t stream);

struct PositionShape {
  int batch, tokens, kept, mask_units, num_tokens, spatial, dim;   // spatial: rows of the (spatial) embedding
};
template <typename T>
cudaError_t AddPosition(const PositionShape& shape, const T* y, const float* position, const float* temporal,
                        const int32_t* keep_idx, const int32_t* unroll_order, float* x, cudaStream_t stream);
cudaError_t AddPositionBackward(const PositionShape& shape, const float* dx, const uint8_t* keep_mask, const int32_t* unroll_order,
                                float* dposition, float* dtemporal, float* scratch, bool accumulate, cudaStream_t stream);

template <typename T>
cudaError_t LayerNorm(const float* x, const float* gamma, const float* beta, T* y, float* mean, float* rstd, int64_t rows,
                      int cols, cudaStream_t stream);
// dx_in: as floats, or as dx_in_narrow + dx_in_low, or nothing (0). dx_out: as floats, with a copy in T on request, or as dx_narrow + dx_low.
// What is not wanted is null, dx_parts too; dx_in may be dx_out, dx_in_low dx_low.
template <typename T>
struct LayerNormGradient {
  const T* dy;
  const float *x, *mean, *rstd, *gamma, *dx_in;
  const T *dx_in_narrow, *dx_in_low;
  float* dx_out;
  T *dx_narrow, *dx_low;
  float *dgamma_parts, *dbeta_parts, *dx_parts;
  int64_t rows;
  int cols, num_parts;
};
template <typename T>
cudaError_t LayerNormBackward(const LayerNormGradient<T>& a, cudaStream_t stream);

template <typename T>
cudaError_t Gelu(const T* h, T* g, int64_t size, cudaStream_t stream);
// dh may be dg.
template <typename T>
cudaError_t GeluBackward(const T* h, const T* dg, T* dh, T* g, float* dh_parts, int64_t rows, int cols, int num_parts, cudaStream_t stream);

struct DropPath {
  double rate;
  int block, which;
};
template <typename T>
cudaError_t Residual(const StepScalars* scalars, const int64_t* visit_ids, const DropPath& drop, const float* base, const T* y,
                     float* out, int64_t batch, int64_t sample_size, cudaStream_t stream);
// x = base + factor * branch; y = LayerNorm(x). Rows: batch * tokens.
template <typename T>
cudaError_t ResidualNorm(const StepScalars* scalars, const int64_t* visit_ids, const DropPath& drop, const float* base, const T* branch,
                         float* x, const float* gamma, const float* beta, T* y, float* mean, float* rstd, int64_t batch, int64_t tokens,
                         int cols, cudaStream_t stream);
template <typename T>
cudaError_t ResidualBackward(const StepScalars* scalars, const int64_t* visit_ids, const DropPath& drop, const float* dout, T* dy,
                             int64_t batch, int64_t sample_size, cudaStream_t stream);
template <typename T>
cudaError_t MaxPool(const T* y, float* base, uint8_t* argmax, int64_t batch, int64_t sample_out, int q_stride, cudaStream_t stream);
template <typename T>
cudaError_t MaxPoolBackward(const float* dbase, const uint8_t* argmax, T* dy, int64_t batch, int64_t sample_out, int q_stride,
                            cudaStream_t stream);
template <typename From, typename To>
cudaError_t Cast(const From* from, To* to, int64_t size, cudaStream_t stream);

struct FusionShape {
  int batch, kept, finals, taps, dim;
};
template <typename To>
cudaError_t FusionGather(const FusionShape& shape, const float* x, const int32_t* order, To* rows, cudaStream_t stream);
template <typename From>
cudaError_t FusionGatherBackward(const FusionShape& shape, const From* drows, const int32_t* order, float* dx, bool accumulate,
                                 cudaStream_t stream);

struct DecoderShape {
  int batch, mask_units, kept, finals, dim;
};
template <typename T>
cudaError_t DecoderAssemble(const DecoderShape& shape, const T* y, const float* mask_token, const float* position,
                            const uint8_t* keep_mask, const int32_t* order, float* x, cudaStream_t stream);
template <typename T>
cudaError_t DecoderAssembleBackward(const DecoderShape& shape, const float* dx, const uint8_t* keep_mask, const int32_t* order,
                                    T* dy, float* dmask_token, float* dposition, float* scratch, bool accumulate, cudaStream_t stream);

// Rows of bytes, whatever their type.
struct MaskedShape {
  int batch, mask_units, kept, finals, row_bytes;
};
cudaError_t TakeMasked(const MaskedShape& shape, const void* x, const uint8_t* keep_mask, const int32_t* order, void* rows, cudaStream_t stream);
cudaError_t PutMasked(const MaskedShape& shape, const void* rows, const uint8_t* keep_mask, const int32_t* order, void* x, cudaStream_t stream);

struct MaeLossShape {
  int batch, mask_units, kept, finals, pred_dim;
  int64_t sample_size;
  bool norm_target, accumulate;
  bool runs;   // four neighbours of a label are four neighbours of the sample, at a multiple of four
};
// record: of a step whose gradients are scaled, else nullptr.
template <typename T>
cudaError_t MaeLoss(const StepScalars* scalars, const StepRecord* record, const MaeLossShape& shape, const T* pred, const float* x,
                    const uint8_t* keep_mask, const int32_t* order, const int32_t* label_index, T* dpred, double* partials, cudaStream_t stream);
template <typename T>
cudaError_t CrossEntropy(const StepScalars* scalars, const StepRecord* record, const T* logits, const int64_t* labels, T* dlogits, double* partials,
                         int batch, int classes, bool accumulate, cudaStream_t stream);
cudaError_t MeanTokens(const float* x, float* y, int batch, int tokens, int dim, cudaStream_t stream);
cudaError_t MeanTokensBackward(const float* dy, float* dx, int batch, int tokens, int dim, cudaStream_t stream);
// Backward too: the same factors.
template <typename T>
cudaError_t Dropout(const StepScalars* scalars, const int64_t* visit_ids, const T* x, T* y, int batch, int dim, double rate,
                    cudaStream_t stream);

template <typename T>
cudaError_t ColumnSum(const T* dy, float* parts, int64_t rows, int cols, int num_parts, cudaStream_t stream);
// grad[c] (+)= sum over the parts of parts[p, c], in order.
struct PartsSum {
  const float* parts;
  float* grad;
  int cols, num_parts;
};
cudaError_t SumParts(const PartsSum* sums, int count, bool accumulate, cudaStream_t stream);
// gradients nullptr: partials holds `size` sums of squares.
cudaError_t GradientNorm(const StepScalars* scalars, const float* gradients, double* partials, const double* loss_partials,
                         StepRecord* record, int64_t size, int batch, bool own_signals, int64_t scale_growth_steps, cudaStream_t stream);
// sum = squares of `values`, in fixed order; partials: kNormParts.
cudaError_t SumOfSquares(const float* values, double* partials, double* sum, int64_t size, cudaStream_t stream);
// `progress`: the host's memory, as the device sees it.
cudaError_t AnnounceCollective(const StepScalars* scalars, CollectiveProgress* progress, int number, bool entered, cudaStream_t stream);
// `ring`: the host's memory, as the device sees it.
cudaError_t Mark(const StepScalars* scalars, StepRecord* record, StepPhase phase, cudaStream_t stream);
cudaError_t PublishRecord(StepRecord* record, uint64_t* not_finite, RecordSlot* ring, cudaStream_t stream);
// What rides behind the gradients: [loss numerator high, low, stop, checkpoint]; signals in StepScalars.signals and
// StepRecord.signals (bit 0 stop, bit 1 checkpoint, bit 2 an input that is not finite).
cudaError_t PackTail(const StepScalars* scalars, const double* loss_partials, const uint64_t* not_finite, float* tail, int batch, cudaStream_t stream);
cudaError_t UnpackTail(const float* tail, double* loss_partials, StepRecord* record, int batch, cudaStream_t stream);

cudaError_t AverageWeights(const StepRecord* record, double decay, const float* master, float* average, int64_t size, cudaStream_t stream);

// See base/plan/plan.h. At most 65535 matrices of a shape.
struct MuonShape {
  int count, rows, cols;
};
// The momentum of all matrices, x of `own` of them from number `first` on.
template <typename T>
cudaError_t MuonMomentum(const StepRecord* record, const MuonShape& shape, int first, int own, double momentum, double clip_norm, bool nesterov,
                         const float* gradients, float* moments, const int64_t* places, T* x, double* scratch, cudaStream_t stream);
template <typename T>
cudaError_t MuonUpdate(const StepScalars* scalars, const StepRecord* record, const MuonShape& shape, double weight_decay, const T* x,
                       const int64_t* places, const float* scale, float* master, T* compute, cudaStream_t stream);

struct AdamWOptions {
  double beta1, beta2, eps, weight_decay, clip_norm;
};
template <typename T>
cudaError_t AdamW(const StepScalars* scalars, const StepRecord* record, const AdamWOptions& options, float* master,
                  const float* gradients, float* moments, const uint8_t* decay, const float* scale, T* compute, int64_t size,
                  cudaStream_t stream);

}  // namespace hierad::kernels
