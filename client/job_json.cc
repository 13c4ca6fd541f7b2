#include "client/job_json.h"

#include <cmath>

#include "base/job_keys.h"

namespace hierad {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

Json Known(double value) { return value == 0 ? Json(nullptr) : JsonOf(value); }
Json KnownTime(int64_t unix_ms) { return unix_ms == 0 ? Json(nullptr) : Json(unix_ms); }

std::string Without(const std::string& prefix, const std::string& name, int number) {
  if (name.empty()) return std::to_string(number);
  return name.rfind(prefix, 0) == 0 ? name.substr(prefix.size()) : name;
}

Json Element(const Message& section, const FieldDescriptor* f, int i) {
  const auto* r = section.GetReflection();
  switch (f->cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32: return r->GetRepeatedInt32(section, f, i);
    case FieldDescriptor::CPPTYPE_BOOL: return r->GetRepeatedBool(section, f, i);
    case FieldDescriptor::CPPTYPE_DOUBLE: return JsonOf(r->GetRepeatedDouble(section, f, i));
    case FieldDescriptor::CPPTYPE_STRING: return r->GetRepeatedString(section, f, i);
    default: return nullptr;   // job.proto has no other lists
  }
}

Json Value(const Message& section, const FieldDescriptor* f) {
  const auto* r = section.GetReflection();
  if (f->is_repeated()) {
    Json list = Json::array();
    for (int i = 0; i < r->FieldSize(section, f); ++i) list.push_back(Element(section, f, i));
    return list;
  }
  switch (f->cpp_type()) {
    case FieldDescriptor::CPPTYPE_STRING: return r->GetString(section, f);
    case FieldDescriptor::CPPTYPE_BOOL: return r->GetBool(section, f);
    case FieldDescriptor::CPPTYPE_DOUBLE: return JsonOf(r->GetDouble(section, f));
    case FieldDescriptor::CPPTYPE_UINT64: return r->GetUInt64(section, f);
    case FieldDescriptor::CPPTYPE_INT64: return r->GetInt64(section, f);
    case FieldDescriptor::CPPTYPE_INT32: return r->GetInt32(section, f);
    default: return nullptr;
  }
}

Json TotalsJson(const v1::RankTotals& t, const v1::DataCounters& data) {
  return {{"steps", t.step_count()}, {"samples", t.samples()}, {"step_s", JsonOf(t.step_s())}, {"data_wait_s", JsonOf(t.data_wait_s())},
          {"forward_s", JsonOf(t.forward_s())}, {"backward_s", JsonOf(t.backward_s())}, {"communication_s", JsonOf(t.communication_s())},
          {"optimizer_s", JsonOf(t.optimizer_s())}, {"memory_bytes", t.memory_bytes()}, {"skipped_samples", data.skipped_samples()},
          {"checkpoints", t.checkpoint_count()}, {"checkpoint_s", JsonOf(t.checkpoint_s())}};
}

Json DataJson(const v1::DataCounters& d) {
  return {{"wait_s", JsonOf(d.wait_s())}, {"bytes", d.bytes()}, {"samples", d.samples()}, {"threads", d.threads()},
          {"slowest", d.slowest()}, {"slowest_s", JsonOf(d.slowest_s())}};
}

Json JsonOf(const v1::RankView& rank) {
  return {{"rank", rank.rank()},   {"node", rank.node()}, {"slot_id", rank.slot_id()},
          {"phase", PhaseName(rank.phase())}, {"step", rank.step()}, {"pid", rank.pid()},
          {"last_seen_ms", KnownTime(rank.last_seen_ms())}, {"waiting_in", rank.waiting_in()},
          {"silent_s", rank.silent_s()}, {"totals", TotalsJson(rank.totals(), rank.data())},
          {"data", DataJson(rank.data())}};
}

}  // namespace

Json JsonOf(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  return value;
}

Json JsonOf(const v1::JobSpec& spec) {
  Json json = Json::object();
  for (const JobKey& key : JobKeys()) {
    if (!IsSet(spec, key)) continue;
    Json value = Value(*SectionOf(spec, key), key.field);
    if (key.section) json[key.section->name()][key.field->name()] = std::move(value);
    else json[key.field->name()] = std::move(value);
  }
  return json;
}

Json JsonOf(const v1::StepMetrics& m) {
  return {{"step", m.step()},       {"epoch", JsonOf(m.epoch())},   {"loss", JsonOf(m.loss())},
          {"grad_norm", JsonOf(m.grad_norm())}, {"lr", JsonOf(m.lr())}, {"samples", m.samples()},
          {"step_s", JsonOf(m.step_s())}, {"data_wait_s", JsonOf(m.data_wait_s())},
          {"forward_s", JsonOf(m.forward_s())}, {"backward_s", JsonOf(m.backward_s())}, {"communication_s", JsonOf(m.communication_s())},
          {"optimizer_s", JsonOf(m.optimizer_s())}, {"skipped", m.skipped()},
          {"time_ms", m.time_ms()}, {"eval_loss", m.has_eval_loss() ? JsonOf(m.eval_loss()) : Json(nullptr)},
          {"loss_scale", m.has_loss_scale() ? JsonOf(m.loss_scale()) : Json(nullptr)}};
}

