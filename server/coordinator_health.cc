// Signs of life: ranks that say nothing, steps that do not finish.
#include <spdlog/spdlog.h>

#include <algorithm>

#include "server/coordinator.h"

namespace hierad {
namespace {

constexpr uint64_t kEarlierSteps = 1024;   // looked at for "slower than before", some of them
constexpr uint64_t kEarlierSample = 64;

}  // namespace

// Of the ranks that hierad should hear of: a process that lives, on a node that is connected.
std::vector<RankSign> Coordinator::SignsOf(const LiveJob& job) const {
  std::vector<RankSign> signs;
  for (size_t r = 0; r < job.ranks.size(); ++r) {
    const RankRow& row = job.row.ranks[r];
    const RankLive& live = job.ranks[r];
    const auto node = nodes_.find(row.node);
    if (row.ended || row.gone || live.exit || live.word || live.heard_at.count() == 0) continue;
    if (node == nodes_.end() || node->second.session == 0 || node->second.lost) continue;
    RankSign& sign = signs.emplace_back();
    sign.rank = static_cast<int>(r);
    sign.pid = live.pid;
    sign.node = row.node;
    sign.phase = live.phase;
    sign.step = live.step;
    sign.waiting_in = live.waiting_in;
    sign.spoken = live.spoken;
    sign.connected = live.session != 0;
    sign.silent = std::max(now_ - live.heard_at, std::chrono::nanoseconds(0));
  }
  return signs;
}

void Coordinator::WatchHealth(LiveJob* job) {
  if (job->row.state != v1::STARTING && job->row.state != v1::RUNNING) return;
  const std::vector<RankSign> signs = SignsOf(*job);
  const auto limit = HangLimit(options_.hang_after, job->step_seconds);
  const auto still = job->moved_at.count() == 0 ? std::chrono::nanoseconds(0) : now_ - job->moved_at;
  if (std::any_of(signs.begin(), signs.end(), [](const RankSign& r) { return r.silent >= kSilent; })) ++job->version;
  const auto hang = FindHang(signs, still, limit, options_.hang_after);
  if (!hang) return;
  spdlog::warn("job {}: {}", job->row.id, hang->message);
  Change(job, RankEnded{hang->rank, v1::REASON_HANG, hang->message, true, 0});
  BlameGpu(job);
}

std::string Coordinator::NoteOn(const LiveJob& job) {
  if (job.row.state != v1::RUNNING) return "";
  if (const std::string problem = disks_.Problem(job.row.run_folder, now_); !problem.empty()) {
    return problem + "; checkpoints that are there are kept, and one that finds no room is tried again";
  }
  std::deque<double> data_wait, earlier;
  const MetricRing& ring = job.ring;
  const uint64_t recent = std::min<uint64_t>(job.step_seconds.size(), ring.end() - ring.first());
  for (uint64_t at = ring.end() - recent; at < ring.end(); ++at) data_wait.push_back(ring.at(at).data_wait_s());
  const uint64_t last = ring.end() - recent;
  const uint64_t first = std::max(ring.first(), last > kEarlierSteps ? last - kEarlierSteps : 0);
  const uint64_t stride = std::max<uint64_t>(1, (last - first) / kEarlierSample);
  for (uint64_t at = first; at < last; at += stride) earlier.push_back(ring.at(at).step_s());
  const auto still = job.moved_at.count() == 0 ? std::chrono::nanoseconds(0) : now_ - job.moved_at;
  return SlowNote(SignsOf(job), still, HangLimit(options_.hang_after, job.step_seconds), job.step_seconds, data_wait, earlier);
}

}  // namespace hierad
