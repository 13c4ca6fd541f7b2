// What several ranks add to a plan: the reductions of the gradients' buckets among the operations of backward, and, where the
// optimizer's state is sharded (ZeRO-1 over the flat buffers), the update of a rank's own parts and the gathering of the
// parameters.
#include <algorithm>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "base/plan/plan_builder.h"

namespace hierad {
namespace {

TensorId Add(Plan* plan, std::string name, int64_t size, DType dtype, Arena arena, int64_t offset_elements = 0) {
  plan->tensors.push_back({std::move(name), {size}, dtype, arena, offset_elements * SizeOf(dtype), size * SizeOf(dtype)});
  return TensorId(plan->tensors.size()) - 1;
}

Op OpOf(OpArgs args, std::string name, Part part, std::vector<TensorId> reads, std::vector<TensorId> writes) {
  Op op;
  op.args = std::move(args);
  op.name = std::move(name);
  op.part = part;
  op.backward = true;
  for (std::vector<TensorId>* list : {&reads, &writes}) list->erase(std::remove(list->begin(), list->end(), kNone), list->end());
  op.reads = std::move(reads), op.writes = std::move(writes);
  return op;
}

class Ranks {
 public:
  explicit Ranks(Plan* plan) : plan_(*plan), real_(plan->tensors[plan->gradients].dtype) {}

  // Each bucket is summed as soon as backward has finished it; the last one, and with it the tail, at the end.
  void AddReductions() {
    int64_t largest = 0;
    for (const Bucket& bucket : plan_.buckets) largest = std::max(largest, bucket.size);
    if (plan_.reduce_bf16) staging_ = Add(&plan_, "reduce staging", largest, DType::kBF16, Arena::kPersistent);
    if (plan_.sharded) {
      partials_ = plan_.Find("norm_partials");   // the norm itself needs them no more
      sums_ = Add(&plan_, "sums of squares", plan_.ranks * int64_t(plan_.buckets.size()), DType::kF64, Arena::kPersistent);
    }
    std::vector<Op> passes = std::move(plan_.forward_backward);
    plan_.forward_backward.clear();
    size_t next = 0;
    for (size_t i = 0; i < passes.size(); ++i) {
      plan_.forward_backward.push_back(std::move(passes[i]));
      for (; next + 1 < plan_.buckets.size() && plan_.buckets[next].ready == int(i); ++next) Reduce(next);
    }
    Reduce(next);
  }

  void ShardUpdate() {
    std::vector<Op> whole = std::move(plan_.update);
    plan_.update.clear();
    const auto average = std::find_if(whole.begin(), whole.end(), [](const Op& op) { return std::holds_alternative<AverageWeights>(op.args); });
    for (Op& op : whole) {
      if (auto* norm = std::get_if<GradientNorm>(&op.args)) {
        norm->gradients = kNone, norm->partials = sums_, norm->size = plan_.ranks * int64_t(plan_.buckets.size());
        op.reads = {norm->scalars, sums_, norm->loss_partials, norm->record}, op.writes = {norm->record};
      } else if (const auto* adamw = std::get_if<AdamW>(&op.args)) {
        UpdateShards(*adamw, average == whole.end() ? nullptr : std::get_if<AverageWeights>(&average->args));
        continue;
      } else if (std::holds_alternative<AverageWeights>(op.args)) {
        continue;
      }
      plan_.update.push_back(std::move(op));
    }
  }

 private:
  void Reduce(size_t b) {
    Bucket& bucket = plan_.buckets[b];
    const bool last = b + 1 == plan_.buckets.size();
    const TensorId slice = Add(&plan_, absl::StrCat("bucket.", b), bucket.size, real_, Arena::kGradients, bucket.offset);
    const TensorId tail = last ? plan_.tail : kNone;
    bucket.ready = int(plan_.forward_backward.size()) - 1;
    if (last) Emit(PackTail{plan_.scalars, plan_.loss_partials, plan_.not_finite, tail, plan_.losses()}, "pack tail", {plan_.scalars, plan_.loss_partials, plan_.not_finite}, {tail});
    ReduceBucket reduce{slice, tail, staging_, bucket.size, int(b), {plan_.scalars, plan_.progress, 0}};
    if (plan_.sharded) {
      const Plan::Shard shard = plan_.ShardOf(bucket, plan_.options.rank);
      reduce.own = Add(&plan_, absl::StrCat("bucket.", b, " own"), shard.size, real_, Arena::kGradients, shard.first);
      reduce.partials = partials_, reduce.sums = sums_;
      own_.push_back(reduce.own);
    }
    Emit(reduce, absl::StrCat(plan_.sharded ? "reduce-scatter " : "all-reduce ", b), {slice, tail, staging_, reduce.sums, plan_.scalars},
         {slice, tail, staging_, reduce.own, reduce.partials, reduce.sums, plan_.progress});
  }

