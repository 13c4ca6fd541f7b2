// A control group (version 2) per rank, where the agent has been given a subtree of its own (systemd's Delegate=): a rank's
// whole tree is then ended by one write that nothing escapes, its memory has a limit, and the kernel's count says whether it
// was killed for want of memory. Where there is none, keeper.h says what is done and what is not guaranteed.
//
// All of it is files below one folder, so tests use a tree of their own.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace hierad {

// Of HOME/PREFIX + name.
inline constexpr char kCgroupPrefix[] = "rank-";

// The folder in which this process may make groups for ranks. Where its own group is called "agent" (systemd 254 and later:
// DelegateSubgroup=agent), the one above, in which the memory controller can be handed down; else its own.
// Unavailable: no version 2, no delegation; the message says which.
absl::StatusOr<std::string> FindCgroupHome(const std::string& proc_folder = "/proc", const std::string& cgroup_folder = "/sys/fs/cgroup");

class RankCgroup {
 public:
  // Makes the group of the rank that is marked `name`. `memory_max`: bytes; 0: no limit. A limit that cannot be set is FailedPrecondition.
  static absl::StatusOr<RankCgroup> Make(const std::string& home, const std::string& name, int64_t memory_max);
  // One that a former agent made; nullopt: it is not there.
  static std::optional<RankCgroup> Open(const std::string& home, const std::string& name);

  // Moves the process, before it makes others. 0 as pid: the caller. 0, or errno: callable between fork and exec.
  int Enter(pid_t pid) const;
  // Kills everything in it at once. False: the kernel has no cgroup.kill (before 5.14): kill by the tree instead.
  bool Kill() const;
  bool Populated() const;
  std::optional<int64_t> OomKills() const;   // since it was made; nullopt: without the memory controller nobody counts
  // Once it is empty.
  void Remove() const;
  const std::string& path() const { return path_; }

 private:
  explicit RankCgroup(std::string path);
  std::string path_, procs_;
};

// Makes a group there and moves a child of this process into it: whether ranks can be given groups, and this limit. Before any
// thread.
absl::Status TryCgroup(const std::string& home, int64_t memory_max);

}  // namespace hierad