Json JsonOf(const v1::AttemptView& a) {
  return {{"attempt", a.attempt()}, {"started_ms", KnownTime(a.started_ms())}, {"ended_ms", KnownTime(a.ended_ms())},
          {"reason", ReasonName(a.reason())}, {"message", a.message()}, {"step", a.step()}};
}

Json JsonOf(const v1::Job& job) {
  Json ranks = Json::array(), attempts = Json::array();
  for (const v1::AttemptView& attempt : job.attempts()) attempts.push_back(JsonOf(attempt));
  for (const v1::RankView& rank : job.ranks()) ranks.push_back(JsonOf(rank));
  Json restarts = Json::object(), alerts = Json::array();
  for (const v1::Restart& restart : job.restarts()) restarts[ReasonName(restart.reason())] = restart.count();
  for (const std::string& alert : job.alerts()) alerts.push_back(alert);
  return {{"id", job.id()},
          {"name", job.spec().name()},
          {"state", StateName(job.state())},
          {"desired", DesiredName(job.desired())},
          {"attempt", job.attempt()},
          {"reason", job.reason() == v1::REASON_UNSPECIFIED ? Json(nullptr) : Json(ReasonName(job.reason()))},
          {"message", job.message()},
          {"submitted_ms", KnownTime(job.submitted_ms())},
          {"started_ms", KnownTime(job.started_ms())},
          {"finished_ms", KnownTime(job.finished_ms())},
          {"step", job.step()},
          {"total_steps", job.total_steps()},
          {"epoch", JsonOf(job.epoch())},
          {"samples_per_s", Known(job.samples_per_s())},
          {"eta_s", Known(job.eta_s())},
          {"last", job.has_last() ? JsonOf(job.last()) : Json(nullptr)},
          {"ranks", std::move(ranks)},
          {"run_folder", job.run_folder()},
          {"submitter", job.submitter()},
          {"nan_steps", job.nan_steps()},
          {"first_step", job.first_step()},
          {"retry_at_ms", KnownTime(job.retry_at_ms())},
          {"best_eval_loss", job.has_best_eval_loss() ? JsonOf(job.best_eval_loss()) : Json(nullptr)},
          {"note", job.note()},
          {"attempts", std::move(attempts)},
          {"checkpoint_ms", KnownTime(job.checkpoint_ms())},
          {"restarts", std::move(restarts)},
          {"alerts", std::move(alerts)},
          {"spec", JsonOf(job.spec())}};
}

Json JsonOf(const v1::CheckpointInfo& c) {
  return {{"step", c.step()}, {"path", c.path()}, {"bytes", c.bytes()}, {"sha256", c.sha256()},
          {"created_ms", KnownTime(c.created_ms())},
          {"eval_loss", c.has_eval_loss() ? JsonOf(c.eval_loss()) : Json(nullptr)},
          {"best", c.best()}, {"damaged", c.damaged()}};
}

Json JsonOf(const v1::Node& node) {
  Json slots = Json::array();
  for (const v1::SlotUse& use : node.slots()) {
    const bool free = use.job_id() == 0;
    slots.push_back({{"id", use.slot().id()},
                     {"kind", SlotKindName(use.slot().kind())},
                     {"model", use.slot().model()},
                     {"memory_bytes", use.slot().memory_bytes()},
                     {"threads", use.slot().threads()},
                     {"job_id", free ? Json(nullptr) : Json(use.job_id())},
                     {"attempt", free ? Json(nullptr) : Json(use.attempt())},
                     {"rank", free ? Json(nullptr) : Json(use.rank())},
                     {"fault", use.fault().empty() ? Json(nullptr) : Json(use.fault())}});
  }
  return {{"name", node.name()}, {"connected", node.connected()}, {"last_seen_ms", KnownTime(node.last_seen_ms())},
          {"version", node.version()}, {"drained", node.drained()}, {"slots", std::move(slots)}};
}

std::string JsonText(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n"; }

std::string StateName(v1::JobState state) { return Without("JOB_STATE_", v1::JobState_Name(state), state); }
std::string DesiredName(v1::DesiredState d) { return Without("DESIRED_", v1::DesiredState_Name(d), d); }
std::string ReasonName(v1::Reason reason) { return Without("REASON_", v1::Reason_Name(reason), reason); }
std::string PhaseName(v1::Phase phase) { return Without("PHASE_", v1::Phase_Name(phase), phase); }
std::string SlotKindName(v1::Slot::Kind kind) { return Without("KIND_", v1::Slot::Kind_Name(kind), kind); }

bool IsEnd(v1::JobState state) {
  return state == v1::SUCCEEDED || state == v1::FAILED || state == v1::CANCELLED;
}

}  // namespace hierad
