#include "server/agent/keeper.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <optional>
#include <string>
#include <system_error>

#include "base/attempt_log.h"
#include "base/clock.h"
#include "base/failpoint.h"
#include "base/fs.h"
#include "base/fs_descriptor.h"
#include "base/limits.h"
#include "base/output_folder.h"
#include "base/status.h"
#include "hierad/v1/agent.pb.h"
#include "base/account.h"
#include "server/agent/cgroup.h"
#include "server/agent/exit_record.h"
#include "server/agent/process_tree.h"
#include "server/agent/rank_name.h"

namespace hierad {
namespace {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;

constexpr milliseconds kTick{1000};
constexpr int kNotStarted = 127;   // exit code of a worker that could not be started, as a shell has it

std::string ErrnoText(int error) { return std::generic_category().message(error); }

class Keeper {
 public:
  struct Options {
    std::string name, worker, account, cgroup_home;
    int64_t memory_max = 0;
    int64_t log_bytes = 0;   // of rank-N.log, then it is emptied
  };
  explicit Keeper(Options options) : options_(std::move(options)), name_(options_.name), worker_(options_.worker) {}
  int Run();

 private:
  absl::Status Prepare();
  absl::Status Listen();
  absl::Status OpenLog();
  absl::Status StartWorker();
  [[noreturn]] void BecomeWorker(pid_t keeper, int report);
  void Serve(int signals);
  void ReadControl();
  void Accept();
  void OnTick();
  bool RotateLog();
  absl::Status BeginLog(bool continued);
  bool Reap();
  void KillTree();
  void RecordEnd();
  void RecordFailure(const absl::Status& status);
  void Publish();
  void Send();
  std::string RanksPath(const char* suffix) const {
    return "/proc/self/fd/" + std::to_string(kKeeperRanksFd) + "/" + name_ + suffix;
  }
  static nanoseconds Now() { return Clock::System().Monotonic(); }

  const Options options_;
  const std::string name_, worker_;
  std::optional<Account> account_;     // none: the keeper's own
  std::optional<RankCgroup> cgroup_;   // none: the agent has no control groups to give
  v1::Assignment assignment_;
  v1::RankProcess process_;
  UniqueFd control_{kKeeperControlFd}, listener_, folder_, log_;   // folder_: the run's, by which alone it is reached
  int64_t log_start_ = 0;
  OomWatch oom_;
  nanoseconds next_sample_{0};
  pid_t pid_ = -1;
  std::optional<int> wait_status_;
  std::optional<nanoseconds> kill_at_;
  bool leaving_ = false;      // the agent said goodbye
  bool agent_lost_ = false;
  bool ordered_ = false;      // the end was asked for
};

int Keeper::Run() {
  // In the keeper these are the agent's business; the child gets the defaults back.
  for (const int signal_number : {SIGPIPE, SIGTERM, SIGINT, SIGHUP}) signal(signal_number, SIG_IGN);
  sigset_t children;
  sigemptyset(&children);
  sigaddset(&children, SIGCHLD);
  sigprocmask(SIG_SETMASK, &children, nullptr);
  const UniqueFd signals(signalfd(-1, &children, SFD_CLOEXEC | SFD_NONBLOCK));
  prctl(PR_SET_CHILD_SUBREAPER, 1);

  (void)Failpoint("keeper.begin");
  absl::Status status = Prepare();
  if (status.ok()) status = StartWorker();
  if (!status.ok()) {
    KillTree();
    RecordFailure(status);
    Publish();
    return 1;
  }
  (void)Failpoint("keeper.started");
  Send();
  Serve(signals.get());
  (void)Failpoint("keeper.ended");
  KillTree();
  RecordEnd();
  (void)Failpoint("keeper.record");
  Publish();
  return 0;
}

absl::Status Keeper::Prepare() {
  std::string bytes;
  char buffer[65536];
  for (ssize_t n; (n = pread(kKeeperAssignmentFd, buffer, sizeof buffer, off_t(bytes.size()))) > 0;) {
    bytes.append(buffer, size_t(n));
  }
  if (!assignment_.ParseFromString(bytes)) {
    return ErrorOf(v1::REASON_INTERNAL, "the rank's keeper got no readable Assignment from its agent");
  }
  process_.set_job_id(assignment_.job_id());
  process_.set_attempt(assignment_.attempt());
  process_.set_rank(assignment_.rank());
  process_.set_slot_id(assignment_.slot().id());
  RETURN_IF_ERROR(Listen());
  if (!options_.account.empty()) {
    ASSIGN_OR_RETURN(account_, FindAccount(options_.account));   // the keeper stays what it is, to be able to end the worker
  }
  if (!options_.cgroup_home.empty()) {
    const char* mark = std::getenv(kRankVariable);
    ASSIGN_OR_RETURN(cgroup_, RankCgroup::Make(options_.cgroup_home, mark == nullptr ? name_ : mark, options_.memory_max));
  }
  return OpenLog();
}

absl::Status Keeper::Listen() {
  const std::string path = RanksPath(".sock");
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path) {
    return ErrorOf(v1::REASON_INTERNAL, "the rank's name \"" + name_ + "\" is too long for a socket");
  }
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  unlink(path.c_str());
  listener_ = UniqueFd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!listener_ || bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0 ||
      listen(listener_.get(), 4) != 0) {
    return ErrorOf(v1::REASON_INTERNAL, "cannot listen at " + name_ + ".sock in the agent's state folder: " +
                                            ErrnoText(errno));
  }
  chmod(path.c_str(), 0600);
  return absl::OkStatus();
}

