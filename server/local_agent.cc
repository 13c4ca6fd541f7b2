#include "server/local_agent.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/fs.h"
#include "base/status.h"
#include "server/state_folder.h"

extern char** environ;

namespace hierad {
namespace {

constexpr std::chrono::milliseconds kLookEvery{500};
constexpr std::chrono::milliseconds kBackoffLeast{500}, kBackoffMost{10000};
constexpr std::chrono::seconds kGoodRun{60};          // after which the back-off begins anew
constexpr int64_t kAgentLogBytes = 16 << 20;          // then the log is moved aside, at a start

bool IsAgent(int pid) {
  auto name = ReadFile(absl::StrCat("/proc/", pid, "/comm"), 64);
  return name.ok() && name->rfind("hierad-agent", 0) == 0;
}

}  // namespace

LocalAgent::LocalAgent(LocalAgentOptions options, const Clock* clock)
    : options_(std::move(options)), clock_(clock), lock_path_(JoinPath(options_.state_folder, "agent.lock")) {}

LocalAgent::~LocalAgent() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    wake_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

absl::Status LocalAgent::Start() {
  if (access(options_.program.c_str(), X_OK) != 0) {
    return absl::NotFoundError(absl::StrCat("agent: \"", options_.program, "\" is not there; install hierad-agent beside hierad, or start with --agent none"));
  }
  RETURN_IF_ERROR(MakeFolders(options_.state_folder, 0700));
  thread_ = std::thread([this] { Watch(); });
  return absl::OkStatus();
}

void LocalAgent::Watch() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    LookAfter();
    wake_.wait_for(lock, kLookEvery, [this] { return stopping_; });
  }
}

bool LocalAgent::ChildLives() {
  if (child_ == 0) return false;
  int status = 0;
  if (waitpid(child_, &status, WNOHANG) == 0) return true;
  spdlog::log(stopping_ ? spdlog::level::info : spdlog::level::warn, "the local agent (process {}) has ended: {}", child_,
               WIFSIGNALED(status) ? absl::StrCat("signal ", WTERMSIG(status)) : absl::StrCat("exit code ", WEXITSTATUS(status), "; see ", options_.state_folder, "/agent.log"));
  child_ = 0;
  if (clock_->Monotonic() - started_at_ > kGoodRun) backoff_ = kBackoffLeast;
  next_start_ = clock_->Monotonic() + backoff_;
  backoff_ = std::min(backoff_ * 2, kBackoffMost);
  return false;
}

void LocalAgent::LookAfter() {
  if (ChildLives() || IsLocked(lock_path_) || clock_->Monotonic() < next_start_) return;
  if (absl::Status started = Spawn(); !started.ok()) {
    spdlog::error("cannot start the local agent: {}", std::string(started.message()));
    next_start_ = clock_->Monotonic() + kBackoffMost;
  }
}

absl::Status LocalAgent::Spawn() {
  const std::string log = JoinPath(options_.state_folder, "agent.log");
  struct stat info;
  if (stat(log.c_str(), &info) == 0 && info.st_size > kAgentLogBytes) rename(log.c_str(), absl::StrCat(log, ".1").c_str());
  std::vector<std::string> words = {options_.program, "--server", options_.endpoint, "--state", options_.state_folder, "--lifetime", options_.lifetime};
  if (options_.cpu_slots >= 0) {
    words.push_back("--cpu-slots");
    words.push_back(absl::StrCat(options_.cpu_slots));
  }
  if (!options_.worker_user.empty()) {
    words.push_back("--worker-user");
    words.push_back(options_.worker_user);
  }
  if (!options_.root_ranks.empty()) {
    words.push_back("--root-ranks");
    words.push_back(options_.root_ranks);
  }
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);

  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&actions, 1, log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
  posix_spawn_file_actions_adddup2(&actions, 1, 2);
  posix_spawn_file_actions_addclosefrom_np(&actions, 3);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t none, all;
  sigemptyset(&none);
  sigfillset(&all);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setsigdefault(&attributes, &all);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  pid_t pid = 0;
  const int error = posix_spawn(&pid, options_.program.c_str(), &actions, &attributes, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  posix_spawnattr_destroy(&attributes);
  if (error != 0) return ErrnoStatus(error, "cannot run", options_.program);
  child_ = pid;
  started_at_ = clock_->Monotonic();
  spdlog::info("started the local agent, process {}", pid);
  return absl::OkStatus();
}

void LocalAgent::End(std::chrono::milliseconds most) {
  std::unique_lock lock(mutex_);
  stopping_ = true;
  wake_.notify_all();
  const int pid = ChildLives() ? child_ : IsLocked(lock_path_) ? LockOwner(lock_path_) : 0;
  if (pid == 0 || (pid != child_ && !IsAgent(pid))) return;
  spdlog::info("ending the local agent, process {}, and its workers", pid);
  kill(pid, SIGTERM);
  const std::chrono::nanoseconds until = clock_->Monotonic() + most;
  while ((child_ != 0 ? ChildLives() : IsLocked(lock_path_)) && clock_->Monotonic() < until) {
    wake_.wait_for(lock, std::chrono::milliseconds(50));
  }
}

}  // namespace hierad
