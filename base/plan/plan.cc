#include "base/plan/plan.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/plan/plan_builder.h"
#include "base/status.h"

namespace hierad {
namespace {

// Tensors of one transformer block that backward needs again.
struct BlockTape {
  std::string name;
  BlockShape shape{};
  int64_t rows_in = 0, rows_out = 0, windows = 1, keys = 0, hidden = 0;
  bool keep = true;   // the tensors below are kept until backward
  bool masked = false;   // behind attention only masked tokens are wanted: rows_out are theirs
  int draw = 0;   // index of the block among those with drop path
  TensorId x = kNone, xn = kNone, mean1 = kNone, rstd1 = kNone, qkv = kNone, o = kNone, lse = kNone, argmax = kNone;
  TensorId o_rows = kNone;   // o, or its masked rows
  TensorId pool_argmax = kNone, x1 = kNone, xn2 = kNone, mean2 = kNone, rstd2 = kNone, h = kNone;
  TensorId g = kNone;   // not kept: backward makes it again
};

class StepPlan {
 public:
  StepPlan(Plan* plan, const v1::JobSpec& spec)
      : plan_(*plan), g_(plan->geometry), spec_(spec), batch_(plan->batch), mae_(g_.spec.task() == "mae"),
        b_(plan, TypeOf(plan->options.compute), plan->options.compute == ComputeType::kF64 ? DType::kF64 : DType::kF32) {}

  void Build() {
    Input();
    Patch();
    Encoder();
    mae_ ? Heads() : PooledNorm();
    if (!plan_.options.features) mae_ ? Decoder() : Classifier();
    plan_.forward_ops = int(plan_.forward_backward.size());
    FlatBuffers();
    if (!plan_.options.features) {
      EmitMark("forward done", StepPhase::kForward);
      mae_ ? HeadsAndDecoderBackward() : ClassifierBackward();
      EncoderBackward();
      PatchBackward();
      Update();
    }
    PlaceTensors(&plan_);
  }

 private:
  static DType TypeOf(ComputeType compute) {
    switch (compute) {
      case ComputeType::kF64: return DType::kF64;
      case ComputeType::kF32: return DType::kF32;
      case ComputeType::kBF16: return DType::kBF16;
      case ComputeType::kF16: return DType::kF16;
    }
    return DType::kF32;
  }
  TensorId ScaleRecord() const { return plan_.options.compute == ComputeType::kF16 ? plan_.record : kNone; }
  static Part StagePart(int stage) { return Part(int(Part::kStage1) + std::min(stage, 5)); }

  bool Checkpointed(int stage) const {
    const auto& stages = spec_.step().checkpoint_stages();
    return std::find(stages.begin(), stages.end(), stage + 1) != stages.end();
  }
  int64_t Kept(int64_t tokens_full) const { return tokens_full / g_.num_mask_units * g_.num_kept; }

  void Input() {
    b_.Enter(Part::kInput, false);
    RowFormat& rows = plan_.options.rows;
    rows = RowFormat::Or(rows, g_);
    const int64_t channels = rows.rules.channels, samples = rows.rules.samples;
    auto staged = [&](const char* name, std::vector<int64_t> shape, DType dtype) {
      return b_.Add(name, std::move(shape), dtype, Arena::kStaging);
    };
    plan_.scalars = staged("scalars", {int64_t(sizeof(StepScalars))}, DType::kU8);
    if (rows.rules.synthetic == 0) plan_.source = staged("source", {2, batch_, channels, samples}, rows.type);
    plan_.source_ids = staged("source_ids", {2, batch_}, DType::kI64);
    plan_.source_labels = staged("source_labels", {2, batch_}, DType::kI64);
    plan_.record = b_.Add("record", {int64_t(sizeof(StepRecord))}, DType::kU8, Arena::kPersistent);
    plan_.not_finite = b_.Add("not_finite", {1}, DType::kI64, Arena::kPersistent);
    if (!plan_.options.features) EmitMark("step begins", StepPhase::kIdle);
    plan_.loss_partials = b_.Add("loss_partials", {batch_, mae_ ? kLossParts : 1}, DType::kF64, Arena::kPersistent);
    const TensorId scale = b_.Constants("input_scale", rows.scale);
    const TensorId offset = b_.Constants("input_offset", rows.offset);
    plan_.x = b_.Activation("x", {batch_, channels, samples}, b_.real());
    plan_.visit_ids = b_.Activation("visit_ids", {batch_}, DType::kI64);
    plan_.labels = b_.Activation("labels", {batch_}, DType::kI64);
    b_.Emit("input", ConvertInput{plan_.scalars, plan_.source, plan_.source_ids, plan_.source_labels, scale, offset, plan_.x,
                                  plan_.visit_ids, plan_.labels, plan_.not_finite, batch_, rows.rules},
            {plan_.scalars, plan_.source, plan_.source_ids, plan_.source_labels, scale, offset, plan_.not_finite},
            {plan_.x, plan_.visit_ids, plan_.labels, plan_.not_finite});
    if (!mae_ || plan_.options.features) return;
    plan_.keep_mask = b_.Activation("keep_mask", {batch_, g_.num_mask_units}, DType::kU8);
    plan_.keep_idx = b_.Activation("keep_idx", {batch_, g_.num_kept}, DType::kI32);
    b_.Emit("mask", DrawMask{plan_.scalars, plan_.visit_ids, plan_.keep_mask, plan_.keep_idx, batch_, g_.num_mask_units, g_.num_kept},
            {plan_.scalars, plan_.visit_ids}, {plan_.keep_mask, plan_.keep_idx});
  }

