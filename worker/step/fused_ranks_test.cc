// Ranks of the fused step over shared memory: what several ranks compute together is what one computes alone.
#include <chrono>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "base/clock.h"
#include "base/plan/random_jobs.h"
#include "worker/comm/communicator.h"
#include "worker/comm/forked_ranks.h"
#include "worker/step/step.h"

namespace hierad {
namespace {

constexpr int kSteps = 3;

// Which samples a rank takes of each step: rows first, first + 1, ... in micro-batches of `rows`.
struct Share {
  int first = 0, micro_batches = 1, rows = 1;
  int empty_from_at_1 = 1 << 20;   // in the second step no sample from this micro-batch on
};

struct Outcome {
  double loss = 0, grad_norm = 0, stop = 0, checkpoint = 0, hash = 0;
  std::vector<float> parameters;
};

std::vector<float> Sample(int64_t size, int step, int number) {
  std::mt19937 random(uint32_t(1000 * step + number));
  std::vector<float> x;
  for (int64_t i = 0; i < size; ++i) x.push_back(float(random()) / 1073741824.0f - 2.0f);
  return x;
}

Outcome Train(v1::JobSpec job, Communicator* communicator, const Share& share, int64_t real[kSteps], StepSignals signals) {
  job.mutable_step()->set_accumulation(share.micro_batches);
  job.mutable_step()->set_batch_per_rank(share.rows);
  auto geometry = Geometry::From(job.model());
  const ParameterTable table = ParameterTable::For(*geometry);
  StepOptions options{job, false, 1};
  options.bucket_elements = 200;   // many buckets
  auto step = MakeFusedCpuStep(options, table, communicator);
  EXPECT_TRUE(step.ok()) << step.status();
  EXPECT_TRUE((*step)->Initialize().ok());
  int64_t size = job.model().in_chans();
  for (int extent : job.model().input_size()) size *= extent;
  Outcome outcome;
  for (int s = 0; s < kSteps; ++s) {
    std::vector<std::vector<float>> x(share.micro_batches);
    std::vector<std::vector<int64_t>> labels(share.micro_batches);
    std::vector<std::vector<uint64_t>> ids(share.micro_batches);
    std::vector<MicroBatch> batches;
    for (int m = 0; m < share.micro_batches; ++m) {
      for (int b = 0; b < share.rows; ++b) {
        const int number = share.first + m * share.rows + b;
        const std::vector<float> sample = Sample(size, s, number);
        x[m].insert(x[m].end(), sample.begin(), sample.end());
        labels[m].push_back(number % job.model().num_classes());
        ids[m].push_back(uint64_t(100 * s + number));
      }
      batches.push_back({x[m].data(), labels[m].data(), ids[m].data(), s == 1 && m >= share.empty_from_at_1 ? 0 : share.rows, 1});
    }
    const auto result = (*step)->RunAndTake(batches, real[s], 1e-3, s == kSteps - 1 ? signals : StepSignals{});
    EXPECT_TRUE(result.ok()) << result.status();
    if (!result.ok()) return outcome;
    outcome.loss = result->loss;
    outcome.grad_norm = result->grad_norm;
    outcome.stop = result->signals.stop;
    outcome.checkpoint = result->signals.checkpoint;
  }
  outcome.parameters = (*step)->Save()->parameters;
  outcome.hash = double(*(*step)->ParameterHash() >> 12);
  return outcome;
}

constexpr size_t kNumbers = 5 * sizeof(double);

// One outcome a rank; all the same to the bit.
Outcome TrainTogether(const v1::JobSpec& job, int ranks, const std::vector<Share>& shares, int64_t real[kSteps]) {
  ForkedRanks together(ranks, {}, 1 << 20, [&](Communicator* communicator) {
    const int rank = communicator->rank();
    const Outcome o = Train(job, communicator, shares[rank], real, {.stop = rank == ranks - 1});
    return std::string(reinterpret_cast<const char*>(&o), kNumbers) +
           std::string(reinterpret_cast<const char*>(o.parameters.data()), o.parameters.size() * sizeof(float));
  });
  const std::string first = together.Wait(0).output;
  for (int r = 1; r < ranks; ++r) EXPECT_EQ(first, together.Wait(r).output) << "the same bits on rank " << r;
  Outcome outcome;
  if (first.size() < kNumbers) {
    ADD_FAILURE() << "rank 0 told nothing";
    return outcome;
  }
  std::memcpy(reinterpret_cast<char*>(&outcome), first.data(), kNumbers);
  outcome.parameters.resize((first.size() - kNumbers) / sizeof(float));
  std::memcpy(outcome.parameters.data(), first.data() + kNumbers, outcome.parameters.size() * sizeof(float));
  return outcome;
}

void ExpectNear(const Outcome& got, const Outcome& expected, double bound) {
  EXPECT_NEAR(got.loss, expected.loss, bound * expected.loss);
  EXPECT_NEAR(got.grad_norm, expected.grad_norm, 10 * bound * expected.grad_norm);
  ASSERT_EQ(got.parameters.size(), expected.parameters.size());
  for (size_t k = 0; k < got.parameters.size(); ++k) ASSERT_NEAR(got.parameters[k], expected.parameters[k], 10 * bound) << k;
}

v1::JobSpec Steady(v1::JobSpec job) {
  job.mutable_optimizer()->set_eps(1e-3);   // else whole steps are made of rounding errors where a gradient is zero
  return job;
}

TEST(FusedRanksTest, RanksAreOneRankWithTheBatchMultiplied) {
  RandomJobs jobs(113);
  const std::unique_ptr<Communicator> alone = MakeSelfCommunicator();
  for (int ranks : {2, 3, 4}) {
    for (int i = 0; i < 2; ++i) {
      const v1::JobSpec job = Steady(jobs.Next());
      SCOPED_TRACE(absl::StrCat(ranks, " ranks: ", job.model().ShortDebugString()));
      const int rows = jobs.Pick(1, 2), accumulation = jobs.Pick(1, 2), each = rows * accumulation;
      int64_t real[kSteps] = {each * ranks, each * ranks, each * ranks};
      std::vector<Share> shares;
      for (int r = 0; r < ranks; ++r) shares.push_back({r * each, accumulation, rows});
      const Outcome together = TrainTogether(job, ranks, shares, real);
      EXPECT_EQ(together.stop, 1);
      EXPECT_EQ(together.checkpoint, 0);
      ExpectNear(together, Train(job, alone.get(), {0, 1, each * ranks}, real, {}), 1e-6);
      ExpectNear(together, Train(job, alone.get(), {0, ranks * accumulation, rows}, real, {}), 1e-6);
      if (HasFailure()) return;
    }
  }
}

TEST(FusedRanksTest, ARankWithoutSamplesReducesAllTheSame) {
  RandomJobs jobs(127);
  const std::unique_ptr<Communicator> alone = MakeSelfCommunicator();
  for (int accumulation : {1, 2}) {
    const v1::JobSpec job = Steady(jobs.Next());
    SCOPED_TRACE(job.model().ShortDebugString());
    // The second rank's samples come last, and are missing in the second step.
    int64_t real[kSteps] = {2 * accumulation, accumulation, 2 * accumulation};
    const Outcome together = TrainTogether(job, 2, {{0, accumulation, 1}, {accumulation, accumulation, 1, 0}}, real);
    // Alone, in micro-batches of one sample, of which the second half is missing then.
    ExpectNear(together, Train(job, alone.get(), {0, 2 * accumulation, 1, accumulation}, real, {}), 1e-6);
  }
}

// One rank has it, all hear of it, none changes.
TEST(FusedRanksTest, ASampleThatIsNotFiniteIsHeardOfByAll) {
  RandomJobs jobs(353);
  v1::JobSpec job = jobs.Next();
  job.mutable_step()->set_accumulation(1);
  job.mutable_step()->set_batch_per_rank(2);
  ForkedRanks together(3, {}, 1 << 20, [&](Communicator* communicator) {
    const auto geometry = Geometry::From(job.model());
    auto step = MakeFusedCpuStep({job, false, 1}, ParameterTable::For(*geometry), communicator);
    if (!step.ok() || !(*step)->Initialize().ok()) return std::string("no step");
    const int64_t size = RowFormat::Plain(*geometry).rules.channels * RowFormat::Plain(*geometry).rules.samples;
    std::vector<float> x = Sample(2 * size, 0, communicator->rank());
    const std::vector<int64_t> labels{0, 1};
    const std::vector<uint64_t> ids{uint64_t(10 * communicator->rank()), uint64_t(10 * communicator->rank() + 1)};
    if (communicator->rank() == 1) x[size] = INFINITY;
    const std::vector<float> before = (*step)->Save()->parameters;
    std::string heard;
    for (int s = 0; s < 2; ++s) {
      const auto result = (*step)->RunAndTake(std::vector{MicroBatch{x.data(), labels.data(), ids.data(), 2, 1}}, 6, 1e-3, {});
      if (!result.ok()) return std::string(result.status().message());
      absl::StrAppend(&heard, result->input_not_finite ? "bad " : "good ", result->not_finite_visit.has_value() ? absl::StrCat(*result->not_finite_visit, " ") : "");
      if (s == 0 && (*step)->Save()->parameters != before) heard += "changed ";
      x = Sample(2 * size, 1, communicator->rank());
    }
    return heard;
  });
  EXPECT_EQ(together.Wait(0).output, "bad good ");
  EXPECT_EQ(together.Wait(1).output, "bad 11 good ");
  EXPECT_EQ(together.Wait(2).output, "bad good ");
}

// A rank that comes late to an all-reduce costs the others time that they book as communication, and itself none.
TEST(FusedRanksTest, WaitingForALateRankIsExposedCommunication) {
  RandomJobs jobs(139);
  v1::JobSpec job = jobs.Next();
  job.mutable_step()->set_accumulation(1);
  job.mutable_step()->set_batch_per_rank(1);
  ForkedRanks together(2, {}, 1 << 20, [&](Communicator* communicator) {
    const auto geometry = Geometry::From(job.model());
    auto step = MakeFusedCpuStep({job, false, 1}, ParameterTable::For(*geometry), communicator);
    if (!step.ok() || !(*step)->Initialize().ok()) return std::string("no step");
    const std::vector<float> x = Sample(RowFormat::Plain(*geometry).rules.channels * RowFormat::Plain(*geometry).rules.samples, 0, communicator->rank());
    const std::vector<int64_t> labels{0};
    const std::vector<uint64_t> ids{uint64_t(communicator->rank())};
    std::string told;
    for (int s = 0; s < 3; ++s) {
      if (communicator->rank() == 1 && s == 1) SleepFor(std::chrono::milliseconds(400));
      const auto result = (*step)->RunAndTake(std::vector{MicroBatch{x.data(), labels.data(), ids.data(), 1, 1}}, 2, 1e-3, {});
      if (!result.ok() || !result->times.has_value()) return std::string("no times");
      absl::StrAppend(&told, result->times->communication_s > 0.3 ? "waits " : "goes ");
    }
    return told;
  });
  EXPECT_EQ(together.Wait(0).output, "goes waits goes ");
  EXPECT_EQ(together.Wait(1).output, "goes goes goes ");
}

// Half the bits on the way: near, and still the same on every rank.
TEST(FusedRanksTest, GradientsMayBeSummedInBfloat16) {
  RandomJobs jobs(131);
  for (int i = 0; i < 2; ++i) {
    v1::JobSpec job = Steady(jobs.Next());
    job.mutable_optimizer()->set_eps(1.0);   // near SGD: an error of a gradient is one of the update
    int64_t real[kSteps] = {3, 3, 3};
    const std::vector<Share> shares = {{0, 1, 1}, {1, 1, 1}, {2, 1, 1}};
    const Outcome wide = TrainTogether(job, 3, shares, real);
    job.mutable_step()->set_reduce_dtype("bf16");
    const Outcome narrow = TrainTogether(job, 3, shares, real);
    EXPECT_NE(narrow.parameters, wide.parameters);
    EXPECT_NEAR(narrow.loss, wide.loss, 1e-3 * wide.loss);
    EXPECT_NEAR(narrow.grad_norm, wide.grad_norm, 1e-2 * wide.grad_norm);
  }
}

}  // namespace
}  // namespace hierad
