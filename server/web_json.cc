#include "server/web_json.h"

#include <algorithm>
#include <cmath>

namespace hierad {
namespace {

using Json = nlohmann::json;

std::string Without(const std::string& prefix, const std::string& name) { return name.rfind(prefix, 0) == 0 ? name.substr(prefix.size()) : name; }

// Shares of the step by phase, of the attempt so far; null: not known.
Json Budget(const v1::Job& job) {
  if (job.ranks_size() == 0 || job.ranks(0).totals().step_count() == 0 || job.ranks(0).totals().step_s() <= 0) return nullptr;
  const v1::RankTotals& t = job.ranks(0).totals();
  const double told = t.data_wait_s() + t.forward_s() + t.backward_s() + t.communication_s() + t.optimizer_s();
  const double whole = std::max(t.step_s(), told);
  return {{"data_wait", t.data_wait_s() / whole}, {"forward", t.forward_s() / whole}, {"backward", t.backward_s() / whole},
          {"comm", t.communication_s() / whole}, {"optimizer", t.optimizer_s() / whole}, {"other", (whole - told) / whole}};
}

}  // namespace

Json WebNumber(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  return value;
}

Json WebSummary(const v1::Job& job) {
  return {{"id", job.id()},
          {"name", job.spec().name()},
          {"state", v1::JobState_Name(job.state())},
          {"step", job.step()},
          {"total_steps", job.total_steps()},
          {"loss", job.has_last() ? WebNumber(job.last().loss()) : Json(nullptr)},
          {"samples_per_s", WebNumber(job.samples_per_s())},
          {"eta_s", WebNumber(job.eta_s())},
          {"alerts", job.alerts_size()},
          {"budget", Budget(job)}};
}

Json WebDetail(const v1::Job& job) {
  Json detail = WebSummary(job);
  Json alerts = Json::array(), ranks = Json::array();
  for (const std::string& alert : job.alerts()) alerts.push_back(alert);
  for (const v1::RankView& rank : job.ranks()) {
    ranks.push_back({{"rank", rank.rank()}, {"node", rank.node()}, {"slot_id", rank.slot_id()}, {"phase", Without("PHASE_", v1::Phase_Name(rank.phase()))},
                     {"step", rank.step()}, {"memory_bytes", rank.totals().memory_bytes()}, {"waiting_in", rank.waiting_in()}});
  }
  detail["alerts"] = std::move(alerts);
  detail["ranks"] = std::move(ranks);
  detail["ranks_wanted"] = job.spec().resources().ranks();
  detail["message"] = job.message();
  detail["reason"] = job.reason() == v1::REASON_UNSPECIFIED ? "" : Without("REASON_", v1::Reason_Name(job.reason()));
  detail["data"] = job.spec().data().source();
  detail["submitter"] = job.submitter();
  detail["attempt"] = job.attempt();
  detail["epoch"] = WebNumber(job.epoch());
  detail["nan_steps"] = job.nan_steps();
  detail["checkpoint_ms"] = job.checkpoint_ms();
  detail["best_eval_loss"] = job.has_best_eval_loss() ? WebNumber(job.best_eval_loss()) : Json(nullptr);
  if (job.has_last()) {
    detail["grad_norm"] = WebNumber(job.last().grad_norm());
    detail["lr"] = WebNumber(job.last().lr());
    detail["step_s"] = WebNumber(job.last().step_s());
  }
  return detail;
}

Json WebNode(const v1::Node& node) {
  Json slots = Json::array();
  for (const v1::SlotUse& use : node.slots()) {
    slots.push_back({{"id", use.slot().id()}, {"model", use.slot().model()}, {"job_id", use.job_id()}, {"rank", use.rank()}, {"fault", use.fault()}});
  }
  return {{"name", node.name()}, {"connected", node.connected()}, {"slots", std::move(slots)}};
}

Json WebPoints(const HistorySteps& steps) {
  Json points = Json::array();
  for (const v1::StepMetrics& m : steps.steps) points.push_back({{"step", m.step()}, {"loss", WebNumber(m.loss())}});
  return {{"points", std::move(points)}};
}

std::string WebText(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); }

}  // namespace hierad
