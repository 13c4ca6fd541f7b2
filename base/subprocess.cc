#include "base/subprocess.h"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/status.h"

extern char** environ;

namespace hierad {
namespace {

// Above every number the child uses, so that no dup2 in the child overwrites a source it still needs.
constexpr int kFirstSourceFd = 16;

std::vector<char*> Pointers(const std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  for (const std::string& s : strings) pointers.push_back(const_cast<char*>(s.c_str()));
  pointers.push_back(nullptr);
  return pointers;
}

struct Actions {
  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
  Actions() {
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawnattr_init(&attributes);
  }
  ~Actions() {
    ::posix_spawn_file_actions_destroy(&actions);
    ::posix_spawnattr_destroy(&attributes);
  }
};

// `moved` keeps the duplicates open until the child has been started.
absl::Status AddDescriptors(const SubprocessOptions& options, Actions* a, std::vector<UniqueFd>* moved) {
  std::vector<int> sources = {options.stdin_fd, options.stdout_fd, options.stderr_fd};
  if (options.inherited_fd) sources.push_back(*options.inherited_fd);
  UniqueFd null(::open("/dev/null", O_RDWR | O_CLOEXEC));
  for (size_t target = 0; target < sources.size(); ++target) {
    const int fd = sources[target] >= 0 ? sources[target] : null.get();
    UniqueFd source(::fcntl(fd, F_DUPFD_CLOEXEC, kFirstSourceFd));
    if (!source) return ErrnoStatus(errno, "cannot hand a descriptor to", options.argv[0]);
    ::posix_spawn_file_actions_adddup2(&a->actions, source.get(), int(target));
    moved->push_back(std::move(source));
  }
  ::posix_spawn_file_actions_addclosefrom_np(&a->actions, int(sources.size()));
  return absl::OkStatus();
}

void SetAttributes(bool own_group, Actions* a) {
  sigset_t all, none;
  ::sigfillset(&all);
  ::sigemptyset(&none);
  // Ignored or blocked signals of ours are not the child's: it must die of SIGTERM and SIGPIPE as anyone does.
  ::posix_spawnattr_setsigdefault(&a->attributes, &all);
  ::posix_spawnattr_setsigmask(&a->attributes, &none);
  ::posix_spawnattr_setpgroup(&a->attributes, 0);
  ::posix_spawnattr_setflags(&a->attributes, short(POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETSIGMASK |
                                                   (own_group ? POSIX_SPAWN_SETPGROUP : 0)));
}

}  // namespace

std::string ExitStatus::Describe() const {
  if (signal == 0) return "exit code " + std::to_string(code);
  const char* name = ::sigdescr_np(signal);
  return "killed by signal " + std::to_string(signal) + (name ? " (" + std::string(name) + ")" : "");
}

absl::StatusOr<Subprocess> Subprocess::Start(const SubprocessOptions& options) {
  if (options.argv.empty() || options.argv[0].empty()) return absl::InvalidArgumentError("no program to start");
  for (const std::string& argument : options.argv) {
    if (argument.find('\0') != std::string::npos) {
      return absl::InvalidArgumentError("an argument of " + Printable(options.argv[0]) + " has a NUL byte in it");
    }
  }
  Actions a;
  std::vector<UniqueFd> moved;
  RETURN_IF_ERROR(AddDescriptors(options, &a, &moved));
  if (!options.folder.empty()) ::posix_spawn_file_actions_addchdir_np(&a.actions, options.folder.c_str());
  SetAttributes(options.own_group, &a);
  const std::vector<char*> argv = Pointers(options.argv);
  const std::vector<char*> env = options.env ? Pointers(*options.env) : std::vector<char*>();
  pid_t pid = -1;
  const int error = ::posix_spawn(&pid, options.argv[0].c_str(), &a.actions, &a.attributes, argv.data(),
                                  options.env ? env.data() : environ);
  if (error != 0) {
    if (!options.folder.empty() && !Exists(options.folder)) return ErrnoStatus(error, "cannot enter", options.folder);
    return ErrnoStatus(error, "cannot start", options.argv[0]);
  }
  return Subprocess(pid, UniqueFd(int(::syscall(SYS_pidfd_open, pid, 0))), options.own_group);
}

Subprocess::Subprocess(Subprocess&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)), pidfd_(std::move(other.pidfd_)), own_group_(other.own_group_),
      ended_(std::move(other.ended_)) {}

Subprocess& Subprocess::operator=(Subprocess&& other) noexcept {
  if (this != &other) {
    End();
    pid_ = std::exchange(other.pid_, -1);
    pidfd_ = std::move(other.pidfd_);
    own_group_ = other.own_group_;
    ended_ = std::move(other.ended_);
  }
  return *this;
}

Subprocess::~Subprocess() { End(); }

void Subprocess::End() {
  if (pid_ < 0 || ended_) return;
  KillGroup(SIGKILL);
  Reap(0);
}

bool Subprocess::Reap(int flags) {
  if (ended_) return true;
  int status = 0;
  pid_t got;
  do got = ::waitpid(pid_, &status, flags);
  while (got < 0 && errno == EINTR);
  if (got == 0) return false;
  ExitStatus end;
  if (got < 0) end.code = 255;   // reaped behind our back (SIGCHLD ignored): it is gone, its code is not known
  else if (WIFSIGNALED(status)) end.signal = WTERMSIG(status);
  else end.code = WEXITSTATUS(status);
  ended_ = end;
  return true;
}

