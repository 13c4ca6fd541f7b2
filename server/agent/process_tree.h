// Whole process trees, found through /proc, and their end. Meant for a process that is the subreaper of the tree: there,
// whatever a worker starts (double fork, setsid, cleared environment) stays a descendant.
// Without cgroups a tree that forks faster than /proc is read can hold out for a while; it is frozen before it is killed.
#pragma once

#include <sys/types.h>

#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace hierad {

// Living descendants of `root`, itself left out. Zombies do not count.
std::vector<pid_t> Descendants(pid_t root);

// Living processes, the caller left out, in whose initial environment a variable `NAME=value` satisfies `matches`.
// Environments that may not be read (another user's) are passed over.
std::vector<pid_t> ProcessesByEnvironment(std::string_view name,
                                          const std::function<bool(std::string_view value)>& matches);

// Stops (SIGSTOP) what `find` returns until nothing new appears, then sends SIGKILL to all. Returns how many it killed:
// call again until 0, as a process may have forked between the two.
int FreezeAndKill(const std::function<std::vector<pid_t>()>& find);

}  // namespace hierad