  void Patch() {
    b_.Enter(Part::kPatch, false);
    tokens_ = Kept(g_.num_tokens);
    const int64_t rows = batch_ * tokens_, dim = g_.spec.embed_dim();
    patch_dim_ = g_.spec.in_chans();
    for (int64_t k : g_.patch_kernel) patch_dim_ *= k;
    unroll_ = b_.Table("unroll_order", g_.num_tokens, [this] {
      const std::vector<int64_t> order = g_.UnrollOrder();
      return std::vector<int32_t>(order.begin(), order.end());
    });
    patch_rows_ = b_.InT("patch_rows", rows, patch_dim_);
    b_.Emit("patch gather", PatchGather{plan_.x, plan_.keep_mask, plan_.keep_idx, unroll_, patch_rows_, batch_},
            {plan_.x, plan_.keep_mask, plan_.keep_idx, unroll_}, {patch_rows_});
    const TensorId y = b_.InT("patch_embed", rows, dim);
    b_.Linear("patch_embed.proj", patch_rows_, y, rows, patch_dim_, dim);
    position_ = b_.Master(g_.separate_pos_embed ? "pos_embed_spatial" : "pos_embed");
    position_temporal_ = g_.separate_pos_embed ? b_.Master("pos_embed_temporal") : kNone;
    x_ = b_.InReal("tokens", rows, dim);
    b_.Emit("pos_embed", AddPosition{y, position_, position_temporal_, plan_.keep_idx, unroll_, x_, batch_, tokens_, dim},
            {y, position_, position_temporal_, plan_.keep_idx, unroll_}, {x_});
  }

  // Takes the residual that makes x with it, where that one waits.
  TensorId Norm(const std::string& parameter, TensorId x, int64_t rows, int64_t cols, TensorId* mean, TensorId* rstd) {
    const TensorId gamma = b_.Master(parameter + ".weight"), beta = b_.Master(parameter + ".bias");
    const TensorId y = b_.InT(parameter + again_, rows, cols);
    *mean = b_.Activation(parameter + again_ + ".mean", {rows}, b_.real());
    *rstd = b_.Activation(parameter + again_ + ".rstd", {rows}, b_.real());
    const LayerNorm norm{x, gamma, beta, y, *mean, *rstd, rows, cols};
    if (waiting_.has_value() && waiting_->out == x) {
      const Residual r = *std::exchange(waiting_, std::nullopt);
      b_.Emit(absl::StrCat(waiting_name_, " and ", parameter), ResidualNorm{r, norm}, {r.scalars, r.base, r.y, r.visit_ids, gamma, beta},
              {x, y, *mean, *rstd});
      return y;
    }
    b_.Emit(parameter, norm, {x, gamma, beta}, {y, *mean, *rstd});
    return y;
  }

  // The gradient of the residual stream; its copy in T and the parts of its sum over rows where they were made with it. real kNone: it
  // is narrow + low (LayerNormBackward).
  struct Flow {
    TensorId real, narrow = kNone, parts = kNone, low = kNone;
  };
  // Who reads the residual stream's gradient behind a norm's backward pass: `enters`: it goes into a layer as it is, which wants it in T and
  // needs its sum for the bias; `norm_next`: besides, the next norm's backward pass alone.
  struct Readers {
    bool enters, norm_next = false;
  };

  // dx_in.real kNone: narrow + low, or nothing. Without `dx_out` the result is made in place, or in a tensor of its own where there is none.
  Flow NormBackward(const std::string& parameter, TensorId dy, TensorId x, TensorId mean, TensorId rstd, const Flow& dx_in,
                    TensorId dx_out, int64_t rows, int64_t cols, Readers readers) {
    const TensorId gamma = b_.Master(parameter + ".weight");
    const TensorId dgamma = b_.Parts(parameter + ".weight parts", rows, cols), dbeta = b_.Parts(parameter + ".bias parts", rows, cols);
    // fp16 has no room below its narrow copy for what that one leaves.
    const bool split = readers.enters && readers.norm_next && b_.compute() == DType::kBF16;
    if (split) {
      dx_out = kNone;
    } else if (dx_out == kNone) {
      dx_out = dx_in.real != kNone ? dx_in.real : b_.InReal(parameter + " backward", rows, cols);
    }
    const TensorId before_narrow = dx_in.low == kNone ? kNone : dx_in.narrow;
    Flow flow{dx_out};
    TensorId narrow = kNone;
    if (split) flow.low = dx_in.low != kNone ? dx_in.low : b_.InT(parameter + " backward left by T", rows, cols);
    if (readers.enters) {
      if (b_.compute() != b_.real()) narrow = b_.InT(parameter + " backward in T", rows, cols);
      flow.narrow = narrow == kNone ? dx_out : narrow;
      flow.parts = b_.Parts(parameter + " backward parts", rows, cols);
    }
    b_.Emit(parameter + " backward",
            LayerNormBackward{dy, x, mean, rstd, gamma, dx_in.real, before_narrow, dx_in.low, dx_out, narrow, flow.low, dgamma, dbeta, flow.parts,
                              rows, cols, ReduceParts(rows)},
            {dy, x, mean, rstd, gamma, dx_in.real, before_narrow, dx_in.low}, {dx_out, narrow, flow.low, dgamma, dbeta, flow.parts});
    b_.SumLater(parameter + ".weight", dgamma);
    b_.SumLater(parameter + ".bias", dbeta);
    return flow;
  }

  // Waits for a norm that takes it along; EmitWaiting emits it alone.
  void AddResidual(const std::string& name, const BlockTape& t, TensorId base, TensorId y, TensorId out, int which) {
    const TensorId ids = t.shape.drop_path > 0 ? plan_.visit_ids : kNone;
    const TensorId scalars = t.shape.drop_path > 0 ? plan_.scalars : kNone;
    waiting_ = Residual{scalars, base, y, out, ids, batch_, t.rows_out / batch_, t.shape.dim_out, t.shape.drop_path, t.draw, which};
    waiting_name_ = name;
  }
  void EmitWaiting() {
    if (!waiting_.has_value()) return;
    const Residual r = *std::exchange(waiting_, std::nullopt);
    b_.Emit(waiting_name_, r, {r.scalars, r.base, r.y, r.visit_ids}, {r.out});
  }
  // What enters a residual branch in T, and the parts of its sum where they are there.
  Flow BranchGradient(const std::string& name, const BlockTape& t, const Flow& dres, int which) {
    if (dres.narrow != kNone) return dres;
    const TensorId ids = t.shape.drop_path > 0 ? plan_.visit_ids : kNone;
    const TensorId scalars = t.shape.drop_path > 0 ? plan_.scalars : kNone;
    const TensorId dy = b_.InT(name, t.rows_out, t.shape.dim_out);
    b_.Emit(absl::StrCat(t.name, ".residual", which + 1, " backward"),
            ResidualBackward{scalars, dres.real, dy, ids, batch_, t.rows_out / batch_, t.shape.dim_out, t.shape.drop_path, t.draw, which},
            {scalars, dres.real, ids}, {dy});
    return {dres.real, dy};
  }

