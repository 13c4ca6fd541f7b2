#include "base/plan/plan.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "base/plan/plan_builder.h"
#include "base/plan/random_jobs.h"
#include "base/status.h"

namespace hierad {
namespace {

using ::testing::HasSubstr;

constexpr int kRandomJobs = 150;

Plan Make(const v1::JobSpec& job, ComputeType compute = ComputeType::kF32, bool features = false) {
  auto plan = Plan::Make(job, {.compute = compute, .features = features});
  EXPECT_TRUE(plan.ok()) << plan.status();
  return plan.ok() ? *std::move(plan) : Plan{};
}

// Calls test(plan) for random jobs in every compute type; every third with Muon.
template <typename Test>
void ForRandomPlans(const Test& test) {
  RandomJobs jobs(17);
  for (int i = 0; i < kRandomJobs; ++i) {
    v1::JobSpec job = jobs.Next();
    if (i % 3 == 2) job.mutable_optimizer()->set_name("muon");
    SCOPED_TRACE(absl::StrCat("job ", i, ": ", job.model().ShortDebugString()));
    for (ComputeType compute : {ComputeType::kF64, ComputeType::kF32, ComputeType::kBF16, ComputeType::kF16}) test(Make(job, compute));
    if (::testing::Test::HasFailure()) return;
  }
}

bool IsScratch(const TensorSpec& t) { return absl::StrContains(t.name, "scratch"); }
bool Meets(const TensorSpec& a, const TensorSpec& b) { return a.offset < b.offset + b.bytes && b.offset < a.offset + a.bytes; }

TEST(PlanTest, NoTwoLiveTensorsShareAByte) {
  ForRandomPlans([](const Plan& plan) {
    // Lifetimes counted here, not taken from the plan.
    std::vector<int> first(plan.tensors.size(), -1), last(plan.tensors.size(), -1);
    std::vector<Op> ops = plan.forward_backward;
    ops.insert(ops.end(), plan.update.begin(), plan.update.end());
    for (int i = 0; i < int(ops.size()); ++i) {
      for (const auto* list : {&ops[i].reads, &ops[i].writes}) {
        for (TensorId id : *list) {
          if (first[id] < 0) first[id] = i;
          last[id] = i;
        }
      }
    }
    const std::set<TensorId> whole{plan.master, plan.compute, plan.gradients, plan.moments, plan.saved};
    for (TensorId a = 0; a < TensorId(plan.tensors.size()); ++a) {
      const TensorSpec& s = plan.tensors[a];
      EXPECT_EQ(s.offset % SizeOf(s.dtype), 0) << s.name;
      EXPECT_GE(s.offset, 0) << s.name;
      EXPECT_LE(s.offset + s.bytes, plan.arena_bytes[int(s.arena)]) << s.name;
      int64_t elements = 1;
      for (int64_t extent : s.shape) elements *= extent;
      EXPECT_EQ(s.bytes, elements * SizeOf(s.dtype)) << s.name;
      for (TensorId b = 0; b < a; ++b) {
        const TensorSpec& t = plan.tensors[b];
        if (s.arena != t.arena || !Meets(s, t) || whole.count(a) + whole.count(b) > 0) continue;
        EXPECT_EQ(s.arena, Arena::kActivations) << s.name << " and " << t.name << " lie on each other";
        EXPECT_TRUE(last[a] < first[b] || last[b] < first[a]) << s.name << " and " << t.name << " live at once on the same bytes";
      }
    }
  });
}

TEST(PlanTest, WhatIsReadWasWrittenAndWhatIsWrittenIsRead) {
  ForRandomPlans([](const Plan& plan) {
    std::set<TensorId> written, read;
    auto given = [&](TensorId id) {   // there before the step begins
      const Arena arena = plan.tensors[id].arena;
      return arena == Arena::kMaster || arena == Arena::kCompute || arena == Arena::kMoments || arena == Arena::kStaging ||
             (arena == Arena::kGradients && plan.accumulate) || id == plan.record || id == plan.not_finite || (id == plan.loss_partials && plan.accumulate) ||
             std::any_of(plan.constants.begin(), plan.constants.end(), [&](const Constant& c) { return c.tensor == id; });
    };
    for (const std::vector<Op>* ops : {&plan.forward_backward, &plan.update}) {
      for (const Op& op : *ops) {
        for (TensorId id : op.reads) {
          if (id != plan.gradients) {   // its parts are written by name
            EXPECT_TRUE(given(id) || written.count(id) == 1) << op.name << " reads " << plan.tensors[id].name << " before it is written";
          }
          read.insert(id);
        }
        written.insert(op.writes.begin(), op.writes.end());
      }
    }
    for (TensorId id : written) {
      const TensorSpec& t = plan.tensors[id];
      if (t.arena != Arena::kActivations || IsScratch(t) || id == plan.labels || id == plan.visit_ids || id == plan.keep_idx) continue;
      EXPECT_EQ(read.count(id), 1u) << t.name << " is written and never read";
    }
    for (const Constant& constant : plan.constants) {
      EXPECT_EQ(int64_t(constant.bytes.size()), plan.tensors[constant.tensor].bytes) << plan.tensors[constant.tensor].name;
      EXPECT_EQ(read.count(constant.tensor), 1u) << plan.tensors[constant.tensor].name;
    }
  });
}

TEST(PlanTest, EveryParameterGetsOneGradientWrite) {
  ForRandomPlans([](const Plan& plan) {
    std::map<std::string, int> writes;
    int64_t previous = -1;   // the flat order is the order in which gradients are finished
    for (size_t i = 0; i < plan.forward_backward.size(); ++i) {
      const Op& op = plan.forward_backward[i];
      int64_t least = INT64_MAX;
      for (TensorId id : op.writes) {
        const TensorSpec& t = plan.tensors[id];
        if (t.arena != Arena::kGradients) continue;
        EXPECT_GE(int(i), plan.forward_ops) << op.name;
        ++writes[t.name];
        least = std::min(least, t.offset);
        const bool also_read = std::count(op.reads.begin(), op.reads.end(), id) == 1;
        EXPECT_EQ(also_read, plan.accumulate) << op.name << " " << t.name;
      }
      if (least == INT64_MAX) continue;
      EXPECT_GT(least, previous) << op.name;
      previous = least;
    }
    EXPECT_EQ(writes.size(), plan.table.parameters.size());
    for (const Parameter& p : plan.table.parameters) EXPECT_EQ(writes["grad:" + p.name], 1) << p.name;
    ASSERT_GE(plan.update.size(), 4u);
    EXPECT_TRUE(std::holds_alternative<GradientNorm>(plan.update[0].args));
    EXPECT_TRUE(std::holds_alternative<AdamW>(plan.update[1].args));
    EXPECT_TRUE(std::holds_alternative<PublishRecord>(plan.update.back().args)) << "the last operation tells";
  });
}

TEST(PlanTest, ParametersLieAlikeInEveryArena) {
  ForRandomPlans([](const Plan& plan) {
    EXPECT_EQ(plan.flat_size, plan.table.flat_size);
    for (size_t p = 0; p < plan.table.parameters.size(); ++p) {
      const Parameter& parameter = plan.table.parameters[p];
      EXPECT_EQ(plan.parameter_offset[p] % kParameterAlign, 0);
      for (const std::string& name : {parameter.name, "grad:" + parameter.name, "compute:" + parameter.name}) {
        bool found = false;   // an activation may have a parameter's name too: look in the arenas of parameters
        for (const TensorSpec& t : plan.tensors) {
          if (t.name != name || t.arena == Arena::kActivations || t.arena == Arena::kPersistent) continue;
          EXPECT_EQ(t.offset, plan.parameter_offset[p] * SizeOf(t.dtype)) << name;
          EXPECT_EQ(t.shape, parameter.shape) << name;
          found = true;
        }
        EXPECT_TRUE(found || name != "grad:" + parameter.name) << name;
      }
    }
  });
}

TEST(PlanTest, BucketsCoverTheGradientsInTheOrderTheyAreFinished) {
  v1::JobSpec job;
  job.mutable_data()->set_source("synthetic");
  FillDefaults(&job);
  const Plan plan = Make(job);
  ASSERT_GT(plan.buckets.size(), 5u);
  int64_t end = 0;
  int ready = 0;
  for (const Bucket& bucket : plan.buckets) {
    EXPECT_EQ(bucket.offset, end);
    end += bucket.size;
    EXPECT_GE(bucket.ready, ready);
    ready = bucket.ready;
    for (size_t i = 0; i < plan.forward_backward.size(); ++i) {
      for (TensorId id : plan.forward_backward[i].writes) {
        const TensorSpec& t = plan.tensors[id];
        if (t.arena != Arena::kGradients || t.offset / 4 < bucket.offset || t.offset / 4 >= end) continue;
        EXPECT_LE(int(i), bucket.ready) << t.name;
      }
    }
  }
  EXPECT_EQ(end, plan.flat_size);
  EXPECT_LT(plan.buckets[2].ready, int(plan.forward_backward.size()) - 100) << "early buckets leave time to hide";
}

// With several ranks: each slice is summed once, after its last gradient and before the update; the tail with the last.
TEST(PlanTest, EveryBucketIsReducedOnceAsSoonAsItIsReady) {
  RandomJobs jobs(19);
  for (int i = 0; i < 60; ++i) {
    v1::JobSpec job = jobs.Next();
    if (i == 0) {   // a model of many buckets
      job.Clear();
      job.mutable_data()->set_source("synthetic");
      FillDefaults(&job);
    }
    job.mutable_resources()->set_ranks(jobs.Pick(2, 5));
    job.mutable_step()->set_reduce_dtype(i % 2 == 0 ? "fp32" : "bf16");
    SCOPED_TRACE(absl::StrCat("job ", i, ": ", job.model().ShortDebugString()));
    const Plan plan = Make(job);
    std::vector<int> covered(size_t(plan.flat_size), 0);
    size_t reductions = 0;
    int packed = -1;
    for (int at = 0; at < int(plan.forward_backward.size()); ++at) {
      const Op& op = plan.forward_backward[at];
      if (std::holds_alternative<PackTail>(op.args)) packed = at;
      EXPECT_EQ(op.reduces, op.part == Part::kCommunication) << op.name;
      const auto* reduce = std::get_if<ReduceBucket>(&op.args);
      if (reduce == nullptr) continue;
      const Bucket& bucket = plan.buckets[reductions];
      const TensorSpec& slice = plan.tensors[reduce->slice];
      EXPECT_EQ(reduce->index, int(reductions++));
      EXPECT_EQ(slice.offset, bucket.offset * 4);
      EXPECT_EQ(slice.bytes, bucket.size * 4);
      EXPECT_EQ(reduce->size, bucket.size);
      EXPECT_EQ(reduce->tail, reductions == plan.buckets.size() ? plan.tail : kNone);
      if (reduce->tail != kNone) {
        EXPECT_EQ(packed, at - 1);
      }
      EXPECT_EQ(reduce->staging != kNone, job.step().reduce_dtype() == "bf16");
      if (reduce->staging != kNone) {
        EXPECT_GE(plan.tensors[reduce->staging].bytes, 2 * bucket.size);
      }
      for (int64_t e = bucket.offset; e < bucket.offset + bucket.size; ++e) ++covered[size_t(e)];
      // Its last gradient is written before it, and no later than just before it but for the last one.
      int last = -1;
      for (int k = 0; k < int(plan.forward_backward.size()); ++k) {
        for (TensorId id : plan.forward_backward[k].writes) {
          const TensorSpec& t = plan.tensors[id];
          if (t.arena != Arena::kGradients || plan.forward_backward[k].reduces) continue;
          if (t.offset >= slice.offset && t.offset < slice.offset + slice.bytes) last = std::max(last, k);
        }
      }
      EXPECT_LE(last, bucket.ready);
      EXPECT_LT(bucket.ready, at);
      for (int k = last + 1; k < at && reduce->tail == kNone; ++k) EXPECT_TRUE(plan.forward_backward[k].reduces) << "waits for nothing else";
    }
    EXPECT_EQ(reductions, plan.buckets.size());
    EXPECT_EQ(std::count(covered.begin(), covered.end(), 1), plan.flat_size);
    EXPECT_EQ(plan.tensors[plan.tail].offset, plan.flat_size * 4);
    EXPECT_TRUE(std::holds_alternative<UnpackTail>(plan.update[0].args));
    // In parts: every element is one rank's, and all that ranks update is gathered.
    job.mutable_step()->set_shard_optimizer(true);
    std::vector<int> owners(size_t(plan.flat_size) * 2, 0), gathered(owners);
    for (int64_t rank = 0; rank < plan.ranks; ++rank) {
      const auto part = Plan::Make(job, {.rank = rank});
      ASSERT_TRUE(part.ok()) << part.status();
      owners.resize(size_t(part->flat_size)), gathered.resize(size_t(part->flat_size));
      EXPECT_EQ(part->arena_bytes[int(Arena::kMoments)], 2 * part->flat_size * 4 / part->ranks);
      int64_t moments = 0;
      for (const Op& op : part->update) {
        if (const auto* adamw = std::get_if<AdamW>(&op.args)) {
          EXPECT_EQ(part->tensors[adamw->master].offset, adamw->first * 4);
          EXPECT_EQ(part->tensors[adamw->gradients].offset, adamw->first * 4);
          EXPECT_EQ(part->tensors[adamw->moments].offset, moments * 4);
          EXPECT_EQ(adamw->size % kParameterAlign, 0);
          moments += 2 * adamw->size;
          for (int64_t e = adamw->first; e < adamw->first + adamw->size; ++e) ++owners[size_t(e)];
        }
        const auto* gather = std::get_if<GatherBucket>(&op.args);
        if (gather == nullptr || rank > 0) continue;
        for (int64_t e = 0; e < gather->size; ++e) ++gathered[size_t(part->tensors[gather->slice].offset / 4 + e)];
      }
    }
    EXPECT_EQ(std::count(owners.begin(), owners.end(), 1), int64_t(owners.size()));
    EXPECT_EQ(std::count(gathered.begin(), gathered.end(), 1), int64_t(gathered.size()));
    // The same arithmetic as alone.
    job.mutable_resources()->set_ranks(1);
    EXPECT_EQ(Make(job).parameter_offset, plan.parameter_offset);
  }
}

// One queue would have to wait for what the other does.
bool Conflict(const Plan& plan, const Op& a, const Op& b) {
  for (const auto& [writer, other] : {std::pair{&a, &b}, std::pair{&b, &a}}) {
    for (TensorId w : writer->writes) {
      for (const auto* list : {&other->reads, &other->writes}) {
        for (TensorId t : *list) {
          if (plan.tensors[w].arena == plan.tensors[t].arena && Meets(plan.tensors[w], plan.tensors[t])) return true;
        }
      }
    }
  }
  return false;
}

// Every matrix of the blocks, and nothing else, has its momentum and its update made once, at its place in every arena, and on
// one rank its products; AdamW passes it over.
TEST(PlanTest, MuonTakesEveryMatrixOnce) {
  RandomJobs jobs(61);
  for (int i = 0; i < 60; ++i) {
    v1::JobSpec job = jobs.Next();
    job.mutable_optimizer()->set_name("muon");
    job.mutable_optimizer()->set_ema_decay(i % 2 == 0 ? 0.99 : 0);
    job.mutable_resources()->set_ranks(jobs.Pick(1, 4));
    job.mutable_step()->set_shard_optimizer(i % 3 == 0);   // says nothing to Muon
    SCOPED_TRACE(absl::StrCat("job ", i, " on ", job.resources().ranks(), " ranks: ", job.model().ShortDebugString()));
    std::map<std::string, int> produced;   // by all ranks
    for (int64_t rank = 0; rank < job.resources().ranks(); ++rank) {
      const auto plan = Plan::Make(job, {.compute = ComputeType::kBF16, .rank = rank});
      ASSERT_TRUE(plan.ok()) << plan.status();
      EXPECT_FALSE(plan->sharded);
      std::map<std::string, int> moments, masters, copies, gradients;
      std::map<int64_t, std::string> by_place;
      for (size_t p = 0; p < plan->parameter_offset.size(); ++p) by_place[plan->parameter_offset[p]] = plan->table.parameters[p].name;
      for (const Op& op : plan->update) {
        const auto* momentum = std::get_if<MuonMomentum>(&op.args);
        if (momentum == nullptr && !std::holds_alternative<MuonUpdate>(op.args)) continue;
        for (TensorId id : op.reads) gradients[plan->tensors[id].arena == Arena::kGradients ? plan->tensors[id].name.substr(5) : ""] += 1;
        for (TensorId id : op.writes) {
          const TensorSpec& t = plan->tensors[id];
          if (t.arena == Arena::kActivations) continue;
          const std::string name = by_place[t.offset / SizeOf(t.dtype)];
          EXPECT_EQ(t.name, (t.arena == Arena::kMoments ? "moments:" : t.arena == Arena::kCompute ? "compute:" : "") + name);
          (t.arena == Arena::kMoments ? moments : t.arena == Arena::kCompute ? copies : masters)[name] += 1;
        }
        if (momentum == nullptr) continue;
        const Constant& places = *std::find_if(plan->constants.begin(), plan->constants.end(), [&](const Constant& c) { return c.tensor == momentum->places; });
        for (int64_t m = momentum->first; m < momentum->first + momentum->own; ++m) {
          int64_t place = 0;
          std::memcpy(&place, places.bytes.data() + m * int64_t(sizeof place), sizeof place);
          ++produced[by_place.at(place)];
        }
      }
      for (size_t p = 0; p < plan->table.parameters.size(); ++p) {
        const Parameter& parameter = plan->table.parameters[p];
        for (auto* counts : {&moments, &masters, &copies, &gradients}) EXPECT_EQ((*counts)[parameter.name], parameter.matrix ? 1 : 0) << parameter.name;
        const Constant& decay = *std::find_if(plan->constants.begin(), plan->constants.end(), [&](const Constant& c) { return c.tensor == plan->Find("decay"); });
        EXPECT_EQ(decay.bytes[size_t(plan->parameter_offset[p] / kParameterAlign)] == kNotAdamW, parameter.matrix) << parameter.name;
      }
    }
    for (const Parameter& parameter : ParameterTable::For(*Geometry::From(job.model())).parameters) {
      EXPECT_EQ(produced[parameter.name], parameter.matrix ? 1 : 0) << parameter.name;
    }
  }
}

// The rounds are three operations each, for all shapes, with as many multiply-adds as the definition has. Before and behind them the two
// queues have about as many bytes to move, and no shape waits for one that the other queue works on.
TEST(PlanTest, MuonsRoundsTakeAllShapesAndItsQueuesDoNotWaitForEachOther) {
  for (const char* variant : {"tiny", "base", "large"}) {
    v1::JobSpec job;
    job.mutable_data()->set_source("synthetic");
    job.mutable_model()->set_variant(variant);
    job.mutable_optimizer()->set_name("muon");
    job.mutable_step()->set_batch_per_rank(128);
    FillDefaults(&job);
    const Plan plan = Make(job, ComputeType::kBF16);
    auto in_queues = [](const Op& op) { return std::holds_alternative<MuonMomentum>(op.args) || std::holds_alternative<MuonUpdate>(op.args); };
    double bytes[2] = {0, 0}, flops = 0, expected = 0;
    size_t shapes = 0, products = 0;
    for (const Op& op : plan.update) shapes += std::holds_alternative<MuonMomentum>(op.args);
    for (size_t i = 0; i < plan.update.size(); ++i) {
      const Op& op = plan.update[i];
      if (const auto* phase = std::get_if<MuonProducts>(&op.args)) {
        EXPECT_EQ(phase->groups.size(), shapes) << op.name;
        EXPECT_FALSE(op.beside) << op.name;
        flops += op.flops, ++products;
      }
      if (in_queues(op)) bytes[op.beside] += op.bytes;
      if (!op.beside) continue;
      for (size_t other = i < 8 ? 0 : i - 8; other < std::min(plan.update.size(), i + 9); ++other) {   // what the chain does meanwhile
        const Op& chain = plan.update[other];
        if (chain.beside || !in_queues(chain)) continue;
        EXPECT_FALSE(Conflict(plan, op, chain)) << op.name << " and " << chain.name;
      }
    }
    for (const Parameter& parameter : plan.table.parameters) {
      if (!parameter.matrix) continue;
      const double shorter = double(std::min(parameter.shape[0], parameter.shape[1])), longer = double(std::max(parameter.shape[0], parameter.shape[1]));
      expected += 5 * 2 * shorter * shorter * (longer + shorter + longer);
    }
    job.mutable_optimizer()->set_name("adamw");
    const Plan adamw = Make(job, ComputeType::kBF16);
    std::printf("%s: %zu shapes, %.2f TFLOP, %.2f and %.2f GB; arenas %.2f GiB, with AdamW %.2f\n", variant, shapes, flops / 1e12, bytes[0] / 1e9, bytes[1] / 1e9,
                double(plan.TotalBytes()) / double(1 << 30), double(adamw.TotalBytes()) / double(1 << 30));
    EXPECT_GT(shapes, 8u);
    EXPECT_EQ(products, 15u);
    EXPECT_NEAR(flops, expected, 1e-9 * expected);
    EXPECT_LT(std::abs(bytes[0] - bytes[1]), 0.1 * (bytes[0] + bytes[1]));
    EXPECT_EQ(plan.arena_bytes[int(Arena::kActivations)], adamw.arena_bytes[int(Arena::kActivations)]) << "there is room where the activations were";
  }
}

// In the passes, what runs beside the chain is awaited by sums, reductions and the update alone.
TEST(PlanTest, TheChainWaitsForNothingThatRunsBesideIt) {
  ForRandomPlans([](const Plan& plan) {
    std::set<TensorId> made_beside;
    for (const Op& op : plan.forward_backward) {
      for (TensorId id : op.reads) {
        if (made_beside.count(id) == 0) continue;
        EXPECT_TRUE(op.reduces || op.beside || std::holds_alternative<Mark>(op.args)) << op.name << " reads " << plan.tensors[id].name;
      }
      if (op.beside) made_beside.insert(op.writes.begin(), op.writes.end());
    }
    EXPECT_FALSE(made_beside.empty());
  });
}

// Multiply-adds of the model counted from the geometry alone, block by block.
struct Count {
  double gemm = 0, attention = 0;   // forward
  double patch = 0;                 // of gemm: has no input gradient
  double step_gemm() const { return 3 * gemm - patch; }
};

Count CountFlops(const v1::JobSpec& job, const Geometry& g) {
  Count count;
  const double B = job.step().batch_per_rank(), ratio = g.spec.mlp_ratio();
  auto block = [&](double rows_in, double rows_out, double keys, double din, double d, double queries) {
    const double hidden = std::floor(d * ratio);
    count.gemm += 2 * (rows_in * din * 3 * d + rows_out * d * d + 2 * rows_out * d * hidden + (din != d ? rows_in * din * d : 0));
    count.attention += 2 * 2 * queries * keys * d;
  };
  double unit = 1, pool = 1, taps = g.spec.in_chans(), units = 1;
  for (int d = 0; d < g.dims; ++d) {
    pool *= g.q_stride[d];
    unit *= std::pow(g.q_stride[d], g.spec.stages_size() - 1);
    taps *= g.patch_kernel[d];
    units *= g.mask_units[d];
  }
  const double kept = g.spec.task() == "mae" ? double(KeptMaskUnits(int64_t(units), g.spec.mask_ratio())) : units;
  double dim = g.spec.embed_dim();
  count.gemm = count.patch = 2 * B * kept * unit * taps * dim;
  std::vector<double> stage_unit, stage_dim;
  for (int s = 0; s < g.spec.stages_size(); ++s) {
    for (int i = 0; i < g.spec.stages(s); ++i) {
      const bool changes = s > 0 && i == 0, pools = changes && s <= g.spec.q_pool();
      const double out = changes ? 2 * dim : dim, unit_out = pools ? unit / pool : unit;
      const bool windowed = g.spec.mask_unit_attn(changes ? s - 1 : s);   // the switch lags by a block
      block(B * kept * unit, B * kept * unit_out, windowed ? unit : kept * unit, dim, out, B * kept * unit_out);
      dim = out;
      unit = unit_out;
    }
    stage_unit.push_back(unit);
    stage_dim.push_back(dim);
  }
  if (g.spec.task() != "mae") {
    count.gemm += 2 * B * dim * g.spec.num_classes();
    return count;
  }
  for (int s = 0; s < g.spec.q_pool(); ++s) count.gemm += 2 * B * kept * unit * (stage_unit[s] / unit * stage_dim[s]) * dim;
  const double decoder = g.spec.decoder_embed_dim(), all = units * unit, masked = (units - kept) * unit;
  count.gemm += 2 * B * kept * unit * dim * decoder + 2 * B * masked * decoder * double(g.pred_dim);
  // Behind its last attention the decoder goes on with masked tokens.
  for (int i = 0; i < g.spec.decoder_depth(); ++i) block(B * all, i + 1 < g.spec.decoder_depth() ? B * all : B * masked, all, decoder, decoder, B * all);
  return count;
}

bool IsProduct(const Op& op) {
  return std::holds_alternative<Gemm>(op.args) || std::holds_alternative<GemmGelu>(op.args) || std::holds_alternative<GemmGeluBackward>(op.args);
}

TEST(PlanTest, FlopsEqualACountFromTheGeometry) {
  RandomJobs jobs(23);
  for (int i = 0; i < kRandomJobs; ++i) {
    const v1::JobSpec job = jobs.Next();
    const Plan plan = Make(job);
    const Count count = CountFlops(job, plan.geometry);
    double gemm = 0, attention = 0, other = 0;
    for (const Op& op : plan.forward_backward) {
      (IsProduct(op)                                                                                   ? gemm
       : std::holds_alternative<Attention>(op.args) || std::holds_alternative<AttentionBackward>(op.args) ? attention
                                                                                                       : other) += op.flops;
    }
    EXPECT_EQ(gemm, count.step_gemm()) << job.model().ShortDebugString();
    EXPECT_EQ(attention, 3.5 * count.attention) << job.model().ShortDebugString();
    EXPECT_EQ(other, 0) << job.model().ShortDebugString();
  }
}

// What design/performance figures are quoted for: Base, 224 x 224, 8 channels, batch 128.
TEST(PlanTest, BaseAt128CountsTheWorkThatItIsKnownFor) {
  v1::JobSpec job;
  job.set_name("base");
  job.mutable_data()->set_source("synthetic");
  job.mutable_model()->set_in_chans(8);
  job.mutable_step()->set_batch_per_rank(128);
  FillDefaults(&job);
  const Plan plan = Make(job, ComputeType::kBF16);
  double gemm = 0, attention = 0;
  for (const Op& op : plan.forward_backward) (IsProduct(op) ? gemm : attention) += op.flops;
  const double gib = 1024.0 * 1024 * 1024;
  std::printf("base B=128 bf16: %.3f TFLOP of GEMM, %.3f of attention; %zu + %zu operations; activations %.2f GiB, all arenas %.2f GiB\n",
              gemm / 1e12, attention / 1e12, plan.forward_backward.size(), plan.update.size(),
              double(plan.arena_bytes[int(Arena::kActivations)]) / gib, double(plan.TotalBytes()) / gib);
  EXPECT_NEAR(gemm / 1e12, 7.36, 0.08);
  EXPECT_NEAR(attention / 1e12, 0.40, 0.07);
  EXPECT_LT(double(plan.TotalBytes()) / gib, 10.0);
}

// Computing a stage again keeps its blocks' inputs only.
TEST(PlanTest, CheckpointedStagesLeaveTheArena) {
  v1::JobSpec job;
  job.mutable_data()->set_source("synthetic");
  job.mutable_step()->set_batch_per_rank(128);
  FillDefaults(&job);
  auto activations = [&](const std::vector<int>& stages, bool decoder) {
    job.mutable_step()->clear_checkpoint_stages();
    for (int stage : stages) job.mutable_step()->add_checkpoint_stages(stage);
    job.mutable_step()->set_checkpoint_decoder(decoder);
    const Plan plan = Make(job, ComputeType::kBF16);
    double flops = 0;
    for (const Op& op : plan.forward_backward) flops += op.flops;
    std::printf("checkpointed: %zu stages%s: activations %.2f GiB, %.3f TFLOP\n", stages.size(), decoder ? " and the decoder" : "",
                double(plan.arena_bytes[int(Arena::kActivations)]) / double(1 << 30), flops / 1e12);
    return std::make_pair(double(plan.arena_bytes[int(Arena::kActivations)]), flops);
  };
  const auto plain = activations({}, false), third = activations({3}, false), decoder = activations({}, true), all = activations({1, 2, 3, 4}, true);
  EXPECT_LT(third.first, 0.8 * plain.first);
  EXPECT_LT(decoder.first, plain.first);
  EXPECT_LT(all.first, 0.5 * plain.first);
  EXPECT_GT(third.second, plain.second);
  EXPECT_LT(all.second, 4.0 / 3 * plain.second) << "a forward pass more, less the MLPs' second layers";
}

// Packing wastes little: the arena is near the most that is alive at one time.
TEST(PlanTest, ActivationsArePackedTightly) {
  v1::JobSpec job;
  job.mutable_data()->set_source("synthetic");
  job.mutable_step()->set_batch_per_rank(16);
  FillDefaults(&job);
  const Plan plan = Make(job, ComputeType::kBF16);
  std::vector<int64_t> alive(plan.forward_backward.size(), 0);
  for (const TensorSpec& t : plan.tensors) {
    if (t.arena != Arena::kActivations || t.first < 0) continue;
    for (int i = t.first; i <= t.last; ++i) alive[i] += t.bytes;
  }
  const int64_t most = *std::max_element(alive.begin(), alive.end());
  EXPECT_GE(plan.arena_bytes[int(Arena::kActivations)], most);
  EXPECT_LE(double(plan.arena_bytes[int(Arena::kActivations)]), 1.05 * double(most));
}

TEST(PlanTest, FeaturesNeedNoMaskNoGradientsAndNoUpdate) {
  RandomJobs jobs(31);
  for (int i = 0; i < 40; ++i) {
    const v1::JobSpec job = jobs.Next();
    const Plan plan = Make(job, ComputeType::kF32, /*features=*/true);
    EXPECT_EQ(plan.forward_ops, int(plan.forward_backward.size()));
    EXPECT_TRUE(plan.update.empty());
    EXPECT_EQ(plan.keep_mask, kNone);
    EXPECT_EQ(plan.arena_bytes[int(Arena::kGradients)] + plan.arena_bytes[int(Arena::kMoments)], 0);
    EXPECT_EQ(plan.geometry.num_kept, plan.geometry.num_mask_units);
    ASSERT_NE(plan.encoded, kNone);
    for (size_t p = 0; p < plan.parameter_offset.size(); ++p) EXPECT_EQ(plan.parameter_offset[p], plan.table.parameters[p].offset);
  }
}

TEST(PlanTest, IndexTablesArePermutations) {
  RandomJobs jobs(37);
  auto is_permutation = [](std::vector<int32_t> order) {
    std::sort(order.begin(), order.end());
    for (size_t i = 0; i < order.size(); ++i) {
      if (order[i] != int32_t(i)) return false;
    }
    return true;
  };
  for (int i = 0; i < kRandomJobs; ++i) {
    const Geometry g = Make(jobs.Next()).geometry;
    if (g.spec.task() != "mae") continue;
    EXPECT_TRUE(is_permutation(FinalOrder(g)));
    for (int stage : g.fusion_stages) EXPECT_TRUE(is_permutation(FusionOrder(g, stage)));
    const std::vector<int32_t> labels = LabelIndex(g);   // every value at most once; all of them but the unread video frames
    EXPECT_EQ(std::set<int32_t>(labels.begin(), labels.end()).size(), labels.size());
  }
}

TEST(PlanTest, RefusesWhatItsIndexTypesCannotHold) {
  v1::JobSpec job;
  job.mutable_data()->set_source("synthetic");
  v1::ModelSpec* m = job.mutable_model();
  m->add_input_size(64);
  m->add_input_size(32);
  for (int d = 0; d < 2; ++d) {
    m->add_q_stride(32);
    m->add_patch_stride(1);
    m->add_patch_kernel(1);
    m->add_patch_padding(0);
  }
  for (int s = 0; s < 2; ++s) m->add_stages(1);
  m->set_q_pool(1);
  m->set_mask_ratio(0.5);
  FillDefaults(&job);
  auto plan = Plan::Make(job, {});
  ASSERT_FALSE(plan.ok());
  EXPECT_EQ(ReasonOf(plan.status()), v1::REASON_USER_ERROR);
  EXPECT_THAT(std::string(plan.status().message()), HasSubstr("at most 256"));
}

}  // namespace
}  // namespace hierad
