#include "worker/bench/ranks.h"

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <memory>
#include <string>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/fs.h"
#include "base/status.h"

namespace hierad {
namespace {

constexpr size_t kBlobBytes = 256;   // of a rendezvous on the pipe, so that each rank takes one whole

// The GPU of a rank, of those that this process may use.
std::string DeviceOf(int rank) {
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  if (visible == nullptr || *visible == '\0') return std::to_string(rank);
  const std::vector<std::string> devices = absl::StrSplit(visible, ',');
  return rank < int(devices.size()) ? devices[size_t(rank)] : "none";
}

absl::StatusOr<std::unique_ptr<Communicator>> Join(const BenchArguments& arguments, int rank, bool cuda, const int pipe_ends[2]) {
  CommunicatorOptions options;
  options.rank = rank;
  options.size = arguments.world;
  options.max_channels = arguments.channels;
  std::string blob;
  close(pipe_ends[rank == 0 ? 0 : 1]);   // so that who reads sees the end where rank 0 has ended
  if (rank == 0) {
    ASSIGN_OR_RETURN(blob, cuda ? MakeNcclRendezvous() : MakeSharedMemoryRendezvous(options, absl::StrCat("bench-", getppid()), int64_t{64} << 20));
    std::string padded = absl::StrCat(blob.size(), " ", blob);
    padded.resize(kBlobBytes);
    for (int other = 1; other < arguments.world; ++other) RETURN_IF_ERROR(WriteAll(pipe_ends[1], padded, "pipe"));
  } else {
    std::string padded(kBlobBytes, '\0');
    if (read(pipe_ends[0], padded.data(), kBlobBytes) != ssize_t(kBlobBytes)) return ErrorOf(v1::REASON_PEER_LOST, "rank 0 ended before it made a rendezvous");
    const size_t size = std::strtoul(padded.c_str(), nullptr, 10);
    blob = padded.substr(padded.find(' ') + 1, size);
  }
  return cuda ? JoinNccl(options, blob) : JoinCpu(options, blob);
}

absl::StatusOr<nlohmann::json> RunRank(const BenchArguments& arguments, int rank, const int pipe_ends[2]) {
  const bool wants_cuda = arguments.device != "cpu";
  if (wants_cuda) setenv("CUDA_VISIBLE_DEVICES", DeviceOf(rank).c_str(), 1);
  setenv("NCCL_GRAPH_REGISTER", "0", /*overwrite=*/0);   // as the worker has it
  const bool cuda = wants_cuda && CudaDeviceCount() > 0;
  if (arguments.device == "cuda" && !cuda) return ErrorOf(v1::REASON_USER_ERROR, absl::StrCat("there is no GPU for rank ", rank, " of --world ", arguments.world));
  ASSIGN_OR_RETURN(const std::unique_ptr<Communicator> communicator, Join(arguments, rank, cuda, pipe_ends));
  ASSIGN_OR_RETURN(nlohmann::json json, Bench(arguments, cuda, communicator.get()));
  RETURN_IF_ERROR(communicator->Barrier());   // none goes while another still talks to it
  return json;
}

std::string ReadToEnd(int fd) {
  std::string text;
  char buffer[65536];
  ssize_t n;
  while ((n = read(fd, buffer, sizeof buffer)) > 0) text.append(buffer, size_t(n));
  return text;
}

}  // namespace

absl::StatusOr<nlohmann::json> JoinRanks(const std::vector<std::string>& texts) {
  std::vector<nlohmann::json> ranks;
  for (size_t r = 0; r < texts.size(); ++r) {
    nlohmann::json json = nlohmann::json::parse(texts[r], nullptr, /*allow_exceptions=*/false);
    if (json.is_discarded()) return ErrorOf(v1::REASON_PEER_LOST, absl::StrCat("rank ", r, ": ", texts[r].empty() ? "ended without a word" : texts[r]));
    ranks.push_back(std::move(json));
  }
  nlohmann::json all = ranks[0];
  nlohmann::json& difference = all["weight_difference"];
  bool same = true;
  for (const nlohmann::json& rank : ranks) {
    for (const char* key : {"full_step_median_ms", "communication_median_ms", "backward_median_ms"}) all["ranks"][key].push_back(rank[key]);
    // "NaN" stays: it is no difference of 0.
    if (const nlohmann::json& own = rank["weight_difference"]; !own.is_number() || (difference.is_number() && own > difference)) difference = own;
    same = same && rank["parameter_hash"] == all["parameter_hash"];
    all["full_step_median_ms"] = std::max(all["full_step_median_ms"].get<double>(), rank["full_step_median_ms"].get<double>());
  }
  all["hashes_equal"] = same;
  return all;
}

absl::StatusOr<nlohmann::json> BenchRanks(const BenchArguments& arguments) {
  int blob[2];
  if (pipe(blob) != 0) return ErrorOf(v1::REASON_INTERNAL, "cannot make a pipe");
  std::vector<int> outputs;
  std::vector<pid_t> pids;
  for (int r = 0; r < arguments.world; ++r) {
    int out[2];
    if (pipe(out) != 0) return ErrorOf(v1::REASON_INTERNAL, "cannot make a pipe");
    const pid_t pid = fork();
    if (pid < 0) return ErrorOf(v1::REASON_INTERNAL, "cannot start a rank");
    if (pid == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      close(out[0]);
      const auto json = RunRank(arguments, r, blob);
      (void)WriteAll(out[1], json.ok() ? json->dump() : std::string(json.status().message()), "pipe");
      _exit(json.ok() ? 0 : 1);
    }
    close(out[1]);
    outputs.push_back(out[0]);
    pids.push_back(pid);
  }
  close(blob[0]), close(blob[1]);
  std::vector<std::string> texts;
  for (int r = 0; r < arguments.world; ++r) {
    texts.push_back(ReadToEnd(outputs[size_t(r)]));
    close(outputs[size_t(r)]);
    waitpid(pids[size_t(r)], nullptr, 0);
  }
  return JoinRanks(texts);
}

}  // namespace hierad
