#include "worker/step/fused_op_cpu.h"

#include "base/plan/products.h"
#include "worker/kernels/reference/adamw.h"
#include "worker/kernels/reference/attention.h"
#include "worker/kernels/reference/classifier.h"
#include "worker/kernels/reference/decoder.h"
#include "worker/kernels/reference/fusion.h"
#include "worker/kernels/reference/gelu.h"
#include "worker/kernels/reference/gemm.h"
#include "worker/kernels/reference/input.h"
#include "worker/kernels/reference/layer_norm.h"
#include "worker/kernels/reference/loss.h"
#include "worker/kernels/reference/muon.h"
#include "worker/kernels/reference/patch.h"
#include "worker/kernels/reference/record.h"
#include "worker/kernels/reference/reduce.h"
#include "worker/kernels/reference/residual.h"

namespace hierad {
namespace {

namespace ref = reference;

// Calls the kernel of each operation; T, S as in worker/kernels/reference/types.h.
template <typename T, typename S>
class CpuOps {
 public:
  explicit CpuOps(const Addresses& addresses) : at_(addresses), plan_(*addresses.plan), g_(plan_.geometry) {}

  void operator()(const ConvertInput& o) const {
    ref::ConvertInput<S>({at_.Get<StepScalars>(o.scalars), at_.At(o.source), RowType(o.source), Ids(o.source_ids), Ids(o.source_labels),
                          at_.Get<float>(o.offset), at_.Get<float>(o.scale), Real(o.x), Ids(o.visit_ids), Ids(o.labels),
                          at_.Get<uint64_t>(o.not_finite), o.batch, o.rules});
  }
  void operator()(const DrawMask& o) const {
    ref::DrawMask(Scalars(o.scalars), Ids(o.visit_ids), Bytes(o.keep_mask), Ints(o.keep_idx), o.batch, o.mask_units, o.kept);
  }
  void operator()(const PatchGather& o) const {
    ref::PatchGather(g_, Real(o.x), Bytes(o.keep_mask), Ints(o.keep_idx), Ints(o.unroll_order), Narrow(o.rows), o.batch, g_.num_kept);
  }
  void operator()(const Gemm& o) const {
    if (IsReal(o.c)) {
      ref::Gemm(Narrow(o.a), Narrow(o.b), Real(o.c), Real(o.bias), o.m, o.n, o.k, o.trans_a, o.trans_b, o.accumulate);
    } else {
      ref::Gemm(Narrow(o.a), Narrow(o.b), Narrow(o.c), Real(o.bias), o.m, o.n, o.k, o.trans_a, o.trans_b, o.accumulate);
    }
  }
  void operator()(const AddPosition& o) const {
    ref::AddPosition(Narrow(o.y), Real(o.position), Real(o.position_temporal), Ints(o.keep_idx), Ints(o.unroll_order), Real(o.x),
                     o.batch, o.tokens, g_.num_kept, g_.num_mask_units, Spatial(), o.dim);
  }
  void operator()(const LayerNorm& o) const {
    ref::LayerNorm(Real(o.x), Real(o.gamma), Real(o.beta), Narrow(o.y), Real(o.mean), Real(o.rstd), o.rows, o.cols);
  }
  void operator()(const Attention& o) const {
    ref::Attention({o.batch, o.windows, o.keys, o.q_stride, o.heads, o.head_dim}, Narrow(o.qkv), Narrow(o.o), Real(o.lse),
                   Bytes(o.argmax));
  }
  void operator()(const MaxPool& o) const {
    ref::MaxPool(Narrow(o.y), Real(o.base), Bytes(o.argmax), o.batch, o.tokens_out * o.dim, o.q_stride);
  }
  void operator()(const Residual& o) const {
    ref::Residual(at_.Get<StepScalars>(o.scalars), Ids(o.visit_ids), {o.rate, o.block, o.which}, Real(o.base), Narrow(o.y),
                  Real(o.out), o.batch, o.tokens * o.dim);
  }
  void operator()(const ResidualNorm& o) const {
    (*this)(o.residual);
    (*this)(o.norm);
  }
  void operator()(const GemmGelu& o) const {
    ref::Gemm(Narrow(o.a), Narrow(o.b), Narrow(o.h), Real(o.bias), o.m, o.n, o.k, false, true, false);
    ref::Gelu<T, S>(Narrow(o.h), Narrow(o.g), o.m * o.n);
  }
  void operator()(const FusionGather& o) const {
    const ref::FusionShape shape{o.batch, o.kept, o.finals, o.taps, o.dim};
    if (IsReal(o.rows)) {
      ref::FusionGather(shape, Real(o.x), Ints(o.order), Real(o.rows));
    } else {
      ref::FusionGather(shape, Real(o.x), Ints(o.order), Narrow(o.rows));
    }
  }
  void operator()(const DecoderAssemble& o) const {
    ref::DecoderAssemble({o.batch, o.mask_units, o.kept, o.finals, o.dim}, Narrow(o.y), Real(o.mask_token), Real(o.position),
                         Bytes(o.keep_mask), Ints(o.order), Real(o.x));
  }
  void operator()(const TakeMasked& o) const {
    const ref::DecoderShape shape{o.batch, o.mask_units, o.kept, o.finals, o.dim};
    if (IsReal(o.x)) {
      ref::TakeMasked(shape, Real(o.x), Bytes(o.keep_mask), Ints(o.order), Real(o.rows));
    } else {
      ref::TakeMasked(shape, Narrow(o.x), Bytes(o.keep_mask), Ints(o.order), Narrow(o.rows));
    }
  }
  void operator()(const PutMasked& o) const {
    const ref::DecoderShape shape{o.batch, o.mask_units, o.kept, o.finals, o.dim};
    if (IsReal(o.x)) {
      ref::PutMasked(shape, Real(o.rows), Bytes(o.keep_mask), Ints(o.order), Real(o.x));
    } else {
      ref::PutMasked(shape, Narrow(o.rows), Bytes(o.keep_mask), Ints(o.order), Narrow(o.x));
    }
  }
  void operator()(const MaeLoss& o) const {
    ref::MaeLoss(Scalars(o.scalars), at_.Get<StepRecord>(o.record),
                 {o.batch, o.mask_units, o.kept, o.finals, o.pred_dim, o.sample_size, o.norm_target, o.accumulate},
                 Narrow(o.pred), Real(o.x), Bytes(o.keep_mask), Ints(o.order), Ints(o.label_index), Narrow(o.dpred),
                 at_.Get<double>(o.partials));
  }
  void operator()(const MeanTokens& o) const { ref::MeanTokens(Real(o.x), Real(o.y), o.batch, o.tokens, o.dim); }
  void operator()(const Dropout& o) const {
    ref::Dropout<T, S>(Scalars(o.scalars), Ids(o.visit_ids), Narrow(o.x), Narrow(o.y), o.batch, o.dim, o.rate);
  }
  void operator()(const CrossEntropy& o) const {
    ref::CrossEntropy<T, S>(Scalars(o.scalars), at_.Get<StepRecord>(o.record), Narrow(o.logits), Ids(o.labels), Narrow(o.dlogits),
                            at_.Get<double>(o.partials), o.batch, o.classes, o.accumulate);
  }
  void operator()(const Cast& o) const {
    if (IsReal(o.from)) {
      ref::Cast(Real(o.from), Narrow(o.to), o.size);
    } else {
      ref::Cast(Narrow(o.from), Real(o.to), o.size);
    }
  }
  void operator()(const ColumnSum& o) const { ref::ColumnSum(Narrow(o.dy), Real(o.parts), o.rows, o.cols, o.num_parts); }
  void operator()(const SumParts& o) const {
    for (const SumParts::Sum& sum : o.sums) ref::SumParts(Real(sum.parts), Real(sum.grad), sum.cols, sum.num_parts, o.accumulate);
  }
  void operator()(const LayerNormBackward& o) const {
    ref::LayerNormBackward(Narrow(o.dy), Real(o.x), Real(o.mean), Real(o.rstd), Real(o.gamma), Real(o.dx_in), Narrow(o.dx_in_narrow),
                           Narrow(o.dx_in_low), Real(o.dx_out), Narrow(o.dx_narrow), Narrow(o.dx_low), Real(o.dgamma_parts), Real(o.dbeta_parts), Real(o.dx_parts), o.rows, o.cols, o.num_parts);
  }
  void operator()(const AttentionBackward& o) const {
    ref::AttentionBackward({o.batch, o.windows, o.keys, o.q_stride, o.heads, o.head_dim}, Narrow(o.qkv), Narrow(o.o), Narrow(o.d_o),
                           Real(o.lse), Bytes(o.argmax), Narrow(o.dqkv), Real(o.scratch));
  }
  void operator()(const MaxPoolBackward& o) const {
    ref::MaxPoolBackward(Real(o.dbase), Bytes(o.argmax), Narrow(o.dy), o.batch, o.tokens_out * o.dim, o.q_stride);
  }
  void operator()(const ResidualBackward& o) const {
    ref::ResidualBackward(at_.Get<StepScalars>(o.scalars), Ids(o.visit_ids), {o.rate, o.block, o.which}, Real(o.dout), Narrow(o.dy),
                          o.batch, o.tokens * o.dim);
  }
  void operator()(const GemmGeluBackward& o) const {
    ref::Gemm(Narrow(o.a), Narrow(o.b), Narrow(o.dh), static_cast<const S*>(nullptr), o.m, o.n, o.k, false, false, false);
    ref::GeluBackward(Narrow(o.h), Narrow(o.dh), Narrow(o.dh), Narrow(o.g), Real(o.dh_parts), o.m, o.n, o.num_parts);
  }
  void operator()(const FusionGatherBackward& o) const {
    const ref::FusionShape shape{o.batch, o.kept, o.finals, o.taps, o.dim};
    if (IsReal(o.drows)) {
      ref::FusionGatherBackward(shape, Real(o.drows), Ints(o.order), Real(o.dx), o.accumulate);
    } else {
      ref::FusionGatherBackward(shape, Narrow(o.drows), Ints(o.order), Real(o.dx), o.accumulate);
    }
  }
  void operator()(const DecoderAssembleBackward& o) const {
    ref::DecoderAssembleBackward({o.batch, o.mask_units, o.kept, o.finals, o.dim}, Real(o.dx), Bytes(o.keep_mask), Ints(o.order),
                                 Narrow(o.dy), Real(o.dmask_token), Real(o.dposition), o.accumulate);
  }
  void operator()(const AddPositionBackward& o) const {
    ref::AddPositionBackward(Real(o.dx), Ints(o.keep_idx), Ints(o.unroll_order), Real(o.dposition), Real(o.dposition_temporal),
                             o.batch, o.tokens, g_.num_kept, g_.num_mask_units, Spatial(), g_.tokens[0],
                             o.dim, o.accumulate);
  }
  void operator()(const MeanTokensBackward& o) const { ref::MeanTokensBackward(Real(o.dy), Real(o.dx), o.batch, o.tokens, o.dim); }
  void operator()(const DropoutBackward& o) const {
    ref::Dropout<T, S>(Scalars(o.scalars), Ids(o.visit_ids), Narrow(o.dy), Narrow(o.dx), o.batch, o.dim, o.rate);
  }
  void operator()(const PackTail& o) const { ref::PackTail(Scalars(o.scalars), at_.Get<double>(o.loss_partials), *at_.Get<uint64_t>(o.not_finite), Real(o.tail), o.losses); }
  void operator()(const UnpackTail& o) const {
    ref::UnpackTail(Real(o.tail), at_.Get<double>(o.loss_partials), at_.Get<StepRecord>(o.record), o.losses);
  }
  // The executor's, which has the communicator.
  void operator()(const ReduceBucket&) const {}
  void operator()(const GatherBucket&) const {}
  void operator()(const GatherMoments&) const {}
  void operator()(const GatherMatrices&) const {}
  void operator()(const Mark& o) const { ref::Mark(Scalars(o.scalars), at_.Get<StepRecord>(o.record), o.phase); }
  void operator()(const PublishRecord& o) const { ref::PublishRecord(at_.Get<StepRecord>(o.record), at_.Get<uint64_t>(o.not_finite), at_.Get<RecordSlot>(o.ring)); }
  void operator()(const SnapshotState& o) const {
    ref::SnapshotState(Real(o.master), Real(o.moments), *at_.Get<StepRecord>(o.record), plan_.flat_size, plan_.num_moments,
                       at_.Get<char>(o.snapshot));
  }
  void operator()(const GradientNorm& o) const {
    ref::GradientNorm(Scalars(o.scalars), Real(o.gradients), at_.Get<double>(o.partials), at_.Get<double>(o.loss_partials), at_.Get<StepRecord>(o.record), o.size,
                      o.losses, o.own_signals, o.scale_growth_steps);
  }
  void operator()(const AdamW& o) const {
    ref::AdamW(Scalars(o.scalars), *at_.Get<StepRecord>(o.record), {o.beta1, o.beta2, o.eps, o.weight_decay, o.clip_norm},
               Real(o.master), Real(o.gradients), Real(o.moments), Bytes(o.decay) + o.first / kParameterAlign,
               o.scale == kNone ? nullptr : at_.Get<float>(o.scale) + o.first / kParameterAlign, Narrow(o.compute), o.size);
  }
  void operator()(const AverageWeights& o) const {
    ref::AverageWeights(*at_.Get<StepRecord>(o.record), o.decay, Real(o.master), Real(o.moments), o.size);
  }
  void operator()(const MuonMomentum& o) const {
    ref::MuonMomentum(*at_.Get<StepRecord>(o.record), {o.count, o.rows, o.cols}, o.first, o.own, o.momentum, o.clip_norm, o.nesterov,
                      Flat<S>(Arena::kGradients), Flat<S>(Arena::kMoments), Ids(o.places), Narrow(o.x), at_.Get<double>(o.scratch));
  }
  void operator()(const MuonProducts& products) const {
    for (const MuonProducts::Group& group : products.groups) {
      const BatchedGemm o = ProductOf(products.phase, group);
      ref::BatchedGemm<T, S>(Narrow(o.a), Narrow(o.b), Narrow(o.c), Narrow(o.d), o.count, o.m, o.n, o.k, o.trans_b, o.alpha, o.beta);
    }
  }
  void operator()(const MuonUpdate& o) const {
    ref::MuonUpdate(Scalars(o.scalars), *at_.Get<StepRecord>(o.record), {o.count, o.rows, o.cols}, o.weight_decay, Narrow(o.x), Ids(o.places),
                    at_.Get<float>(o.scale), Flat<S>(Arena::kMaster), Flat<T>(Arena::kCompute));
  }

