// step.mode fused on as many GPUs as there are, through NCCL; where there is one, two ranks share it, through the host. What
// the ranks compute together, captured under backward, is what one rank computes alone, and what they update in parts is
// what each updates whole. A rank that is lost or stopped is noticed, and named with what waits for it.
#include <gtest/gtest.h>

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <random>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/fs.h"
#include "base/plan/random_jobs.h"
#include "base/status.h"
#include "tests/gpu/staged_communicator.h"
#include "worker/comm/communicator.h"
#include "worker/step/step.h"
#include "worker/step_watch.h"

namespace hierad {
namespace {

constexpr size_t kBlobBytes = 256;
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

// A rank of `ranks`, which share GPU 0 where there are not as many. `blob`: a pipe.
absl::StatusOr<std::unique_ptr<Communicator>> Join(int rank, int ranks, bool staged, const int blob[2]) {
  setenv("CUDA_VISIBLE_DEVICES", staged ? "0" : std::to_string(rank).c_str(), 1);
  if (ranks == 1) return MakeSelfCommunicator();
  CommunicatorOptions options;
  options.rank = rank;
  options.size = ranks;
  std::string rendezvous(kBlobBytes, '\0');
  if (rank == 0) {
    const auto made = staged ? MakeSharedMemoryRendezvous(options, "gpu-test", int64_t{8} << 20) : MakeNcclRendezvous();
    if (!made.ok()) return made.status();
    std::copy(made->begin(), made->end(), rendezvous.begin());
    for (int other = 1; other < ranks; ++other) RETURN_IF_ERROR(WriteAll(blob[1], rendezvous, "pipe"));
  } else if (read(blob[0], rendezvous.data(), kBlobBytes) != ssize_t(kBlobBytes)) {
    return absl::InternalError("no rendezvous came");
  }
  if (!staged) return JoinNccl(options, rendezvous.substr(0, 128));   // an ncclUniqueId
  ASSIGN_OR_RETURN(auto joined, JoinSharedMemory(options, rendezvous.c_str()));
  return std::make_unique<StagedCommunicator>(std::move(joined));
}

struct Ranks {
  std::vector<pid_t> pids;
  std::vector<int> outputs;
};

Ranks Start(int ranks, bool staged, const std::function<std::string(Communicator*)>& body) {
  int blob[2];
  EXPECT_EQ(pipe(blob), 0);
  Ranks started;
  for (int r = 0; r < ranks; ++r) {
    int out[2];
    EXPECT_EQ(pipe(out), 0);
    const pid_t pid = fork();
    if (pid == 0) {
      const auto communicator = Join(r, ranks, staged, blob);
      if (!communicator.ok()) {
        std::fprintf(stderr, "rank %d: %s\n", r, std::string(communicator.status().message()).c_str());
        _exit(2);
      }
      (void)WriteAll(out[1], body(communicator->get()), "pipe");
      (void)(*communicator)->Barrier();
      _exit(0);
    }
    close(out[1]);
    started.outputs.push_back(out[0]);
    started.pids.push_back(pid);
  }
  close(blob[0]), close(blob[1]);
  return started;
}

std::string ReadToEnd(int fd) {
  std::string text;
  char buffer[65536];
  ssize_t n;
  while ((n = read(fd, buffer, sizeof buffer)) > 0) text.append(buffer, size_t(n));
  close(fd);
  return text;
}

std::vector<std::string> RunRanks(const v1::JobSpec& job, int ranks, bool staged, int accumulation, int rows, int world) {
  const int each = rows * accumulation * (ranks == 1 ? world : 1);
  const Ranks started = Start(ranks, staged, [&](Communicator* communicator) {
    return Train(job, communicator, communicator->rank() * each, accumulation, each / accumulation, rows * accumulation * world);
  });
  std::vector<std::string> texts;
  for (int r = 0; r < ranks; ++r) {
    texts.push_back(ReadToEnd(started.outputs[r]));
    int status = 0;
    waitpid(started.pids[r], &status, 0);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "rank " << r << " ended with " << status;
  }
  return texts;
}

int CountOfJobs() {   // fewer where time on the card is short
  const char* wanted = std::getenv("HIERAD_TEST_JOBS");
  return wanted != nullptr ? std::atoi(wanted) : 12;
}

TEST(FusedRanksGpuTest, RanksAreOneGpuWithTheBatchMultiplied) {
  const int gpus = Gpus(), ranks = std::clamp(gpus, 2, 4);
  ASSERT_GE(gpus, 1) << "this test needs a GPU";
  const bool staged = gpus < 2;
  std::printf("%d ranks %s\n", ranks, staged ? "on one GPU, through the host" : "through NCCL");
  RandomJobs jobs(401);
  for (int i = 0; i < CountOfJobs(); ++i) {
    v1::JobSpec job = jobs.Next();
    job.mutable_step()->set_mode("fused");
    job.mutable_optimizer()->set_eps(1e-3);
    job.mutable_step()->set_reduce_dtype(i % 3 == 2 ? "bf16" : "fp32");
    job.mutable_optimizer()->set_name(i % 4 == 1 ? "muon" : "adamw");
    job.mutable_step()->set_shard_optimizer(i % 4 == 2);
    SCOPED_TRACE(absl::StrCat("job ", i, ": ", job.ShortDebugString()));
    const int accumulation = jobs.Pick(1, 2), rows = jobs.Pick(1, 2);
    const auto together = RunRanks(job, ranks, staged, accumulation, rows, ranks), again = RunRanks(job, ranks, staged, accumulation, rows, ranks);
    const auto alone = RunRanks(job, 1, staged, accumulation, rows, ranks);
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

// Sharded or not: the same bits where nothing is clipped, moments and snapshots included.
TEST(FusedRanksGpuTest, ShardedIsWhole) {
  const int gpus = Gpus(), ranks = std::clamp(gpus, 2, 4);
  ASSERT_GE(gpus, 1) << "this test needs a GPU";
  RandomJobs jobs(409);
  for (int i = 0; i < std::max(2, CountOfJobs() / 3); ++i) {
    v1::JobSpec job = jobs.Next();
    job.mutable_step()->set_mode("fused");
    job.mutable_step()->set_precision(i % 3 == 0 ? "bf16" : i % 3 == 1 ? "fp32" : "fp16");
    job.mutable_optimizer()->set_clip_norm(0);
    job.mutable_optimizer()->set_ema_decay(i % 2 == 0 ? 0.9 : 0);
    SCOPED_TRACE(absl::StrCat("job ", i, ": ", job.ShortDebugString()));
    const auto whole = RunRanks(job, ranks, gpus < 2, 1, 2, ranks);
    job.mutable_step()->set_shard_optimizer(true);
    const auto sharded = RunRanks(job, ranks, gpus < 2, 1, 2, ranks);
    // Losses, then parameters; the norms between them are summed in another order.
    ASSERT_EQ(whole[0].size(), sharded[0].size());
    ASSERT_GT(whole[0].size(), 2 * kSteps * sizeof(double));
    EXPECT_TRUE(whole[0].substr(2 * kSteps * sizeof(double)) == sharded[0].substr(2 * kSteps * sizeof(double)));
    for (const std::string& text : sharded) EXPECT_TRUE(text == sharded[0]) << "the same bits on every rank";
    if (HasFailure()) return;
  }
}

// Rank 1 goes, or stops, before its third step; what the others say of it, and how soon they are gone.
void LoseARank(int signal) {
  const int gpus = Gpus(), ranks = 2;
  ASSERT_GE(gpus, 1) << "this test needs a GPU";
  RandomJobs jobs(419);
  v1::JobSpec job = jobs.Next();
  job.mutable_step()->set_mode("fused");
  job.mutable_step()->set_batch_per_rank(1);
  job.mutable_step()->set_accumulation(1);
  const auto began = Clock::System().Monotonic();
  const Ranks started = Start(ranks, gpus < 2, [&](Communicator* communicator) -> std::string {
    const ParameterTable table = ParameterTable::For(*Geometry::From(job.model()));
    StepOptions options{job, true};
    options.bucket_elements = 2000;
    auto made = MakeFusedGpuStep(options, table, communicator);
    if (!made.ok() || !(*made)->Initialize().ok()) return "no step";
    int64_t size = job.model().in_chans();
    for (int extent : job.model().input_size()) size *= extent;
    const std::vector<float> x(size, 0.5f);
    const std::vector<int64_t> labels{0};
    const std::vector<uint64_t> ids{uint64_t(communicator->rank())};
    const MicroBatch batch{x.data(), labels.data(), ids.data(), 1, 1};
    int64_t step = 0;
    StepWatch::Limits limits;
    limits.first = std::chrono::seconds(60), limits.least = std::chrono::seconds(3), limits.look_every = std::chrono::milliseconds(100);
    StepWatch watch(limits, [&](std::chrono::nanoseconds) {
      const std::string text = absl::StrCat("rank ", communicator->rank(), ": step ", step, " did not finish (in ", (*made)->WaitingIn(), ")");
      (void)WriteAll(STDERR_FILENO, absl::StrCat(text, "\n"), "stderr");
      communicator->Abort();
      _exit((*made)->WaitingIn().empty() ? 9 : 7);
    });
    for (step = 1; step <= 6; ++step) {
      if (step == 3 && communicator->rank() == 1) kill(getpid(), signal);
      watch.Begin();
      absl::Status status = (*made)->RunAndTake({&batch, 1}, ranks, 1e-3, {}).status();
      if (status.ok()) status = communicator->CheckAsync();
      if (!status.ok()) {
        std::fprintf(stderr, "rank %d: %s\n", communicator->rank(), std::string(status.message()).c_str());
        _exit(ReasonOf(status) == v1::REASON_PEER_LOST ? 7 : 8);
      }
      watch.End();
    }
    return "went on alone";
  });
  (void)ReadToEnd(started.outputs[0]);
  int status = 0;
  waitpid(started.pids[0], &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 7) << "rank 0 ended with " << status;
  EXPECT_LT(Clock::System().Monotonic() - began, std::chrono::seconds(60));
  kill(started.pids[1], SIGKILL);
  waitpid(started.pids[1], nullptr, 0);
  close(started.outputs[1]);
}

TEST(FusedRanksGpuTest, ARankThatIsKilledIsNoticed) { LoseARank(SIGKILL); }
TEST(FusedRanksGpuTest, ARankThatIsStoppedIsNoticed) { LoseARank(SIGSTOP); }

}  // namespace
}  // namespace hierad