  // A block up to its MLP's hidden layer: all that backward reads again, and GELU of it.
  BlockTape BlockFront(const std::string& name, const BlockShape& shape, TensorId x, int64_t tokens_in, int64_t windows, int draw, bool masked) {
    BlockTape t;
    t.name = name;
    t.shape = shape;
    t.draw = draw;
    t.x = x;
    t.rows_in = batch_ * tokens_in;
    t.masked = masked;
    t.rows_out = masked ? batch_ * MaskedTokens() : t.rows_in / shape.q_stride;
    t.windows = windows;
    t.keys = tokens_in / windows;
    t.hidden = int64_t(double(shape.dim_out) * g_.spec.mlp_ratio());
    const int64_t din = shape.dim_in, d = shape.dim_out, head_dim = d / shape.heads, queries = t.keys / shape.q_stride;
    const std::string at = name + again_;   // of tensors

    t.xn = Norm(name + ".norm1", x, t.rows_in, din, &t.mean1, &t.rstd1);
    t.qkv = b_.InT(at + ".attn.qkv", t.rows_in, 3 * d);
    b_.Linear(name + ".attn.qkv", t.xn, t.qkv, t.rows_in, din, 3 * d);
    t.o = b_.InT(at + ".attn", t.rows_in / shape.q_stride, d);
    t.lse = b_.Activation(at + ".attn.lse", {batch_, shape.heads, windows, queries}, b_.real());
    if (shape.q_stride > 1) t.argmax = b_.Activation(at + ".attn.argmax", {t.rows_out, d}, DType::kU8);
    t.o_rows = t.o;
    b_.Emit(at + ".attn", Attention{t.qkv, t.o, t.lse, t.argmax, batch_, windows, t.keys, shape.q_stride, shape.heads, head_dim},
            {t.qkv}, {t.o, t.lse, t.argmax}, 4.0 * batch_ * windows * queries * t.keys * d);
    TensorId base = x;
    if (masked) {
      t.o_rows = b_.InT(at + ".attn.masked", t.rows_out, d);
      EmitTakeMasked(at + ".attn.masked", t.o, t.o_rows, d);
      base = b_.InReal(at + ".masked", t.rows_out, d);
      EmitTakeMasked(at + ".masked", x, base, d);
    }
    const TensorId y = b_.InT(at + ".attn.proj", t.rows_out, d);
    b_.Linear(name + ".attn.proj", t.o_rows, y, t.rows_out, d, d);
    if (din != d) {
      const TensorId skip = b_.InT(at + ".proj", t.rows_in, d);
      b_.Linear(name + ".proj", t.xn, skip, t.rows_in, din, d);
      base = b_.InReal(at + ".pooled", t.rows_out, d);
      if (shape.q_stride > 1) {
        t.pool_argmax = b_.Activation(at + ".pool.argmax", {t.rows_out, d}, DType::kU8);
        b_.Emit(at + ".pool", MaxPool{skip, base, t.pool_argmax, batch_, t.rows_out / batch_, d, shape.q_stride}, {skip}, {base, t.pool_argmax});
      } else {
        b_.Emit(at + ".pool", Cast{skip, base, t.rows_out * d}, {skip}, {base});
      }
    }
    t.x1 = b_.InReal(at + ".x1", t.rows_out, d);
    AddResidual(at + ".residual1", t, base, y, t.x1, 0);
    t.xn2 = Norm(name + ".norm2", t.x1, t.rows_out, d, &t.mean2, &t.rstd2);
    t.h = b_.InT(at + ".mlp.fc1", t.rows_out, t.hidden);
    t.g = b_.InT(at + ".mlp.gelu", t.rows_out, t.hidden);
    b_.LinearGelu(name + ".mlp.fc1", t.xn2, t.h, t.g, t.rows_out, d, t.hidden);
    return t;
  }

  // One block: x [rows_in, dim_in] -> [rows_out, dim_out]. `keep`: what backward reads is kept, else computed again there.
  TensorId Block(const std::string& name, const BlockShape& shape, TensorId x, int64_t tokens_in, int64_t windows, int draw, bool keep,
                 bool masked = false) {
    BlockTape t = BlockFront(name, shape, x, tokens_in, windows, draw, masked);
    t.keep = keep;
    const int64_t d = shape.dim_out;
    const TensorId y2 = b_.InT(name + ".mlp.fc2", t.rows_out, d);
    b_.Linear(name + ".mlp.fc2", t.g, y2, t.rows_out, t.hidden, d);
    const TensorId x2 = b_.InReal(name + ".x2", t.rows_out, d);
    AddResidual(name + ".residual2", t, t.x1, y2, x2, 1);
    tape_.push_back(t);
    return x2;
  }

  // What backward reads of a block: as kept, or, from the block's input, by the same operations once more, so the same bits.
  BlockTape TapeOf(const BlockTape& t) {
    if (t.keep) return t;
    again_ = " again";
    const BlockTape again = BlockFront(t.name, t.shape, t.x, t.rows_in / batch_, t.windows, t.draw, t.masked);
    again_.clear();
    return again;
  }

