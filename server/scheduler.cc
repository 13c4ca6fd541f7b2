#include "server/scheduler.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace hierad {
namespace {

enum class Count { kAll, kFree };

bool Holds(const v1::Slot& slot, int64_t bytes) { return slot.memory_bytes() == 0 || slot.memory_bytes() >= bytes; }

// Ranks that fit into the memory that a node's CPU slots share.
int HostRoom(const NodeSlots& node, int64_t bytes, Count which) {
  int64_t left = 0;
  bool known = true;
  for (const NodeSlots::Use& use : node.slots) {
    if (use.slot.kind() != v1::Slot::CPU) continue;
    known = known && use.slot.memory_bytes() > 0;
    left += use.slot.memory_bytes() - (which == Count::kFree ? use.taken_bytes : 0);
  }
  if (bytes <= 0 || !known) return std::numeric_limits<int>::max();
  return static_cast<int>(std::clamp<int64_t>(left / bytes, 0, std::numeric_limits<int>::max()));
}

// Ranks of `bytes` each that a node can take.
int Room(const NodeSlots& node, v1::Slot::Kind kind, int64_t bytes, Count which) {
  const int slots = static_cast<int>(std::count_if(node.slots.begin(), node.slots.end(), [&](const NodeSlots::Use& use) {
    return use.slot.kind() == kind && !use.faulty && !(which == Count::kFree && use.busy) && (kind == v1::Slot::CPU || Holds(use.slot, bytes));
  }));
  return kind == v1::Slot::CPU ? std::min(slots, HostRoom(node, bytes, which)) : slots;
}

const char* Word(v1::Slot::Kind kind) { return kind == v1::Slot::CUDA ? "GPU" : "CPU"; }

std::string Gib(int64_t bytes) { return absl::StrFormat("%.1f GiB", static_cast<double>(bytes) / (int64_t{1} << 30)); }

// The memory of the largest card, or of the largest node's CPU slots together.
int64_t LargestMemory(const std::vector<NodeSlots>& nodes, v1::Slot::Kind kind) {
  int64_t largest = 0;
  for (const NodeSlots& node : nodes) {
    int64_t sum = 0;
    for (const NodeSlots::Use& use : node.slots) {
      if (use.slot.kind() != kind || use.faulty) continue;
      sum = kind == v1::Slot::CPU ? sum + use.slot.memory_bytes() : std::max(sum, use.slot.memory_bytes());
    }
    largest = std::max(largest, sum);
  }
  return largest;
}

// What the memory of a job's ranks is measured against, for a sentence.
std::string MemoryWords(const std::vector<NodeSlots>& nodes, v1::Slot::Kind kind, const QueuedJob& job) {
  const std::string has = Gib(LargestMemory(nodes, kind));
  if (kind == v1::Slot::CUDA) {
    return absl::StrCat("needs ", Gib(job.rank_bytes), " of device memory", job.ranks > 1 ? " a rank" : "", " by its plan; the largest card has ", has);
  }
  if (job.ranks == 1) return absl::StrCat("needs ", Gib(job.rank_bytes), " of memory by its plan; the largest node has ", has);
  return absl::StrCat("needs ", Gib(job.ranks * job.rank_bytes), " of memory by its plan (", job.ranks, " ranks of ",
                      Gib(job.rank_bytes), "); the largest node has ", has);
}

}  // namespace

Scheduler::Scheduler(std::vector<NodeSlots> nodes) : nodes_(std::move(nodes)) {}

v1::Slot::Kind Scheduler::KindFor(const std::string& device) const {
  if (device == "cpu") return v1::Slot::CPU;
  if (device == "cuda") return v1::Slot::CUDA;
  const bool has_gpu = std::any_of(nodes_.begin(), nodes_.end(), [](const NodeSlots& node) {
    return node.connected && std::any_of(node.slots.begin(), node.slots.end(), [](const NodeSlots::Use& use) { return use.slot.kind() == v1::Slot::CUDA; });
  });
  return has_gpu ? v1::Slot::CUDA : v1::Slot::CPU;
}

