// For tests: the ranks of one attempt as real processes, forked before any thread exists, joined by shared memory or TCP.
#pragma once

#include <csignal>
#include <cstring>
#include <functional>
#include <string>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include "base/fs.h"
#include "worker/comm/communicator.h"

namespace hierad {

class ForkedRanks {
 public:
  using Body = std::function<std::string(Communicator*)>;
  struct Outcome {
    bool exited = false;       // by itself
    std::string output;        // what the body returned, or the error of joining
  };

  // Runs `body` in each of `ranks` processes. `max_bytes`: of shared memory; kTcp: they join over the loopback.
  static constexpr int64_t kTcp = -1;
  ForkedRanks(int ranks, CommunicatorOptions options, int64_t max_bytes, const Body& body) {
    options.size = ranks;
    int blob[2];
    if (pipe(blob) != 0) abort();
    for (int r = 0; r < ranks; ++r) {
      int out[2];
      if (pipe(out) != 0) abort();
      const pid_t pid = fork();
      if (pid == 0) {
        options.rank = r;
        const std::string output = Run(options, max_bytes, body, blob);
        _exit(WriteAll(out[1], output, "pipe").ok() ? 0 : 1);
      }
      close(out[1]);
      outputs_.push_back(out[0]);
      pids_.push_back(pid);
    }
    close(blob[0]);
    close(blob[1]);
  }
  ~ForkedRanks() {
    for (size_t r = 0; r < pids_.size(); ++r) {
      if (pids_[r] > 0) {
        kill(pids_[r], SIGKILL);
        waitpid(pids_[r], nullptr, 0);
      }
      close(outputs_[r]);
    }
  }

  pid_t pid(int rank) const { return pids_[size_t(rank)]; }

  Outcome Wait(int rank) {
    Outcome outcome;
    char buffer[4096];
    ssize_t n;
    while ((n = read(outputs_[size_t(rank)], buffer, sizeof buffer)) > 0) outcome.output.append(buffer, size_t(n));
    int status = 0;
    waitpid(pids_[size_t(rank)], &status, 0);
    pids_[size_t(rank)] = -1;
    outcome.exited = WIFEXITED(status) && WEXITSTATUS(status) == 0;
    return outcome;
  }

 private:
  static std::string Run(const CommunicatorOptions& options, int64_t max_bytes, const Body& body, const int blob[2]) {
    char text[256] = {};   // of fixed size, so that each rank takes one
    if (options.rank == 0) {
      const auto made = max_bytes == kTcp ? MakeTcpRendezvous("127.0.0.1") : MakeSharedMemoryRendezvous(options, "test", max_bytes);
      if (!made.ok()) return std::string(made.status().message());
      std::memcpy(text, made->data(), made->size());
      for (int r = 1; r < options.size; ++r) {
        if (write(blob[1], text, sizeof text) != ssize_t(sizeof text)) return "pipe";
      }
    } else if (read(blob[0], text, sizeof text) != ssize_t(sizeof text)) {
      return "pipe";
    }
    auto communicator = JoinCpu(options, text);
    if (!communicator.ok()) return "join: " + std::string(communicator.status().message());
    return body(communicator->get());
  }

  std::vector<pid_t> pids_;
  std::vector<int> outputs_;
};

}  // namespace hierad
