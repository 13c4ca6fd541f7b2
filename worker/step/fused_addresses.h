// Where a plan's tensors lie: the plan's offsets on top of one base address per arena. Shared by the executors of all
// devices; the kernels get what this resolves and nothing else.
#pragma once

#include <cstddef>
#include <vector>

#include "base/plan/plan.h"

namespace hierad {

struct Addresses {
  const Plan* plan = nullptr;
  std::byte* arena[kNumArenas] = {};
  // Tests: every tensor asked for is noted here.
  mutable std::vector<TensorId>* touched = nullptr;

  // nullptr for kNone.
  void* At(TensorId id) const {
    if (id == kNone) return nullptr;
    if (touched != nullptr) touched->push_back(id);
    const TensorSpec& tensor = plan->tensors[id];
    return arena[int(tensor.arena)] + tensor.offset;
  }
  template <typename V>
  V* Get(TensorId id) const {
    return static_cast<V*>(At(id));
  }
};

// Of a collective of the plan; nullptr: it is none.
const Announced* AnnouncedBy(const OpArgs& args);

}  // namespace hierad
