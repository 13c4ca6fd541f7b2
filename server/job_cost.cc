#include "server/job_cost.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "base/plan/plan.h"
#include "base/plan/plan_report.h"

namespace hierad {
namespace {

std::optional<JobCost> CostOf(const v1::JobSpec& spec, const std::string& model) {
  const auto plan = Plan::Make(spec, {.compute = ComputeTypeOf(spec.step())});
  if (!plan.ok()) return std::nullopt;
  const Card* card = nullptr;
  for (const Card& known : Cards()) {
    if (absl::StrContains(absl::AsciiStrToLower(model), absl::AsciiStrToLower(known.name))) card = &known;
  }
  JobCost cost;
  if (card != nullptr) cost.flops_per_s = PeakFlops(*card, spec.step());
  const auto add = [&](const std::vector<Op>& ops, double times) {
    for (const Op& op : ops) {
      cost.flops += times * op.flops * spec.resources().ranks();
      if (card != nullptr) cost.floor_s += times * std::max(op.flops / cost.flops_per_s, op.bytes / card->bytes_per_s);
    }
  };
  add(plan->forward_backward, spec.step().accumulation());
  add(plan->update, 1);
  return cost;
}

}  // namespace

std::optional<JobCost> JobCosts::Of(const v1::JobSpec& spec, const std::string& card) {
  const std::string key = spec.model().SerializeAsString() + "\n" + spec.step().SerializeAsString() + "\n" +
                          spec.resources().SerializeAsString() + "\n" + card;
  if (const auto found = known_.find(key); found != known_.end()) return found->second;
  if (clock_->Monotonic() >= planning_until_) return std::nullopt;
  if (known_.size() >= kKept) known_.clear();
  return known_[key] = CostOf(spec, card);
}

}  // namespace hierad
