// Between a TrainState (the parameter table's order) and a plan's flat arenas (the order in which backward finishes), and
// what the host makes of records and snapshots. Host memory; shared by the fused steps of all devices.
#pragma once

#include <atomic>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/plan/plan.h"
#include "base/status.h"
#include "worker/comm/communicator.h"
#include "worker/kernels/reference/types.h"
#include "worker/step/fused_addresses.h"
#include "worker/step/step.h"

namespace hierad {

inline absl::Status CheckState(const TrainState& state, const ParameterTable& table) {
  for (const std::vector<float>* buffer : {&state.parameters, &state.exp_avg, &state.exp_avg_sq}) {
    if (int64_t(buffer->size()) == table.flat_size) continue;
    return ErrorOf(v1::REASON_INTERNAL, absl::StrCat("a state of ", buffer->size(), " elements was loaded into a step of ",
                                                     table.flat_size, "."));
  }
  return absl::OkStatus();
}

// Both buffers hold flat_size elements; padding is left as it is.
inline void ToPlanOrder(const Plan& plan, const float* table_order, float* plan_order) {
  for (size_t p = 0; p < plan.parameter_offset.size(); ++p) {
    const Parameter& parameter = plan.table.parameters[p];
    std::memcpy(plan_order + plan.parameter_offset[p], table_order + parameter.offset, parameter.size * sizeof(float));
  }
}

inline void FromPlanOrder(const Plan& plan, const float* plan_order, float* table_order) {
  for (size_t p = 0; p < plan.parameter_offset.size(); ++p) {
    const Parameter& parameter = plan.table.parameters[p];
    std::memcpy(table_order + parameter.offset, plan_order + plan.parameter_offset[p], parameter.size * sizeof(float));
  }
}

// Elements of the loss per real sample.
inline int64_t LossElements(const Geometry& g) {
  if (g.spec.task() != "mae") return 1;
  return (g.num_mask_units - g.num_kept) * g.mask_unit_final_tokens * g.pred_dim;
}

inline absl::Status CheckLabels(const MicroBatch& batch, const Geometry& g) {
  if (g.spec.task() == "mae") return absl::OkStatus();
  for (int64_t b = 0; b < batch.real; ++b) {
    const int64_t label = batch.labels_B == nullptr ? -1 : batch.labels_B[b];
    if (label >= 0 && label < g.spec.num_classes()) continue;
    return ErrorOf(v1::REASON_DATA_ERROR,
                   absl::StrCat("sample visit ", batch.visit_ids_B[b], " has label ", label, "; model.num_classes ",
                                g.spec.num_classes(), " allows 0 to ", g.spec.num_classes() - 1, "."));
  }
  return absl::OkStatus();
}

// Of StepRecord::not_finite.
inline std::optional<uint64_t> VisitOf(uint64_t not_finite) { return not_finite == 0 ? std::nullopt : std::optional(not_finite - 1); }

// The counters that a step goes on with from `state`.
inline StepRecord RecordFrom(const TrainState& state, const v1::StepSpec& step, uint64_t published) {
  StepRecord record{};
  record.step = state.step;
  record.updates = state.updates;
  record.nan_in_row = state.nan_steps_in_row;
  record.scale = LossScaleFrom(state, step);
  record.published = published;
  return record;
}

// Value `i` of `values` in T, as float.
inline float Widened(ComputeType compute, const void* values, int64_t i) {
  if (compute == ComputeType::kBF16) return float(static_cast<const reference::BFloat16*>(values)[i]);
  if (compute == ComputeType::kF16) return float(static_cast<const reference::Float16*>(values)[i]);
  return static_cast<const float*>(values)[i];
}

// What the host hears of a step.
inline StepResult ResultOf(const StepRecord& r) {
  StepResult result;
  result.step = r.step;
  result.loss = r.loss;
  result.grad_norm = r.grad_norm;
  result.skipped = r.skipped != 0;
  result.overflowed = r.overflowed != 0;
  result.loss_scale = r.scale.value > 0 ? r.scaled_by : 0;
  result.nan_in_row = r.nan_in_row;
  result.halted = r.halted != 0;
  result.signals = {(r.signals & 1) != 0, (r.signals & 2) != 0};
  result.not_finite_visit = VisitOf(r.not_finite);
  result.input_not_finite = result.not_finite_visit.has_value() || (r.signals & 4) != 0;
  auto seconds = [&](StepPhase phase) { return double(r.spent_ns[int(phase)]) * 1e-9; };
  result.times = StepResult::Times{seconds(StepPhase::kIdle), seconds(StepPhase::kForward), seconds(StepPhase::kBackward),
                                   seconds(StepPhase::kCommunication), seconds(StepPhase::kOptimizer)};
  return result;
}

// The state's buffers in the order in which a plan holds them: the master's, then the moments'.
inline std::vector<std::vector<float>*> BuffersOf(const Plan& plan, TrainState* state) {
  std::vector<std::vector<float>*> buffers{&state->parameters, &state->exp_avg, &state->exp_avg_sq};
  if (plan.num_moments > 2) buffers.push_back(&state->ema);
  return buffers;
}
// The same to load from; an average that the state does not have begins as the parameters.
inline std::vector<const std::vector<float>*> BuffersOf(const Plan& plan, const TrainState& state) {
  std::vector<const std::vector<float>*> buffers{&state.parameters, &state.exp_avg, &state.exp_avg_sq};
  if (plan.num_moments > 2) buffers.push_back(state.ema.empty() ? &state.parameters : &state.ema);
  return buffers;
}

// Elements of a rank's kMoments.
inline int64_t MomentsSize(const Plan& plan) { return plan.num_moments * plan.flat_size / (plan.sharded ? plan.ranks : 1); }

// Between buffer `i` of the moments in plan order and rank `rank`'s arena, which holds the rank's parts alone where they are
// sharded: calls body(place in plan order, place in the arena, elements).
template <typename Body>
void ForEachPart(const Plan& plan, int64_t rank, int64_t i, const Body& body) {
  if (!plan.sharded) return body(int64_t{0}, i * plan.flat_size, plan.flat_size);
  for (const Bucket& bucket : plan.buckets) {
    const Plan::Shard shard = plan.ShardOf(bucket, rank);
    body(shard.first, shard.moments + i * shard.size, shard.size);
  }
}

// A state's moments as rank `rank`'s arena holds them.
inline std::vector<float> MomentsOf(const Plan& plan, int64_t rank, const TrainState& state) {
  std::vector<float> moments(MomentsSize(plan), 0.0f), flat(plan.flat_size, 0.0f);
  const auto buffers = BuffersOf(plan, state);
  for (size_t i = 1; i < buffers.size(); ++i) {
    ToPlanOrder(plan, buffers[i]->data(), flat.data());
    ForEachPart(plan, rank, int64_t(i) - 1, [&](int64_t at, int64_t in_arena, int64_t size) {
      std::memcpy(moments.data() + in_arena, flat.data() + at, size * sizeof(float));
    });
  }
  return moments;
}

// The state of a record, the parameters in plan order, and the moments' arenas of all ranks (of one where they are not sharded).
inline TrainState StateOf(const Plan& plan, const float* parameters, const std::vector<const float*>& moments, const StepRecord& record) {
  TrainState state{record.step, record.updates, record.nan_in_row, {}, {}, {}, {}, record.scale};
  std::vector<float> flat(plan.flat_size);
  const auto buffers = BuffersOf(plan, &state);
  for (size_t i = 0; i < buffers.size(); ++i) {
    buffers[i]->assign(plan.table.flat_size, 0.0f);
    for (size_t r = 0; i > 0 && r < moments.size(); ++r) {
      ForEachPart(plan, int64_t(r), int64_t(i) - 1, [&](int64_t at, int64_t in_arena, int64_t size) {
        std::memcpy(flat.data() + at, moments[r] + in_arena, size * sizeof(float));
      });
    }
    FromPlanOrder(plan, i == 0 ? parameters : flat.data(), buffers[i]->data());
  }
  return state;
}

// A snapshot's buffers, one behind the other as they lie in its arena, and its record, as a state.
inline TrainState StateOfSnapshot(const Plan& plan, const float* buffers, const StepRecord& record) {
  std::vector<const float*> moments;
  for (int64_t r = 0; r < (plan.sharded ? plan.ranks : 1); ++r) moments.push_back(buffers + plan.flat_size + r * MomentsSize(plan));
  return StateOf(plan, buffers, moments, record);
}

// The same from what this rank holds; where the moments are sharded all ranks call it, and each gets the others'.
inline absl::StatusOr<TrainState> StateOfRanks(const Plan& plan, const float* parameters, const std::vector<float>& own_moments,
                                               const StepRecord& record, Communicator* communicator) {
  std::vector<std::vector<float>> all{own_moments};
  if (plan.sharded) {
    all.resize(size_t(plan.ranks));
    for (int r = 0; r < int(plan.ranks); ++r) {
      all[size_t(r)].resize(own_moments.size());
      if (r == plan.options.rank) all[size_t(r)] = own_moments;
      RETURN_IF_ERROR(communicator->BroadcastHost(all[size_t(r)].data(), int64_t(own_moments.size() * sizeof(float)), r));
    }
  }
  std::vector<const float*> moments;
  for (const std::vector<float>& one : all) moments.push_back(one.data());
  return StateOf(plan, parameters, moments, record);
}

// "all-reduce 3 of 9 of step 17", empty between two. Any thread.
inline std::string DescribeProgress(const Plan& plan, CollectiveProgress* progress) {
  if (progress == nullptr) return "";
  auto value = [](int64_t* place) { return std::atomic_ref<int64_t>(*place).load(std::memory_order_relaxed); };
  const int64_t left = value(&progress->left), entered = value(&progress->entered), step = value(&progress->step);
  if (entered == left || entered == 0) return "";
  for (const std::vector<Op>* ops : {&plan.forward_backward, &plan.update, &plan.snapshot}) {
    for (const Op& op : *ops) {
      const Announced* announced = AnnouncedBy(op.args);
      if (announced == nullptr || announced->number != entered) continue;
      return absl::StrCat(op.name, op.reduces ? absl::StrCat(" of ", plan.buckets.size(), " buckets") : "", ", step ", step);
    }
  }
  return "";
}

}  // namespace hierad
