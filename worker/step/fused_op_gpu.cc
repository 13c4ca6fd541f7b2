#include "worker/step/fused_op_gpu.h"

#include <type_traits>

#include "absl/strings/str_cat.h"
#include "base/plan/products.h"
#include "base/status.h"
#include "worker/kernels/attention.h"
#include "worker/kernels/card.h"
#include "worker/kernels/gemm_gelu.h"
#include "worker/kernels/kernels.h"

namespace hierad {
namespace {

namespace k = kernels;

template <typename T>
class GpuOps {
 public:
  GpuOps(const Addresses& addresses, const GpuContext& context)
      : at_(addresses), plan_(*addresses.plan), g_(plan_.geometry), context_(context), stream_(context.stream) {}

  absl::Status operator()(const Gemm& o) const {
    const GemmShape shape = ShapeOf(o, plan_, context_.tf32);
    const void* bias = at_.At(o.bias);
    if (bias != nullptr && kNarrow && !shape.wide_out) bias = Compute(o.bias);
    if (context_.tune) return context_.gemm->Tune(shape, at_.At(o.a), at_.At(o.b), at_.At(o.c), bias, stream_);
    return context_.gemm->Run(shape, at_.At(o.a), at_.At(o.b), at_.At(o.c), bias, stream_, context_.lane);
  }
  // With the elementwise part in the product's epilogue where there is such a kernel, else behind it.
  absl::Status operator()(const GemmGelu& o) const {
    if (InEpilogue(o)) {
      const k::GemmGeluForward product{o.m, o.n, o.k, at_.At(o.a), at_.At(o.b), Real(o.bias), at_.At(o.h), at_.At(o.g), kHalf};
      return context_.tune ? absl::OkStatus() : CudaStatus(k::RunGemmGelu(product, stream_), "a product with GELU");
    }
    RETURN_IF_ERROR((*this)(ProductOf(o)));
    return context_.tune ? absl::OkStatus() : CudaStatus(k::Gelu(Narrow(o.h), Narrow(o.g), o.m * o.n, stream_), "a kernel's launch");
  }
  absl::Status operator()(const GemmGeluBackward& o) const {
    if (InEpilogue(o)) {
      const k::GemmGeluBackward product{o.m, o.n, o.k, at_.At(o.a), at_.At(o.b), at_.At(o.h), at_.At(o.dh), at_.At(o.g), Real(o.dh_parts), kHalf};
      return context_.tune ? absl::OkStatus() : CudaStatus(k::RunGemmGeluBackward(product, stream_), "a product with GELU's backward");
    }
    RETURN_IF_ERROR((*this)(ProductOf(o)));
    if (context_.tune) return absl::OkStatus();
    return CudaStatus(k::GeluBackward(Narrow(o.h), Narrow(o.dh), Narrow(o.dh), Narrow(o.g), Real(o.dh_parts), o.m, int(o.n), int(o.num_parts), stream_), "a kernel's launch");
  }
  // In one launch what there is a kernel for; the rest by the library, shape by shape.
  absl::Status operator()(const MuonProducts& o) const {
    std::vector<k::MuonGroup> together;
    for (const MuonProducts::Group& g : o.groups) {
      const BatchedGemm p = ProductOf(o.phase, g);
      if (context_.muon != nullptr && TakesMuonGroup(k::ThisCard().capability, plan_.options.compute, g)) {
        together.push_back({{int(g.count), int(g.shorter), int(g.longer)}, at_.At(g.x), o.phase == MuonPhase::kGram ? nullptr : at_.At(p.a), at_.At(p.d)});
        continue;
      }
      const GemmShape shape = ShapeOf(p, plan_, context_.tf32);
      if (context_.tune) RETURN_IF_ERROR(context_.gemm->Tune(shape, at_.At(p.a), at_.At(p.b), at_.At(p.d), nullptr, stream_));
      else RETURN_IF_ERROR(context_.gemm->Run(shape, at_.At(p.a), at_.At(p.b), at_.At(p.d), nullptr, stream_, context_.lane, at_.At(p.c)));
    }
    return together.empty() || context_.tune ? absl::OkStatus() : context_.muon->Run(o.phase, together, kHalf, stream_);
  }
  absl::Status operator()(const ReduceBucket& o) const { return Announce(o, [&] { return o.own == kNone ? Reduce(o) : Scatter(o); }); }
  absl::Status operator()(const GatherBucket& o) const {
    return Announce(o, [&] { return context_.communicator->AllGather(at_.At(o.slice), plan_.tensors[o.slice].bytes / plan_.ranks, stream_); });
  }
  absl::Status operator()(const GatherMoments& o) const {
    return Announce(o, [&] {
      std::byte* to = o.snapshot == kNone ? nullptr : at_.Get<std::byte>(o.snapshot) + plan_.tensors[plan_.master].bytes;
      return context_.communicator->Gather(at_.At(o.moments), to, o.bytes, 0, stream_);
    });
  }
  absl::Status operator()(const GatherMatrices& o) const {
    return Announce(o, [&]() -> absl::Status {
      const int64_t bytes = o.size * int64_t(sizeof(T));
      RETURN_IF_ERROR(CudaStatus(cudaMemcpyAsync(at_.Get<std::byte>(o.all) + plan_.options.rank * bytes, at_.At(o.own), bytes,
                                                 cudaMemcpyDeviceToDevice, stream_), "copying a rank's matrices"));
      return context_.communicator->AllGather(at_.At(o.all), bytes, stream_);
    });
  }
  template <typename O>
  absl::Status operator()(const O& o) const { return CudaStatus(Launch(o), "a kernel's launch"); }

