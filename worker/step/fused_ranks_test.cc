// Ranks of the fused step over shared memory: what two ranks compute together is what one computes alone.
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "base/plan/random_jobs.h"
#include "worker/comm/communicator.h"
#include "worker/comm/forked_ranks.h"
#include "worker/step/step.h"

namespace hierad {
namespace {

struct Outcome {
  double loss = 0, grad_norm = 0;
  StepSignals signals;
  std::vector<float> parameters;
};

// Two steps over the micro-batches `first`, `first + stride`, ... of a step of two micro-batches in all.
Outcome Train(const v1::JobSpec& job, Communicator* communicator, int first, int count, StepSignals signals) {
  auto geometry = Geometry::From(job.model());
  const ParameterTable table = ParameterTable::For(*geometry);
  auto step = MakeFusedCpuStep({job, false, 1}, table, communicator);
  EXPECT_TRUE((*step)->Initialize().ok());
  const int rows = job.step().batch_per_rank();
  int64_t size = job.model().in_chans();
  for (int extent : job.model().input_size()) size *= extent;
  Outcome outcome;
  for (int s = 0; s < 2; ++s) {
    std::vector<std::vector<float>> x(count);
    std::vector<std::vector<int64_t>> labels(count);
    std::vector<std::vector<uint64_t>> ids(count);
    std::vector<MicroBatch> batches;
    for (int m = 0; m < count; ++m) {
      std::mt19937 random(uint32_t(10 * s + first + m));
      for (int64_t i = 0; i < rows * size; ++i) x[m].push_back(float(random()) / 1073741824.0f - 2.0f);
      for (int b = 0; b < rows; ++b) {
        labels[m].push_back(random() % uint32_t(job.model().num_classes()));
        ids[m].push_back(random());
      }
      batches.push_back({x[m].data(), labels[m].data(), ids[m].data(), rows, 1});
    }
    const auto result = (*step)->Run(batches, 2 * rows, 1e-3, s == 1 ? signals : StepSignals{});
    EXPECT_TRUE(result.ok()) << result.status();
    if (!result.ok()) return outcome;
    outcome.loss = result->loss;
    outcome.grad_norm = result->grad_norm;
    outcome.signals = result->signals;
  }
  outcome.parameters = (*step)->Save()->parameters;
  return outcome;
}

TEST(FusedRanksTest, TwoRanksAreOneRankWithTwiceTheMicroBatches) {
  RandomJobs jobs(113);
  for (int i = 0; i < 4; ++i) {
    v1::JobSpec job = jobs.Next();
    job.mutable_optimizer()->set_eps(1e-3);
    job.mutable_step()->set_accumulation(2);
    const std::unique_ptr<Communicator> alone = MakeSelfCommunicator();
    const Outcome expected = Train(job, alone.get(), 0, 2, {});
    job.mutable_step()->set_accumulation(1);
    ForkedRanks ranks(2, {}, 1 << 20, [&](Communicator* communicator) {
      const int rank = communicator->rank();
      const Outcome o = Train(job, communicator, rank, 1, {.stop = rank == 1});
      std::string bytes(reinterpret_cast<const char*>(o.parameters.data()), o.parameters.size() * sizeof(float));
      const double numbers[4] = {o.loss, o.grad_norm, o.signals.stop ? 1.0 : 0.0, o.signals.checkpoint ? 1.0 : 0.0};
      return std::string(reinterpret_cast<const char*>(numbers), sizeof(numbers)) + bytes;
    });
    const std::string first = ranks.Wait(0).output, second = ranks.Wait(1).output;
    EXPECT_EQ(first, second) << "the same bits on every rank";
    double numbers[4];
    ASSERT_EQ(first.size(), sizeof(numbers) + expected.parameters.size() * sizeof(float));
    std::memcpy(numbers, first.data(), sizeof(numbers));
    EXPECT_NEAR(numbers[0], expected.loss, 1e-9 * expected.loss);
    EXPECT_NEAR(numbers[1], expected.grad_norm, 1e-5 * expected.grad_norm);
    EXPECT_EQ(numbers[2], 1.0);
    EXPECT_EQ(numbers[3], 0.0);
    std::vector<float> parameters(expected.parameters.size());
    std::memcpy(parameters.data(), first.data() + sizeof(numbers), parameters.size() * sizeof(float));
    for (size_t k = 0; k < parameters.size(); ++k) ASSERT_NEAR(parameters[k], expected.parameters[k], 1e-5) << k;
  }
}

}  // namespace
}  // namespace hierad
