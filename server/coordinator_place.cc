// The coordinator's clock and its placements.
#include <spdlog/spdlog.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/failpoint.h"
#include "base/job_yaml.h"
#include "base/plan/plan_report.h"
#include "base/status.h"
#include "server/coordinator.h"
#include "server/credential.h"
#include "server/run_folder.h"

namespace hierad {
namespace {

int64_t RankBytes(LiveJob* job) {
  if (!job->rank_bytes) job->rank_bytes = LeastMemory(job->row.spec).value_or(0);
  return *job->rank_bytes;
}

}  // namespace

void Coordinator::Tick() {
  LoseNodes();
  GiveUpLogs();
  WatchDisk();
  const std::vector<uint64_t> active(active_.begin(), active_.end());
  for (uint64_t id : active) {
    LiveJob* job = Find(id);
    Settle(job);
    WatchHealth(job);
    if (IsActive(job->row.state) && job->kill_at && now_ >= *job->kill_at && !job->kill_sent) {
      job->kill_sent = true;
      MarkOrders(*job);
    }
  }
  // A job that waits for its next attempt holds its place, so only the first one's time matters.
  if (!queued_.empty() && head_ != 0) {
    if (const LiveJob* head = Find(head_); head && head->row.retry_at_ms > 0 && now_ >= head->retry_due) place_ = true;
  }
  if (now_ - started_ >= options_.node_lost_after && aside_.count(head_) != 0) place_ = true;
  DropOld();
}

// Said in the log before anything is lost; what waits for room looks again.
void Coordinator::WatchDisk() {
  const std::string problem = disks_.Problem(options_.runs_folder, now_);
  if (problem.empty() == disk_said_.empty()) {
    if (!queued_.empty() && disk_waits_ && now_ - disk_looked_ >= DiskWatch::kLookEvery) place_ = true;
    return;
  }
  disk_said_ = problem;
  place_ = true;
  problem.empty() ? spdlog::info("the disk of {} has room again", options_.runs_folder) : spdlog::warn("no job is let in: {}", problem);
}

void Coordinator::LoseNodes() {
  for (auto& [name, node] : nodes_) {
    if (node.lost || now_ - node.last_seen < options_.node_lost_after) continue;
    node.lost = true;
    place_ = true;
    const int64_t silent_s = std::chrono::duration_cast<std::chrono::seconds>(now_ - node.last_seen).count();
    spdlog::warn("node {} is lost: no report for {} s", name, silent_s);
    const std::vector<uint64_t> active(active_.begin(), active_.end());
    for (uint64_t id : active) {
      LiveJob* job = Find(id);
      for (size_t r = 0; r < job->row.ranks.size(); ++r) {
        if (job->row.ranks[r].node != name || job->row.ranks[r].gone) continue;
        job->ranks[r].exit = RankEnded{static_cast<int>(r), v1::REASON_NODE_LOST,
                                       absl::StrCat("node ", name, " has not reported for ", silent_s,
                                                    " s; see whether it is up and its hierad-agent runs"), true, 0};
        job->ranks[r].exit_wait = now_;
      }
      Settle(job);
    }
  }
}

void Coordinator::DropOld() {
  while (!ended_.empty()) {
    auto oldest = std::min_element(ended_.begin(), ended_.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
    if (ended_.size() <= kRecentJobsMax && now_ - oldest->second < kRecentJobs) break;
    const uint64_t id = oldest->first;
    if (undo_.count(id) != 0) break;   // ended in this very turn
    Forget(id);
  }
  if (nodes_.size() <= kMaxNodes / 2) return;
  for (auto node = nodes_.begin(); node != nodes_.end();) {
    node = node->second.lost && node->second.session == 0 && now_ - node->second.last_seen > kRecentJobs ? nodes_.erase(node) : std::next(node);
  }
}

void Coordinator::Settle(LiveJob* job) {
  if (!IsActive(job->row.state)) return;
  const int attempt = job->row.attempt;
  for (size_t r = 0; r < job->ranks.size(); ++r) {
    // An attempt that is over takes its ranks' live state with it.
    const auto current = [&] { return IsActive(job->row.state) && job->row.attempt == attempt; };
    if (job->ranks[r].word && !job->row.ranks[r].ended) {
      Change(job, *job->ranks[r].word);
      if (current()) BlameGpu(job);
    }
    if (!current() || !job->ranks[r].exit || job->row.ranks[r].gone) continue;
    RankLive& live = job->ranks[r];
    if (!job->row.ranks[r].ended && live.session != 0 && now_ < live.exit_wait) continue;
    Change(job, *live.exit);
    BlameGpu(job);
    Change(job, RankGone{static_cast<int>(r)});
    if (!current()) return;
  }
}

std::vector<NodeSlots> Coordinator::SlotsNow() const {
  std::map<std::pair<std::string, std::string>, int64_t> busy;   // by a rank, and what it takes
  for (uint64_t id : active_) {
    LiveJob* job = jobs_.at(id).get();
    for (const RankRow& rank : job->row.ranks) busy[{rank.node, rank.slot.id()}] = RankBytes(job);
  }
  std::vector<NodeSlots> all;
  for (const auto& [name, node] : nodes_) {
    NodeSlots& slots = all.emplace_back();
    slots.name = name;
    slots.connected = node.session != 0 && !node.lost;
    slots.drained = node.drained;
    std::set<std::string> occupied;   // by processes that no job of ours has: they are being killed
    for (const v1::RankProcess& process : node.processes) {
      if (!process.ended()) occupied.insert(process.slot_id());
    }
    for (const v1::Slot& slot : node.slots) {
      const auto used = busy.find({name, slot.id()});
      slots.slots.push_back({slot, used != busy.end() || occupied.count(slot.id()) != 0, node.faults.count(slot.id()) != 0,
                             used != busy.end() ? used->second : 0});
    }
  }
  return all;
}

void Coordinator::Place() {
  place_ = false;
  head_ = 0;
  aside_.clear();
  disk_waits_ = false;
  disk_looked_ = now_;
  if (queued_.empty()) return;
  Scheduler scheduler(SlotsNow());
  // The set changes under the loop, and is not copied: mostly its first job waits.
  for (auto at = queued_.begin(); at != queued_.end();) {
    const uint64_t id = *at++;
    LiveJob* job = Find(id);
    // Others may run on other disks.
    if (const std::string problem = disks_.Problem(job->row.run_folder, now_); !problem.empty()) {
      aside_[id] = absl::StrCat("waits: ", problem);
      disk_waits_ = true;
      ++job->version;
      continue;
    }
    QueuedJob ask;
    ask.id = id;
    ask.ranks = job->row.spec.resources().ranks();
    ask.device = job->row.spec.resources().device();
    ask.rank_bytes = RankBytes(job);
    if (job->row.retry_at_ms > 0 && now_ < job->retry_due) {
      ask.retry_in_ms = std::max<int64_t>(1, std::chrono::duration_cast<std::chrono::milliseconds>(job->retry_due - now_).count());
    }
    Scheduler::Decision decision = scheduler.Consider(ask);
    ++job->version;
    if (decision.verdict == Scheduler::Verdict::kPlaced) {
      Begin(job, decision.places);
      continue;
    }
    // Shortly after a start not every node has come back, so "larger than everything" is not known yet.
    if (decision.verdict == Scheduler::Verdict::kStepsAside) {
      aside_[id] = decision.why;
      if (now_ - started_ >= options_.node_lost_after) continue;
    }
    head_ = id;
    head_why_ = decision.why;
    break;
  }
}

void Coordinator::Begin(LiveJob* job, const std::vector<struct Place>& places) {
  Placed placed;
  placed.credential = NewCredential();
  absl::Status made = Failpoint("hierad.run_folder");
  const auto account = options_.account_for(job->row.submitter);
  if (made.ok()) made = account.ok() ? MakeRunFolder(job->row, options_.allowed_roots, placed.credential, *account) : account.status();
  if (!made.ok()) {
    const bool ours = made.code() == absl::StatusCode::kResourceExhausted || made.code() == absl::StatusCode::kInternal ||
                      made.code() == absl::StatusCode::kUnavailable;
    Change(job, PlacementFailed{ours ? v1::REASON_CHECKPOINT : v1::REASON_USER_ERROR, std::string(made.message())});
    return;
  }
  for (const struct Place& place : places) {
    RankRow& rank = placed.ranks.emplace_back();
    rank.rank = static_cast<int>(placed.ranks.size()) - 1;
    rank.node = place.node;
    rank.slot = place.slot;
    rank.local_rank = place.local_rank;
    rank.local_world_size = place.local_world_size;
  }
  Change(job, placed);
}

}  // namespace hierad
