// Whether a gang makes progress, from what its ranks say: pure. A rank that shows no sign of life (stopped, its machine
// hangs) and a step that does not finish are told apart, and the rank that holds up the others is named with the
// collective they wait in.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "hierad/v1/job.pb.h"

namespace hierad {

struct RankSign {
  int rank = 0;
  int pid = 0;
  std::string node;
  v1::Phase phase = v1::PHASE_UNSPECIFIED;
  int64_t step = 0;
  std::string waiting_in;                  // of its last report
  bool spoken = false;                     // has reported at all
  bool connected = true;                   // its session is open
  std::chrono::nanoseconds silent{0};      // since its last report, or since its process is known
};

// Worth telling: workers report once a second.
inline constexpr std::chrono::seconds kSilent{4};
// A process may load its libraries for so long before it first reports.
inline constexpr std::chrono::seconds kFirstReport{180};
// Without a session it may be on its way back to a hierad that was away: it tries every few seconds, on a machine that may be busy.
inline constexpr std::chrono::seconds kReconnect{20};
// The first step of an attempt loads kernels, warms up and captures.
inline constexpr std::chrono::minutes kFirstStep{15};
inline constexpr int kHangMedians = 10;
inline constexpr size_t kStepsForMedian = 31;

double Median(std::deque<double> values);   // 0: of none

// After which time without any step a gang hangs: the larger of `least` and kHangMedians median steps.
std::chrono::nanoseconds HangLimit(std::chrono::nanoseconds least, const std::deque<double>& step_seconds);

struct Hang {
  int rank = 0;          // the one that holds up the others, as far as is known
  std::string message;
};
// `still`: since any rank's step or phase last changed. `least`: a rank that is silent for longer hangs, whatever it is at; one that has
// no session is given kReconnect, if that is more.
std::optional<Hang> FindHang(const std::vector<RankSign>& ranks, std::chrono::nanoseconds still, std::chrono::nanoseconds limit,
                             std::chrono::nanoseconds least);

// What is out of the ordinary with a running gang, in a sentence; empty: nothing. `recent` and `earlier`: seconds of its
// newest steps and of steps before those; `data_wait`: of the newest steps, waiting for input.
std::string SlowNote(const std::vector<RankSign>& ranks, std::chrono::nanoseconds still, std::chrono::nanoseconds limit,
                     const std::deque<double>& recent, const std::deque<double>& data_wait, const std::deque<double>& earlier);

// A rank that is alive and slow: it waits in all-reduces for nobody, and every other one waits for it, in a sentence that names it;
// empty: there is none. By rank, what each has done in this attempt.
std::string LateRank(const std::vector<v1::RankTotals>& totals);

}  // namespace hierad
