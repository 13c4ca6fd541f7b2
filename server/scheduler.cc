#include "server/scheduler.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"

namespace hierad {
namespace {

int CountSlots(const NodeSlots& node, v1::Slot::Kind kind, bool free_only) {
  return static_cast<int>(std::count_if(node.slots.begin(), node.slots.end(), [&](const NodeSlots::Use& use) {
    return use.slot.kind() == kind && !(free_only && use.busy);
  }));
}

const char* Word(v1::Slot::Kind kind) { return kind == v1::Slot::CUDA ? "GPU" : "CPU"; }

}  // namespace

Scheduler::Scheduler(std::vector<NodeSlots> nodes) : nodes_(std::move(nodes)) {}

v1::Slot::Kind Scheduler::KindFor(const std::string& device) const {
  if (device == "cpu") return v1::Slot::CPU;
  if (device == "cuda") return v1::Slot::CUDA;
  const bool has_gpu = std::any_of(nodes_.begin(), nodes_.end(), [](const NodeSlots& node) {
    return node.connected && CountSlots(node, v1::Slot::CUDA, false) > 0;
  });
  return has_gpu ? v1::Slot::CUDA : v1::Slot::CPU;
}

std::vector<Place> Scheduler::Take(const std::vector<size_t>& order, v1::Slot::Kind kind, int ranks) {
  std::vector<Place> places;
  for (size_t n : order) {
    NodeSlots& node = nodes_[n];
    const size_t first = places.size();
    for (NodeSlots::Use& use : node.slots) {
      if (static_cast<int>(places.size()) == ranks) break;
      if (use.busy || use.slot.kind() != kind) continue;
      use.busy = true;
      places.push_back({node.name, use.slot, static_cast<int>(places.size() - first), 0});
    }
    for (size_t i = first; i < places.size(); ++i) places[i].local_world_size = static_cast<int>(places.size() - first);
  }
  return places;
}

Scheduler::Decision Scheduler::Consider(const QueuedJob& job) {
  if (job.retry_in_ms > 0) {
    return {Verdict::kWaits, {}, absl::StrCat("is tried again in ", (job.retry_in_ms + 999) / 1000, " s")};
  }
  const v1::Slot::Kind kind = KindFor(job.device);
  int connected = 0, known = 0, free = 0;
  std::vector<size_t> order;   // connected nodes with a free slot
  std::vector<int> free_of(nodes_.size());
  for (size_t n = 0; n < nodes_.size(); ++n) {
    const int all = CountSlots(nodes_[n], kind, false);
    known += all;
    if (!nodes_[n].connected) continue;
    ++connected;
    free_of[n] = CountSlots(nodes_[n], kind, true);
    free += free_of[n];
    if (free_of[n] > 0) order.push_back(n);
  }
  if (nodes_.empty()) {
    return {Verdict::kWaits, {}, "waits for an agent: none has connected yet (is hierad-agent running?)"};
  }
  const std::string wants = absl::StrCat("wants ", job.ranks, " ", Word(kind), job.ranks == 1 ? " slot" : " slots");
  if (known < job.ranks) {
    return {Verdict::kStepsAside, {}, absl::StrCat(wants, "; all known nodes together have ", known,
                                                   ". It waits for a node with more; lower resources.ranks or cancel it")};
  }

  // One node: the one with the least left over.
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return free_of[a] < free_of[b]; });
  for (size_t n : order) {
    if (free_of[n] >= job.ranks) return {Verdict::kPlaced, Take({n}, kind, job.ranks), ""};
  }
  // Several: as few as possible.
  if (free >= job.ranks) {
    std::reverse(order.begin(), order.end());
    return {Verdict::kPlaced, Take(order, kind, job.ranks), ""};
  }
  return {Verdict::kWaits, {}, absl::StrCat("waits for free slots: ", wants, "; free are ", free, " of ", known,
                                            connected == 0 ? ", and no agent is connected" : "")};
}

}  // namespace hierad
