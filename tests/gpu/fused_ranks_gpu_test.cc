// step.mode fused on as many GPUs as there are, through NCCL; where there is one, two ranks share it, through the host. What
// the ranks compute together, captured under backward, is what one rank computes alone, and what they update in parts is
// what each updates whole. A rank that is lost or stopped is noticed, and named with what waits for it.
#include <gtest/gtest.h>

#include <signal.h>
#include <sys/prctl.h>
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
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      const auto communicator = Join(r, ranks, staged, blob);
      if (!communicator.ok()) {
        std::fprintf(stderr, "rank %d: %s\n", r, std::string(communicator.status().message()).c_str());
        _exit(2);
      }
      (void)WriteAll(out[1], body(communicator->get()), "pipe");
      close(out[1]);   // before the barrier: the test reads rank after rank, each to its end
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

// What is trained, by each rank `accumulation` times `rows` samples a step; alone, one takes the samples of `world` ranks.
struct Case {
  v1::JobSpec job;
  int accumulation = 1, rows = 1;
};

// What each rank tells of each case: result[rank][case]. All cases by the same processes, since a process's first second or
// two on a GPU goes into its context.
std::vector<std::vector<std::string>> RunRanks(const std::vector<Case>& cases, int ranks, bool staged, int world) {
  const auto began = Clock::System().Monotonic();
  const Ranks started = Start(ranks, staged, [&](Communicator* communicator) {
    std::string all;
    for (size_t i = 0; i < cases.size(); ++i) {
      const Case& c = cases[i];
      const int each = c.rows * c.accumulation * (ranks == 1 ? world : 1);
      const std::string told = Train(c.job, communicator, communicator->rank() * each, c.accumulation, each / c.accumulation, c.rows * c.accumulation * world);
      if (told.empty()) {
        std::fprintf(stderr, "rank %d of %d failed in case %zu\n", communicator->rank(), ranks, i);
        _exit(3);   // the others notice
      }
      const uint64_t size = told.size();
      all.append(reinterpret_cast<const char*>(&size), sizeof size).append(told);
    }
    return all;
  });
  // All is read before any is waited for: none ends before the last has told its numbers, more than a pipe holds.
  std::vector<std::string> told;
  for (int r = 0; r < ranks; ++r) told.push_back(ReadToEnd(started.outputs[r]));
  std::vector<std::vector<std::string>> results;
  for (int r = 0; r < ranks; ++r) {
    int status = 0;
    waitpid(started.pids[r], &status, 0);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "rank " << r << " ended with " << status;
    const std::string& all = told[size_t(r)];
    std::vector<std::string> texts;
    for (size_t at = 0; at < all.size();) {
      uint64_t size = 0;
      std::memcpy(&size, all.data() + at, sizeof size);
      texts.push_back(all.substr(at + sizeof size, size));
      at += sizeof size + size;
    }
    texts.resize(cases.size());   // "" where a rank ended before
    results.push_back(std::move(texts));
  }
  std::printf("%d rank%s, %zu cases of %d steps: %.1f s\n", ranks, ranks == 1 ? "" : "s", cases.size(), kSteps,
              std::chrono::duration<double>(Clock::System().Monotonic() - began).count());
  return results;
}

int CountOfJobs() {   // fewer where time on the card is short
  const char* wanted = std::getenv("HIERAD_TEST_JOBS");
  return wanted != nullptr ? std::atoi(wanted) : 12;
}

// What the ranks are here: NCCL takes a GPU each, so that on one card it is not tested; what the ranks share then goes through the
// host, in graphs and queues as NCCL's would.
bool Staged(int gpus, int ranks) {
  std::printf(gpus < 2 ? "%d ranks share one GPU, through the host: NCCL is NOT tested here, that takes two GPUs\n" : "%d ranks through NCCL\n", ranks);
  std::fflush(stdout);
  return gpus < 2;
}

TEST(FusedRanksGpuTest, RanksAreOneGpuWithTheBatchMultiplied) {
  const int gpus = Gpus(), ranks = std::clamp(gpus, 2, 4);
  ASSERT_GE(gpus, 1) << "this test needs a GPU";
  const bool staged = Staged(gpus, ranks);
  RandomJobs jobs(401);
  std::vector<Case> cases;
  for (int i = 0; i < CountOfJobs(); ++i) {
    v1::JobSpec job = jobs.Next();
    job.mutable_step()->set_mode("fused");
    job.mutable_optimizer()->set_eps(1e-3);
    job.mutable_step()->set_reduce_dtype(i % 3 == 2 ? "bf16" : "fp32");
    job.mutable_optimizer()->set_name(i % 4 == 1 ? "muon" : "adamw");
    job.mutable_step()->set_shard_optimizer(i % 4 == 2);
    const int accumulation = jobs.Pick(1, 2), rows = jobs.Pick(1, 2);
    cases.push_back({job, accumulation, rows});
  }
  const auto together = RunRanks(cases, ranks, staged, ranks), again = RunRanks(cases, ranks, staged, ranks), alone = RunRanks(cases, 1, staged, ranks);
  EXPECT_TRUE(together == again) << "two runs, the same bits";
  for (size_t i = 0; i < cases.size(); ++i) {
    SCOPED_TRACE(absl::StrCat("case ", i, ": ", cases[i].job.ShortDebugString()));
    const std::string &one = alone[0][i], &first = together[0][i];
    for (int r = 1; r < ranks; ++r) EXPECT_TRUE(together[r][i] == first) << "rank " << r << " and rank 0 differ";
    ASSERT_EQ(first.size(), one.size());
    ASSERT_GT(one.size(), 0u);
    const double bound = cases[i].job.step().reduce_dtype() == "bf16" ? 3e-2 : 1e-4;
    double distance = 0, norm = 0;
    for (size_t at = 0; at < one.size(); at += sizeof(double)) {
      double a, b;
      std::memcpy(&a, first.data() + at, sizeof a);
      std::memcpy(&b, one.data() + at, sizeof b);
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
  const bool staged = Staged(gpus, ranks);
  RandomJobs jobs(409);
  std::vector<Case> cases;
  for (int i = 0; i < std::max(2, CountOfJobs() / 3); ++i) {
    v1::JobSpec job = jobs.Next();
    job.mutable_step()->set_mode("fused");
    job.mutable_step()->set_precision(i % 3 == 0 ? "bf16" : i % 3 == 1 ? "fp32" : "fp16");
    job.mutable_optimizer()->set_clip_norm(0);
    job.mutable_optimizer()->set_ema_decay(i % 2 == 0 ? 0.9 : 0);
    cases.push_back({job, 1, 2});
  }
  const auto whole = RunRanks(cases, ranks, staged, ranks);
  for (Case& c : cases) c.job.mutable_step()->set_shard_optimizer(true);
  const auto sharded = RunRanks(cases, ranks, staged, ranks);
  for (size_t i = 0; i < cases.size(); ++i) {
    SCOPED_TRACE(absl::StrCat("case ", i, ": ", cases[i].job.ShortDebugString()));
    // Losses and norms, then parameters; the norms are summed in another order.
    ASSERT_EQ(whole[0][i].size(), sharded[0][i].size());
    ASSERT_GT(whole[0][i].size(), 2 * kSteps * sizeof(double));
    EXPECT_TRUE(whole[0][i].substr(2 * kSteps * sizeof(double)) == sharded[0][i].substr(2 * kSteps * sizeof(double)));
    for (int r = 1; r < ranks; ++r) EXPECT_TRUE(sharded[r][i] == sharded[0][i]) << "rank " << r << " and rank 0 differ";
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