  // Takes and returns the gradient of the residual stream; `readers` of what is returned.
  Flow BlockBackward(const BlockTape& tape, Flow dres, Readers readers) {
    const BlockTape t = TapeOf(tape);
    const std::string& name = t.name;
    const int64_t din = t.shape.dim_in, d = t.shape.dim_out;
    const Flow dy2 = BranchGradient(name + ".d_fc2", t, dres, 1);
    const TensorId dh = b_.InT(name + ".d_fc1", t.rows_out, t.hidden), g = b_.InT(name + ".mlp.gelu again", t.rows_out, t.hidden);
    const TensorId dh_parts = b_.InputGradientGelu(name + ".mlp.fc2", dy2.narrow, t.h, dh, g, t.rows_out, t.hidden, d);
    b_.WeightGradient(name + ".mlp.fc2", g, dy2.narrow, t.rows_out, t.hidden, d, dy2.parts);
    const TensorId dxn2 = b_.InT(name + ".d_norm2", t.rows_out, d);
    b_.LinearBackward(name + ".mlp.fc1", t.xn2, dh, dxn2, t.rows_out, d, t.hidden, dh_parts);
    dres = NormBackward(name + ".norm2", dxn2, t.x1, t.mean2, t.rstd2, dres, kNone, t.rows_out, d,
                        {t.shape.drop_path == 0, /*norm_next=*/din == d && !t.masked});

    const Flow dy = BranchGradient(name + ".d_proj", t, dres, 0);
    TensorId d_o = b_.InT(name + ".d_attn", t.rows_out, d);
    b_.LinearBackward(name + ".attn.proj", t.o_rows, dy.narrow, d_o, t.rows_out, d, d, dy.parts);
    if (t.masked) {
      d_o = EmitPutMasked(name + ".d_attn of all", d_o, b_.InT(name + ".d_attn of all", t.rows_in, d), d);
      dres = {EmitPutMasked(name + ".d_x of all", dres.real, b_.InReal(name + ".d_x of all", t.rows_in, d), d)};
    }
    const TensorId dqkv = b_.InT(name + ".d_qkv", t.rows_in, 3 * d);
    // sum over head_dim of o * do, per query.
    const TensorId scratch = b_.Activation(name + ".attn scratch", b_.At(t.lse).shape, b_.real());
    b_.Emit(name + ".attn backward",
            AttentionBackward{t.qkv, t.o, d_o, t.lse, t.argmax, dqkv, scratch, batch_, t.windows, t.keys, t.shape.q_stride,
                              t.shape.heads, d / t.shape.heads},
            {t.qkv, t.o, d_o, t.lse, t.argmax}, {dqkv, scratch},
            10.0 * batch_ * t.windows * (t.keys / t.shape.q_stride) * t.keys * d);
    const TensorId dxn = b_.InT(name + ".d_norm1", t.rows_in, din);
    b_.LinearBackward(name + ".attn.qkv", t.xn, dqkv, dxn, t.rows_in, din, 3 * d);
    if (din != d) {
      ShortcutBackward(t, dres.real, dxn);
      dres = {kNone};
    }
    dres = NormBackward(name + ".norm1", dxn, t.x, t.mean1, t.rstd1, dres, kNone, t.rows_in, din, readers);
    b_.EmitSums(name + " sums");
    return dres;
  }

  // The tokens of a sample that the loss looks at.
  int64_t MaskedTokens() const { return (g_.num_mask_units - g_.num_kept) * g_.mask_unit_final_tokens; }
  void EmitTakeMasked(const std::string& name, TensorId x, TensorId rows, int64_t dim) {
    b_.Emit(name, TakeMasked{x, plan_.keep_mask, final_order_, rows, batch_, g_.num_mask_units, g_.num_kept, g_.mask_unit_final_tokens, dim},
            {x, plan_.keep_mask, final_order_}, {rows});
  }
  TensorId EmitPutMasked(const std::string& name, TensorId rows, TensorId x, int64_t dim) {
    b_.Emit(name, PutMasked{rows, plan_.keep_mask, final_order_, x, batch_, g_.num_mask_units, g_.num_kept, g_.mask_unit_final_tokens, dim},
            {rows, plan_.keep_mask, final_order_}, {x});
    return x;
  }

  // The projected and pooled shortcut of a block that changes the width adds to the norm's gradient.
  void ShortcutBackward(const BlockTape& t, TensorId dres, TensorId dxn) {
    const int64_t din = t.shape.dim_in, d = t.shape.dim_out;
    const TensorId dskip = b_.InT(t.name + ".d_skip", t.rows_in, d);
    if (t.shape.q_stride > 1) {
      b_.Emit(t.name + ".pool backward", MaxPoolBackward{dres, t.pool_argmax, dskip, batch_, t.rows_out / batch_, d, t.shape.q_stride},
              {dres, t.pool_argmax}, {dskip});
    } else {
      b_.Emit(t.name + ".pool backward", Cast{dres, dskip, t.rows_out * d}, {dres}, {dskip});
    }
    b_.LinearBackward(t.name + ".proj", t.xn, dskip, dxn, t.rows_in, din, d, kNone, /*accumulate_dx=*/true);
  }

  void Encoder() {
    for (const BlockShape& shape : g_.blocks) {
      b_.Enter(StagePart(shape.stage), false);
      const int64_t tokens_in = Kept(shape.tokens_full_in);
      const int64_t windows = shape.mask_unit_attn ? g_.num_kept : 1;
      x_ = Block(absl::StrCat("blocks.", shape.index), shape, x_, tokens_in, windows, shape.index, !Checkpointed(shape.stage));
      tokens_ = tokens_in / shape.q_stride;
      if (shape.index == g_.stage_ends[shape.stage]) stage_output_.push_back(x_);
    }
    EmitWaiting();
  }

  // Rows and taps of fusion head `i`; the last one is the identity.
  int64_t Taps(size_t i) const {
    int64_t taps = 1;
    if (i < g_.fusion_kernels.size()) for (int64_t k : g_.fusion_kernels[i]) taps *= k;
    return taps;
  }
  int64_t StageDim(int stage) const { return g_.blocks[g_.stage_ends[stage]].dim_out; }

