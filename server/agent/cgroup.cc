#include "server/agent/cgroup.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <string_view>

#include "base/fs.h"
#include "base/status.h"
#include "base/text.h"

namespace hierad {
namespace {

// One write, as the kernel's files want it. 0, or errno.
int WriteControl(const std::string& path, const char* text) {
  const UniqueFd fd(open(path.c_str(), O_WRONLY | O_CLOEXEC));
  if (!fd) return errno;
  return write(fd.get(), text, std::strlen(text)) < 0 ? errno : 0;
}

// N of the line "KEY N"; -1: there is none.
int64_t Value(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  std::string word;
  int64_t value = 0;
  while (file >> word >> value) {
    if (word == key) return value;
  }
  return -1;
}

bool HasWord(const std::string& path, const std::string& wanted) {
  std::ifstream file(path);
  for (std::string word; file >> word;) {
    if (word == wanted) return true;
  }
  return false;
}

}  // namespace

absl::StatusOr<std::string> FindCgroupHome(const std::string& proc_folder, const std::string& cgroup_folder) {
  if (!Exists(cgroup_folder + "/cgroup.controllers")) return absl::UnavailableError("no cgroup version 2 at " + cgroup_folder);
  std::ifstream groups(proc_folder + "/self/cgroup");
  std::string own;
  for (std::string line; std::getline(groups, line);) {
    if (line.rfind("0::", 0) == 0) own = line.substr(3);
  }
  if (own.size() < 2) return absl::UnavailableError("the agent is in no control group of its own");
  std::string home = cgroup_folder + own;
  constexpr char kSubgroup[] = "/agent";
  const bool above = own.size() > sizeof kSubgroup && std::string_view(own).ends_with(kSubgroup);
  if (above) home = FolderOf(home);
  if (access((home + "/cgroup.procs").c_str(), W_OK) != 0 || access(home.c_str(), W_OK) != 0) {
    return absl::UnavailableError("the control group " + own + " is not delegated to the agent");
  }
  // Only where no process is in the group itself can its controllers be handed down. Without it: groups, but no limit.
  if (above && HasWord(home + "/cgroup.controllers", "memory")) WriteControl(home + "/cgroup.subtree_control", "+memory");
  return home;
}

absl::Status TryCgroup(const std::string& home, int64_t memory_max) {
  ASSIGN_OR_RETURN(const RankCgroup group, RankCgroup::Make(home, "try." + std::to_string(getpid()), memory_max));
  const pid_t pid = fork();
  if (pid == 0) _exit(group.Enter(0));
  int status = 0;
  while (pid > 0 && waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  group.Remove();
  if (pid < 0 || !WIFEXITED(status)) return absl::UnavailableError("cannot try the control groups of " + home);
  if (WEXITSTATUS(status) == 0) return absl::OkStatus();
  return absl::UnavailableError("a process cannot be moved into a control group below " + home + " (" + std::strerror(WEXITSTATUS(status)) + ")");
}

RankCgroup::RankCgroup(std::string path) : path_(std::move(path)), procs_(path_ + "/cgroup.procs") {}

absl::StatusOr<RankCgroup> RankCgroup::Make(const std::string& home, const std::string& name, int64_t memory_max) {
  RankCgroup group(home + "/" + kCgroupPrefix + name);
  if (mkdir(group.path_.c_str(), 0755) != 0 && errno != EEXIST) return ErrnoStatus(errno, "cannot make the control group", group.path_);
  if (memory_max > 0) {
    const int error = WriteControl(group.path_ + "/memory.max", std::to_string(memory_max).c_str());
    if (error != 0) {
      group.Remove();
      return absl::FailedPreconditionError("the memory limit of ranks cannot be set in " + Printable(group.path_) + " (" + std::strerror(error) +
                                           "): the memory controller was not handed down to it");
    }
    // The whole rank or nothing: a tree with one process shot is of no use.
    WriteControl(group.path_ + "/memory.oom.group", "1");
  }
  return group;
}

std::optional<RankCgroup> RankCgroup::Open(const std::string& home, const std::string& name) {
  RankCgroup group(home + "/" + kCgroupPrefix + name);
  if (!Exists(group.procs_)) return std::nullopt;
  return group;
}

int RankCgroup::Enter(pid_t pid) const { return WriteControl(procs_, std::to_string(pid).c_str()); }

bool RankCgroup::Kill() const { return WriteControl(path_ + "/cgroup.kill", "1") == 0; }

bool RankCgroup::Populated() const { return Value(path_ + "/cgroup.events", "populated") > 0; }

std::optional<int64_t> RankCgroup::OomKills() const {
  const int64_t kills = Value(path_ + "/memory.events", "oom_kill");
  return kills < 0 ? std::nullopt : std::optional<int64_t>(kills);
}

void RankCgroup::Remove() const { rmdir(path_.c_str()); }

}  // namespace hierad