std::vector<Place> Scheduler::Take(const std::vector<size_t>& order, v1::Slot::Kind kind, const QueuedJob& job) {
  std::vector<Place> places;
  for (size_t n : order) {
    NodeSlots& node = nodes_[n];
    const size_t first = places.size();
    const size_t room = static_cast<size_t>(Room(node, kind, job.rank_bytes, Count::kFree));
    for (NodeSlots::Use& use : node.slots) {
      if (static_cast<int>(places.size()) == job.ranks || places.size() - first == room) break;
      if (use.busy || use.faulty || use.slot.kind() != kind || (kind == v1::Slot::CUDA && !Holds(use.slot, job.rank_bytes))) continue;
      use.busy = true;
      use.taken_bytes = job.rank_bytes;
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
  int connected = 0, known = 0, free = 0, slots = 0, free_slots = 0, drained = 0, faulty = 0;
  std::vector<size_t> order;   // connected nodes that can take a rank
  std::vector<int> free_of(nodes_.size());
  for (size_t n = 0; n < nodes_.size(); ++n) {
    const int all = Room(nodes_[n], kind, job.rank_bytes, Count::kAll), bare = Room(nodes_[n], kind, 0, Count::kAll);
    known += all;
    slots += bare;
    faulty += static_cast<int>(std::count_if(nodes_[n].slots.begin(), nodes_[n].slots.end(), [&](const auto& use) { return use.faulty && use.slot.kind() == kind; }));
    if (!nodes_[n].connected) continue;
    ++connected;
    drained += nodes_[n].drained;
    if (nodes_[n].drained) continue;
    free_of[n] = Room(nodes_[n], kind, job.rank_bytes, Count::kFree);
    free += free_of[n];
    free_slots += Room(nodes_[n], kind, 0, Count::kFree);
    if (free_of[n] > 0) order.push_back(n);
  }
  if (nodes_.empty()) {
    return {Verdict::kWaits, {}, "waits for an agent: none has connected yet (is hierad-agent running?)"};
  }
  const std::string wants = absl::StrCat("wants ", job.ranks, " ", Word(kind), job.ranks == 1 ? " slot" : " slots");
  const std::string out_of_use = faulty == 0 ? "" : absl::StrCat(faulty == 1 ? "; 1 more is" : absl::StrCat("; ", faulty, " more are"),
                                                                 " out of use for a fault of its card (hierctl nodes)");
  if (slots < job.ranks) {
    return {Verdict::kStepsAside, {}, absl::StrCat(wants, "; all known nodes together have ", slots, out_of_use,
                                                   ". It waits for a node with more; lower resources.ranks or cancel it")};
  }
  if (known < job.ranks) {
    const std::string enough = kind == v1::Slot::CUDA && known > 0 ? absl::StrCat(", and ", known, known == 1 ? " card has" : " cards have", " room for one") : "";
    return {Verdict::kStepsAside, {}, absl::StrCat(MemoryWords(nodes_, kind, job), enough, out_of_use,
                                                   ". It waits for more; lower step.batch_per_rank (hierctl plan tells the largest that fits) or cancel it")};
  }

  // One node: the one with the least left over.
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return free_of[a] < free_of[b]; });
  for (size_t n : order) {
    if (free_of[n] >= job.ranks) return {Verdict::kPlaced, Take({n}, kind, job), ""};
  }
  // Several: as few as possible.
  if (free >= job.ranks) {
    std::reverse(order.begin(), order.end());
    return {Verdict::kPlaced, Take(order, kind, job), ""};
  }
  std::string why = absl::StrCat("waits for free slots: ", wants, "; free are ",
                                 free_slots, " of ", slots, connected == 0 ? ", and no agent is connected" : "");
  why += out_of_use;
  if (drained > 0) absl::StrAppend(&why, "; ", drained, drained == 1 ? " node is" : " nodes are", " drained");
  if (free < free_slots) absl::StrAppend(&why, "; it ", MemoryWords(nodes_, kind, job));
  return {Verdict::kWaits, {}, why};
}

}  // namespace hierad
