// step.shard_optimizer and Muon's shared products: what ranks compute in parts is what each computes whole.
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "base/plan/plan.h"
#include "base/plan/random_jobs.h"
#include "worker/comm/communicator.h"
#include "worker/comm/forked_ranks.h"
#include "worker/step/step.h"

namespace hierad {
namespace {

constexpr int kSteps = 4, kHalf = 2;

StepOptions OptionsOf(const v1::JobSpec& job) {
  StepOptions options{job, false, 1};
  options.bucket_elements = 200;   // many buckets
  return options;
}

std::unique_ptr<Step> Make(const v1::JobSpec& job, Communicator* communicator) {
  auto step = MakeFusedCpuStep(OptionsOf(job), ParameterTable::For(*Geometry::From(job.model())), communicator);
  EXPECT_TRUE(step.ok()) << step.status();
  return step.ok() ? *std::move(step) : nullptr;
}

// Step `s` (from 0) of the run: every rank's sample is its own. `bad`: a loss that is not finite.
absl::StatusOr<StepResult> RunStep(const v1::JobSpec& job, Communicator* communicator, Step* step, int s, bool bad) {
  int64_t size = job.model().in_chans();
  for (int extent : job.model().input_size()) size *= extent;
  const int number = s * communicator->size() + communicator->rank();
  std::mt19937 random(uint32_t(7000 + number));
  std::vector<float> x;
  for (int64_t i = 0; i < size; ++i) x.push_back(bad ? std::nanf("") : float(random()) / 1073741824.0f - 2.0f);
  const std::vector<int64_t> labels{number % job.model().num_classes()};
  const std::vector<uint64_t> ids{uint64_t(number)};
  const MicroBatch batch{x.data(), labels.data(), ids.data(), 1, 1};
  return step->RunAndTake({&batch, 1}, communicator->size(), 1e-3, {});
}

std::string BytesOf(const TrainState& state) {
  std::string bytes = absl::StrCat(state.step, " ", state.updates, " ", state.nan_steps_in_row, " ", state.loss_scale.value, " ", state.loss_scale.good_steps, ";");
  for (const auto* buffer : {&state.parameters, &state.exp_avg, &state.exp_avg_sq, &state.ema}) {
    bytes.append(reinterpret_cast<const char*>(buffer->data()), buffer->size() * sizeof(float));
  }
  return bytes;
}

// The state after kSteps steps on every rank; "" after an error. In the middle what rank 0's snapshot and every rank's Save
// say is loaded into another step, `then`'s, which goes on.
std::string Train(const v1::JobSpec& first, const v1::JobSpec& then, Communicator* communicator, bool bad_at_1) {
  std::unique_ptr<Step> step = Make(first, communicator);
  if (step == nullptr || !step->Initialize().ok()) return "";
  for (int s = 0; s < kSteps; ++s) {
    if (s == kHalf) {
      const auto saved = step->Save();
      if (!saved.ok()) return "";
      if (communicator->rank() == 0 || step->shared_state()) {
        const auto snapshot = step->Snapshot();
        if (!snapshot.ok() || (*snapshot == nullptr) != (communicator->rank() != 0)) return "wrong snapshot";
        if (*snapshot != nullptr) {
          const auto read = (*snapshot)->Read();
          if (!read.ok() || BytesOf(*read) != BytesOf(*saved)) return "a snapshot that is not what Save says";
        }
      }
      step = Make(then, communicator);
      if (step == nullptr || !step->Load(*saved).ok()) return "";
    }
    if (!RunStep(first, communicator, step.get(), s, bad_at_1 && s == 1).ok()) return "";
  }
  const auto state = step->Save();
  return state.ok() ? BytesOf(*state) : "";
}

std::string TrainTogether(const v1::JobSpec& first, const v1::JobSpec& then, int ranks, bool bad_at_1 = false, int64_t by = 1 << 20) {
  ForkedRanks together(ranks, {}, by, [&](Communicator* communicator) { return Train(first, then, communicator, bad_at_1); });
  const std::string state = together.Wait(0).output;
  EXPECT_GT(state.size(), 100u) << state;
  for (int r = 1; r < ranks; ++r) EXPECT_TRUE(state == together.Wait(r).output) << "the same bits on rank " << r;
  return state;
}

v1::JobSpec Sharded(v1::JobSpec job) {
  job.mutable_step()->set_shard_optimizer(true);
  return job;
}

v1::JobSpec NextJob(RandomJobs* jobs) {
  v1::JobSpec job = jobs->Next();
  job.mutable_step()->set_mode("fused");
  job.mutable_step()->set_batch_per_rank(1);
  job.mutable_step()->set_accumulation(1);
  return job;
}

TEST(FusedShardTest, ShardedIsWholeToTheBitWhereNothingIsClipped) {
  RandomJobs jobs(211);
  for (int ranks : {2, 3, 4}) {
    v1::JobSpec job = NextJob(&jobs);
    SCOPED_TRACE(absl::StrCat(ranks, " ranks: ", job.model().ShortDebugString()));
    job.mutable_optimizer()->set_clip_norm(0);
    if (ranks != 3) job.mutable_optimizer()->set_ema_decay(0.9);
    if (ranks == 4) job.mutable_step()->set_reduce_dtype("bf16");
    if (ranks == 2) job.mutable_step()->set_precision("bf16");
    if (ranks == 3) {
      job.mutable_optimizer()->set_layer_decay(0.7);
      job.mutable_step()->set_precision("fp16");
      job.mutable_step()->set_loss_scale(64);
      job.mutable_step()->set_loss_scale_growth_steps(2);
    }
    const std::string whole = TrainTogether(job, job, ranks, ranks == 3);
    EXPECT_TRUE(whole == TrainTogether(Sharded(job), Sharded(job), ranks, ranks == 3)) << "sharded";
    EXPECT_TRUE(whole == TrainTogether(Sharded(job), job, ranks, ranks == 3)) << "sharded, then whole";
    EXPECT_TRUE(whole == TrainTogether(job, Sharded(job), ranks, ranks == 3, ForkedRanks::kTcp)) << "whole, then sharded, over TCP";
  }
}

// The norm is summed in another order: clipping may round otherwise.
TEST(FusedShardTest, ClippingRoundsOtherwiseAtMost) {
  RandomJobs jobs(223);
  v1::JobSpec job = NextJob(&jobs);
  job.mutable_optimizer()->set_clip_norm(1e-3);
  job.mutable_optimizer()->set_eps(1e-3);
  const std::string whole = TrainTogether(job, job, 3), sharded = TrainTogether(Sharded(job), Sharded(job), 3);
  ASSERT_EQ(whole.size(), sharded.size());
  const size_t head = whole.find(';') + 1;
  for (size_t at = head; at < whole.size(); at += sizeof(float)) {
    float a, b;
    std::memcpy(&a, whole.data() + at, sizeof a);
    std::memcpy(&b, sharded.data() + at, sizeof b);
    ASSERT_NEAR(a, b, 1e-6);
  }
}

TEST(FusedShardTest, MuonsProductsAreSharedOut) {
  RandomJobs jobs(227);
  for (int ranks : {1, 2, 3, 4}) {
    v1::JobSpec job = NextJob(&jobs);
    SCOPED_TRACE(absl::StrCat(ranks, " ranks: ", job.model().ShortDebugString()));
    job.mutable_optimizer()->set_name("muon");
    job.mutable_optimizer()->set_eps(1e-3);
    if (ranks % 2 == 0) job.mutable_optimizer()->set_ema_decay(0.9);
    if (ranks > 2) job.mutable_optimizer()->set_layer_decay(0.7);
    const std::string together = TrainTogether(job, job, ranks);
    EXPECT_TRUE(together == TrainTogether(job, job, ranks)) << "two runs, the same bits";
    // The key says nothing to Muon.
    EXPECT_TRUE(together == TrainTogether(Sharded(job), Sharded(job), ranks)) << "sharded";
    // Alone: the ranks' samples as micro-batches of one step.
    v1::JobSpec alone_job = job;
    alone_job.mutable_step()->set_accumulation(ranks);
    const auto alone = MakeSelfCommunicator();
    const auto step = Make(alone_job, alone.get());
    ASSERT_TRUE(step != nullptr && step->Initialize().ok());
    int64_t size = job.model().in_chans();
    for (int extent : job.model().input_size()) size *= extent;
    for (int s = 0; s < kSteps; ++s) {
      std::vector<std::vector<float>> x(ranks);
      std::vector<int64_t> labels;
      std::vector<uint64_t> ids;
      for (int r = 0; r < ranks; ++r) {
        const int number = s * ranks + r;
        std::mt19937 random(uint32_t(7000 + number));
        for (int64_t i = 0; i < size; ++i) x[r].push_back(float(random()) / 1073741824.0f - 2.0f);
        labels.push_back(number % job.model().num_classes());
        ids.push_back(uint64_t(number));
      }
      std::vector<MicroBatch> batches;
      for (int r = 0; r < ranks; ++r) batches.push_back({x[r].data(), &labels[r], &ids[r], 1, 1});
      ASSERT_TRUE(step->RunAndTake(batches, ranks, 1e-3, {}).ok());
    }
    // Parameters, moments of Muon's matrices and of AdamW's rest, the average of the weights.
    const std::string state = BytesOf(*step->Save());
    const size_t head = together.find(';') + 1;
    ASSERT_EQ(together.size(), state.size());
    EXPECT_EQ(together.substr(0, head), state.substr(0, head));
    for (size_t at = head; at < state.size(); at += sizeof(float)) {
      float got, expected;
      std::memcpy(&got, together.data() + at, sizeof got);
      std::memcpy(&expected, state.data() + at, sizeof expected);
      ASSERT_NEAR(got, expected, 1e-5) << (at - head) / sizeof(float);
    }
  }
}

TEST(FusedShardTest, OnlyRankZeroHasASnapshotAndEachRankItsShareOfMoments) {
  RandomJobs jobs(229);
  v1::JobSpec job = NextJob(&jobs);
  job.mutable_resources()->set_ranks(4);
  const auto whole = Plan::Make(job, {.rank = 1}), first = Plan::Make(Sharded(job), {}), second = Plan::Make(Sharded(job), {.rank = 1});
  ASSERT_TRUE(whole.ok() && first.ok() && second.ok());
  EXPECT_EQ(whole->arena_bytes[int(Arena::kSnapshot)], 0);
  EXPECT_EQ(second->arena_bytes[int(Arena::kSnapshot)], 0);
  EXPECT_GT(first->arena_bytes[int(Arena::kSnapshot)], 3 * first->arena_bytes[int(Arena::kMaster)]);
  EXPECT_EQ(first->arena_bytes[int(Arena::kMoments)], 2 * first->arena_bytes[int(Arena::kMaster)] / 4);
  EXPECT_EQ(whole->arena_bytes[int(Arena::kMoments)], 2 * whole->arena_bytes[int(Arena::kMaster)]);
}

}  // namespace
}  // namespace hierad
