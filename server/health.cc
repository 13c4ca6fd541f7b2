#include "server/health.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace hierad {
namespace {

using std::chrono::nanoseconds;

constexpr double kDataShare = 0.3;        // of the step's time; more is worth telling
constexpr double kSlower = 1.5;           // than before
constexpr double kLateShare = 0.05;       // of a step, that all others wait for one rank
constexpr size_t kStepsToCompare = 16;
constexpr nanoseconds kStillTold = std::chrono::seconds(10);

double Seconds(nanoseconds t) { return std::chrono::duration<double>(t).count(); }
std::string Whole(nanoseconds t) { return absl::StrCat(std::chrono::duration_cast<std::chrono::seconds>(t).count(), " s"); }

std::string Name(const RankSign& r) {
  return absl::StrCat("rank ", r.rank, " (pid ", r.pid, " on ", r.node, ")");
}

bool IsReading(const RankSign& r) { return r.waiting_in.rfind("reading", 0) == 0; }

// The collective that most of the others wait in.
std::string Collective(const std::vector<RankSign>& ranks, int but) {
  for (const RankSign& r : ranks) {
    if (r.rank != but && !r.waiting_in.empty() && !IsReading(r)) return r.waiting_in;
  }
  return "";
}

std::string OthersWait(const std::vector<RankSign>& ranks, int rank) {
  const std::string in = Collective(ranks, rank);
  return in.empty() ? "" : absl::StrCat("; the others wait in ", in);
}

std::string Silence(const RankSign& r) {
  return r.connected ? absl::StrCat(Name(r), " has shown no sign of life for ", Whole(r.silent), ": it is stopped, or its machine hangs")
                     : absl::StrCat(Name(r), " has not been connected to hierad for ", Whole(r.silent), ": it is stopped, its machine hangs, or cannot "
                                                                                                        "reach hierad");
}

bool AtWork(v1::Phase phase) { return phase == v1::PHASE_TRAINING; }

const RankSign* MostSilent(const std::vector<RankSign>& ranks) {
  const RankSign* most = nullptr;
  for (const RankSign& r : ranks) {
    if (most == nullptr || r.silent > most->silent) most = &r;
  }
  return most;
}

// Among ranks that all live: who is not where the others wait.
Hang HoldsUp(const std::vector<RankSign>& ranks, const std::string& what) {
  for (const RankSign& r : ranks) {
    if (IsReading(r)) {
      return {r.rank, absl::StrCat(what, ": ", Name(r), " is ", r.waiting_in, ", so its data comes too slowly or not at all",
                                   OthersWait(ranks, r.rank))};
    }
  }
  for (const RankSign& r : ranks) {
    if (r.waiting_in.empty()) {
      return {r.rank, absl::StrCat(what, ": ", Name(r), " is still computing it", OthersWait(ranks, r.rank))};
    }
  }
  const RankSign& lowest = *std::min_element(ranks.begin(), ranks.end(), [](const auto& a, const auto& b) { return a.step < b.step; });
  return {lowest.rank, absl::StrCat(what, ": ", ranks.size() > 1 ? "all ranks wait, " : "", Name(lowest), " in ", lowest.waiting_in)};
}

}  // namespace

double Median(std::deque<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

nanoseconds HangLimit(nanoseconds least, const std::deque<double>& step_seconds) {
  if (step_seconds.empty()) return std::max<nanoseconds>(least, kFirstStep);
  // A clock that jumped makes no limit of years.
  const double seconds = std::clamp(kHangMedians * Median(step_seconds), 0.0, 86400.0);
  return std::max(least, nanoseconds(static_cast<int64_t>(seconds * 1e9)));
}

std::optional<Hang> FindHang(const std::vector<RankSign>& ranks, nanoseconds still, nanoseconds limit, nanoseconds least) {
  if (ranks.empty()) return std::nullopt;
  for (const RankSign& r : ranks) {
    if (!r.spoken && r.silent >= std::max<nanoseconds>(least, kFirstReport)) {
      return Hang{r.rank, absl::StrCat(Name(r), " has not reported for ", Whole(r.silent), " since its start; see its log")};
    }
  }
  const RankSign* quiet = nullptr;
  for (const RankSign& r : ranks) {
    const nanoseconds most = r.connected ? least : std::max<nanoseconds>(least, kReconnect);
    if (r.spoken && r.silent >= most && (quiet == nullptr || r.silent > quiet->silent)) quiet = &r;
  }
  if (quiet != nullptr) return Hang{quiet->rank, Silence(*quiet) + OthersWait(ranks, quiet->rank)};
  if (still < limit || !std::all_of(ranks.begin(), ranks.end(), [](const RankSign& r) { return AtWork(r.phase); })) return std::nullopt;
  const int64_t step = std::max_element(ranks.begin(), ranks.end(), [](const auto& a, const auto& b) { return a.step < b.step; })->step + 1;
  return HoldsUp(ranks, absl::StrCat("step ", step, " did not finish within ", Whole(still)));
}

std::string SlowNote(const std::vector<RankSign>& ranks, nanoseconds still, nanoseconds limit, const std::deque<double>& recent,
                     const std::deque<double>& data_wait, const std::deque<double>& earlier) {
  if (ranks.empty()) return "";
  const RankSign& quiet = *MostSilent(ranks);
  if (quiet.spoken && quiet.silent >= kSilent) {
    return Silence(quiet) + OthersWait(ranks, quiet.rank);
  }
  const bool training = std::all_of(ranks.begin(), ranks.end(), [](const RankSign& r) { return AtWork(r.phase); });
  const double step_s = Median(recent);
  if (training && still >= kStillTold && Seconds(still) > 3 * step_s) {
    const Hang hang = HoldsUp(ranks, absl::StrCat("no step has finished for ", Whole(still)));
    return absl::StrCat(hang.message, "; the attempt is ended after ", Whole(limit));
  }
  const double all = std::accumulate(recent.begin(), recent.end(), 0.0), waited = std::accumulate(data_wait.begin(), data_wait.end(), 0.0);
  if (recent.size() >= kStepsToCompare && waited > kDataShare * all) {
    return absl::StrFormat("it waits for data in %.0f%% of its time (%.3g of %.3g s a step): the readers are its limit; raise data.workers, "
                           "or put data.path on a faster disk", 100 * waited / all, waited / double(recent.size()), all / double(recent.size()));
  }
  const double before = Median(earlier);
  if (recent.size() >= kStepsToCompare && earlier.size() >= kStepsToCompare && before > 0 && step_s > kSlower * before) {
    return absl::StrFormat("a step takes %.3g s, %.1f times as long as before (%.3g s): something else uses its machine, or its GPU is throttled",
                           step_s, step_s / before, before);
  }
  return "";
}

std::string LateRank(const std::vector<v1::RankTotals>& totals) {
  if (totals.size() < 2) return "";
  std::vector<std::pair<double, size_t>> waits;   // share of a step, rank
  for (size_t r = 0; r < totals.size(); ++r) {
    if (totals[r].step_count() == 0 || totals[r].step_s() <= 0) return "";
    waits.emplace_back(totals[r].communication_s() / totals[r].step_s(), r);
  }
  std::nth_element(waits.begin(), waits.begin() + 1, waits.end());   // the two that wait least
  if (waits[1].first - waits[0].first <= kLateShare) return "";
  return absl::StrFormat("rank %d comes late to all-reduces: the others wait at least %.0f%% of a step for it", waits[0].second,
                         100 * (waits[1].first - waits[0].first));
}

}  // namespace hierad
