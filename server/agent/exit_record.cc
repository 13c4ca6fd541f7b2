#include "server/agent/exit_record.h"

#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <vector>

#include "base/limits.h"

namespace hierad {
namespace {

constexpr size_t kSamplesKept = 4;

// N of the line "oom_kill N"; 0 where there is none.
int64_t OomKills(const std::string& path) {
  std::ifstream file(path);
  std::string key;
  int64_t value = 0;
  while (file >> key >> value) {
    if (key == "oom_kill") return value;
  }
  return 0;
}

}  // namespace

OomWatch::OomWatch(std::string proc_folder, std::string cgroup_folder)
    : vmstat_(proc_folder + "/vmstat") {
  // Lines "0::/path" (version 2) and "4:memory,...:/path" (version 1).
  std::ifstream groups(proc_folder + "/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string path = line.substr(second + 1);
    if (controllers == ",,") cgroup2_ = cgroup_folder + path + "/memory.events";
    if (controllers.find(",memory,") != std::string::npos) {
      cgroup1_ = cgroup_folder + "/memory" + path + "/memory.oom_control";
    }
  }
  Sample();
}

void OomWatch::Sample() {
  counts_.push_back(Count());
  if (counts_.size() > kSamplesKept) counts_.pop_front();
}

bool OomWatch::KilledRecently() const { return counts_.back() > counts_.front(); }

int64_t OomWatch::Count() const {
  int64_t count = OomKills(vmstat_);
  for (const std::string& file : {cgroup2_, cgroup1_}) {
    if (!file.empty()) count += OomKills(file);
  }
  return count;
}

v1::Reason ClassifyExit(int wait_status, bool ended_by_us, bool oom_killed) {
  if (WIFEXITED(wait_status)) {
    // Other codes are explained by the worker itself (WorkerEnd).
    return WEXITSTATUS(wait_status) == 0 ? v1::REASON_COMPLETED : v1::REASON_UNSPECIFIED;
  }
  if (ended_by_us) return v1::REASON_UNSPECIFIED;
  if (WTERMSIG(wait_status) == SIGKILL && oom_killed) return v1::REASON_HOST_OOM;
  return v1::REASON_CRASHED;
}

std::string LastWords(int log, int64_t from) {
  struct stat info {};
  if (log < 0 || fstat(log, &info) != 0) return {};
  // A log that was rotated meanwhile is shorter than `from`: all of it is new.
  int64_t start = info.st_size >= from ? from : 0;
  const bool cut = info.st_size - start > limits::kLastWordsBytes;
  if (cut) start = info.st_size - limits::kLastWordsBytes;
  std::string text(size_t(info.st_size - start), '\0');
  const ssize_t n = pread(log, text.data(), text.size(), start);
  text.resize(n > 0 ? size_t(n) : 0);
  if (cut) {
    const size_t line = text.find('\n');
    if (line != std::string::npos && line + 1 < text.size()) text.erase(0, line + 1);
  }
  return ValidUtf8(text);
}

std::string ValidUtf8(std::string_view text) {
  std::string clean;
  clean.reserve(text.size());
  const auto byte = [&](size_t i) { return i < text.size() ? uint8_t(text[i]) : 0; };
  for (size_t i = 0; i < text.size();) {
    const uint8_t lead = byte(i);
    const size_t length = lead < 0x80 ? 1 : (lead >> 5) == 6 ? 2 : (lead >> 4) == 14 ? 3 : (lead >> 3) == 30 ? 4 : 0;
    uint32_t code = length == 1 ? lead : lead & (0x7Fu >> length);
    bool good = length != 0 && lead != 0;
    for (size_t k = 1; k < length && good; ++k) {
      good = (byte(i + k) & 0xC0) == 0x80;
      code = code << 6 | (byte(i + k) & 0x3F);
    }
    constexpr uint32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
    good = good && code >= kLeast[length] && code <= 0x10FFFF && (code < 0xD800 || code > 0xDFFF);
    if (good) {
      clean.append(text.substr(i, length));
      i += length;
    } else {
      clean.push_back('?');
      ++i;
    }
  }
  return clean;
}

}  // namespace hierad
