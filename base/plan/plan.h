// The static step as data: every tensor with its place in an arena, every operation in order. Made from a JobSpec alone,
// on any machine, before anything is allocated. `hierctl plan` prints it, admission asks it, the executor runs it, the
// capture freezes it: there is no second source of truth.
//
// Notation: B batch_per_rank, K kept mask units, N tokens, D width; T the compute type (bf16, fp16, or fp32 / fp64
// for fidelity). Tokens are unrolled: n = t * windows + w. Residual stream, statistics and gradients of parameters are fp32
// (fp64 in an fp64 plan).
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "base/plan/geometry.h"
#include "base/plan/parameters.h"
#include "base/plan/row_format.h"
#include "base/plan/step_values.h"

namespace hierad {

// Each arena is one allocation whose address never changes during a run.
enum class Arena : uint8_t {
  kMaster,        // parameters at Plan::parameter_offset: the order in which backward finishes their gradients
  kCompute,       // their copy in T (only where T differs from the master's type), same order
  kGradients,     // same order, so that a bucket of the all-reduce is a slice that is ready early
  kMoments,       // exp_avg, then exp_avg_sq, then the average of the parameters where one is kept; same order. Sharded: Plan::ShardOf
  kActivations,   // lifetimes packed
  kStaging,       // two input slots filled by the copy stream, and the step's scalars
  kPersistent,    // what outlives a step: index tables, decay flags, update counter, metric record
  kSnapshot,      // of rank 0: master, moments and record as they were after some step, for a checkpoint written while training goes on;
                  // on a GPU pinned host memory
  kRecords,       // the ring of records: host memory that the device writes, not counted among the device's bytes
};
inline constexpr int kNumArenas = 9;
// Whether a GPU's step keeps it in host memory, which the device writes.
inline constexpr bool OnHost(Arena arena) { return arena == Arena::kRecords || arena == Arena::kSnapshot; }
inline constexpr int64_t kArenaAlign = 256;   // bytes

// Where an operation's time and bytes are booked.
enum class Part : uint8_t { kInput, kPatch, kStage1, kStage2, kStage3, kStage4, kStage5, kStage6, kHeads, kDecoder, kLoss, kCommunication, kOptimizer };

using TensorId = int;
inline constexpr TensorId kNone = -1;

struct TensorSpec {
  std::string name;            // "blocks.3.attn.qkv", "grad:blocks.3.attn.qkv.weight"
  std::vector<int64_t> shape;
  DType dtype;
  Arena arena;
  int64_t offset = 0;          // bytes into the arena
  int64_t bytes = 0;
  int first = 0, last = 0;     // operations that write it first and read it last (activations); the update's count on from the passes'
};

// --- Operations. Every field named like a tensor is a TensorId. --------------------------------------------------

// From the staging slot that StepScalars names into static places, as RowRules say: x_BCS, visit ids, labels. source,
// source_ids, source_labels: [2 slots, B, ...]. source kNone: a synthetic set's values are drawn. not_finite: as RowBatch's.
struct ConvertInput {
  TensorId scalars, source, source_ids, source_labels, scale, offset, x, visit_ids, labels, not_finite;
  int64_t batch;
  RowRules rules;
};
// Keeps the `kept` mask units with the least (word, index); Draw::kMask of (seed, epoch, visit id). keep_idx ascending.
struct DrawMask { TensorId scalars, visit_ids, keep_mask, keep_idx; int64_t batch, mask_units, kept; };
// Rows of the patch convolution for kept tokens only, unrolled order, removed neighbours read as zero:
// rows[b, t * K + j, (c, kernel...)]. Without a mask (classify): keep_idx and keep_mask are kNone, all units kept.
// unroll_order: Geometry::UnrollOrder(), the row-major place of token t * num_mask_units + unit.
struct PatchGather { TensorId x, keep_mask, keep_idx, unroll_order, rows; int64_t batch; };
// c[m, n] = op(a) op(b) (+ bias[n]) (+ c). a: [m, k] or, transposed, [k, m]; b: [k, n] or, transposed, [n, k]; row-major.
// c's type is its tensor's; products accumulate in fp32 (fp64 for fp64).
struct Gemm { TensorId a, b, c, bias; int64_t m, n, k; bool trans_a, trans_b, accumulate; };
// h[m, n] = a b^T + bias, g = GELU (exact, erf form) of h as it is stored; a: [m, k], b: [n, k].
struct GemmGelu { TensorId a, b, bias, h, g; int64_t m, n, k; };
// x[b, n] = y[b, n] + position of token n. Separate embedding: spatial[s] + temporal[t].
struct AddPosition { TensorId y, position, position_temporal, keep_idx, unroll_order, x; int64_t batch, tokens, dim; };
// eps 1e-6; mean and rstd per row are kept for backward.
struct LayerNorm { TensorId x, gamma, beta, y, mean, rstd; int64_t rows, cols; };
// qkv[b, n, 3, heads, head_dim] -> o[b, n', heads * head_dim]: softmax(q k^T / sqrt(head_dim)) v inside each of `windows`
// windows of `keys` tokens (n = t * windows + w); queries first max-pooled over the slowest `q_stride` of t, argmax kept
// (kNone without pooling). lse: [b, heads, windows, keys / q_stride].
struct Attention { TensorId qkv, o, lse, argmax; int64_t batch, windows, keys, q_stride, heads, head_dim; };
// y[b, q_stride, n', d] -> base[b, n', d], argmax in 0..q_stride-1 (ties: the first, as torch).
struct MaxPool { TensorId y, base, argmax; int64_t batch, tokens_out, dim, q_stride; };
// out = base + s_b * y; s_b: drop path of `block`, draw `which` (0 attention, 1 MLP): 0 or 1 / (1 - rate); rate 0: 1.
struct Residual { TensorId scalars, base, y, out, visit_ids; int64_t batch, tokens, dim; double rate; int block, which; };
// A residual and the norm of its sum, in one pass: residual.out == norm.x.
struct ResidualNorm { Residual residual; LayerNorm norm; };
// Stage output in unrolled order -> rows in the spatial order of the final mask unit, ready for a convolution whose kernel
// equals its stride: rows[b, j, f, c, p] = x[b, order[f * taps + p] * kept + j, c]. taps 1: the identity head.
struct FusionGather { TensorId x, order, rows; int64_t batch, kept, finals, taps, dim; };
// Decoder input in spatial order of the whole input: x[b, order[unit * finals + f]] = y[b, j, f] where unit =
// keep_idx[b, j], mask_token where the unit is removed; + position.
struct DecoderAssemble {
  TensorId y, mask_token, position, keep_mask, keep_idx, order, x;
  int64_t batch, mask_units, kept, finals, dim;
};
// Only removed mask units count in the loss: behind the last attention the decoder goes on with their tokens alone.
// rows[b, r * finals + f] = x[b, order[unit * finals + f]], unit the r-th removed one of the sample; both of one type.
struct TakeMasked { TensorId x, keep_mask, order, rows; int64_t batch, mask_units, kept, finals, dim; };
// Rows as TakeMasked gives them. label[token, e] = x[b, label_index[token, e]] (FAIR's order for 2-D and 3-D, ours for 1-D),
// normalised by mean and unbiased variance + 1e-6 if asked. Real samples: partials[b, kLossParts] (+)= sums of (pred - label)^2, dpred =
// 2 (pred - label) loss_weight; samples that are not real give 0. record: where the gradient is scaled, it is multiplied by
// the record's scale; else kNone.
struct MaeLoss {
  TensorId scalars, record, pred, x, keep_mask, order, label_index, dpred, partials;
  int64_t batch, mask_units, kept, finals, pred_dim, sample_size;
  bool norm_target, accumulate;
};
struct MeanTokens { TensorId x, y; int64_t batch, tokens, dim; };
// Inverted dropout, Draw::kDropout of the visit; the identity where StepScalars says so.
struct Dropout { TensorId scalars, x, y, visit_ids; int64_t batch, dim; double rate; };
// partials[b] (+)= -log softmax(logits)[label] of real samples; dlogits = (softmax - onehot) loss_weight, 0 elsewhere. record: as
// MaeLoss's.
struct CrossEntropy { TensorId scalars, record, logits, labels, dlogits, partials; int64_t batch, classes; bool accumulate; };
// Copies with conversion of type (a residual into T, say).
struct Cast { TensorId from, to; int64_t size; };

// Sums over rows are made in two steps: parts[p, n] is the sum over the rows of part p (ReduceParts of step_values.h), and
// SumParts adds the parts up, in a fixed order both; one SumParts serves many sums.
// parts[p, n] = sum over the part's rows of dy[m, n].
struct ColumnSum { TensorId dy, parts; int64_t rows, cols, num_parts; };
// grad[c] (+)= sum over p of parts[p, c].
struct SumParts {
  struct Sum { TensorId parts, grad; int64_t cols, num_parts; };
  std::vector<Sum> sums;
  bool accumulate;
};
// dx_out = dx_in + dLN(dy); dx_in kNone: 0. dx_narrow: dx_out in T too (kNone: not wanted). Parts of the gradients of gamma
// and beta and, unless kNone, of the sum over rows of dx_out: the bias gradient of the layer that dx_out enters.
// Where one such operation hands the gradient to another, dx_out (dx_in) is kNone and the gradient is the sum of two values in T,
// dx_narrow (dx_in_narrow) and what that one leaves, dx_low (dx_in_low): 16 bits of it, in the bytes of the copy and two more.
struct LayerNormBackward {
  TensorId dy, x, mean, rstd, gamma, dx_in, dx_in_narrow, dx_in_low, dx_out, dx_narrow, dx_low, dgamma_parts, dbeta_parts, dx_parts;
  int64_t rows, cols, num_parts;
};
struct AttentionBackward { TensorId qkv, o, d_o, lse, argmax, dqkv, scratch; int64_t batch, windows, keys, q_stride, heads, head_dim; };
struct MaxPoolBackward { TensorId dbase, argmax, dy; int64_t batch, tokens_out, dim, q_stride; };
// dy = s_b * dout in T.
struct ResidualBackward { TensorId scalars, dout, dy, visit_ids; int64_t batch, tokens, dim; double rate; int block, which; };
// dh[m, n] = (a b) * gelu'(h), a: [m, k], b: [k, n]; g = gelu(h) again, so that the forward pass need not keep it for fc2's
// weight gradient. Parts of the sum over rows of dh, kGeluPartRows each: fc1's bias gradient.
struct GemmGeluBackward { TensorId a, b, h, dh, g, dh_parts; int64_t m, n, k, num_parts; };
// dx (+)= the gather's transpose.
struct FusionGatherBackward { TensorId drows, order, dx; int64_t batch, kept, finals, taps, dim; bool accumulate; };
// TakeMasked's transpose: x is zero at visible tokens.
struct PutMasked { TensorId rows, keep_mask, order, x; int64_t batch, mask_units, kept, finals, dim; };
// dy of visible tokens, gradients of the mask token (over removed ones) and of the position (over all), in fixed order.
struct DecoderAssembleBackward {
  TensorId dx, keep_mask, keep_idx, order, dy, dmask_token, dposition, scratch;
  int64_t batch, mask_units, kept, finals, dim;
  bool accumulate;
};
// The position's gradient sums, in batch order, over the samples that kept the token. Separate embedding: spatial over t,
// temporal over s, through scratch [num_tokens, D].
struct AddPositionBackward {
  TensorId dx, keep_mask, keep_idx, unroll_order, dposition, dposition_temporal, scratch;
  int64_t batch, tokens, dim;
  bool accumulate;
};
struct MeanTokensBackward { TensorId dy, dx; int64_t batch, tokens, dim; };
struct DropoutBackward { TensorId scalars, dy, dx, visit_ids; int64_t batch, dim; double rate; };

// Behind the gradients, for all ranks: sum of loss_partials as two floats (the high one of 12 bits, so that its sum over
// ranks is exact), this rank's signals, and whether its input was finite.
struct PackTail { TensorId scalars, loss_partials, not_finite, tail; int64_t losses; };   // losses: of loss_partials
// A collective says in `progress`, a CollectiveProgress in the host's memory, when it is entered and when it is over;
// `number` counts the plan's collectives from 1.
struct Announced { TensorId scalars, progress; int number; };
// Sums a slice of the gradients, and the tail with the last one (else kNone), over all ranks; the same bits on every rank.
// staging: the slice in bf16, the type in which it is summed (kNone: summed as it is; the tail always is).
// Sharded: only this rank's part of the sums, `own`, is made. Its sum of squares goes to place rank * buckets + index of
// `sums` (through `partials`), and the last bucket gathers those of all ranks there.
struct ReduceBucket {
  TensorId slice, tail, staging;
  int64_t size;
  int index;
  Announced announced;
  TensorId own = kNone, partials = kNone, sums = kNone;
};
// Sharded: each rank's part of a slice of the parameters to all ranks.
struct GatherBucket { TensorId slice; int64_t size; int index; Announced announced; };
// Sharded: the moments of all ranks behind one another into rank 0's snapshot (kNone on the others), after the parameters.
struct GatherMoments { TensorId moments, snapshot; int64_t bytes; Announced announced; };
// all[rank, ...] = own[...] of every rank, `size` elements each.
struct GatherMatrices { TensorId own, all; int64_t size; Announced announced; };
// loss_partials: the numerator of all ranks, then zeros; signals of all ranks into the record.
struct UnpackTail { TensorId tail, loss_partials, record; int64_t losses; };

// Books the device's time since the last mark under `phase` (StepRecord); nothing where StepScalars says evaluation.
struct Mark { TensorId scalars, record; StepPhase phase; };
// Copies the record, not_finite with it, into the ring's next slot, its number last; sets the booked times and not_finite back to 0.
struct PublishRecord { TensorId record, not_finite, ring; };
// master, moments, record one behind the other into the snapshot. moments kNone: they come by a GatherMoments.
struct SnapshotState { TensorId master, moments, record, snapshot; };

// Global L2 norm of the flat gradients in fixed order; loss = loss_weight * sum of loss_partials; both into the record,
// with the verdict whether the step is skipped (either one not finite, or the run halted) and the counters that follow
// from it. own_signals: the record's signals are this rank's. gradients kNone (sharded): partials holds the sums of squares
// already, `size` of them. scale_growth_steps: the gradients are scaled (loss_scale.h): the norm is divided by the scale, which
// goes on for the next step, and an overflow is told from what nothing helps; 0: they are not.
struct GradientNorm {
  TensorId scalars, gradients, partials, loss_partials, record;
  int64_t size, losses;
  bool own_signals;
  int64_t scale_growth_steps;
};
// Muon, in the form of torch.optim.Muon with adjust_lr_fn match_rms_adamw, for `count` matrices [rows, cols] of one shape at
// the places (elements, i64) in the arenas of parameters, their copies in T, gradients and moments, whose first buffer is its
// momentum. An operation declares those matrices, not the whole arenas: shapes do not wait for each other.
//   m += (1 - momentum) (g - m), g the clipped gradient, freed of its scale; u = m, or with nesterov g + momentum (m - g)
//   x = u / max(|u|, 1e-7) in T, transposed where rows > cols; scratch: parts of |u|^2
// Several ranks: m of all matrices, x of the `own` matrices from `first` on, whose products this rank makes.
struct MuonMomentum {
  TensorId record, places, x, scratch;
  int64_t count, rows, cols;
  double momentum, clip_norm;
  bool nesterov;
  int64_t first, own;
};
// A phase of a round of Newton-Schulz, of this rank's matrices of every shape: `count` of them a group, contiguous. x, next: [shorter, longer];
// gram, polynomial: [shorter, shorter], symmetric. What a phase does not touch is kNone.
//   kGram: gram = x x^T; kPolynomial: polynomial = kMuonB gram + kMuonC gram gram; kTurn: next = kMuonA x + polynomial x
// One rounding at the end of each, sums as Gemm's.
struct MuonProducts {
  struct Group { TensorId x, gram, polynomial, next; int64_t count, shorter, longer; };
  MuonPhase phase;
  std::vector<Group> groups;
};
// w = w (1 - lr weight_decay) - lr 0.2 sqrt(max(rows, cols)) x; lr times `scale` as AdamW's. A skipped step changes nothing.
struct MuonUpdate {
  TensorId scalars, record, x, places, scale;
  int64_t count, rows, cols;
  double weight_decay;
};

// The average of the parameters behind the moments: a += (1 - decay) (w - a). A skipped step changes nothing.
struct AverageWeights { TensorId record, master, moments; int64_t size; double decay; };

// Decoupled AdamW (torch.optim.AdamW's order of operations) over the flat buffers. Clip factor min(1, clip / (norm +
// 1e-6)), over record.scaled_by, lr and the update count t = record.updates are device values; a skipped step changes nothing.
// `decay`: a DecayGroup per kParameterAlign elements; `scale`: as many factors of lr (kNone: 1). Writes the compute copy too (kNone
// where T is the master's type).
struct AdamW {
  TensorId scalars, master, gradients, moments, decay, scale, compute, record;
  int64_t size;
  double beta1, beta2, eps, weight_decay, clip_norm;
  int64_t first = 0;   // sharded: the element of the flat arenas at which master and gradients begin; decay and scale are whole
};

using OpArgs = std::variant<ConvertInput, DrawMask, PatchGather, Gemm, GemmGelu, AddPosition, LayerNorm, Attention, MaxPool, Residual, ResidualNorm,
                            FusionGather, DecoderAssemble, TakeMasked, MaeLoss, MeanTokens, Dropout, CrossEntropy, Cast, ColumnSum,
                            SumParts, LayerNormBackward, AttentionBackward, MaxPoolBackward, ResidualBackward, GemmGeluBackward,
                            FusionGatherBackward, PutMasked, DecoderAssembleBackward, AddPositionBackward, MeanTokensBackward,
                            DropoutBackward, PackTail, ReduceBucket, GatherBucket, GatherMoments, GatherMatrices, UnpackTail, Mark,
                            PublishRecord, SnapshotState, GradientNorm, MuonMomentum, MuonProducts, MuonUpdate, AverageWeights, AdamW>;

struct Op {
  OpArgs args;
  std::string name;                     // "blocks.3.attn.qkv dgrad"
  Part part;
  bool backward = false;
  // In the second of two queues (Lanes), beside the operations after it, as far as memory allows: what it reads and writes is
  // declared, and whoever shares a byte with it waits. In the passes: weight gradients and sums, whose results only a SumParts,
  // a reduction or the update reads. In the update: every other shape's momentum and update of Muon's.
  bool beside = false;
  bool reduces = false;                 // of the all-reduce: runs in a step's last micro-batch only
  std::vector<TensorId> reads, writes;  // a tensor updated in place stands in both
  double flops = 0, bytes = 0;          // counted: multiply-adds as 2; each input read once, each output written once
};

enum class ComputeType : uint8_t { kF64, kF32, kBF16, kF16 };
ComputeType ComputeTypeOf(const v1::StepSpec& step);   // of step.precision

struct PlanOptions {
  ComputeType compute = ComputeType::kF32;
  RowFormat rows;                  // of the input as it arrives; nothing: fp32, as it is
  // The encoder alone, nothing masked, no backward: Plan::encoded is what Step::Features averages over tokens. Parameters
  // lie in the table's order; the arenas of gradients and moments are empty.
  bool features = false;
  // Index tables stay empty: for who asks what a step takes, and shall not take it himself.
  bool sizes_only = false;
  int64_t rank = 0;                // whose plan; rank 0's has the snapshot
  int64_t bucket_elements = int64_t{8} << 20;   // Plan::buckets
};

// An index table or other constant that the executor copies into kPersistent once.
struct Constant {
  TensorId tensor;
  std::vector<uint8_t> bytes;
};

// A slice of the flat gradients that is all-reduced at once, by a ReduceBucket as soon as it is ready (several ranks). It is
// closed once it holds PlanOptions::bucket_elements (by default 32 MiB of fp32): large enough for full bandwidth, small
// enough that most of the reduction hides behind the rest of backward.
struct Bucket {
  int64_t offset, size;   // elements; with the last one goes the tail
  int ready;              // index of the operation after which all of it is written
};
struct Plan {
  Geometry geometry;
  ParameterTable table;
  PlanOptions options;
  int64_t batch = 0;                       // batch_per_rank
  int64_t ranks = 1;
  bool reduce_bf16 = false;                // step.reduce_dtype
  bool sharded = false;                    // step.shard_optimizer, where there are several ranks
  int num_collectives = 0;                 // Announced::number goes so far
  int num_moments = 2;                     // flat buffers in kMoments
  bool accumulate = false;                 // gradients add to what is there: the executor clears them before a step
  std::vector<int64_t> parameter_offset;   // elements in the flat arenas, by index in the table
  int64_t flat_size = 0;                   // elements, padding included
  std::vector<TensorSpec> tensors;
  std::vector<Op> forward_backward;        // one micro-batch; the first `forward_ops` are the forward pass
  int forward_ops = 0;
  std::vector<Op> update;                  // once per optimizer step
  std::vector<Op> snapshot;                // between two steps, when a checkpoint is due
  std::vector<Constant> constants;
  std::vector<Bucket> buckets;             // in the order of readiness
  int64_t arena_bytes[kNumArenas] = {};
  // What the step's owner writes or reads. source kNone: nothing is to be written there.
  TensorId source = kNone, source_ids = kNone, source_labels = kNone, scalars = kNone, record = kNone, ring = kNone;
  TensorId master = kNone, gradients = kNone, moments = kNone, compute = kNone;   // whole flat buffers
  TensorId tail = kNone;    // behind the gradients, where there are several ranks
  TensorId saved = kNone;   // the snapshot: rank 0
  TensorId not_finite = kNone;   // of a step's input, until its record is published
  TensorId progress = kNone;   // CollectiveProgress, where there are several ranks
  TensorId x = kNone, visit_ids = kNone, labels = kNone, keep_mask = kNone, keep_idx = kNone;
  TensorId pred = kNone, encoded = kNone, loss_partials = kNone;   // classify: pred holds the logits

  // Sharded: what rank `rank` updates of a bucket (buckets are multiples of ranks * kParameterAlign then), in elements: its
  // place in the flat arenas, and that of its moments, `num_moments` buffers behind one another, in kMoments.
  struct Shard { int64_t first, size, moments; };
  Shard ShardOf(const Bucket& bucket, int64_t rank) const {
    const int64_t size = bucket.size / ranks;
    return {bucket.offset + rank * size, size, num_moments * (bucket.offset / ranks)};
  }
  int64_t losses() const { return tensors[loss_partials].bytes / int64_t(sizeof(double)); }   // values of loss_partials
  int64_t TotalBytes() const;   // of the device; where that is the CPU, SnapshotBytes() too
  int64_t SnapshotBytes() const { return arena_bytes[int(Arena::kSnapshot)]; }
  TensorId Find(const std::string& name) const;   // kNone: unknown

  // `spec` has its defaults filled in. Errors: what Geometry::From refuses, and sizes beyond the plan's index types.
  static absl::StatusOr<Plan> Make(const v1::JobSpec& spec, const PlanOptions& options);
};

}  // namespace hierad
