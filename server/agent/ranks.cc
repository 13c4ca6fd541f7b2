#include "server/agent/ranks.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <optional>
#include <system_error>

#include "base/address.h"
#include "base/channel/certificates.h"
#include "base/failpoint.h"
#include "base/status.h"
#include "server/agent/cgroup.h"
#include "server/agent/keeper.h"
#include "server/agent/process_tree.h"
#include "spdlog/spdlog.h"

extern char** environ;

namespace hierad {
namespace {

using std::chrono::milliseconds;

constexpr size_t kForgottenKept = 4096;
constexpr int kAdoptTimeoutMs = 10'000;   // a keeper answers at once, unless it is killing its tree
constexpr int64_t kRecordBytes = 1 << 20;

std::string ErrnoText(int error) { return std::generic_category().message(error); }

// One datagram of a keeper; nullopt: nothing to read yet. An empty RankProcess: the keeper is gone.
std::optional<v1::RankProcess> Receive(int fd) {
  std::string buffer(kKeeperMessageBytes, '\0');
  const ssize_t n = recv(fd, buffer.data(), buffer.size(), MSG_DONTWAIT);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return std::nullopt;
  v1::RankProcess process;
  if (n > 0 && process.ParseFromArray(buffer.data(), int(n))) return process;
  return v1::RankProcess();
}

// The rank of a file called NAME + `suffix`; nullopt for any other file.
std::optional<RankName> NameOfFile(const std::string& file, std::string_view suffix) {
  if (file.size() <= suffix.size() || !std::string_view(file).ends_with(suffix)) return std::nullopt;
  return RankName::Parse(std::string_view(file).substr(0, file.size() - suffix.size()));
}

bool Tell(int fd, const std::string& message) {
  return send(fd, message.data(), message.size(), MSG_NOSIGNAL | MSG_DONTWAIT) == ssize_t(message.size());
}

}  // namespace

std::vector<std::string> RankEnvironment(const v1::Assignment& assignment, const std::string& marker,
                                         const char* const* inherited, const std::optional<Account>& account) {
  const v1::Slot& slot = assignment.slot();
  const int wanted = assignment.spec().resources().threads_per_rank();
  const int threads = std::max(1, wanted > 0 ? wanted : slot.threads());
  std::map<std::string, std::string> own = {
      {"RANK", std::to_string(assignment.rank())},
      {"LOCAL_RANK", std::to_string(assignment.local_rank())},
      {"WORLD_SIZE", std::to_string(assignment.world_size())},
      {"LOCAL_WORLD_SIZE", std::to_string(assignment.local_world_size())},
      {"CUDA_VISIBLE_DEVICES", slot.kind() == v1::Slot::CUDA ? slot.id() : ""},
      {"OMP_NUM_THREADS", std::to_string(threads)},
      {kRankVariable, marker},
  };
  if (account) {
    own["HOME"] = account->home;
    own["USER"] = own["LOGNAME"] = account->name;
  }
  std::vector<std::string> environment;
  for (const char* const* variable = inherited; *variable != nullptr; ++variable) {
    const std::string text = *variable;
    if (!own.contains(text.substr(0, text.find('=')))) environment.push_back(text);
  }
  for (const auto& [name, value] : own) environment.push_back(name + "=" + value);
  return environment;
}

absl::StatusOr<std::unique_ptr<Ranks>> Ranks::Open(const Options& options) {
  std::unique_ptr<Ranks> ranks(new Ranks(options));
  ranks->folder_ = JoinPath(options.state_folder, "ranks");
  RETURN_IF_ERROR(MakeFolders(ranks->folder_, 0700));
  ranks->folder_fd_ = UniqueFd(open(ranks->folder_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!ranks->folder_fd_) return ErrnoStatus(errno, "cannot open the folder", ranks->folder_);
  RETURN_IF_ERROR(ranks->Adopt());
  return ranks;
}

// Short whatever the state folder is called: a socket's path has at most 107 bytes.
std::string Ranks::Path(const RankName& name, const char* suffix) const {
  return "/proc/self/fd/" + std::to_string(folder_fd_.get()) + "/" + name.ToString() + suffix;
}

absl::Status Ranks::Adopt() {
  ASSIGN_OR_RETURN(const std::vector<std::string> files, ListFolder(folder_));
  std::set<RankName> sockets, lost;
  for (const std::string& file : files) {
    if (const std::optional<RankName> name = NameOfFile(file, ".sock")) sockets.insert(*name);
  }
  for (const RankName& name : sockets) {
    if (!AdoptKeeper(name)) lost.insert(name);
  }
  // Whatever carries this folder's mark and belongs to no adopted keeper has outlived its agent.
  KillMarked([this](const RankName& name) { return !entries_.contains(name); });
  KillGroups([this](const RankName& name) { return !entries_.contains(name); });
  for (const RankName& name : lost) {
    if (!Exists(Path(name, ".exit"))) {
      Entry entry;
      Record(name, &entry, SIGKILL, v1::REASON_NODE_LOST, "its agent was killed, and with it the rank");
    }
    unlink(Path(name, ".sock").c_str());
  }
  ASSIGN_OR_RETURN(const std::vector<std::string> now, ListFolder(folder_));
  for (const std::string& file : now) {
    if (const std::optional<RankName> name = NameOfFile(file, ".exit")) AdoptExit(*name);
  }
  return absl::OkStatus();
}

bool Ranks::AdoptKeeper(const RankName& name) {
  const std::string path = Path(name, ".sock");
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.c_str(), std::min(path.size() + 1, sizeof address.sun_path - 1));
  UniqueFd keeper(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!keeper || connect(keeper.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) return false;
  pollfd ready{keeper.get(), POLLIN, 0};
  if (poll(&ready, 1, kAdoptTimeoutMs) != 1) return false;
  const std::optional<v1::RankProcess> process = Receive(keeper.get());
  if (!process || process->attempt() == 0 || process->ended()) return false;
  spdlog::info("adopted job {} attempt {} rank {}, pid {}", name.job_id, name.attempt, name.rank, process->pid());
  Entry& entry = entries_[name];
  entry.process = *process;
  entry.keeper = std::move(keeper);
  return true;
}

void Ranks::AdoptExit(const RankName& name) {
  // Beside a living keeper of the same name it can only be old.
  if (entries_.contains(name)) return;
  const absl::StatusOr<std::string> bytes = ReadFile(Path(name, ".exit"), kRecordBytes);
  Entry entry;
  if (!bytes.ok() || !entry.process.ParseFromString(*bytes)) {
    Record(name, &entry, SIGKILL, v1::REASON_CRASHED, "the record of its end could not be read");
  }
  entries_[name] = std::move(entry);
}

void Ranks::Apply(const v1::AgentOrders& orders) {
  (void)Failpoint("agent.apply");
  for (const v1::RankId& id : orders.acknowledged()) Forget(RankName::Of(id));
  for (const v1::RankId& id : orders.kill_now()) {
    const auto it = entries_.find(RankName::Of(id));
    if (it != entries_.end()) End(&it->second, milliseconds{0});
  }
  std::set<RankName> wanted;
  for (const v1::Assignment& assignment : orders.assignments()) wanted.insert(RankName::Of(assignment));
  for (auto& [name, entry] : entries_) {
    if (!wanted.contains(name)) End(&entry, milliseconds(std::max<int64_t>(0, orders.grace_ms())));
  }
  for (const v1::Assignment& assignment : orders.assignments()) {
    const RankName name = RankName::Of(assignment);
    if (!entries_.contains(name) && !forgotten_.contains(name)) Start(assignment);
  }
}

void Ranks::Start(const v1::Assignment& assignment) {
  const RankName name = RankName::Of(assignment);
  Entry& entry = entries_[name];
  entry.process.set_slot_id(assignment.slot().id());
  (void)Failpoint("agent.start");
  absl::StatusOr<UniqueFd> keeper = SpawnKeeper(name, assignment);
  (void)Failpoint("agent.started");
  if (!keeper.ok()) {
    Record(name, &entry, 0, ReasonOf(keeper.status()), std::string(keeper.status().message()));
    return;
  }
  entry.keeper = *std::move(keeper);
  entry.process.set_job_id(name.job_id);
  entry.process.set_attempt(name.attempt);
  entry.process.set_rank(name.rank);
  spdlog::info("starting job {} attempt {} rank {} of {} on {}", name.job_id, name.attempt, name.rank,
               assignment.world_size(), assignment.slot().id());
}

absl::StatusOr<UniqueFd> Ranks::SpawnKeeper(const RankName& name, const v1::Assignment& assignment) {
  const auto failed = [&](const char* what, int error) {
    return ErrorOf(v1::REASON_INTERNAL, "cannot start the rank's keeper: " + std::string(what) + ": " + ErrnoText(error));
  };
  ASSIGN_OR_RETURN(const std::optional<Account> account, AccountFor(options_.rights, assignment.user()));
  const UniqueFd memory(memfd_create("assignment", MFD_CLOEXEC));
  if (!memory) return failed("memfd_create", errno);
  v1::Assignment complete = assignment;
  complete.set_endpoint(options_.server);
  complete.set_node_address(options_.address);
  if (options_.address.empty()) {
    ASSIGN_OR_RETURN(*complete.mutable_node_address(), AddressToward(options_.server));
  }
  if (!options_.worker_certificates.empty()) {
    auto certificates = ReadCertificates(options_.worker_certificates);
    if (!certificates.ok()) return ErrorOf(v1::REASON_INTERNAL, std::string(certificates.status().message()));
    *complete.mutable_certificates() = *std::move(certificates);
  }
  RETURN_IF_ERROR(WriteAll(memory.get(), complete.SerializeAsString(), "assignment"));
  int pair[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0) return failed("socketpair", errno);
  UniqueFd ours(pair[0]);
  const UniqueFd theirs(pair[1]);
  // Above the numbers they get in the child, so that no dup2 overwrites another's source.
  const UniqueFd control(fcntl(theirs.get(), F_DUPFD_CLOEXEC, 16)), order(fcntl(memory.get(), F_DUPFD_CLOEXEC, 16)),
      folder(fcntl(folder_fd_.get(), F_DUPFD_CLOEXEC, 16));
  if (!control || !order || !folder) return failed("dup", errno);

  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDWR, 0);
  // Not the agent's own output: a keeper outlives the pipe that reads it.
  posix_spawn_file_actions_adddup2(&actions, 0, 1);
  posix_spawn_file_actions_adddup2(&actions, 0, 2);
  posix_spawn_file_actions_adddup2(&actions, control.get(), kKeeperControlFd);
  posix_spawn_file_actions_adddup2(&actions, order.get(), kKeeperAssignmentFd);
  posix_spawn_file_actions_adddup2(&actions, folder.get(), kKeeperRanksFd);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t none;
  sigemptyset(&none);
  posix_spawnattr_setsigmask(&attributes, &none);
  // A session of its own: Ctrl-C in the agent's terminal is the agent's to handle.
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSID);