  void Heads() {
    b_.Enter(Part::kHeads, false);
    const int64_t finals = g_.mask_unit_final_tokens, e = g_.encoder_dim_out, rows = batch_ * g_.num_kept * finals;
    encoder_rows_ = rows;
    fused_ = b_.InReal("fused", rows, e);
    for (size_t i = g_.fusion_stages.size(); i-- > 0;) {   // the identity first: it writes what the others add to
      const int stage = g_.fusion_stages[i];
      const int64_t taps = Taps(i), dim = StageDim(stage);
      const bool identity = i + 1 == g_.fusion_stages.size();
      const TensorId order = b_.Table(absl::StrCat("fusion_order.", stage), finals * taps, [&] { return FusionOrder(g_, stage); });
      fusion_orders_.insert(fusion_orders_.begin(), order);
      const TensorId to = identity ? fused_ : b_.InT(absl::StrCat("fusion_rows.", stage), rows, taps * dim);
      fusion_rows_.insert(fusion_rows_.begin(), to);
      b_.Emit(absl::StrCat("fusion gather ", stage), FusionGather{stage_output_[stage], order, to, batch_, g_.num_kept, finals, taps, dim},
              {stage_output_[stage], order}, {to});
      if (!identity) b_.Linear(absl::StrCat("multi_scale_fusion_heads.", i), to, fused_, rows, taps * dim, e, /*accumulate=*/true);
    }
    encoded_ = Norm("encoder_norm", fused_, rows, e, &encoder_mean_, &encoder_rstd_);
    plan_.encoded = encoded_;
  }

  void Decoder() {
    b_.Enter(Part::kDecoder, false);
    const int64_t finals = g_.mask_unit_final_tokens, e = g_.encoder_dim_out, rows = encoder_rows_;
    const int64_t dd = g_.decoder_dim, units = g_.num_mask_units, all = g_.num_tokens_final;
    const TensorId y = b_.InT("decoder_embed", rows, dd);
    b_.Linear("decoder_embed", encoded_, y, rows, e, dd);
    final_order_ = b_.Table("final_order", all, [this] { return FinalOrder(g_); });
    const TensorId token = b_.Master("mask_token"), position = b_.Master("decoder_pos_embed");
    x_ = b_.InReal("decoder_tokens", batch_ * all, dd);
    b_.Emit("decoder assemble",
            DecoderAssemble{y, token, position, plan_.keep_mask, plan_.keep_idx, final_order_, x_, batch_, units, g_.num_kept, finals, dd},
            {y, token, position, plan_.keep_mask, plan_.keep_idx, final_order_}, {x_});
    for (int i = 0; i < g_.decoder_depth; ++i) {
      BlockShape shape{i, 0, dd, dd, g_.decoder_heads, 1, false, all, all, 0.0};
      x_ = Block(absl::StrCat("decoder_blocks.", i), shape, x_, all, 1, 0, !spec_.step().checkpoint_decoder(), /*masked=*/i + 1 == g_.decoder_depth);
    }
    const int64_t masked = batch_ * MaskedTokens();
    if (g_.decoder_depth == 0) {
      const TensorId tokens = x_;
      x_ = b_.InReal("decoder_tokens masked", masked, dd);
      EmitTakeMasked("decoder_tokens masked", tokens, x_, dd);
    }
    decoder_out_ = x_;
    decoded_ = Norm("decoder_norm", x_, masked, dd, &decoder_mean_, &decoder_rstd_);
    plan_.pred = b_.InT("pred", masked, g_.pred_dim);
    b_.Linear("decoder_pred", decoded_, plan_.pred, masked, dd, g_.pred_dim);

    b_.Enter(Part::kLoss, false);
    const TensorId label_index = b_.Table("label_index", all * g_.pred_dim, [this] { return LabelIndex(g_); });
    dpred_ = b_.InT("d_pred", masked, g_.pred_dim);
    const int64_t sample = b_.At(plan_.x).shape[1] * b_.At(plan_.x).shape[2];
    b_.Emit("loss",
            MaeLoss{plan_.scalars, ScaleRecord(), plan_.pred, plan_.x, plan_.keep_mask, final_order_, label_index, dpred_, plan_.loss_partials,
                    batch_, units, g_.num_kept, finals, g_.pred_dim, sample, g_.spec.norm_target(), plan_.accumulate},
            {plan_.scalars, ScaleRecord(), plan_.pred, plan_.x, plan_.keep_mask, final_order_, label_index, plan_.accumulate ? plan_.loss_partials : kNone},
            {dpred_, plan_.loss_partials});
  }

  void HeadsAndDecoderBackward() {
    b_.Enter(Part::kDecoder, true);
    const int64_t dd = g_.decoder_dim, all = g_.num_tokens_final, e = g_.encoder_dim_out, rows = encoder_rows_;
    const int64_t masked = batch_ * MaskedTokens();
    const TensorId d_norm = b_.InT("d_decoder_norm", masked, dd);
    b_.LinearBackward("decoder_pred", decoded_, dpred_, d_norm, masked, dd, g_.pred_dim);
    Flow flow = NormBackward("decoder_norm", d_norm, decoder_out_, decoder_mean_, decoder_rstd_, {kNone}, kNone, masked, dd,
                             {g_.decoder_depth > 0, /*norm_next=*/true});
    if (g_.decoder_depth == 0) {
      flow = {EmitPutMasked("decoder_tokens masked backward", flow.real, b_.InReal("d_decoder_tokens", batch_ * all, dd), dd)};
    }
    for (int i = 0; i < g_.decoder_depth; ++i) {
      const bool block_next = i + 1 < g_.decoder_depth;
      flow = BlockBackward(tape_.back(), flow, {block_next, block_next});
      tape_.pop_back();
    }
    const TensorId dres = flow.real;
    const TensorId dy = b_.InT("d_decoder_embed", rows, dd);
    const TensorId dtoken = b_.Gradient("mask_token"), dposition = b_.Gradient("decoder_pos_embed");
    const TensorId scratch = b_.Activation("decoder assemble scratch", {kReduceParts, dd}, b_.real());
    std::vector<TensorId> reads{dres, plan_.keep_mask, plan_.keep_idx, final_order_};
    if (plan_.accumulate) reads.insert(reads.end(), {dtoken, dposition});
    b_.Emit("decoder assemble backward",
            DecoderAssembleBackward{dres, plan_.keep_mask, plan_.keep_idx, final_order_, dy, dtoken, dposition, scratch, batch_,
                                    g_.num_mask_units, g_.num_kept, g_.mask_unit_final_tokens, dd, plan_.accumulate},
            std::move(reads), {dy, dtoken, dposition, scratch});
    const TensorId d_encoded = b_.InT("d_encoder_norm", rows, e);
    b_.LinearBackward("decoder_embed", encoded_, dy, d_encoded, rows, e, dd);

    b_.Enter(Part::kHeads, true);
    d_fused_ = b_.InReal("d_fused", rows, e);
    d_fused_in_t_ = NormBackward("encoder_norm", d_encoded, fused_, encoder_mean_, encoder_rstd_, {kNone}, d_fused_, rows, e,
                                 {!g_.fusion_kernels.empty()});
  }

