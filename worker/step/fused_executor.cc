#include "worker/step/fused_executor.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "worker/step/fused_op_cpu.h"

namespace hierad {

absl::StatusOr<std::unique_ptr<FusedExecutor>> FusedExecutor::Make(Plan plan, const Options& options) {
  std::unique_ptr<FusedExecutor> executor(new FusedExecutor(std::move(plan), options));
  const Plan& p = executor->plan_;
  executor->addresses_.plan = &p;
  for (int arena = 0; arena < kNumArenas; ++arena) {
    const size_t bytes = size_t(p.arena_bytes[arena] + kArenaAlign - 1) / kArenaAlign * kArenaAlign;
    if (bytes == 0) continue;
    auto* memory = static_cast<std::byte*>(std::aligned_alloc(kArenaAlign, bytes));
    if (memory == nullptr) {
      return absl::ResourceExhaustedError(absl::StrCat("The step needs ", p.TotalBytes(), " bytes of memory, of which an arena of ", bytes,
                                                       " could not be had; use a smaller step.batch_per_rank."));
    }
    std::memset(memory, 0, bytes);
    executor->arenas_[arena].reset(memory);
    executor->addresses_.arena[arena] = memory;
  }
  for (const Constant& constant : p.constants) {
    std::memcpy(executor->addresses_.At(constant.tensor), constant.bytes.data(), constant.bytes.size());
  }
  if (!options.poison) return executor;
  executor->begins_.resize(p.forward_backward.size());
  executor->ends_.resize(p.forward_backward.size());
  for (TensorId id = 0; id < TensorId(p.tensors.size()); ++id) {
    const TensorSpec& tensor = p.tensors[id];
    if (tensor.arena != Arena::kActivations || tensor.first < 0) continue;
    executor->begins_[tensor.first].push_back(id);
    executor->ends_[tensor.last].push_back(id);
  }
  return executor;
}

void FusedExecutor::ClearSums() {
  if (plan_.gradients != kNone) std::memset(Get<void>(plan_.gradients), 0, plan_.arena_bytes[int(Arena::kGradients)]);
  std::memset(Get<void>(plan_.loss_partials), 0, plan_.tensors[plan_.loss_partials].bytes);
}

void FusedExecutor::Poison(int op, bool before) {
  for (TensorId id : before ? begins_[op] : ends_[op]) {
    std::memset(Get<void>(id), 0xFF, plan_.tensors[id].bytes);   // NaN in every floating type
  }
}

absl::Status FusedExecutor::Run(const Op& op) {
  if (!options_.poison) {
    RunOpOnCpu(op, addresses_);
    return absl::OkStatus();
  }
  std::vector<TensorId> touched;
  addresses_.touched = &touched;
  RunOpOnCpu(op, addresses_);
  addresses_.touched = nullptr;
  for (TensorId id : touched) {
    if (std::find(op.reads.begin(), op.reads.end(), id) != op.reads.end()) continue;
    if (std::find(op.writes.begin(), op.writes.end(), id) != op.writes.end()) continue;
    return absl::InternalError(absl::StrCat("Operation ", op.name, " touches tensor ", plan_.tensors[id].name,
                                            ", which it does not declare."));
  }
  return absl::OkStatus();
}

absl::Status FusedExecutor::RunRange(int first, int end) {
  if (options_.poison && first == 0) {
    std::memset(arenas_[int(Arena::kActivations)].get(), 0xFF, plan_.arena_bytes[int(Arena::kActivations)]);
  }
  for (int i = first; i < end; ++i) {
    if (options_.poison) Poison(i, /*before=*/true);
    if (absl::Status status = Run(plan_.forward_backward[i]); !status.ok()) return status;
    if (options_.poison) Poison(i, /*before=*/false);
  }
  return absl::OkStatus();
}

absl::Status FusedExecutor::RunForward() { return RunRange(0, plan_.forward_ops); }
absl::Status FusedExecutor::RunBackward() { return RunRange(plan_.forward_ops, int(plan_.forward_backward.size())); }
absl::Status FusedExecutor::RunForwardBackward() { return RunRange(0, int(plan_.forward_backward.size())); }

absl::Status FusedExecutor::RunUpdate() {
  for (const Op& op : plan_.update) {
    if (absl::Status status = Run(op); !status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace hierad