  const std::string text = name.ToString();
  const std::string account_name = account ? account->name : "", memory_max = std::to_string(options_.memory_max), log_bytes = std::to_string(options_.log_bytes);
  const char* arguments[] = {"hierad-agent", "--keeper", text.c_str(), options_.worker.c_str(), account_name.c_str(),
                             options_.cgroup_home.c_str(), memory_max.c_str(), log_bytes.c_str(), nullptr};
  std::vector<std::string> environment = RankEnvironment(assignment, Marker(name), environ, account);
  std::vector<char*> variables;
  for (std::string& variable : environment) variables.push_back(variable.data());
  variables.push_back(nullptr);
  pid_t pid = 0;
  const int error = posix_spawn(&pid, "/proc/self/exe", &actions, &attributes, const_cast<char**>(arguments),
                                variables.data());
  posix_spawn_file_actions_destroy(&actions);
  posix_spawnattr_destroy(&attributes);
  if (error != 0) return failed("posix_spawn", error);
  return ours;
}

void Ranks::End(Entry* entry, milliseconds grace) {
  if (!entry->keeper || entry->kill_sent || (grace.count() > 0 && entry->term_sent)) return;
  if (grace.count() > 0) {
    entry->term_sent = Tell(entry->keeper.get(), "term " + std::to_string(grace.count()));
  } else {
    entry->kill_sent = Tell(entry->keeper.get(), "kill");
  }
  spdlog::info("{} job {} attempt {} rank {}", grace.count() > 0 ? "ending" : "killing", entry->process.job_id(),
               entry->process.attempt(), entry->process.rank());
}

