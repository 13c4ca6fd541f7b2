// Between a TrainState (the parameter table's order) and a plan's flat arenas (the order in which backward finishes), and
// what rides behind the gradients. Host memory; shared by the fused steps of all devices.
#pragma once

#include <bit>
#include <cstring>

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

// The tail of the gradients. The high part of the loss numerator has 12 bits, so that its sum over ranks is exact.
enum TailPlace { kTailLossHigh, kTailLossLow, kTailStop, kTailCheckpoint, kTailUsed };
static_assert(kTailUsed <= kGradientTail);

inline void PackTail(double numerator, StepSignals signals, float* tail) {
  const float high = std::bit_cast<float>(std::bit_cast<uint32_t>(float(numerator)) & ~uint32_t{0xFFF});
  tail[kTailLossHigh] = high;
  tail[kTailLossLow] = float(numerator - double(high));
  tail[kTailStop] = signals.stop ? 1.0f : 0.0f;
  tail[kTailCheckpoint] = signals.checkpoint ? 1.0f : 0.0f;
}

// The numerator; signals: OR over the ranks.
inline double UnpackTail(const float* tail, StepSignals* signals) {
  *signals = {tail[kTailStop] > 0, tail[kTailCheckpoint] > 0};
  return double(tail[kTailLossHigh]) + double(tail[kTailLossLow]);
}

}  // namespace hierad
