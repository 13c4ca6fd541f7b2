#include "server/agent/process_tree.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <cctype>
#include <cstdlib>
#include <map>
#include <set>

namespace hierad {
namespace {

// A file of /proc: it has no size, and may be gone at any moment (then: empty).
std::string ReadProcFile(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return {};
  std::string text;
  char buffer[16384];
  ssize_t n;
  while ((n = read(fd, buffer, sizeof buffer)) > 0) text.append(buffer, size_t(n));
  close(fd);
  return text;
}

template <typename Visitor>
void ForEachProcess(const Visitor& visit) {
  DIR* proc = opendir("/proc");
  if (proc == nullptr) return;
  while (const dirent* entry = readdir(proc)) {
    if (std::isdigit(static_cast<unsigned char>(entry->d_name[0]))) visit(pid_t(std::atoi(entry->d_name)));
  }
  closedir(proc);
}

// State letter and parent of a process; false when it is gone.
bool ReadStat(pid_t pid, char* state, pid_t* parent) {
  const std::string stat = ReadProcFile("/proc/" + std::to_string(pid) + "/stat");
  // The command's name, in parentheses, may hold anything: count from the last one.
  const size_t end = stat.rfind(')');
  if (end == std::string::npos || end + 4 >= stat.size()) return false;
  *state = stat[end + 2];
  *parent = pid_t(std::atoi(stat.c_str() + end + 4));
  return true;
}

}  // namespace

std::vector<pid_t> Descendants(pid_t root) {
  std::multimap<pid_t, pid_t> children;
  std::set<pid_t> zombies;
  ForEachProcess([&](pid_t pid) {
    char state = 0;
    pid_t parent = 0;
    if (!ReadStat(pid, &state, &parent)) return;
    children.emplace(parent, pid);
    // A zombie leader may still have threads and children; it is walked through but not listed.
    if (state == 'Z' || state == 'X') zombies.insert(pid);
  });
  std::vector<pid_t> found, queue{root};
  std::set<pid_t> seen{root};
  while (!queue.empty()) {
    const pid_t parent = queue.back();
    queue.pop_back();
    for (auto [it, end] = children.equal_range(parent); it != end; ++it) {
      if (!seen.insert(it->second).second) continue;
      queue.push_back(it->second);
      if (!zombies.contains(it->second)) found.push_back(it->second);
    }
  }
  return found;
}

std::vector<pid_t> ProcessesByEnvironment(std::string_view name,
                                          const std::function<bool(std::string_view value)>& matches) {
  std::vector<pid_t> found;
  const std::string start = std::string(name) + "=";
  ForEachProcess([&](pid_t pid) {
    if (pid == getpid()) return;
    const std::string environment = ReadProcFile("/proc/" + std::to_string(pid) + "/environ");
    for (size_t at = 0; at < environment.size();) {
      size_t end = environment.find('\0', at);
      if (end == std::string::npos) end = environment.size();
      const std::string_view variable(environment.data() + at, end - at);
      if (variable.substr(0, start.size()) == start && matches(variable.substr(start.size()))) {
        found.push_back(pid);
        return;
      }
      at = end + 1;
    }
  });
  return found;
}

int FreezeAndKill(const std::function<std::vector<pid_t>()>& find) {
  std::set<pid_t> frozen;
  for (int pass = 0; pass < 100; ++pass) {
    bool news = false;
    for (const pid_t pid : find()) {
      if (!frozen.insert(pid).second) continue;
      kill(pid, SIGSTOP);
      news = true;
    }
    if (!news) break;
  }
  for (const pid_t pid : frozen) kill(pid, SIGKILL);
  return int(frozen.size());
}

}  // namespace hierad
