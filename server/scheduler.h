// Which queued job goes where: pure, no I/O. Strictly first come, first served; no backfill: the first job that must
// wait lets none behind it pass. Exception: a job that is larger than everything that is known can never be the next,
// so it steps aside until a node comes that has room for it. A gang is placed whole or not at all; on one node where
// one has room, else over several.
//
// Memory is a slot's property like its kind: a rank whose plan takes more than a card has is never put there. CPU slots
// share their node's memory, so the ranks on a node together must fit into the sum of its CPU slots.
#pragma once

#include <string>
#include <vector>

#include "hierad/v1/worker.pb.h"

namespace hierad {

struct NodeSlots {
  std::string name;
  bool connected = false;
  bool drained = false;    // its slots are there, but get no more work
  struct Use {
    v1::Slot slot;             // memory_bytes 0: not known, everything fits
    bool busy = false;
    bool faulty = false;       // there, but nothing is put on it before it was mended: as if it were not
    int64_t taken_bytes = 0;   // by the rank on it, at least
  };
  std::vector<Use> slots;
};

struct QueuedJob {
  uint64_t id = 0;
  int ranks = 1;
  std::string device;      // auto, cpu, cuda
  int64_t retry_in_ms = 0; // > 0: holds its place, but may not start yet
  int64_t rank_bytes = 0;  // a rank takes at least so much memory on its slot (LeastMemory); 0: not known
};

struct Place {
  std::string node;
  v1::Slot slot;
  int local_rank = 0;
  int local_world_size = 1;
};

// Considers jobs one after another, in queue order; a placement takes its slots.
class Scheduler {
 public:
  explicit Scheduler(std::vector<NodeSlots> nodes);

  enum class Verdict {
    kPlaced,
    kWaits,        // nothing behind it may start
    kStepsAside,   // larger than all that is known, or than the memory there
  };
  struct Decision {
    Verdict verdict;
    std::vector<Place> places;   // kPlaced: one a rank, in rank order
    std::string why;             // else: a sentence
  };
  Decision Consider(const QueuedJob& job);

  // CUDA if a connected node has such a slot, else CPU.
  v1::Slot::Kind KindFor(const std::string& device) const;

 private:
  std::vector<Place> Take(const std::vector<size_t>& order, v1::Slot::Kind kind, const QueuedJob& job);

  std::vector<NodeSlots> nodes_;
};

}  // namespace hierad