void Ranks::Forget(const RankName& name) {
  const auto it = entries_.find(name);
  if (it == entries_.end() || it->second.keeper) return;
  (void)Failpoint("agent.forget");
  entries_.erase(it);
  unlink(Path(name, ".exit").c_str());
  if (forgotten_.insert(name).second) forgotten_order_.push_back(name);
  if (forgotten_order_.size() > kForgottenKept) {
    forgotten_.erase(forgotten_order_.front());
    forgotten_order_.pop_front();
  }
}

std::vector<v1::RankProcess> Ranks::Snapshot() const {
  std::vector<v1::RankProcess> processes;
  for (const auto& [name, entry] : entries_) processes.push_back(entry.process);
  return processes;
}

int Ranks::running() const {
  return int(std::count_if(entries_.begin(), entries_.end(), [](const auto& e) { return bool(e.second.keeper); }));
}

void Ranks::AppendPollFds(std::vector<pollfd>* fds) const {
  for (const auto& [name, entry] : entries_) {
    if (entry.keeper) fds->push_back({entry.keeper.get(), POLLIN, 0});
  }
}

bool Ranks::OnReady(int fd) {
  for (auto& [name, entry] : entries_) {
    if (!entry.keeper || entry.keeper.get() != fd) continue;
    const std::optional<v1::RankProcess> news = Receive(fd);
    if (!news) return false;
    if (news->attempt() == 0 || news->ended()) {
      if (news->ended()) entry.process = *news;
      OnKeeperGone(name, &entry);
    } else {
      entry.process = *news;
    }
    return true;
  }
  return false;
}