 private:
  static constexpr bool kNarrow = sizeof(T) != sizeof(float), kHalf = std::is_same_v<T, __half>;

  // A collective between the words that it has begun and that it is over.
  template <typename O, typename Body>
  absl::Status Announce(const O& o, const Body& body) const {
    if (context_.communicator == nullptr) return ErrorOf(v1::REASON_INTERNAL, "a plan of several ranks runs without a communicator.");
    auto say = [&](bool entered) {
      return CudaStatus(k::AnnounceCollective(Scalars(o.announced.scalars), at_.Get<CollectiveProgress>(o.announced.progress), o.announced.number,
                                              entered, stream_), "a kernel's launch");
    };
    RETURN_IF_ERROR(say(true));
    RETURN_IF_ERROR(body());
    return say(false);
  }

  absl::Status Scatter(const ReduceBucket& o) const {
    const int64_t part = o.size / plan_.ranks, buckets = int64_t(plan_.buckets.size());
    if (o.staging != kNone) {
      auto* narrow = at_.Get<__nv_bfloat16>(o.staging);
      RETURN_IF_ERROR(CudaStatus(k::Cast(Real(o.slice), narrow, o.size, stream_), "a kernel's launch"));
      RETURN_IF_ERROR(context_.communicator->ReduceScatterSumBF16(at_.Get<uint16_t>(o.staging), part, stream_));
      RETURN_IF_ERROR(CudaStatus(k::Cast(narrow + plan_.options.rank * part, Real(o.own), part, stream_), "a kernel's launch"));
    } else {
      RETURN_IF_ERROR(context_.communicator->ReduceScatterSum(Real(o.slice), part, stream_));
    }
    RETURN_IF_ERROR(CudaStatus(k::SumOfSquares(Real(o.own), Doubles(o.partials), Doubles(o.sums) + plan_.options.rank * buckets + o.index, part,
                                               stream_), "a kernel's launch"));
    if (o.tail == kNone) return absl::OkStatus();
    RETURN_IF_ERROR(context_.communicator->AllReduceSum(Real(o.tail), kGradientTail, stream_));
    return context_.communicator->AllGather(Doubles(o.sums), buckets * int64_t(sizeof(double)), stream_);
  }

