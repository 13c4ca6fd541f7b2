// The static step as data: every tensor with its place in an arena, every operation in order. Made from a JobSpec alone,
// on any machine, before anything is allocated. `hierctl plan` prints it, admission asks it, the executor runs it, the
// capture freezes it: there is no second source of truth.
//
// Notation: B batch_per_rank, K kept mask units, N tokens, D width; T the compute type (bf16, or fp32 / fp64 for
// fidelity). Tokens are unrolled: n = t * windows + w. Residual stream, statistics and gradients of parameters are fp32
// (fp64 in an fp64 plan).
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "base/plan/geometry.h"
#include "base/plan/parameters.h"

namespace hierad {

enum class DType : uint8_t { kF64, kF32, kBF16, kF16, kI64, kI32, kI16, kU8 };
int64_t SizeOf(DType dtype);

// Each arena is one allocation whose address never changes during a run.
enum class Arena : uint8_t {
  kMaster,        // parameters, at the parameter table's offsets
  kCompute,       // their copy in T (only where T differs from the master's type)
  kGradients,     // flat, in the order backward finishes them; a bucket is a slice
  kMoments,       // exp_avg, then exp_avg_sq
  kActivations,   // lifetimes packed
  kStaging,       // two input slots filled by the copy stream, and the step's scalars
  kPersistent,    // what outlives a step: update counter, NaN counter, metric record
};
inline constexpr int kNumArenas = 7;
inline constexpr int64_t kArenaAlign = 256;   // bytes

// Where an operation's time and bytes are booked.
enum class Part : uint8_t { kInput, kPatch, kStage1, kStage2, kStage3, kStage4, kStage5, kStage6, kHeads, kDecoder, kLoss, kOptimizer };

using TensorId = int;
inline constexpr TensorId kNone = -1;

struct TensorSpec {
  std::string name;            // "blocks.3.attn.qkv", "grad:blocks.3.attn.qkv.weight"
  std::vector<int64_t> shape;
  DType dtype;
  Arena arena;
  int64_t offset = 0;          // bytes into the arena
  int64_t bytes = 0;
  int first = 0, last = 0;     // operations that write it first and read it last (activations)
};

// --- Operations. Every field named like a tensor is a TensorId. --------------------------------------------------

// x_BCS = source * scale[c] + shift[c]; rows at and beyond `real` become zero.
struct ConvertInput { TensorId source, x; int64_t batch, channels, samples; std::vector<float> scale, shift; };
// Keeps the `kept` mask units with the least (word, index); Draw::kMask of (seed, epoch, visit id). keep_idx ascending.
struct DrawMask { TensorId visit_ids, keep_mask, keep_idx; int64_t batch, mask_units, kept; };
// Rows of the patch convolution for kept tokens only, unrolled order, removed neighbours read as zero:
// rows[(b * Nk + t * K + j), (c, kernel...)]. Without a mask (classify): keep_idx and keep_mask are kNone, all units kept.
struct PatchGather { TensorId x, keep_mask, keep_idx, rows; int64_t batch; };
// c[m, n] = op(a) op(b) (+ bias[n]) (+ c). a: [m, k] or, transposed, [k, m]; b: [k, n] or, transposed, [n, k]; row-major.
// c's type is its tensor's; products accumulate in fp32 (fp64 for fp64).
struct Gemm { TensorId a, b, c, bias; int64_t m, n, k; bool trans_a, trans_b, accumulate; };
// x[b, n] = y[b, n] + position of token n. Separate embedding: spatial[s] + temporal[t].
struct AddPosition { TensorId y, position, position_temporal, keep_idx, x; int64_t batch; };
// eps 1e-6; mean and rstd per row are kept for backward.
struct LayerNorm { TensorId x, gamma, beta, y, mean, rstd; int64_t rows, cols; };
// qkv[b, n, 3, heads, head_dim] -> o[b, n', heads * head_dim]: softmax(q k^T / sqrt(head_dim)) v inside each of `windows`
// windows of `keys` tokens (n = t * windows + w); queries first max-pooled over the slowest `q_stride` of t, argmax kept
// (kNone without pooling). lse: [b, heads, windows, keys / q_stride].
struct Attention { TensorId qkv, o, lse, argmax; int64_t batch, windows, keys, q_stride, heads, head_dim; };
// y[b, q_stride, n', d] -> base[b, n', d], argmax in 0..q_stride-1 (ties: the first, as torch).
struct MaxPool { TensorId y, base, argmax; int64_t batch, tokens_out, dim, q_stride; };
// out = base + s_b * y; s_b: drop path of `block`, draw `which` (0 attention, 1 MLP): 0 or 1 / (1 - rate); rate 0: 1.
struct Residual { TensorId base, y, out, visit_ids; int64_t batch, tokens, dim; double rate; int block, which; };
// Exact (erf) form.
struct Gelu { TensorId h, g; int64_t size; };
// Stage output in unrolled order -> rows in the spatial order of the final mask unit, ready for a convolution whose kernel
// equals its stride: rows[(b, k, f), (c, kernel...)]. Kernel 1: the identity head, or a plain return to spatial order.
struct FusionGather { TensorId x, rows; int64_t batch, dim; int stage; };
// Decoder input in spatial order of the whole input: visible tokens from y, mask_token elsewhere, + position.
struct DecoderAssemble { TensorId y, mask_token, position, keep_mask, keep_idx, x; int64_t batch; };
// Label from x (FAIR's order for 2-D and 3-D, ours for 1-D), optionally normalised; loss numerator over masked tokens of
// real samples into `partials` (summed in fixed order); dpred = 2 * (pred - label) * loss_weight, 0 elsewhere.
struct MaeLoss { TensorId pred, x, keep_mask, dpred, partials; int64_t batch; };
struct MeanTokens { TensorId x, y; int64_t batch, tokens, dim; };
// Inverted dropout, Draw::kDropout of the visit.
struct Dropout { TensorId x, y, visit_ids; int64_t batch, dim; double rate; };
struct CrossEntropy { TensorId logits, labels, dlogits, partials; int64_t batch, classes; };
// Copies with conversion of type (a residual into T, say).
struct Cast { TensorId from, to; int64_t size; };

// grad[n] (+)= sum over rows of dy[m, n], in a fixed order.
struct ColumnSum { TensorId dy, grad, scratch; int64_t rows, cols; bool accumulate; };
// dx_out = dx_in + dLN(dy); dx_in kNone: 0. dgamma, dbeta in fixed order through scratch.
struct LayerNormBackward {
  TensorId dy, x, mean, rstd, gamma, dx_in, dx_out, dgamma, dbeta, scratch;
  int64_t rows, cols;
  bool accumulate;
};
struct AttentionBackward { TensorId qkv, o, d_o, lse, argmax, dqkv, scratch; int64_t batch, windows, keys, q_stride, heads, head_dim; };
struct MaxPoolBackward { TensorId dbase, argmax, dy; int64_t batch, tokens_out, dim, q_stride; };
// dy = s_b * dout in T.
struct ResidualBackward { TensorId dout, dy, visit_ids; int64_t batch, tokens, dim; double rate; int block, which; };
struct GeluBackward { TensorId h, dg, dh; int64_t size; };
// dx (+)= the gather's transpose.
struct FusionGatherBackward { TensorId drows, dx; int64_t batch, dim; int stage; bool accumulate; };
struct DecoderAssembleBackward { TensorId dx, keep_mask, keep_idx, dy, dmask_token, dposition, scratch; int64_t batch; bool accumulate; };
struct AddPositionBackward { TensorId dx, keep_mask, keep_idx, dy, dposition, dposition_temporal, scratch; int64_t batch; bool accumulate; };
struct MeanTokensBackward { TensorId dy, dx; int64_t batch, tokens, dim; };
struct DropoutBackward { TensorId dy, dx, visit_ids; int64_t batch, dim; double rate; };

// Global L2 norm of the flat gradients in fixed order; decides on the device whether the step is skipped.
struct GradientNorm { TensorId gradients, partials, loss_partials, record; int64_t size; };
// Decoupled AdamW over the flat buffers, clip factor and lr from device values; skipped steps change nothing. Also writes
// the compute copy.
struct AdamW { TensorId master, gradients, moments, compute, record; int64_t size; };
// Step, loss, gradient norm, lr, samples, phase times -> the record the host reads.
struct WriteRecord { TensorId record; };

using OpArgs = std::variant<ConvertInput, DrawMask, PatchGather, Gemm, AddPosition, LayerNorm, Attention, MaxPool, Residual, Gelu,
                            FusionGather, DecoderAssemble, MaeLoss, MeanTokens, Dropout, CrossEntropy, Cast, ColumnSum,
                            LayerNormBackward, AttentionBackward, MaxPoolBackward, ResidualBackward, GeluBackward,
                            FusionGatherBackward, DecoderAssembleBackward, AddPositionBackward, MeanTokensBackward,
                            DropoutBackward, GradientNorm, AdamW, WriteRecord>;

struct Op {
  OpArgs args;
  std::string name;                     // "blocks.3.attn.qkv dgrad"
  Part part;
  bool backward = false;
  std::vector<TensorId> reads, writes;  // a tensor updated in place stands in both
  double flops = 0, bytes = 0;          // counted: multiply-adds as 2; each input read once, each output written once
};

// Values that change from step to step and live on the device, so that they are not baked into a graph. Written by the
// host into kStaging before the step.
struct StepScalars {
  uint64_t seed;
  uint32_t epoch;
  int32_t real;            // rows of this micro-batch that are samples
  float loss_weight;       // 1 / (global real masked elements of the whole step)
  float lr;
  int64_t step;
};

enum class ComputeType : uint8_t { kF64, kF32, kBF16 };

struct PlanOptions {
  int64_t batch = 1;               // batch_per_rank
  ComputeType compute = ComputeType::kF32;
  bool accumulate = false;         // gradients add to what is there (accumulation > 1)
  DType source = DType::kF32;      // type of the input as it arrives
};

struct Plan {
  Geometry geometry;
  ParameterTable table;
  PlanOptions options;
  std::vector<TensorSpec> tensors;
  std::vector<Op> forward_backward;   // one micro-batch
  std::vector<Op> update;             // once per optimizer step
  int64_t arena_bytes[kNumArenas] = {};
  // Named tensors the step's owner writes or reads.
  TensorId source = kNone, scalars = kNone, visit_ids = kNone, labels = kNone, record = kNone, loss_partials = kNone;
  TensorId x = kNone, keep_mask = kNone, keep_idx = kNone, pred = kNone, encoded = kNone;

  int64_t TotalBytes() const;

  static absl::StatusOr<Plan> Make(const Geometry& geometry, const ParameterTable& table, const v1::ModelSpec& spec,
                                   const PlanOptions& options);
};

}  // namespace hierad