 private:
  // A whole arena of parameters, of which the operation declares some; nullptr: there is none.
  template <typename V>
  V* Flat(Arena arena) const { return reinterpret_cast<V*>(at_.arena[int(arena)]); }
  S* Real(TensorId id) const { return at_.Get<S>(id); }
  T* Narrow(TensorId id) const { return at_.Get<T>(id); }
  uint8_t* Bytes(TensorId id) const { return at_.Get<uint8_t>(id); }
  int32_t* Ints(TensorId id) const { return at_.Get<int32_t>(id); }
  int64_t* Ids(TensorId id) const { return at_.Get<int64_t>(id); }
  const StepScalars& Scalars(TensorId id) const { return *at_.Get<StepScalars>(id); }
  DType Type(TensorId id) const { return plan_.tensors[id].dtype; }
  DType RowType(TensorId source) const { return source == kNone ? DType::kF32 : Type(source); }   // none: rows are drawn
  bool IsReal(TensorId id) const { return SizeOf(Type(id)) == int64_t(sizeof(S)); }
  // Rows of pos_embed, or of pos_embed_spatial.
  int64_t Spatial() const { return g_.separate_pos_embed ? g_.num_tokens / g_.tokens[0] : g_.num_tokens; }

  const Addresses& at_;
  const Plan& plan_;
  const Geometry& g_;
};

}  // namespace

void RunOpOnCpu(const Op& op, const Addresses& addresses) {
  switch (addresses.plan->options.compute) {
    case ComputeType::kF64: return std::visit(CpuOps<double, double>(addresses), op.args);
    case ComputeType::kF32: return std::visit(CpuOps<float, float>(addresses), op.args);
    case ComputeType::kBF16: return std::visit(CpuOps<ref::BFloat16, float>(addresses), op.args);
    case ComputeType::kF16: return std::visit(CpuOps<ref::Float16, float>(addresses), op.args);
  }
}

void RefreshComputeCopyOnCpu(const Addresses& addresses) {
  const Plan& plan = *addresses.plan;
  if (plan.compute == kNone) return;   // T is the master's type
  const float* master = addresses.Get<float>(plan.master);
  if (plan.options.compute == ComputeType::kBF16) {
    ref::Cast(master, addresses.Get<ref::BFloat16>(plan.compute), plan.flat_size);
  } else {
    ref::Cast(master, addresses.Get<ref::Float16>(plan.compute), plan.flat_size);
  }
}

}  // namespace hierad
