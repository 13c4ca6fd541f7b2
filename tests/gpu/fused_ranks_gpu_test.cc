// step.mode fused on as many GPUs as there are (two at least, else the test is skipped and says so): what the ranks compute
// together through NCCL, captured under backward, is what one GPU computes alone.
#include <gtest/gtest.h>

#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/fs.h"
#include "base/plan/random_jobs.h"
#include "worker/comm/communicator.h"
#include "worker/step/step.h"

namespace hierad {
namespace {

constexpr size_t kBlobBytes = 128;
constexpr int kSteps = 4;

// Asked in a child: CUDA does not survive a fork.
int Gpus() {
  const pid_t child = fork();
  if (child == 0) _exit(CudaDeviceCount());
  int status = 0;
  waitpid(child, &status, 0);
  return WEXITSTATUS(status);
}

// Losses, norms and parameters of some steps; "" after an error, which is printed.
std::string Train(v1::JobSpec job, Communicator* communicator, int first, int micro_batches, int rows, int all_rows) {
  job.mutable_step()->set_accumulation(micro_batches);
  job.mutable_step()->set_batch_per_rank(rows);
  const ParameterTable table = ParameterTable::For(*Geometry::From(job.model()));
  StepOptions options{job, true};
  options.bucket_elements = 2000;
  auto made = MakeFusedGpuStep(options, table, communicator);
  const auto failed = [](const absl::Status& status) {
    std::fprintf(stderr, "%s\n", status.ToString().c_str());
    return std::string();
  };
  if (!made.ok()) return failed(made.status());
  Step& step = **made;
  if (absl::Status status = step.Initialize(); !status.ok()) return failed(status);
  int64_t size = job.model().in_chans();
  for (int extent : job.model().input_size()) size *= extent;
  std::string told;
  auto tell = [&told](double value) { told.append(reinterpret_cast<const char*>(&value), sizeof value); };
  for (int s = 0; s < kSteps; ++s) {
    std::vector<std::vector<float>> x(micro_batches);
    std::vector<std::vector<int64_t>> labels(micro_batches);
    std::vector<std::vector<uint64_t>> ids(micro_batches);
    std::vector<MicroBatch> batches;
    for (int m = 0; m < micro_batches; ++m) {
      for (int b = 0; b < rows; ++b) {
        const int number = first + m * rows + b;
        std::mt19937 random(uint32_t(1000 * s + number));
        for (int64_t i = 0; i < size; ++i) x[m].push_back(float(random()) / 1073741824.0f - 2.0f);
        labels[m].push_back(number % job.model().num_classes());
        ids[m].push_back(uint64_t(100 * s + number));
      }
      batches.push_back({x[m].data(), labels[m].data(), ids[m].data(), rows, 1});
    }
    if (absl::Status status = step.Run(batches, all_rows, 1e-3, {}); !status.ok()) return failed(status);
  }
  for (int s = 0; s < kSteps; ++s) {
    const auto result = step.Take();
    if (!result.ok()) return failed(result.status());
    tell(result->loss), tell(result->grad_norm);
  }
  const auto state = step.Save();
  if (!state.ok()) return failed(state.status());
  for (const float value : state->parameters) tell(value);
  return told;
}

std::vector<std::string> RunRanks(const v1::JobSpec& job, int ranks, int accumulation, int rows, int world) {
  int blob[2];
  EXPECT_EQ(pipe(blob), 0);
  std::vector<int> outputs;
  std::vector<pid_t> pids;
  for (int r = 0; r < ranks; ++r) {
    int out[2];
    EXPECT_EQ(pipe(out), 0);
    const pid_t pid = fork();
    if (pid == 0) {
      setenv("CUDA_VISIBLE_DEVICES", std::to_string(r).c_str(), 1);
      CommunicatorOptions options;
      options.rank = r;
      options.size = ranks;
      std::unique_ptr<Communicator> communicator = MakeSelfCommunicator();
      if (ranks > 1) {
        std::string rendezvous(kBlobBytes, '\0');
        if (r == 0) {
          const auto made = MakeNcclRendezvous();
          if (made.ok()) rendezvous = *made;
          for (int other = 1; other < ranks; ++other) (void)WriteAll(blob[1], rendezvous, "pipe");
        } else if (read(blob[0], rendezvous.data(), kBlobBytes) != ssize_t(kBlobBytes)) {
          _exit(1);
        }
        auto joined = JoinNccl(options, rendezvous);
        if (!joined.ok()) _exit(2);
        communicator = *std::move(joined);
      }
      const int each = rows * accumulation * (ranks == 1 ? world : 1);
      (void)WriteAll(out[1], Train(job, communicator.get(), r * each, accumulation, each / accumulation, rows * accumulation * world), "pipe");
      _exit(0);
    }
    close(out[1]);
    outputs.push_back(out[0]);
    pids.push_back(pid);
  }
  std::vector<std::string> texts;
  for (int r = 0; r < ranks; ++r) {
    std::string text;
    char buffer[65536];
    ssize_t n;
    while ((n = read(outputs[r], buffer, sizeof buffer)) > 0) text.append(buffer, size_t(n));
    close(outputs[r]);
    int status = 0;
    waitpid(pids[r], &status, 0);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "rank " << r << " ended with " << status;
    texts.push_back(text);
  }
  close(blob[0]), close(blob[1]);
  return texts;
}

TEST(FusedRanksGpuTest, RanksAreOneGpuWithTheBatchMultiplied) {
  const int ranks = std::min(Gpus(), 4);
  if (ranks < 2) GTEST_SKIP() << "needs two GPUs, there is " << ranks;
  RandomJobs jobs(401);
  const char* wanted = std::getenv("HIERAD_TEST_JOBS");   // where time on the card is short
  const int count = wanted != nullptr ? std::atoi(wanted) : 12;
  for (int i = 0; i < count; ++i) {
    v1::JobSpec job = jobs.Next();
    job.mutable_step()->set_mode("fused");
    job.mutable_optimizer()->set_eps(1e-3);
    job.mutable_step()->set_reduce_dtype(i % 3 == 2 ? "bf16" : "fp32");
    SCOPED_TRACE(absl::StrCat("job ", i, ": ", job.ShortDebugString()));
    const int accumulation = jobs.Pick(1, 2), rows = jobs.Pick(1, 2);
    const auto together = RunRanks(job, ranks, accumulation, rows, ranks), again = RunRanks(job, ranks, accumulation, rows, ranks);
    const auto alone = RunRanks(job, 1, accumulation, rows, ranks);
    for (const std::string& text : together) EXPECT_EQ(text, together[0]) << "the same bits on every rank";
    EXPECT_EQ(together, again) << "two runs, the same bits";
    ASSERT_EQ(together[0].size(), alone[0].size());
    ASSERT_GT(alone[0].size(), 0u);
    const double bound = job.step().reduce_dtype() == "bf16" ? 3e-2 : 1e-4;
    double distance = 0, norm = 0;
    for (size_t at = 0; at < alone[0].size(); at += sizeof(double)) {
      double a, b;
      std::memcpy(&a, together[0].data() + at, sizeof a);
      std::memcpy(&b, alone[0].data() + at, sizeof b);
      if (at < 2 * kSteps * sizeof(double)) {
        EXPECT_NEAR(a, b, bound * std::abs(b)) << "loss or norm " << at / sizeof(double);
      } else {
        distance += (a - b) * (a - b), norm += b * b;
      }
    }
    EXPECT_LT(std::sqrt(distance / norm), bound);
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace hierad