  // What fusion head `i` sends back into the residual stream of its stage's output.
  TensorId FusionBackward(size_t i, TensorId dres) {
    b_.Enter(Part::kHeads, true);
    const int stage = g_.fusion_stages[i];
    const int64_t taps = Taps(i), dim = StageDim(stage), rows = encoder_rows_, finals = g_.mask_unit_final_tokens;
    const bool identity = i + 1 == g_.fusion_stages.size();
    TensorId drows = d_fused_;
    if (!identity) {
      drows = b_.InT(absl::StrCat("d_fusion_rows.", stage), rows, taps * dim);
      b_.LinearBackward(absl::StrCat("multi_scale_fusion_heads.", i), fusion_rows_[i], d_fused_in_t_.narrow, drows, rows, taps * dim, g_.encoder_dim_out,
                        d_fused_in_t_.parts);
    }
    const bool add = dres != kNone;
    if (!add) dres = b_.InReal("d_encoder", b_.At(stage_output_[stage]).shape[0], dim);
    b_.Emit(absl::StrCat("fusion gather ", stage, " backward"),
            FusionGatherBackward{drows, fusion_orders_[i], dres, batch_, g_.num_kept, finals, taps, dim, add},
            {drows, fusion_orders_[i], add ? dres : kNone}, {dres});
    return dres;
  }

  void EncoderBackward() {
    auto heads_after = [&](const BlockTape& t) {   // fusion heads that read this block's output
      std::vector<size_t> heads;
      if (!mae_ || t.shape.index != g_.stage_ends[t.shape.stage]) return heads;
      for (size_t i = 0; i < g_.fusion_stages.size(); ++i) {
        if (g_.fusion_stages[i] == t.shape.stage) heads.push_back(i);
      }
      return heads;
    };
    Flow flow{d_encoder_};
    while (!tape_.empty()) {
      const BlockTape t = tape_.back();
      tape_.pop_back();
      for (size_t i : heads_after(t)) flow = {FusionBackward(i, flow.real)};
      b_.Enter(StagePart(t.shape.stage), true);
      const bool block_next = !tape_.empty() && tape_.back().shape.drop_path == 0 && heads_after(tape_.back()).empty();
      flow = BlockBackward(t, flow, {tape_.empty() || block_next, block_next});
    }
    d_tokens_ = flow;
  }

  void PatchBackward() {
    b_.Enter(Part::kPatch, true);
    const int64_t tokens = Kept(g_.num_tokens), rows = batch_ * tokens, dim = g_.spec.embed_dim();
    const bool separate = g_.separate_pos_embed;
    const TensorId dposition = b_.Gradient(separate ? "pos_embed_spatial" : "pos_embed");
    const TensorId dtemporal = separate ? b_.Gradient("pos_embed_temporal") : kNone;
    const TensorId scratch = separate ? b_.Activation("pos_embed scratch", {g_.num_tokens, dim}, b_.real()) : kNone;
    std::vector<TensorId> reads{d_tokens_.real, plan_.keep_mask, plan_.keep_idx, unroll_};
    if (plan_.accumulate) reads.insert(reads.end(), {dposition, dtemporal});
    b_.Emit("pos_embed backward",
            AddPositionBackward{d_tokens_.real, plan_.keep_mask, plan_.keep_idx, unroll_, dposition, dtemporal, scratch, batch_, tokens, dim, plan_.accumulate},
            std::move(reads), {dposition, dtemporal, scratch});
    b_.LinearBackward("patch_embed.proj", patch_rows_, d_tokens_.narrow, kNone, rows, patch_dim_, dim, d_tokens_.parts);
    b_.EmitSums("patch_embed sums");
    // After the last gradients, wherever they were made.
    EmitMark("backward done", StepPhase::kBackward, b_.Gradient("patch_embed.proj.bias"));
  }

  void EmitMark(const char* name, StepPhase phase, TensorId after = kNone) {
    b_.Emit(name, Mark{plan_.scalars, plan_.record, phase}, {plan_.scalars, plan_.record, after}, {plan_.record});
  }

  void PooledNorm() {
    b_.Enter(Part::kHeads, false);
    const int64_t e = g_.encoder_dim_out;
    pooled_ = b_.InReal("mean_tokens", batch_, e);
    b_.Emit("mean_tokens", MeanTokens{x_, pooled_, batch_, tokens_, e}, {x_}, {pooled_});
    encoded_ = Norm("norm", pooled_, batch_, e, &encoder_mean_, &encoder_rstd_);
    plan_.encoded = encoded_;
  }

