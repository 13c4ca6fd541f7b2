// Another program, started without a shell: by posix_spawn, so that it is safe in a process with threads and with gRPC
// (nothing of ours runs between fork and exec). Of our descriptors the child sees only those named here.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/fs.h"

namespace hierad {

struct SubprocessOptions {
  std::vector<std::string> argv;                   // argv[0]: the program's path (FindProgram looks one up)
  std::optional<std::vector<std::string>> env;     // "NAME=value"; none: ours
  std::string folder;                              // working folder; empty: ours
  // Descriptors of ours, which stay ours: the child has duplicates. -1: /dev/null.
  int stdin_fd = -1;
  int stdout_fd = 1;
  int stderr_fd = 2;
  std::optional<int> inherited_fd;                 // becomes descriptor kInheritedFd in the child
  bool own_group = true;                           // leads a new process group: KillGroup reaches its descendants,
                                                   // and the terminal's Ctrl-C does not reach it
};
inline constexpr int kInheritedFd = 3;

struct ExitStatus {
  int code = 0;     // exit code; meaningful with signal 0
  int signal = 0;   // that killed it, else 0
  bool ok() const { return code == 0 && signal == 0; }
  std::string Describe() const;   // "exit code 3", "killed by signal 9 (Killed)"
};

// A started child. Owned by one thread at a time. Destroyed while running: its group is killed and it is reaped.
class Subprocess {
 public:
  // NotFound, PermissionDenied, ... when the program cannot be executed: a started one did exec.
  static absl::StatusOr<Subprocess> Start(const SubprocessOptions& options);
  Subprocess(Subprocess&& other) noexcept;
  Subprocess& operator=(Subprocess&& other) noexcept;
  ~Subprocess();

  pid_t pid() const { return pid_; }               // stays the child's until Wait has returned its end
  // Reaps. DeadlineExceeded: still running after `timeout`. Once it has ended, the same answer again and again.
  absl::StatusOr<ExitStatus> Wait(std::chrono::nanoseconds timeout);
  absl::StatusOr<ExitStatus> Wait();               // for ever
  // Sends to the whole group (or, without own_group, to the process). An ended child is no error.
  void KillGroup(int signal);

 private:
  Subprocess(pid_t pid, UniqueFd pidfd, bool own_group) : pid_(pid), pidfd_(std::move(pidfd)), own_group_(own_group) {}
  bool Reap(int flags);
  void End();

  pid_t pid_ = -1;
  UniqueFd pidfd_;
  bool own_group_ = true;
  std::optional<ExitStatus> ended_;
};

struct CommandResult {
  ExitStatus exit;
  std::string out, err;      // what it wrote, each cut at max_bytes
  bool truncated = false;
};

// Runs to its end with stdout and stderr captured (`options`' are ignored). Past `timeout` the group is killed:
// DeadlineExceeded.
absl::StatusOr<CommandResult> RunCommand(SubprocessOptions options, std::chrono::nanoseconds timeout,
                                         size_t max_bytes = 1 << 20);

// Path of an executable: beside the running program, then in $PATH. A name with a slash stands for itself. NotFound
// says where it looked.
absl::StatusOr<std::string> FindProgram(const std::string& name);
// Folder of the running program.
absl::StatusOr<std::string> ProgramFolder();

}  // namespace hierad