absl::Status Keeper::OpenLog() {
  const std::string& folder = assignment_.run_folder();
  const auto& roots = assignment_.allowed_roots();
  auto made = MakeOutputFolder({folder, !assignment_.spec().output().folder().empty(), {roots.begin(), roots.end()}}, account_);
  if (!made.ok()) {
    return ErrorOf(v1::REASON_USER_ERROR,
                   "output.folder: cannot make the run's folder: " + std::string(made.status().message()));
  }
  folder_ = *std::move(made);
  const FilesAs rights(account_);
  RETURN_IF_ERROR(rights.status());
  auto log = OpenRegularIn(folder_.get(), RankLogName(assignment_.rank()), O_RDWR | O_CREAT | O_APPEND, 0644,
                           RankLogPath(folder, assignment_.rank()));
  if (!log.ok()) return ErrorOf(v1::REASON_USER_ERROR, "output.folder: cannot write the log: " + std::string(log.status().message()));
  log_ = *std::move(log);
  struct stat info {};
  // Too large to copy, and no hole: as an agent with another limit may have left it. Nobody has it open but us.
  if (fstat(log_.get(), &info) == 0 && info.st_size > limits::kLogReadBytes && info.st_blocks * 512 >= info.st_size) {
    const std::string name = RankLogName(assignment_.rank());
    if (renameat(folder_.get(), name.c_str(), folder_.get(), (name + ".1").c_str()) == 0) {
      ASSIGN_OR_RETURN(log_, OpenRegularIn(folder_.get(), name, O_RDWR | O_CREAT | O_APPEND, 0644, RankLogPath(folder, assignment_.rank())));
    }
  }
  RotateLog();
  return BeginLog(false);
}

absl::Status Keeper::BeginLog(bool continued) {
  RETURN_IF_ERROR(WriteAll(log_.get(), AttemptLineText(assignment_.job_id(), assignment_.attempt(), assignment_.rank(), assignment_.slot().id(),
                                                       Clock::System().UnixMs(), continued) + "\n", "the log"));
  struct stat info {};
  fstat(log_.get(), &info);
  log_start_ = info.st_size;
  return absl::OkStatus();
}

absl::Status Keeper::StartWorker() {
  int report[2];
  if (pipe2(report, O_CLOEXEC) != 0) {
    return ErrorOf(v1::REASON_INTERNAL, "cannot start the worker: " + ErrnoText(errno));
  }
  const pid_t keeper = getpid();
  pid_ = fork();
  if (pid_ == 0) BecomeWorker(keeper, report[1]);
  close(report[1]);
  const UniqueFd reading(report[0]);
  if (pid_ < 0) return ErrorOf(v1::REASON_INTERNAL, "cannot start the worker: " + ErrnoText(errno));
  // The pipe closes with exec; before that it brings what failed.
  int error = 0;
  if (read(reading.get(), &error, sizeof error) == sizeof error && error < 0) {
    return ErrorOf(v1::REASON_INTERNAL, "cannot start the worker with the rights of " + (account_ ? account_->name : "its agent") + ": " +
                                            ErrnoText(-error));
  }
  if (error != 0) {
    return ErrorOf(v1::REASON_INTERNAL, "cannot run the worker \"" + worker_ + "\": " + ErrnoText(error) +
                                            "; install it there or name another by hierad-agent --worker");
  }
  process_.set_pid(pid_);
  return absl::OkStatus();
}