  void Classifier() {
    const int64_t e = g_.encoder_dim_out, classes = g_.spec.num_classes();
    head_in_ = encoded_;
    if (g_.spec.head_dropout() > 0) {
      head_in_ = b_.InT("head.dropout", batch_, e);
      b_.Emit("head.dropout", Dropout{plan_.scalars, encoded_, head_in_, plan_.visit_ids, batch_, e, g_.spec.head_dropout()},
              {plan_.scalars, encoded_, plan_.visit_ids}, {head_in_});
    }
    plan_.pred = b_.InT("logits", batch_, classes);
    b_.Linear("head.projection", head_in_, plan_.pred, batch_, e, classes);
    b_.Enter(Part::kLoss, false);
    dpred_ = b_.InT("d_logits", batch_, classes);
    b_.Emit("loss",
            CrossEntropy{plan_.scalars, ScaleRecord(), plan_.pred, plan_.labels, dpred_, plan_.loss_partials, batch_, classes, plan_.accumulate},
            {plan_.scalars, ScaleRecord(), plan_.pred, plan_.labels, plan_.accumulate ? plan_.loss_partials : kNone}, {dpred_, plan_.loss_partials});
  }

  void ClassifierBackward() {
    b_.Enter(Part::kHeads, true);
    const int64_t e = g_.encoder_dim_out;
    TensorId d_norm = b_.InT("d_head", batch_, e);
    b_.LinearBackward("head.projection", head_in_, dpred_, d_norm, batch_, e, g_.spec.num_classes());
    if (g_.spec.head_dropout() > 0) {
      const TensorId dropped = b_.InT("d_dropout", batch_, e);
      b_.Emit("head.dropout backward", DropoutBackward{plan_.scalars, d_norm, dropped, plan_.visit_ids, batch_, e, g_.spec.head_dropout()},
              {plan_.scalars, d_norm, plan_.visit_ids}, {dropped});
      d_norm = dropped;
    }
    const TensorId d_pooled = b_.InReal("d_mean_tokens", batch_, e);
    NormBackward("norm", d_norm, pooled_, encoder_mean_, encoder_rstd_, {kNone}, d_pooled, batch_, e, {false});
    d_encoder_ = b_.InReal("d_encoder", batch_ * tokens_, e);
    b_.Emit("mean_tokens backward", MeanTokensBackward{d_pooled, d_encoder_, batch_, tokens_, e}, {d_pooled}, {d_encoder_});
  }

  // The arenas of parameters as one tensor each; PlaceTensors gives them their size.
  void FlatBuffers() {
    auto whole = [&](const char* name, DType dtype, Arena arena) { return b_.Add(name, {0}, dtype, arena); };
    plan_.master = whole("parameters", b_.real(), Arena::kMaster);
    if (b_.compute() != b_.real()) plan_.compute = whole("compute", b_.compute(), Arena::kCompute);
    if (plan_.options.features) return;
    plan_.gradients = whole("gradients", b_.real(), Arena::kGradients);
    plan_.moments = whole("moments", b_.real(), Arena::kMoments);
    if (plan_.options.rank == 0) plan_.saved = whole("snapshot", DType::kU8, Arena::kSnapshot);
    plan_.ring = b_.Add("ring", {kRecordSlots, int64_t(sizeof(RecordSlot))}, DType::kU8, Arena::kRecords);
    if (plan_.ranks == 1) return;
    plan_.tail = whole("gradient tail", b_.real(), Arena::kGradients);
    plan_.progress = b_.Add("progress", {int64_t(sizeof(CollectiveProgress))}, DType::kU8, Arena::kRecords);
  }

  void Update() {
    b_.Enter(Part::kOptimizer, true);
    const int64_t size = plan_.table.flat_size;
    decay_ = b_.Add("decay", {size / kParameterAlign}, DType::kU8, Arena::kPersistent);
    const TensorId partials = b_.Add("norm_partials", {kNormParts}, DType::kF64, Arena::kPersistent);
    if (plan_.ranks > 1) {
      b_.Emit("unpack tail", UnpackTail{plan_.tail, plan_.loss_partials, plan_.record, plan_.losses()}, {plan_.tail, plan_.record},
              {plan_.loss_partials, plan_.record});
      EmitMark("gradients of all ranks", StepPhase::kCommunication);
    }
    b_.Emit("gradient norm", GradientNorm{plan_.scalars, plan_.gradients, partials, plan_.loss_partials, plan_.record, size, plan_.losses(), plan_.ranks == 1,
                         ScaleRecord() == kNone ? 0 : spec_.step().loss_scale_growth_steps()},
            {plan_.scalars, plan_.gradients, plan_.loss_partials, plan_.record}, {partials, plan_.record});
    const v1::OptimizerSpec& o = spec_.optimizer();
    if (o.layer_decay() < 1 && o.has_layer_decay()) scale_ = b_.Add("rate factors", {size / kParameterAlign}, DType::kF32, Arena::kPersistent);
    b_.Emit("adamw",
            AdamW{plan_.scalars, plan_.master, plan_.gradients, plan_.moments, decay_, scale_, plan_.compute, plan_.record, size, o.beta1(),
                  o.beta2(), o.eps(), o.weight_decay(), o.clip_norm()},
            {plan_.scalars, plan_.master, plan_.gradients, plan_.moments, decay_, scale_, plan_.record},
            {plan_.master, plan_.moments, plan_.compute});
    if (o.name() == "muon") places_ = EmitMuon(&b_, &plan_, o, scale_);
    if (plan_.num_moments > 2) {
      b_.Emit("average of the weights", AverageWeights{plan_.record, plan_.master, plan_.moments, size, o.ema_decay()},
              {plan_.record, plan_.master, plan_.moments}, {plan_.moments});
    }
    EmitSnapshots();
    EmitMark("update done", StepPhase::kOptimizer, plan_.master);
    b_.Emit("record", PublishRecord{plan_.record, plan_.not_finite, plan_.ring}, {plan_.record, plan_.not_finite},
            {plan_.record, plan_.not_finite, plan_.ring});
  }

  // Rank 0 saves; what the others hold alone they send it.
  void EmitSnapshots() {
    const TensorId moments = plan_.sharded ? kNone : plan_.moments;
    if (plan_.saved != kNone) {
      b_.EmitSnapshot("snapshot", SnapshotState{plan_.master, moments, plan_.record, plan_.saved}, {plan_.master, moments, plan_.record}, {plan_.saved});
    }
    if (!plan_.sharded) return;
    b_.EmitSnapshot("gather moments", GatherMoments{plan_.moments, plan_.saved, 0, {plan_.scalars, plan_.progress, 0}},
                    {plan_.moments, plan_.scalars}, {plan_.saved, plan_.progress});
  }