  absl::Status Reduce(const ReduceBucket& o) const {
    if (o.staging != kNone) {
      RETURN_IF_ERROR(CudaStatus(k::Cast(Real(o.slice), at_.Get<__nv_bfloat16>(o.staging), o.size, stream_), "a kernel's launch"));
      RETURN_IF_ERROR(context_.communicator->AllReduceSumBF16(at_.Get<uint16_t>(o.staging), o.size, stream_));
      RETURN_IF_ERROR(CudaStatus(k::Cast(at_.Get<__nv_bfloat16>(o.staging), Real(o.slice), o.size, stream_), "a kernel's launch"));
    } else {
      // The tail lies behind the last slice.
      return context_.communicator->AllReduceSum(Real(o.slice), o.size + (o.tail == kNone ? 0 : kGradientTail), stream_);
    }
    return o.tail == kNone ? absl::OkStatus() : context_.communicator->AllReduceSum(Real(o.tail), kGradientTail, stream_);
  }
  template <typename O>
  bool InEpilogue(const O& o) const {
    return kNarrow && context_.epilogues && k::TakesGemmGelu(std::is_same_v<O, GemmGeluBackward>, kHalf, o.m, o.n, o.k);
  }
  cudaError_t Launch(const ConvertInput& o) const {
    return k::ConvertInput({Scalars(o.scalars), at_.At(o.source), o.source == kNone ? DType::kF32 : plan_.tensors[o.source].dtype, Ids(o.source_ids), Ids(o.source_labels),
                            Real(o.offset), Real(o.scale), Real(o.x), Ids(o.visit_ids), Ids(o.labels),
                            at_.Get<uint64_t>(o.not_finite), o.batch, o.rules}, stream_);
  }
  cudaError_t Launch(const DrawMask& o) const {
    return k::DrawMask(Scalars(o.scalars), Ids(o.visit_ids), Bytes(o.keep_mask), Ints(o.keep_idx), int(o.batch), int(o.mask_units),
                       int(o.kept), stream_);
  }
  cudaError_t Launch(const PatchGather& o) const {
    k::PatchShape s{int(o.batch), int(g_.spec.in_chans()), int(g_.num_kept), int(g_.num_mask_units), int(g_.mask_unit_tokens),
                    {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {0, 0, 0}, {1, 1, 1}, {1, 1, 1}};
    for (int d = 0; d < g_.dims; ++d) {
      const int axis = 3 - g_.dims + d;
      s.input[axis] = int(g_.input_size[d]), s.tokens[axis] = int(g_.tokens[d]), s.kernel[axis] = int(g_.patch_kernel[d]);
      s.stride[axis] = int(g_.patch_stride[d]), s.padding[axis] = int(g_.patch_padding[d]);
      s.unit_samples[axis] = int(g_.patch_stride[d] * g_.mask_unit_size[d]), s.units[axis] = int(g_.mask_units[d]);
    }
    return k::PatchGather(s, Real(o.x), Bytes(o.keep_mask), Ints(o.keep_idx), Ints(o.unroll_order), Narrow(o.rows), stream_);
  }
  k::PositionShape Position(int64_t batch, int64_t tokens, int64_t dim) const {
    const int64_t spatial = g_.separate_pos_embed ? g_.num_tokens / g_.tokens[0] : g_.num_tokens;
    return {int(batch), int(tokens), int(g_.num_kept), int(g_.num_mask_units), int(g_.num_tokens), int(spatial), int(dim)};
  }
  cudaError_t Launch(const AddPosition& o) const {
    return k::AddPosition(Position(o.batch, o.tokens, o.dim), Narrow(o.y), Real(o.position), Real(o.position_temporal), Ints(o.keep_idx),
                          Ints(o.unroll_order), Real(o.x), stream_);
  }
  cudaError_t Launch(const AddPositionBackward& o) const {
    return k::AddPositionBackward(Position(o.batch, o.tokens, o.dim), Real(o.dx), Bytes(o.keep_mask), Ints(o.unroll_order),
                                  Real(o.dposition), Real(o.dposition_temporal), Real(o.scratch), o.accumulate, stream_);
  }
  cudaError_t Launch(const LayerNorm& o) const {
    return k::LayerNorm(Real(o.x), Real(o.gamma), Real(o.beta), Narrow(o.y), Real(o.mean), Real(o.rstd), o.rows, int(o.cols), stream_);
  }
  cudaError_t Launch(const LayerNormBackward& o) const {
    return k::LayerNormBackward<T>({Narrow(o.dy), Real(o.x), Real(o.mean), Real(o.rstd), Real(o.gamma), Real(o.dx_in), Narrow(o.dx_in_narrow),
                                    Narrow(o.dx_in_low), Real(o.dx_out), Narrow(o.dx_narrow), Narrow(o.dx_low), Real(o.dgamma_parts), Real(o.dbeta_parts), Real(o.dx_parts), o.rows,
                                    int(o.cols), int(o.num_parts)}, stream_);
  }
  template <typename O>
  static k::AttentionShape Shape(const O& o) {
    return {int(o.batch), int(o.windows), int(o.keys), int(o.q_stride), int(o.heads), int(o.head_dim)};
  }
  cudaError_t Launch(const Attention& o) const {
    return k::AttentionForward(Shape(o), Narrow(o.qkv), Narrow(o.o), Real(o.lse), Bytes(o.argmax), stream_);
  }
  cudaError_t Launch(const AttentionBackward& o) const {
    return k::AttentionBackward(Shape(o), Narrow(o.qkv), Narrow(o.o), Narrow(o.d_o), Real(o.lse), Bytes(o.argmax), Narrow(o.dqkv),
                                Real(o.scratch), stream_);
  }
  cudaError_t Launch(const MaxPool& o) const {
    return k::MaxPool(Narrow(o.y), Real(o.base), Bytes(o.argmax), o.batch, o.tokens_out * o.dim, int(o.q_stride), stream_);
  }
  cudaError_t Launch(const MaxPoolBackward& o) const {
    return k::MaxPoolBackward(Real(o.dbase), Bytes(o.argmax), Narrow(o.dy), o.batch, o.tokens_out * o.dim, int(o.q_stride), stream_);
  }
  cudaError_t Launch(const Residual& o) const {
    return k::Residual(Scalars(o.scalars), Ids(o.visit_ids), {o.rate, o.block, o.which}, Real(o.base), Narrow(o.y), Real(o.out), o.batch,
                       o.tokens * o.dim, stream_);
  }
  cudaError_t Launch(const ResidualNorm& o) const {
    const struct Residual& r = o.residual;
    const struct LayerNorm& n = o.norm;
    return k::ResidualNorm(Scalars(r.scalars), Ids(r.visit_ids), {r.rate, r.block, r.which}, Real(r.base), Narrow(r.y), Real(r.out),
                           Real(n.gamma), Real(n.beta), Narrow(n.y), Real(n.mean), Real(n.rstd), r.batch, r.tokens, int(n.cols), stream_);
  }
  cudaError_t Launch(const ResidualBackward& o) const {
    return k::ResidualBackward(Scalars(o.scalars), Ids(o.visit_ids), {o.rate, o.block, o.which}, Real(o.dout), Narrow(o.dy), o.batch,
                               o.tokens * o.dim, stream_);
  }
  cudaError_t Launch(const FusionGather& o) const {
    const k::FusionShape s{int(o.batch), int(o.kept), int(o.finals), int(o.taps), int(o.dim)};
    return IsReal(o.rows) ? k::FusionGather(s, Real(o.x), Ints(o.order), Real(o.rows), stream_)
                          : k::FusionGather(s, Real(o.x), Ints(o.order), Narrow(o.rows), stream_);
  }
  cudaError_t Launch(const FusionGatherBackward& o) const {
    const k::FusionShape s{int(o.batch), int(o.kept), int(o.finals), int(o.taps), int(o.dim)};
    return IsReal(o.drows) ? k::FusionGatherBackward(s, Real(o.drows), Ints(o.order), Real(o.dx), o.accumulate, stream_)
                           : k::FusionGatherBackward(s, Narrow(o.drows), Ints(o.order), Real(o.dx), o.accumulate, stream_);
  }
  cudaError_t Launch(const DecoderAssemble& o) const {
    const k::DecoderShape s{int(o.batch), int(o.mask_units), int(o.kept), int(o.finals), int(o.dim)};
    return k::DecoderAssemble(s, Narrow(o.y), Real(o.mask_token), Real(o.position), Bytes(o.keep_mask), Ints(o.order), Real(o.x), stream_);
  }
  cudaError_t Launch(const DecoderAssembleBackward& o) const {
    const k::DecoderShape s{int(o.batch), int(o.mask_units), int(o.kept), int(o.finals), int(o.dim)};
    return k::DecoderAssembleBackward(s, Real(o.dx), Bytes(o.keep_mask), Ints(o.order), Narrow(o.dy), Real(o.dmask_token), Real(o.dposition),
                                      Real(o.scratch), o.accumulate, stream_);
  }
  template <typename O>
  k::MaskedShape Masked(const O& o) const {
    return {int(o.batch), int(o.mask_units), int(o.kept), int(o.finals), int(o.dim * (IsReal(o.x) ? sizeof(float) : sizeof(T)))};
  }
  cudaError_t Launch(const TakeMasked& o) const {
    return k::TakeMasked(Masked(o), at_.At(o.x), Bytes(o.keep_mask), Ints(o.order), at_.At(o.rows), stream_);
  }
  cudaError_t Launch(const PutMasked& o) const {
    return k::PutMasked(Masked(o), at_.At(o.rows), Bytes(o.keep_mask), Ints(o.order), at_.At(o.x), stream_);
  }
  // Labels in runs along a line of the sample (MaeLossShape::runs): LabelIndex of base/plan.
  bool LabelsRun() const {
    const int64_t width = g_.input_size[g_.dims - 1];
    return g_.pred_stride % 4 == 0 && width % 4 == 0 && (g_.dims == 2 || (g_.dims == 1 && g_.spec.in_chans() == 1));
  }
  cudaError_t Launch(const MaeLoss& o) const {
    const k::MaeLossShape s{int(o.batch), int(o.mask_units), int(o.kept), int(o.finals), int(o.pred_dim), o.sample_size, o.norm_target, o.accumulate,
                            LabelsRun()};
    return k::MaeLoss(Scalars(o.scalars), at_.Get<StepRecord>(o.record), s, Narrow(o.pred), Real(o.x), Bytes(o.keep_mask), Ints(o.order),
                      Ints(o.label_index), Narrow(o.dpred), Doubles(o.partials), stream_);
  }
  cudaError_t Launch(const MeanTokens& o) const { return k::MeanTokens(Real(o.x), Real(o.y), int(o.batch), int(o.tokens), int(o.dim), stream_); }
  cudaError_t Launch(const MeanTokensBackward& o) const {
    return k::MeanTokensBackward(Real(o.dy), Real(o.dx), int(o.batch), int(o.tokens), int(o.dim), stream_);
  }
  cudaError_t Launch(const Dropout& o) const {
    return k::Dropout(Scalars(o.scalars), Ids(o.visit_ids), Narrow(o.x), Narrow(o.y), int(o.batch), int(o.dim), o.rate, stream_);
  }
  cudaError_t Launch(const DropoutBackward& o) const {
    return k::Dropout(Scalars(o.scalars), Ids(o.visit_ids), Narrow(o.dy), Narrow(o.dx), int(o.batch), int(o.dim), o.rate, stream_);
  }
  cudaError_t Launch(const CrossEntropy& o) const {
    return k::CrossEntropy(Scalars(o.scalars), at_.Get<StepRecord>(o.record), Narrow(o.logits), Ids(o.labels), Narrow(o.dlogits),
                           Doubles(o.partials), int(o.batch), int(o.classes), o.accumulate, stream_);
  }
  cudaError_t Launch(const Cast& o) const {
    return IsReal(o.from) ? k::Cast(Real(o.from), Narrow(o.to), o.size, stream_) : k::Cast(Narrow(o.from), Real(o.to), o.size, stream_);
  }
  cudaError_t Launch(const ColumnSum& o) const {
    return k::ColumnSum(Narrow(o.dy), Real(o.parts), o.rows, int(o.cols), int(o.num_parts), stream_);
  }
  cudaError_t Launch(const SumParts& o) const {
    std::vector<k::PartsSum> sums;
    for (const SumParts::Sum& s : o.sums) sums.push_back({Real(s.parts), Real(s.grad), int(s.cols), int(s.num_parts)});
    return k::SumParts(sums.data(), int(sums.size()), o.accumulate, stream_);
  }
  cudaError_t Launch(const GradientNorm& o) const {
    return k::GradientNorm(Scalars(o.scalars), Real(o.gradients), Doubles(o.partials), Doubles(o.loss_partials), at_.Get<StepRecord>(o.record),
                           o.size, int(o.losses), o.own_signals, o.scale_growth_steps, stream_);
  }
  cudaError_t Launch(const PackTail& o) const {
    return k::PackTail(Scalars(o.scalars), Doubles(o.loss_partials), at_.Get<uint64_t>(o.not_finite), Real(o.tail), int(o.losses), stream_);
  }
  cudaError_t Launch(const UnpackTail& o) const {
    return k::UnpackTail(Real(o.tail), Doubles(o.loss_partials), at_.Get<StepRecord>(o.record), int(o.losses), stream_);
  }
  cudaError_t Launch(const Mark& o) const { return k::Mark(Scalars(o.scalars), at_.Get<StepRecord>(o.record), o.phase, stream_); }
  cudaError_t Launch(const PublishRecord& o) const {
    return k::PublishRecord(at_.Get<StepRecord>(o.record), at_.Get<uint64_t>(o.not_finite), at_.Get<RecordSlot>(o.ring), stream_);
  }
  cudaError_t Launch(const SnapshotState& o) const {
    std::byte* to = at_.Get<std::byte>(o.snapshot);
    for (TensorId id : {o.master, o.moments, o.record}) {
      if (id == kNone) {   // comes by a GatherMoments
        to += plan_.ranks * plan_.tensors[plan_.moments].bytes;
        continue;
      }
      const int64_t bytes = plan_.tensors[id].bytes;
      if (const cudaError_t error = cudaMemcpyAsync(to, at_.At(id), bytes, cudaMemcpyDefault, stream_); error != cudaSuccess) return error;
      to += bytes;
    }
    return cudaSuccess;
  }
  cudaError_t Launch(const AdamW& o) const {
    return k::AdamW(Scalars(o.scalars), at_.Get<StepRecord>(o.record), {o.beta1, o.beta2, o.eps, o.weight_decay, o.clip_norm}, Real(o.master),
                    Real(o.gradients), Real(o.moments), Bytes(o.decay) + o.first / kParameterAlign,
                    o.scale == kNone ? nullptr : Real(o.scale) + o.first / kParameterAlign, Narrow(o.compute), o.size, stream_);
  }
  cudaError_t Launch(const AverageWeights& o) const {
    return k::AverageWeights(at_.Get<StepRecord>(o.record), o.decay, Real(o.master), Real(o.moments) + 2 * o.size, o.size, stream_);
  }
  cudaError_t Launch(const MuonMomentum& o) const {
    return k::MuonMomentum(at_.Get<StepRecord>(o.record), {int(o.count), int(o.rows), int(o.cols)}, int(o.first), int(o.own), o.momentum, o.clip_norm, o.nesterov,
                           Flat<float>(Arena::kGradients), Flat<float>(Arena::kMoments), Ids(o.places), Narrow(o.x), Doubles(o.scratch), stream_);
  }
  cudaError_t Launch(const MuonUpdate& o) const {
    return k::MuonUpdate(Scalars(o.scalars), at_.Get<StepRecord>(o.record), {int(o.count), int(o.rows), int(o.cols)}, o.weight_decay,
                         Narrow(o.x), Ids(o.places), Real(o.scale), Flat<float>(Arena::kMaster), Flat<T>(Arena::kCompute), stream_);
  }

  // A whole arena of parameters, of which the operation declares some; nullptr: there is none.
  template <typename V>
  V* Flat(Arena arena) const { return reinterpret_cast<V*>(at_.arena[int(arena)]); }

  // The copy in T of a master parameter.
  const void* Compute(TensorId master) const {
    return at_.arena[int(Arena::kCompute)] + plan_.tensors[master].offset / int64_t(sizeof(float)) * int64_t(sizeof(T));
  }
  bool IsReal(TensorId id) const { return plan_.tensors[id].dtype == DType::kF32; }
  float* Real(TensorId id) const { return at_.Get<float>(id); }
  T* Narrow(TensorId id) const { return at_.Get<T>(id); }
  uint8_t* Bytes(TensorId id) const { return at_.Get<uint8_t>(id); }
  int32_t* Ints(TensorId id) const { return at_.Get<int32_t>(id); }
  int64_t* Ids(TensorId id) const { return at_.Get<int64_t>(id); }
  double* Doubles(TensorId id) const { return at_.Get<double>(id); }
  const StepScalars* Scalars(TensorId id) const { return at_.Get<StepScalars>(id); }

  const Addresses& at_;
  const Plan& plan_;
  const Geometry& g_;
  const GpuContext& context_;
  cudaStream_t stream_;
};

}  // namespace

absl::Status RunOpOnGpu(const Op& op, const Addresses& addresses, const GpuContext& context) {
  const ComputeType compute = addresses.plan->options.compute;
  const absl::Status status = compute == ComputeType::kBF16  ? std::visit(GpuOps<__nv_bfloat16>(addresses, context), op.args)
                              : compute == ComputeType::kF16 ? std::visit(GpuOps<__half>(addresses, context), op.args)
                                                             : std::visit(GpuOps<float>(addresses, context), op.args);
  return status.ok() ? status : Annotate(status, op.name);
}

absl::Status RefreshComputeCopyOnGpu(const Addresses& addresses, cudaStream_t stream) {
  const Plan& plan = *addresses.plan;
  if (plan.compute == kNone) return absl::OkStatus();
  const float* master = addresses.Get<float>(plan.master);
  return CudaStatus(plan.options.compute == ComputeType::kBF16 ? k::Cast(master, addresses.Get<__nv_bfloat16>(plan.compute), plan.flat_size, stream)
                                                               : k::Cast(master, addresses.Get<__half>(plan.compute), plan.flat_size, stream),
                    "converting the parameters");
}

absl::Status CudaStatus(cudaError_t error, const std::string& what) {
  if (error == cudaSuccess) return absl::OkStatus();
  const v1::Reason reason = error == cudaErrorMemoryAllocation ? v1::REASON_CUDA_OOM
                            : error == cudaErrorECCUncorrectable || error == cudaErrorHardwareStackError ? v1::REASON_GPU_FAULT
                                                                                                         : v1::REASON_CRASHED;
  const char* advice = error == cudaErrorNoKernelImageForDevice
                           ? " This hiera-worker was built for other cards: build it on a machine with such a card, or with -DCMAKE_CUDA_ARCHITECTURES."
                           : "";
  return ErrorOf(reason, absl::StrCat(what, " failed: ", cudaGetErrorString(error), ".", advice));
}

}  // namespace hierad