void Ranks::OnKeeperGone(const RankName& name, Entry* entry) {
  (void)Failpoint("agent.rank_ended");
  entry->keeper.reset();
  if (!entry->process.ended()) {
    const absl::StatusOr<std::string> bytes = ReadFile(Path(name, ".exit"), kRecordBytes);
    v1::RankProcess record;
    if (bytes.ok() && record.ParseFromString(*bytes) && record.ended()) entry->process = record;
  }
  if (!entry->process.ended()) {
    KillMarked([&](const RankName& other) { return other == name; });
    KillGroups([&](const RankName& other) { return other == name; });
    Record(name, entry, SIGKILL, v1::REASON_CRASHED, "the keeper of this rank was killed, and with it the rank");
    unlink(Path(name, ".sock").c_str());
  }
  const v1::RankProcess& process = entry->process;
  spdlog::info("job {} attempt {} rank {} has ended: {} {}", name.job_id, name.attempt, name.rank,
               process.signal() != 0 ? "signal" : "exit code",
               process.signal() != 0 ? process.signal() : process.exit_code());
}

void Ranks::Record(const RankName& name, Entry* entry, int signal, v1::Reason reason, const std::string& words) {
  v1::RankProcess& process = entry->process;
  process.set_job_id(name.job_id);
  process.set_attempt(name.attempt);
  process.set_rank(name.rank);
  process.set_ended(true);
  process.set_signal(signal);
  if (signal == 0) process.set_exit_code(127);
  process.set_reason(reason);
  process.set_last_words(words);
  const absl::Status written = WriteFileAtomic(Path(name, ".exit"), process.SerializeAsString(), 0600);
  if (!written.ok()) spdlog::warn("the end of {} is not recorded: {}", name.ToString(), std::string(written.message()));
}

void Ranks::KillMarked(const std::function<bool(const RankName&)>& whose) const {
  const auto find = [&] {
    return ProcessesByEnvironment(kRankVariable, [&](std::string_view value) {
      const size_t dot = value.rfind('.');
      if (dot == std::string_view::npos || value.substr(dot + 1) != options_.agent_id) return false;
      const std::optional<RankName> name = RankName::Parse(value.substr(0, dot));
      return name && whose(*name);
    });
  };
  for (int wait_ms = 1; FreezeAndKill(find) > 0 && wait_ms < 4096; wait_ms *= 2) poll(nullptr, 0, wait_ms);
}

void Ranks::KillGroups(const std::function<bool(const RankName&)>& whose) const {
  if (options_.cgroup_home.empty()) return;
  const auto folders = ListFolder(options_.cgroup_home);
  if (!folders.ok()) return;
  // Another agent of this machine may have its groups beside ours: the mark tells.
  const std::string suffix = "." + options_.agent_id;
  for (const std::string& folder : *folders) {
    std::string_view mark = folder;
    if (!mark.starts_with(kCgroupPrefix) || !mark.ends_with(suffix)) continue;
    mark.remove_prefix(std::string_view(kCgroupPrefix).size());
    if (mark.size() <= suffix.size()) continue;
    const auto name = RankName::Parse(mark.substr(0, mark.size() - suffix.size()));
    if (!name || !whose(*name)) continue;
    const auto group = RankCgroup::Open(options_.cgroup_home, Marker(*name));
    if (!group) continue;
    group->Kill();
    for (int wait_ms = 1; group->Populated() && wait_ms < 4096; wait_ms *= 2) poll(nullptr, 0, wait_ms);
    group->Remove();
  }
}

void Ranks::SayGoodbye() {
  for (const auto& [name, entry] : entries_) {
    if (entry.keeper) Tell(entry.keeper.get(), "goodbye");
  }
}

void Ranks::EndAll(milliseconds grace) {
  for (auto& [name, entry] : entries_) End(&entry, grace);
}

}  // namespace hierad
