#include "worker/step/fused_executor.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "worker/kernels/reference/reduce.h"
#include "worker/kernels/reference/residual.h"
#include "worker/step/fused_op_cpu.h"

namespace hierad {
namespace {

// Other threads look at it.
void Tell(int64_t* place, int64_t value) { std::atomic_ref<int64_t>(*place).store(value, std::memory_order_relaxed); }

}  // namespace

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
  executor->begins_.resize(p.forward_backward.size() + p.update.size());
  executor->ends_.resize(executor->begins_.size());
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

absl::Status FusedExecutor::Reduce(const ReduceBucket& op) {
  if (SizeOf(plan_.tensors[op.slice].dtype) != int64_t(sizeof(float))) return absl::InternalError("gradients of several ranks are fp32");
  Communicator& communicator = *options_.communicator;
  const bool sharded = op.own != kNone;
  const int64_t part = op.size / plan_.ranks;
  auto* slice = Get<float>(op.slice);
  if (op.staging != kNone) {
    auto* narrow = Get<reference::BFloat16>(op.staging);
    reference::Cast(slice, narrow, op.size);
    if (absl::Status s = sharded ? communicator.ReduceScatterSumBF16(&narrow->bits, part, nullptr)
                                 : communicator.AllReduceSumBF16(&narrow->bits, op.size, nullptr); !s.ok()) return s;
    reference::Cast(narrow, slice, op.size);
  } else if (sharded) {
    if (absl::Status s = communicator.ReduceScatterSum(slice, part, nullptr); !s.ok()) return s;
  } else if (op.tail == kNone) {
    return communicator.AllReduceSum(slice, op.size, nullptr);
  } else {
    return communicator.AllReduceSum(slice, op.size + kGradientTail, nullptr);   // the tail lies behind it
  }
  const int64_t buckets = int64_t(plan_.buckets.size());
  if (sharded) Get<double>(op.sums)[plan_.options.rank * buckets + op.index] = reference::SumOfSquares(Get<float>(op.own), part);
  if (op.tail == kNone) return absl::OkStatus();
  if (absl::Status s = communicator.AllReduceSum(Get<float>(op.tail), kGradientTail, nullptr); !s.ok() || !sharded) return s;
  return communicator.AllGather(Get<double>(op.sums), buckets * int64_t(sizeof(double)), nullptr);
}

absl::Status FusedExecutor::Collect(const OpArgs& args) {
  Communicator& communicator = *options_.communicator;
  if (const auto* bucket = std::get_if<ReduceBucket>(&args)) return Reduce(*bucket);
  if (const auto* bucket = std::get_if<GatherBucket>(&args)) {
    return communicator.AllGather(Get<void>(bucket->slice), plan_.tensors[bucket->slice].bytes / plan_.ranks, nullptr);
  }
  if (const auto* moments = std::get_if<GatherMoments>(&args)) {
    auto* to = moments->snapshot == kNone ? nullptr : Get<char>(moments->snapshot) + plan_.tensors[plan_.master].bytes;
    return communicator.Gather(Get<void>(moments->moments), to, moments->bytes, 0, nullptr);
  }
  const auto& matrices = std::get<GatherMatrices>(args);
  const int64_t bytes = matrices.size * SizeOf(plan_.tensors[matrices.own].dtype);
  auto* all = Get<char>(matrices.all);
  std::memcpy(all + plan_.options.rank * bytes, Get<void>(matrices.own), size_t(bytes));
  return communicator.AllGather(all, bytes, nullptr);
}

const Announced* AnnouncedBy(const OpArgs& args) {
  return std::visit([](const auto& o) -> const Announced* {
    if constexpr (requires { o.announced; }) return &o.announced;
    return nullptr;
  }, args);
}

absl::Status FusedExecutor::Run(const Op& op) {
  std::vector<TensorId> touched;
  addresses_.touched = options_.poison ? &touched : nullptr;
  absl::Status status;
  if (const Announced* announced = AnnouncedBy(op.args); announced != nullptr) {
    if (options_.communicator == nullptr) return absl::InternalError("a plan of several ranks runs without a communicator");
    auto* progress = Get<CollectiveProgress>(announced->progress);
    Tell(&progress->step, Get<StepScalars>(announced->scalars)->step);
    Tell(&progress->entered, announced->number);
    status = Collect(op.args);
    if (status.ok()) Tell(&progress->left, announced->number);
  } else {
    RunOpOnCpu(op, addresses_);
  }
  addresses_.touched = nullptr;
  if (!status.ok()) return status;
  for (TensorId id : touched) {
    if (std::find(op.reads.begin(), op.reads.end(), id) != op.reads.end()) continue;
    if (std::find(op.writes.begin(), op.writes.end(), id) != op.writes.end()) continue;
    return absl::InternalError(absl::StrCat("Operation ", op.name, " touches tensor ", plan_.tensors[id].name,
                                            ", which it does not declare."));
  }
  return absl::OkStatus();
}

absl::Status FusedExecutor::RunRange(int ops, bool reduce) {
  if (options_.poison) {
    std::memset(arenas_[int(Arena::kActivations)].get(), 0xFF, plan_.arena_bytes[int(Arena::kActivations)]);
  }
  for (int i = 0; i < ops; ++i) {
    if (plan_.forward_backward[i].reduces && !reduce) continue;
    if (options_.poison) Poison(i, /*before=*/true);
    if (absl::Status status = Run(plan_.forward_backward[i]); !status.ok()) return status;
    if (options_.poison) Poison(i, /*before=*/false);
  }
  return absl::OkStatus();
}

absl::Status FusedExecutor::RunForward() { return RunRange(plan_.forward_ops, false); }
absl::Status FusedExecutor::RunForwardBackward(bool reduce) { return RunRange(int(plan_.forward_backward.size()), reduce); }

absl::Status FusedExecutor::RunReductions() {
  for (const Op& op : plan_.forward_backward) {
    if (!op.reduces) continue;
    if (absl::Status status = Run(op); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status FusedExecutor::RunUpdate() {
  const int passes = int(plan_.forward_backward.size());
  for (int i = 0; i < int(plan_.update.size()); ++i) {
    if (options_.poison) Poison(passes + i, /*before=*/true);
    if (absl::Status status = Run(plan_.update[i]); !status.ok()) return status;
    if (options_.poison) Poison(passes + i, /*before=*/false);
  }
  return absl::OkStatus();
}

absl::Status FusedExecutor::RunSnapshot() {
  for (const Op& op : plan_.snapshot) {
    if (absl::Status status = Run(op); !status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace hierad