void Keeper::BecomeWorker(pid_t keeper, int report) {
  const auto fail = [report](int error) {
    const ssize_t ignored = write(report, &error, sizeof error);
    (void)ignored;
    _exit(kNotStarted);
  };
  setsid();
  for (const int signal_number : {SIGPIPE, SIGTERM, SIGINT, SIGHUP}) signal(signal_number, SIG_DFL);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  const int null = open("/dev/null", O_RDWR);
  if (null < 0 || dup2(null, 0) < 0 || dup2(log_.get(), 1) < 0 || dup2(log_.get(), 2) < 0) fail(errno);
  // Through /proc: a file offset of its own, at 0.
  const int assignment = open(("/proc/self/fd/" + std::to_string(kKeeperAssignmentFd)).c_str(), O_RDONLY);
  if (assignment < 0 || dup2(assignment, kWorkerAssignmentFd) < 0) fail(errno);
  if (cgroup_) {
    if (const int error = cgroup_->Enter(0); error != 0) fail(-error);
  }
  if (const int error = DropPrivileges(account_); error != 0) fail(-error);
  prctl(PR_SET_PDEATHSIG, SIGKILL);   // after the account: taking one clears it
  if (getppid() != keeper) _exit(kNotStarted);   // it died before the line above
  if (fchdir(folder_.get()) != 0) fail(errno);
  if (null > kWorkerAssignmentFd) close(null);
  if (assignment > kWorkerAssignmentFd) close(assignment);
  const std::string descriptor = std::to_string(kWorkerAssignmentFd);
  const char* arguments[] = {worker_.c_str(), "run", "--assignment-fd", descriptor.c_str(), nullptr};
  execv(worker_.c_str(), const_cast<char**>(arguments));
  fail(errno);
  _exit(kNotStarted);
}

void Keeper::Serve(int signals) {
  while (!wait_status_ && !agent_lost_) {
    nanoseconds wait = kTick;
    if (kill_at_) wait = std::clamp<nanoseconds>(*kill_at_ - Now(), nanoseconds{0}, kTick);
    pollfd fds[] = {{signals, POLLIN, 0}, {control_.get(), POLLIN, 0}, {control_ ? -1 : listener_.get(), POLLIN, 0}};
    poll(fds, 3, int(std::chrono::ceil<milliseconds>(wait).count()));
    signalfd_siginfo info;
    while (read(signals, &info, sizeof info) == sizeof info) {
    }
    Reap();
    if (fds[1].revents != 0) ReadControl();
    if (fds[2].revents != 0) Accept();
    OnTick();
  }
}

void Keeper::ReadControl() {
  char buffer[256];
  const ssize_t n = recv(control_.get(), buffer, sizeof buffer, MSG_DONTWAIT);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (n <= 0) {
    control_.reset();
    agent_lost_ = !leaving_;
    return;
  }
  const std::string message(buffer, size_t(n));
  if (message == "goodbye") {
    leaving_ = true;
  } else if (message == "kill") {
    ordered_ = true;
    kill_at_ = Now();
  } else if (message.rfind("term ", 0) == 0) {
    ordered_ = true;
    const nanoseconds at = Now() + milliseconds(std::max(0L, std::atol(message.c_str() + 5)));
    kill_at_ = kill_at_ ? std::min(*kill_at_, at) : at;
    if (!wait_status_) kill(-pid_, SIGTERM);
  }
}

void Keeper::Accept() {
  control_ = UniqueFd(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!control_) return;
  leaving_ = false;
  Send();
}

void Keeper::OnTick() {
  if (Now() >= next_sample_) {
    next_sample_ = Now() + kTick;
    oom_.Sample();
    if (RotateLog()) (void)BeginLog(true);
  }
  if (kill_at_ && Now() >= *kill_at_ && !wait_status_) {
    KillTree();
    return;
  }
  // Alone, and the state folder was removed: no agent can ever come back for this rank.
  if (!control_ && access(RanksPath(".sock").c_str(), F_OK) != 0) agent_lost_ = true;
}