 public:
  // After the parameters have their places: what the update knows of each kParameterAlign elements, and Muon of its matrices.
  void AddUpdateTables() {
    if (decay_ == kNone) return;
    std::vector<uint8_t> groups(plan_.flat_size / kParameterAlign, kWithoutDecay);
    std::vector<float> scales(groups.size(), 1.0f);
    const v1::OptimizerSpec& o = spec_.optimizer();
    for (size_t p = 0; p < plan_.table.parameters.size(); ++p) {
      const Parameter& parameter = plan_.table.parameters[p];
      const int64_t first = plan_.parameter_offset[p] / kParameterAlign;
      const int64_t count = (parameter.size + kParameterAlign - 1) / kParameterAlign;
      const bool muon = o.name() == "muon" && parameter.matrix;
      std::fill_n(groups.begin() + first, count, muon ? kNotAdamW : parameter.decay ? kWithDecay : kWithoutDecay);
      std::fill_n(scales.begin() + first, count, float(RateFactor(parameter.layer, plan_.table.num_layers, o)));
    }
    plan_.constants.push_back({decay_, std::move(groups)});
    if (scale_ != kNone) AddConstant(scale_, scales);
    for (const auto& [tensor, matrices] : places_) {
      std::vector<int64_t> places;
      for (int p : matrices) places.push_back(plan_.parameter_offset[p]);
      AddConstant(tensor, places);
    }
  }

 private:
  template <typename V>
  void AddConstant(TensorId tensor, const std::vector<V>& values) {
    Constant constant{tensor, std::vector<uint8_t>(values.size() * sizeof(V))};
    std::memcpy(constant.bytes.data(), values.data(), constant.bytes.size());
    plan_.constants.push_back(std::move(constant));
  }

  Plan& plan_;
  const Geometry& g_;
  const v1::JobSpec& spec_;
  const int64_t batch_;
  const bool mae_;
  PlanBuilder b_;

  TensorId x_ = kNone;          // the residual stream, as far as it is built
  int64_t tokens_ = 0;          // its tokens per sample
  int64_t patch_dim_ = 0, encoder_rows_ = 0;
  TensorId unroll_ = kNone, patch_rows_ = kNone, position_ = kNone, position_temporal_ = kNone, final_order_ = kNone;
  std::vector<BlockTape> tape_;
  std::vector<TensorId> stage_output_, fusion_rows_, fusion_orders_;
  TensorId fused_ = kNone, encoded_ = kNone, encoder_mean_ = kNone, encoder_rstd_ = kNone, d_fused_ = kNone;
  Flow d_fused_in_t_{kNone}, d_tokens_{kNone};
  std::optional<Residual> waiting_;   // for the norm of what it makes
  std::string waiting_name_;
  std::string again_;                 // in the names of tensors that are computed once more
  TensorId decoder_out_ = kNone, decoded_ = kNone, decoder_mean_ = kNone, decoder_rstd_ = kNone, dpred_ = kNone;
  TensorId pooled_ = kNone, head_in_ = kNone, d_encoder_ = kNone, decay_ = kNone, scale_ = kNone;
  std::vector<MuonPlaces> places_;
};

}  // namespace

// Places among pooled tokens are bytes, places in a sample 32-bit integers.
static absl::Status CheckIndexTypes(const Geometry& g) {
  if (g.flat_q_stride > 256 && g.spec.q_pool() > 0) {
    return ErrorOf(v1::REASON_USER_ERROR,
                   absl::StrCat("model.q_stride: pools ", g.flat_q_stride, " tokens at once, step.mode fused takes at most 256; "
                                "use step.mode: graph_safe."));
  }
  int64_t samples = g.spec.in_chans();
  for (int64_t s : g.input_size) samples *= s;
  if (samples > INT32_MAX) {
    return ErrorOf(v1::REASON_USER_ERROR,
                   absl::StrCat("model.input_size: a sample of ", samples, " values, step.mode fused takes at most ", INT32_MAX,
                                "; use step.mode: graph_safe."));
  }
  return absl::OkStatus();
}

ComputeType ComputeTypeOf(const v1::StepSpec& step) {
  return step.precision() == "bf16" ? ComputeType::kBF16 : step.precision() == "fp16" ? ComputeType::kF16 : ComputeType::kF32;
}

int64_t Plan::TotalBytes() const {
  int64_t total = 0;
  for (int arena = 0; arena < kNumArenas; ++arena) total += OnHost(Arena(arena)) ? 0 : arena_bytes[arena];
  return total;
}

TensorId Plan::Find(const std::string& name) const {
  for (TensorId id = 0; id < TensorId(tensors.size()); ++id) {
    if (tensors[id].name == name) return id;
  }
  return kNone;
}

absl::StatusOr<Plan> Plan::Make(const v1::JobSpec& spec, const PlanOptions& options) {
  Plan plan;
  ASSIGN_OR_RETURN(plan.geometry, Geometry::From(spec.model()));
  RETURN_IF_ERROR(CheckIndexTypes(plan.geometry));
  if (options.features) plan.geometry.num_kept = plan.geometry.num_mask_units;
  plan.table = ParameterTable::For(plan.geometry);
  plan.options = options;
  plan.batch = spec.step().batch_per_rank();
  plan.ranks = std::max(1, spec.resources().ranks());
  plan.reduce_bf16 = spec.step().reduce_dtype() == "bf16";
  plan.sharded = spec.step().shard_optimizer() && plan.ranks > 1 && !options.features && spec.optimizer().name() != "muon";
  plan.num_moments = spec.optimizer().ema_decay() > 0 ? 3 : 2;
  plan.accumulate = spec.step().accumulation() > 1;
  StepPlan step(&plan, spec);
  step.Build();
  step.AddUpdateTables();
  return plan;
}

}  // namespace hierad
