// Between a TrainState (the parameter table's order) and a plan's flat arenas (the order in which backward finishes), and
// what the host makes of records and snapshots. Host memory; shared by the fused steps of all devices.
#pragma once

#include <cstring>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/plan/plan.h"
#include "base/status.h"
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

// What the host hears of a step.
inline StepResult ResultOf(const StepRecord& r) {
  StepResult result;
  result.step = r.step;
  result.loss = r.loss;
  result.grad_norm = r.grad_norm;
  result.skipped = r.skipped != 0;
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

// A snapshot's buffers, one behind the other in plan order, and its record, as a state.
inline TrainState StateOf(const Plan& plan, const float* buffers, const StepRecord& record) {
  TrainState state{record.step, record.updates, record.nan_in_row, {}, {}, {}, {}};
  for (std::vector<float>* buffer : BuffersOf(plan, &state)) {
    buffer->assign(plan.table.flat_size, 0.0f);
    FromPlanOrder(plan, buffers, buffer->data());
    buffers += plan.flat_size;
  }
  return state;
}

}  // namespace hierad