absl::StatusOr<ExitStatus> Subprocess::Wait(std::chrono::nanoseconds timeout) {
  const auto deadline = Clock::System().Monotonic() + timeout;
  while (!Reap(WNOHANG)) {
    const auto left = deadline - Clock::System().Monotonic();
    if (left.count() <= 0) {
      return absl::DeadlineExceededError("process " + std::to_string(pid_) + " is still running");
    }
    auto wait_ms = std::chrono::ceil<std::chrono::milliseconds>(left).count();
    wait_ms = std::min<int64_t>(wait_ms, pidfd_ ? 60'000 : 20);   // without pidfd (Linux < 5.3): ask now and then
    pollfd ended{pidfd_.get(), POLLIN, 0};
    ::poll(&ended, 1, int(wait_ms));
  }
  return *ended_;
}

absl::StatusOr<ExitStatus> Subprocess::Wait() {
  Reap(0);
  return *ended_;
}

void Subprocess::KillGroup(int signal) {
  // After the leader is reaped its number may be another's: the group is then left alone.
  if (pid_ <= 0 || ended_) return;
  ::kill(own_group_ ? -pid_ : pid_, signal);
}

namespace {

struct Pipe {
  UniqueFd read, write;
};

absl::StatusOr<Pipe> MakePipe() {
  int fds[2];
  if (::pipe2(fds, O_CLOEXEC) != 0) return ErrnoStatus(errno, "cannot open", "a pipe");
  return Pipe{UniqueFd(fds[0]), UniqueFd(fds[1])};
}

// Reads what is there; closes at the end of the stream.
void Drain(UniqueFd* fd, std::string* text, size_t max_bytes, bool* truncated) {
  char buffer[16 << 10];
  const ssize_t n = ::read(fd->get(), buffer, sizeof buffer);
  if (n < 0 && (errno == EINTR || errno == EAGAIN)) return;
  if (n <= 0) return fd->reset();
  const size_t take = std::min(size_t(n), max_bytes - text->size());
  text->append(buffer, take);
  if (take < size_t(n)) *truncated = true;
}

}  // namespace

absl::StatusOr<CommandResult> RunCommand(SubprocessOptions options, std::chrono::nanoseconds timeout,
                                         size_t max_bytes) {
  const auto deadline = Clock::System().Monotonic() + timeout;
  ASSIGN_OR_RETURN(Pipe out, MakePipe());
  ASSIGN_OR_RETURN(Pipe err, MakePipe());
  options.stdout_fd = out.write.get();
  options.stderr_fd = err.write.get();
  ASSIGN_OR_RETURN(Subprocess child, Subprocess::Start(options));
  out.write.reset();
  err.write.reset();
  CommandResult result;
  while (out.read || err.read) {
    const auto left = deadline - Clock::System().Monotonic();
    if (left.count() <= 0) {
      return absl::DeadlineExceededError(Printable(options.argv[0]) + " did not end within " +
                                         std::to_string(std::chrono::ceil<std::chrono::seconds>(timeout).count()) +
                                         " s and was killed");
    }
    pollfd ready[2] = {{out.read.get(), POLLIN, 0}, {err.read.get(), POLLIN, 0}};
    ::poll(ready, 2, int(std::min<int64_t>(std::chrono::ceil<std::chrono::milliseconds>(left).count(), 60'000)));
    if (ready[0].revents) Drain(&out.read, &result.out, max_bytes, &result.truncated);
    if (ready[1].revents) Drain(&err.read, &result.err, max_bytes, &result.truncated);
  }
  ASSIGN_OR_RETURN(result.exit, child.Wait(std::max(deadline - Clock::System().Monotonic(),
                                                    std::chrono::nanoseconds(std::chrono::seconds(1)))));
  return result;
}

absl::StatusOr<std::string> ProgramFolder() {
  char path[4096];
  const ssize_t n = ::readlink("/proc/self/exe", path, sizeof path);
  if (n <= 0) return ErrnoStatus(errno, "cannot read", "/proc/self/exe");
  return FolderOf(std::string_view(path, size_t(n)));
}

absl::StatusOr<std::string> FindProgram(const std::string& name) {
  const auto is_program = [](const std::string& path) {
    struct stat info;
    return ::stat(path.c_str(), &info) == 0 && S_ISREG(info.st_mode) && ::access(path.c_str(), X_OK) == 0;
  };
  if (name.find('/') != std::string::npos) {
    if (is_program(name)) return name;
    return absl::NotFoundError("\"" + Printable(name) + "\" is not an executable file");
  }
  std::string beside;
  if (const auto folder = ProgramFolder(); folder.ok()) {
    beside = JoinPath(*folder, name);
    if (is_program(beside)) return beside;
  }
  const char* path = std::getenv("PATH");
  for (const std::string& folder : Split(path ? path : "/usr/local/bin:/usr/bin:/bin", ':')) {
    const std::string candidate = JoinPath(folder.empty() ? "." : folder, name);
    if (is_program(candidate)) return candidate;
  }
  return absl::NotFoundError(name + " is neither at " + Printable(beside) + " nor in $PATH");
}

}  // namespace hierad