// The worker's descriptor cannot be exchanged: the file is copied away and emptied (it is written by appending). True: it was.
bool Keeper::RotateLog() {
  struct stat info {};
  if (fstat(log_.get(), &info) != 0 || info.st_size <= options_.log_bytes) return false;
  const FilesAs rights(account_);
  const std::string name = RankLogName(assignment_.rank()) + ".1";
  if (info.st_size > limits::kLogReadBytes || !rights.status().ok()) {
    // Made large by a hole: there is nothing in it that is worth the disk and the time.
    const bool emptied = ftruncate(log_.get(), 0) == 0;
    (void)WriteAll(log_.get(), "this log had " + std::to_string(info.st_size) + " bytes, more than is copied to " + name +
                             "; it was emptied\n", name);
    return emptied;
  }
  // A new file: what else has that name, a pipe say, is not opened.
  unlinkat(folder_.get(), name.c_str(), 0);
  const UniqueFd old(openat(folder_.get(), name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
  char buffer[65536];
  off_t at = 0;
  for (ssize_t n; old && at < limits::kLogReadBytes && (n = pread(log_.get(), buffer, sizeof buffer, at)) > 0; at += n) {
    if (!WriteAll(old.get(), std::string_view(buffer, size_t(n)), name).ok()) break;
  }
  return ftruncate(log_.get(), 0) == 0;
}

// Collects ended children; false when there are no children left.
bool Keeper::Reap() {
  int status = 0;
  pid_t pid = 0;
  while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
    if (pid == pid_) wait_status_ = status;
  }
  return pid == 0 || errno != ECHILD;
}

void Keeper::KillTree() {
  // As subreaper, no child left means no descendant left. A process in an uninterruptible wait holds this up: rightly,
  // its memory and its GPU are still in use.
  if (cgroup_) cgroup_->Kill();
  for (int wait_ms = 1; Reap(); wait_ms = std::min(wait_ms * 2, 200)) {
    FreezeAndKill([] { return Descendants(getpid()); });
    if (!Reap()) return;
    poll(nullptr, 0, wait_ms);
  }
}

void Keeper::RecordEnd() {
  oom_.Sample();
  const int status = wait_status_.value_or(SIGKILL);
  process_.set_ended(true);
  if (WIFSIGNALED(status)) {
    process_.set_signal(WTERMSIG(status));
  } else {
    process_.set_exit_code(WEXITSTATUS(status));
  }
  const std::optional<int64_t> counted = cgroup_ ? cgroup_->OomKills() : std::nullopt;
  process_.set_reason(agent_lost_ && WIFSIGNALED(status) ? v1::REASON_NODE_LOST
                                                         : ClassifyExit(status, ordered_, counted ? *counted > 0 : oom_.KilledRecently()));
  process_.set_last_words(LastWords(log_.get(), log_start_));
}

void Keeper::RecordFailure(const absl::Status& status) {
  process_.set_ended(true);
  process_.set_exit_code(kNotStarted);
  process_.set_reason(ReasonOf(status));
  process_.set_last_words(ValidUtf8(std::string(status.message())));
  if (log_) (void)WriteAll(log_.get(), process_.last_words() + "\n", "log");
}

void Keeper::Publish() {
  // The record first: whoever sees the socket gone finds it.
  (void)WriteFileAtomic(RanksPath(".exit"), process_.SerializeAsString(), 0600);
  (void)Failpoint("keeper.recorded");
  unlink(RanksPath(".sock").c_str());
  if (cgroup_) cgroup_->Remove();
  Send();
}

void Keeper::Send() {
  if (!control_) return;
  const std::string bytes = process_.SerializeAsString();
  send(control_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
}

}  // namespace

int KeeperMain(int argc, char** argv) {
  if (argc != 8 || !RankName::Parse(argv[2])) {
    std::fprintf(stderr, "hierad-agent: --keeper is for the agent's own use\n");
    return 1;
  }
  prctl(PR_SET_NAME, "hierad-keeper");   // exec of /proc/self/exe named it "exe"
  close_range(kKeeperRanksFd + 1, ~0U, 0);
  for (const int fd : {kKeeperControlFd, kKeeperAssignmentFd, kKeeperRanksFd}) fcntl(fd, F_SETFD, FD_CLOEXEC);
  return Keeper({argv[2], argv[3], argv[4], argv[5], std::atoll(argv[6]), std::atoll(argv[7])}).Run();
}

}  // namespace hierad
