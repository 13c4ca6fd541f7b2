// On the GPUs that are here: two ranks where there are two, else one. NCCL takes no two ranks on one GPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include "base/clock.h"
#include "base/fs.h"
#include "base/status.h"
#include "worker/comm/agree.h"
#include "worker/comm/communicator.h"

namespace hierad {
namespace {

using ::testing::HasSubstr;

constexpr size_t kBlobBytes = 128;

// Asked in a child: CUDA does not survive a fork.
int Gpus() {
  const pid_t child = fork();
  if (child == 0) _exit(CudaDeviceCount());
  int status = 0;
  waitpid(child, &status, 0);
  return WEXITSTATUS(status);
}

// "" or what failed, of each rank.
std::vector<std::string> RunRanks(int ranks, const std::function<std::string(Communicator*)>& body) {
  int blob[2];
  if (pipe(blob) != 0) return {"pipe"};
  std::vector<int> outputs;
  std::vector<pid_t> pids;
  for (int r = 0; r < ranks; ++r) {
    int out[2];
    if (pipe(out) != 0) return {"pipe"};
    const pid_t pid = fork();
    if (pid == 0) {
      setenv("CUDA_VISIBLE_DEVICES", std::to_string(r).c_str(), 1);
      CommunicatorOptions options;
      options.rank = r;
      options.size = ranks;
      options.busy_timeout = std::chrono::seconds(5);
      std::string rendezvous(kBlobBytes, '\0');
      if (r == 0) {
        const auto made = MakeNcclRendezvous();
        if (made.ok()) rendezvous = *made;
        for (int other = 1; other < ranks; ++other) (void)WriteAll(blob[1], rendezvous, "pipe");
      } else if (read(blob[0], rendezvous.data(), kBlobBytes) != ssize_t(kBlobBytes)) {
        _exit(1);
      }
      const auto joined = JoinNccl(options, rendezvous);
      (void)WriteAll(out[1], joined.ok() ? body(joined->get()) : std::string(joined.status().message()), "pipe");
      _exit(0);
    }
    close(out[1]);
    outputs.push_back(out[0]);
    pids.push_back(pid);
  }
  std::vector<std::string> results;
  for (int r = 0; r < ranks; ++r) {
    std::string text;
    char buffer[4096];
    ssize_t n;
    while ((n = read(outputs[size_t(r)], buffer, sizeof buffer)) > 0) text.append(buffer, size_t(n));
    int status = 0;
    waitpid(pids[size_t(r)], &status, 0);
    results.push_back(WIFSIGNALED(status) ? "killed" : text);
  }
  return results;
}

std::string SumsAndBroadcasts(Communicator* comm) {
  constexpr int64_t kCount = 1 << 20;
  std::vector<float> host(kCount, float(comm->rank() + 1));
  float* device = nullptr;
  cudaStream_t stream = nullptr;
  if (cudaMalloc(reinterpret_cast<void**>(&device), kCount * sizeof(float)) != cudaSuccess || cudaStreamCreate(&stream) != cudaSuccess) return "cuda";
  float expected = 0;
  for (int r = 0; r < comm->size(); ++r) expected += float(r + 1);
  // Enqueued, then recorded in a graph and replayed.
  cudaMemcpy(device, host.data(), kCount * sizeof(float), cudaMemcpyHostToDevice);
  if (const auto status = comm->AllReduceSum(device, kCount, stream); !status.ok()) return std::string(status.message());
  cudaStreamSynchronize(stream);
  cudaMemcpy(host.data(), device, kCount * sizeof(float), cudaMemcpyDeviceToHost);
  if (host.front() != expected || host.back() != expected) return "wrong sum";
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
  if (const auto status = comm->AllReduceSum(device, kCount, stream); !status.ok()) return std::string(status.message());
  if (cudaStreamEndCapture(stream, &graph) != cudaSuccess || cudaGraphInstantiate(&executable, graph, 0) != cudaSuccess) return "capture";
  cudaGraphLaunch(executable, stream);
  cudaStreamSynchronize(stream);
  cudaMemcpy(host.data(), device, sizeof(float), cudaMemcpyDeviceToHost);
  if (host.front() != expected * float(comm->size())) return "wrong sum of the replay";
  // Host memory, more than the staging buffer holds at a time.
  std::string data(size_t(40 << 20), comm->rank() == 0 ? 'x' : 'y');
  if (const auto status = comm->BroadcastHost(data.data(), int64_t(data.size()), 0); !status.ok()) return std::string(status.message());
  if (data != std::string(data.size(), 'x')) return "wrong bytes";
  if (const auto sum = SumOverRanks(comm, {1, 2}); !sum.ok() || sum->second != 2.0 * comm->size()) return "wrong sum on the host";
  if (!comm->Barrier().ok() || !comm->CheckAsync().ok() || !comm->WaitingIn().empty()) return "barrier";
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  return "";
}

TEST(Nccl, SumsBroadcastsAndIsCaptured) {
  const int gpus = Gpus();
  ASSERT_GE(gpus, 1) << "this test needs a GPU";
  for (const std::string& result : RunRanks(std::min(gpus, 2), SumsAndBroadcasts)) EXPECT_EQ(result, "");
}

TEST(Nccl, ALostPeerEndsAWaitOnTheHost) {
  if (Gpus() < 2) return;   // said by the name of the test before
  const auto results = RunRanks(2, [](Communicator* comm) {
    if (comm->rank() == 1) kill(getpid(), SIGKILL);
    const auto status = comm->Barrier();
    return v1::Reason_Name(ReasonOf(status));
  });
  EXPECT_EQ(results[0], "REASON_PEER_LOST");
}

TEST(Nccl, APeerThatNeverJoinsEndsTheWait) {
  const pid_t child = fork();
  if (child == 0) {
    CommunicatorOptions options;
    options.size = 2;
    options.join_timeout = std::chrono::seconds(3);
    const auto rendezvous = MakeNcclRendezvous();
    const auto joined = JoinNccl(options, rendezvous.ok() ? *rendezvous : "");
    const bool right = ReasonOf(joined.status()) == v1::REASON_PEER_LOST &&
                       std::string(joined.status().message()).find("within 3 s") != std::string::npos;
    if (!right) fprintf(stderr, "%s\n", std::string(joined.status().message()).c_str());
    _exit(right ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace hierad
