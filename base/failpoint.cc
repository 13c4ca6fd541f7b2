#include "base/failpoint.h"

#ifdef HIERAD_FAILPOINTS

#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <mutex>
#include <string>

#include "base/clock.h"

namespace hierad {
namespace {

struct Armed {
  std::string path, action;
  int64_t skip = 0, argument = 0;
};

// The folder's file of that name, if the environment names a folder.
std::optional<Armed> Look(const char* name) {
  static const char* const folder = std::getenv("HIERAD_FAILPOINTS");
  if (folder == nullptr || folder[0] == '\0') return std::nullopt;
  Armed armed;
  armed.path = std::string(folder) + "/" + name;
  struct stat info {};
  if (stat(armed.path.c_str(), &info) != 0) return std::nullopt;
  std::ifstream file(armed.path);
  if (!(file >> armed.action)) return std::nullopt;
  file >> armed.skip >> armed.argument;
  return armed;
}

}  // namespace

absl::Status Failpoint(const char* name) {
  const std::optional<Armed> armed = Look(name);
  if (!armed || armed->action == "value") return absl::OkStatus();
  static std::mutex& mutex = *new std::mutex;
  static std::map<std::string, int64_t>& passes = *new std::map<std::string, int64_t>;
  {
    std::lock_guard lock(mutex);
    if (passes[name]++ < armed->skip) return absl::OkStatus();
    passes[name] = 0;
  }
  if (rename(armed->path.c_str(), (armed->path + ".fired").c_str()) != 0) return absl::OkStatus();   // another was first
  std::fprintf(stderr, "failpoint %s: %s\n", name, armed->action.c_str());
  if (armed->action == "kill") {
    kill(getpid(), SIGKILL);
    while (true) pause();
  }
  if (armed->action == "delay") {
    SleepFor(std::chrono::milliseconds(armed->argument));
    return absl::OkStatus();
  }
  const std::string text = std::string("failpoint ") + name;
  return armed->action == "enospc" ? absl::ResourceExhaustedError(text + ": no space left on device") : absl::UnavailableError(text);
}

std::optional<int64_t> FailpointValue(const char* name) {
  const std::optional<Armed> armed = Look(name);
  if (!armed || armed->action != "value") return std::nullopt;
  return armed->argument;
}

}  // namespace hierad

#else

namespace hierad {

absl::Status Failpoint(const char*) { return absl::OkStatus(); }
std::optional<int64_t> FailpointValue(const char*) { return std::nullopt; }

}  // namespace hierad

#endif
