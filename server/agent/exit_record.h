// What is said of a process that has ended: its class, and the end of its log.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <deque>
#include <string>
#include <string_view>

#include "hierad/v1/job.pb.h"

namespace hierad {

// How often the kernel has killed for want of memory: the machine's count (/proc/vmstat) and that of the memory cgroup
// (version 2 or 1) of the process that asks, whichever can be read. Both may count kills that were none of ours: so only
// kills of the last seconds are held against a rank that has just died by SIGKILL. One thread.
class OomWatch {
 public:
  explicit OomWatch(std::string proc_folder = "/proc", std::string cgroup_folder = "/sys/fs/cgroup");

  // Call about once a second, and once more before asking.
  void Sample();
  // Since the oldest of the last few samples.
  bool KilledRecently() const;

 private:
  int64_t Count() const;

  std::string vmstat_;
  std::string cgroup2_, cgroup1_;   // files with a line "oom_kill N"; empty: none
  std::deque<int64_t> counts_;
};

// `wait_status` as waitpid gives it; `ended_by_us`: the signal was ours, on orders.
v1::Reason ClassifyExit(int wait_status, bool ended_by_us, bool oom_killed);

// The newest lines of what `log` holds from offset `from` on, at most limits::kLastWordsBytes, whole lines where there
// is more than one, as valid UTF-8.
std::string LastWords(int log, int64_t from);

// Bytes that are not UTF-8 become '?': messages with other bytes cannot be parsed by their receiver.
std::string ValidUtf8(std::string_view text);

}  // namespace hierad
