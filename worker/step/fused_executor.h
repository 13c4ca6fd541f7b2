// Runs a plan on the CPU: one allocation per arena, the plan's constants in place, the plan's operations in order. It
// adds nothing of its own: what runs, where it reads and where it writes is the plan's. One thread.
#pragma once

#include <cstdlib>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/plan/plan.h"
#include "worker/comm/communicator.h"
#include "worker/step/fused_addresses.h"

namespace hierad {

class FusedExecutor {
 public:
  struct Options {
    // Tests: activations hold NaN bytes wherever no tensor lives (before a tensor's first operation and after its last),
    // and an operation that asks for a tensor it does not declare is an error.
    bool poison = false;
    Communicator* communicator = nullptr;   // for the reductions of a plan of several ranks; outlives the executor
  };
  // Arenas begin as zeros. ResourceExhausted where memory does not suffice.
  static absl::StatusOr<std::unique_ptr<FusedExecutor>> Make(Plan plan, const Options& options);

  const Plan& plan() const { return plan_; }
  const Addresses& addresses() const { return addresses_; }
  template <typename V>
  V* Get(TensorId id) const { return addresses_.Get<V>(id); }

  void ClearSums();                      // gradients (tail included) and loss partials, before a step of a plan that accumulates
  absl::Status RunForward();             // of one micro-batch: scalars and a staging slot are filled
  // `reduce`: with the plan's reductions; in a step's last micro-batch.
  absl::Status RunForwardBackward(bool reduce = true);
  absl::Status RunReductions();          // alone: of a rank that has no sample in a step
  absl::Status RunUpdate();
  absl::Status RunSnapshot();

 private:
  FusedExecutor(Plan plan, const Options& options) : plan_(std::move(plan)), options_(options) {}
  absl::Status Run(const Op& op);
  absl::Status RunRange(int ops, bool reduce);
  absl::Status Reduce(const ReduceBucket& op);
  absl::Status Collect(const OpArgs& op);
  void Poison(int op, bool before);

  const Plan plan_;
  const Options options_;
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  std::unique_ptr<std::byte[], Free> arenas_[kNumArenas];
  Addresses addresses_;
  std::vector<std::vector<TensorId>> begins_, ends_;   // with poison: activations by the operation that they begin or end at
};

}  // namespace hierad