  void Emit(OpArgs args, std::string name, std::vector<TensorId> reads, std::vector<TensorId> writes) {
    plan_.forward_backward.push_back(OpOf(std::move(args), std::move(name), Part::kCommunication, std::move(reads), std::move(writes)));
    plan_.forward_backward.back().reduces = true;
  }

  // Part by part, so that one part's parameters are on their way while the next is updated; the copies in T at the end.
  void UpdateShards(const AdamW& whole, const AverageWeights* average) {
    std::vector<Op> casts;
    for (size_t b = 0; b < plan_.buckets.size(); ++b) {
      const Bucket& bucket = plan_.buckets[b];
      const Plan::Shard shard = plan_.ShardOf(bucket, plan_.options.rank);
      AdamW adamw = whole;
      adamw.master = Add(&plan_, absl::StrCat("parameters.", b, " own"), shard.size, real_, Arena::kMaster, shard.first);
      adamw.moments = Add(&plan_, absl::StrCat("moments.", b), plan_.num_moments * shard.size, real_, Arena::kMoments, shard.moments);
      adamw.gradients = own_[b], adamw.compute = kNone, adamw.size = shard.size, adamw.first = shard.first;
      plan_.update.push_back(OpOf(adamw, absl::StrCat("adamw ", b), Part::kOptimizer,
                                  {adamw.scalars, adamw.master, adamw.gradients, adamw.moments, adamw.decay, adamw.scale, adamw.record},
                                  {adamw.master, adamw.moments}));
      if (average != nullptr) {
        const AverageWeights own{average->record, adamw.master, adamw.moments, shard.size, average->decay};
        plan_.update.push_back(OpOf(own, absl::StrCat("average of the weights ", b), Part::kOptimizer, {own.record, own.master, own.moments}, {own.moments}));
      }
      const TensorId slice = Add(&plan_, absl::StrCat("parameters.", b), bucket.size, real_, Arena::kMaster, bucket.offset);
      plan_.update.push_back(OpOf(GatherBucket{slice, bucket.size, int(b), {plan_.scalars, plan_.progress, 0}}, absl::StrCat("all-gather ", b),
                                  Part::kCommunication, {slice, plan_.scalars}, {slice, plan_.progress}));
      if (plan_.compute == kNone) continue;
      const TensorId narrow = Add(&plan_, absl::StrCat("compute.", b), bucket.size, plan_.tensors[plan_.compute].dtype, Arena::kCompute, bucket.offset);
      casts.push_back(OpOf(Cast{slice, narrow, bucket.size}, absl::StrCat("parameters in T ", b), Part::kOptimizer, {slice}, {narrow}));
    }
    for (Op& cast : casts) plan_.update.push_back(std::move(cast));
  }

  Plan& plan_;
  const DType real_;
  TensorId staging_ = kNone, partials_ = kNone, sums_ = kNone;
  std::vector<TensorId> own_;   // gradients of this rank's parts, by bucket
};

}  // namespace

void AddReductions(Plan* plan) {
  if (plan->ranks == 1 || plan->options.features) return;
  Ranks ranks(plan);
  ranks.AddReductions();
  if (plan->sharded) ranks.ShardUpdate();
}

void NumberCollectives(Plan* plan) {
  for (std::vector<Op>* ops : {&plan->forward_backward, &plan->update, &plan->snapshot}) {
    for (Op& op : *ops) {
      std::visit([&](auto& args) {
        if constexpr (requires { args.announced; }) args.announced.number = ++plan->num_collectives;
      }, op.args);
    }
  }
}

}  // namespace hierad
