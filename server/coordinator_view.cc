// What clients and the exporter see.
#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "base/job_validate.h"
#include "base/limits.h"
#include "server/coordinator.h"
#include "server/health.h"

namespace hierad {
namespace {

constexpr size_t kAttemptsShown = 50;
constexpr uint64_t kMetricsInMessage = 1000;   // some 150 bytes each, within limits::kGrpcMessageBytes
constexpr double kSilentS = 30;                // a rank reports once a second
constexpr int64_t kStepsToJudge = 20;          // the first steps of an attempt are no measure

// When the newest good checkpoint was written, or the attempt began.
int64_t SavedSince(const JobRow& row) {
  int64_t since = row.started_ms;
  for (const v1::CheckpointInfo& info : row.checkpoints) {
    if (!info.damaged()) since = std::max(since, info.created_ms());
  }
  return since;
}

}  // namespace

// Why a queued job is not running.
std::string Coordinator::WaitWords(const LiveJob& job) const {
  const uint64_t id = job.row.id;
  if (draining_) return "waits: hierad is stopping";
  if (job.row.retry_at_ms > 0 && now_ < job.retry_due) {
    const int64_t ms = std::chrono::duration_cast<std::chrono::milliseconds>(job.retry_due - now_).count();
    return absl::StrCat("is tried again in ", (ms + 999) / 1000, " s");
  }
  if (const auto aside = aside_.find(id); aside != aside_.end()) return aside->second;
  if (id == head_) return head_why_;
  if (head_ != 0 && head_ < id) return absl::StrCat("waits behind job ", head_, ", which is first in the queue");
  return "waits to be placed";
}

v1::Job Coordinator::View(const LiveJob& job) const {
  const JobRow& row = job.row;
  v1::Job view;
  view.set_id(row.id);
  *view.mutable_spec() = row.spec;
  view.set_state(row.state);
  view.set_desired(row.desired);
  view.set_attempt(row.attempt);
  view.set_reason(row.reason);
  view.set_message(row.message);
  if (row.state == v1::QUEUED) {
    view.set_message(row.message.empty() ? WaitWords(job)
                                         : absl::StrCat(WaitWords(job), "; attempt ", row.attempt, " ended: ", row.message));
  }
  view.set_submitted_ms(row.submitted_ms);
  view.set_started_ms(row.started_ms);
  view.set_finished_ms(row.finished_ms);
  view.set_step(row.step);
  view.set_total_steps(row.total_steps);
  view.set_run_folder(row.run_folder);
  view.set_submitter(row.submitter);
  view.set_nan_steps(row.nan_steps);
  view.set_first_step(row.first_step);
  view.set_retry_at_ms(row.retry_at_ms);
  if (row.best_eval_loss) view.set_best_eval_loss(*row.best_eval_loss);
  for (const auto& [reason, count] : job.restarts) {
    v1::Restart* restart = view.add_restarts();
    restart->set_reason(reason);
    restart->set_count(count);
  }
  for (const v1::CheckpointInfo& info : row.checkpoints) {
    if (!info.damaged()) view.set_checkpoint_ms(std::max(view.checkpoint_ms(), info.created_ms()));
  }
  for (const std::string& alert : AlertsOf(job)) view.add_alerts(alert);
  if (!job.ring.empty()) {
    *view.mutable_last() = job.ring.newest();
    view.set_epoch(job.ring.newest().epoch());
  }
  if (row.state == v1::RUNNING && std::isfinite(job.samples_per_s) && job.samples_per_s > 0) {
    view.set_samples_per_s(job.samples_per_s);
    const int64_t left = std::max<int64_t>(0, row.total_steps - row.step);
    view.set_eta_s(static_cast<double>(left) * static_cast<double>(EffectiveBatch(row.spec)) / job.samples_per_s);
  }
  for (size_t r = 0; r < row.ranks.size(); ++r) {
    v1::RankView* rank = view.add_ranks();
    rank->set_rank(static_cast<int>(r));
    rank->set_node(row.ranks[r].node);
    rank->set_slot_id(row.ranks[r].slot.id());
    rank->set_pid(std::max(0, row.ranks[r].pid));
    if (r >= job.ranks.size()) continue;
    const RankLive& live = job.ranks[r];
    rank->set_phase(live.phase);
    rank->set_step(live.step);
    if (live.pid > 0) rank->set_pid(live.pid);
    rank->set_last_seen_ms(live.last_seen_ms);
    rank->set_waiting_in(live.waiting_in);
    *rank->mutable_totals() = live.totals;
    *rank->mutable_data() = live.data;
  }
  for (const RankSign& sign : SignsOf(job)) {
    if (sign.spoken && sign.silent >= kSilent) {
      view.mutable_ranks(sign.rank)->set_silent_s(std::chrono::duration_cast<std::chrono::seconds>(sign.silent).count());
    }
  }
  return view;
}

v1::Job Coordinator::DetailedView(const LiveJob& job) {
  v1::Job view = View(job);
  view.set_note(NoteOn(job));
  if (job.row.attempt == 0) return view;
  auto attempts = store_->Attempts(job.row.id);
  if (!attempts.ok()) return view;
  const size_t first = attempts->size() > kAttemptsShown ? attempts->size() - kAttemptsShown : 0;
  for (size_t i = first; i < attempts->size(); ++i) {
    const AttemptRow& row = (*attempts)[i];
    v1::AttemptView* attempt = view.add_attempts();
    attempt->set_attempt(row.attempt);
    attempt->set_started_ms(row.started_ms);
    attempt->set_ended_ms(row.ended_ms);
    attempt->set_reason(row.reason);
    attempt->set_message(row.message);
    attempt->set_step(row.step);
  }
  return view;
}

absl::StatusOr<v1::Job> Coordinator::ViewOf(uint64_t job_id) {
  if (const LiveJob* live = Find(job_id)) return DetailedView(*live);
  auto row = store_->Load(job_id);
  if (!row.ok()) return row.status();
  if (!*row) return absl::NotFoundError(absl::StrCat("there is no job ", job_id));
  LiveJob rest;
  rest.row = **std::move(row);
  if (options_.history != nullptr) {
    auto newest = options_.history->Read(job_id, {.last = 1});
    if (newest.ok() && !newest->steps.empty()) rest.ring.Push(newest->steps.back());
  }
  return DetailedView(rest);
}

// What a person should look at now. The same conditions as deploy/prometheus/alerts.yaml where that has them.
std::vector<std::string> Coordinator::AlertsOf(const LiveJob& job) const {
  std::vector<std::string> alerts;
  const JobRow& row = job.row;
  if (!IsActive(row.state)) return alerts;
  const auto seconds_since = [&](int64_t ms) { return static_cast<double>(unix_ms_ - ms) / 1000; };
  for (size_t r = 0; r < job.ranks.size(); ++r) {
    const RankLive& live = job.ranks[r];
    if (live.last_seen_ms > 0 && !row.ranks[r].gone && seconds_since(live.last_seen_ms) > kSilentS) {
      alerts.push_back(absl::StrCat("rank ", r, " has not reported for ", static_cast<int64_t>(seconds_since(live.last_seen_ms)), " s"));
      break;
    }
  }
  for (size_t r = 0; r < job.ranks.size(); ++r) {
    if (!job.ranks[r].gpu_fault.empty()) alerts.push_back(absl::StrCat("rank ", r, ": ", job.ranks[r].gpu_fault));
  }
  if (row.state == v1::RUNNING && !job.ring.empty()) {
    const v1::StepMetrics& last = job.ring.newest();
    const bool working = job.ranks.empty() || job.ranks[0].phase == v1::PHASE_TRAINING;
    if (working && last.time_ms() >= row.started_ms && seconds_since(last.time_ms()) > std::max(kSilentS, 20 * last.step_s())) {
      alerts.push_back(absl::StrCat("no step for ", static_cast<int64_t>(seconds_since(last.time_ms())), " s"));
    }
    if (!std::isfinite(last.loss())) alerts.push_back(absl::StrCat("the loss of step ", last.step(), " is not finite"));
  }
  int64_t left_out = 0;
  for (const RankLive& live : job.ranks) left_out += live.data.skipped_samples();
  if (left_out > 0) alerts.push_back(absl::StrCat(left_out, left_out == 1 ? " sample" : " samples", " could not be read and left out; rank-N.log names them"));
  if (row.nan_steps > 0) alerts.push_back(absl::StrCat(row.nan_steps, " steps were skipped for a non-finite loss or gradient"));
  if (job.ranks.empty()) return alerts;
  const v1::RankTotals& totals = job.ranks[0].totals;
  if (totals.step_count() < kStepsToJudge || totals.step_s() <= 0) return alerts;
  const auto share = [&](double part, double most, const char* what) {
    const double ratio = part / totals.step_s();
    if (ratio > most) alerts.push_back(absl::StrCat(std::lround(100 * ratio), "% of the step ", what));
  };
  share(totals.data_wait_s(), 0.10, "waits for input: data.workers, or a faster disk");
  share(totals.communication_s(), 0.05, "waits for the all-reduce");
  std::vector<v1::RankTotals> all;
  for (const RankLive& live : job.ranks) all.push_back(live.totals);
  if (const std::string late = LateRank(all); !late.empty()) alerts.push_back(late);
  const int64_t since = SavedSince(row);
  const double interval = static_cast<double>(row.spec.checkpoint().every_steps()) * totals.step_s() / static_cast<double>(totals.step_count());
  if (row.state == v1::RUNNING && seconds_since(since) > std::max(60.0, 2 * interval)) {
    alerts.push_back(absl::StrCat("no checkpoint for ", static_cast<int64_t>(seconds_since(since)), " s"));
  }
  return alerts;
}

// Nothing new and not `answer_anyway`: nothing.
std::optional<absl::StatusOr<WatchView>> Coordinator::ViewWatch(const WatchPlace& place, bool answer_anyway) {
  const LiveJob* job = Find(place.job_id);
  if (job == nullptr) {
    auto rest = ViewOf(place.job_id);
    if (!rest.ok()) return rest.status();
    WatchView view;
    *view.reply.mutable_job() = *std::move(rest);
    view.done = IsTerminal(view.reply.job().state());
    return view;
  }
  const bool terminal = IsTerminal(job->row.state);
  if (place.version && *place.version == job->version && place.cursor >= job->ring.end() && !terminal && !answer_anyway) return std::nullopt;
  WatchView view;
  view.version = job->version;
  *view.reply.mutable_job() = View(*job);
  view.reply.mutable_job()->set_note(NoteOn(*job));
  const MetricRing& ring = job->ring;
  uint64_t at = std::max(place.cursor, ring.first());
  if (!place.version) {
    while (at < ring.end() && ring.at(at).step() <= place.after_step) ++at;
    if (at == ring.first() && !ring.empty()) view.reply.set_metrics_dropped(std::max<int64_t>(0, ring.at(at).step() - place.after_step - 1));
  } else {
    view.reply.set_metrics_dropped(static_cast<int64_t>(at - place.cursor));
  }
  const uint64_t end = std::min(ring.end(), at + kMetricsInMessage);
  for (; at < end; ++at) *view.reply.add_metrics() = ring.at(at);
  view.cursor = at;
  view.more = at < ring.end();
  view.done = terminal && !view.more;
  return view;
}

void Coordinator::AnswerWatches() {
  std::vector<Parked> waiting = std::exchange(parked_, {});
  for (Parked& parked : waiting) {
    auto view = ViewWatch(parked.place, now_ >= parked.until);
    if (view) {
      parked.reply(*std::move(view));
    } else {
      parked_.push_back(std::move(parked));
    }
  }
}

Overview Coordinator::LookNow() {
  Overview overview;
  if (auto counts = store_->CountByState(); counts.ok()) overview.jobs_by_state = *std::move(counts);
  const auto add = [&](uint64_t id) {
    if (overview.jobs.size() >= kMetricJobs) return;
    const LiveJob& job = *Find(id);
    overview.jobs.push_back({View(job), IsActive(job.row.state) && !job.row.ranks.empty() ? job.row.ranks[0].slot.model() : ""});
  };
  for (uint64_t id : active_) add(id);
  for (uint64_t id : queued_) add(id);
  for (const auto& [id, when] : ended_) {
    if (now_ - when < kEndedShown) add(id);
  }
  for (const NodeSlots& node : SlotsNow()) {
    ++(node.connected ? overview.nodes_connected : overview.nodes_lost);
    Overview::NodeLook& look = overview.nodes.emplace_back();
    look.name = node.name;
    look.connected = node.connected;
    look.last_seen_ms = nodes_.at(node.name).last_seen_ms;
    for (const NodeSlots::Use& use : node.slots) {
      const int state = !node.connected ? 2 : use.faulty ? 3 : use.busy ? 1 : 0;
      int64_t* const totals[] = {&overview.slots_free, &overview.slots_busy, &overview.slots_lost, &overview.slots_faulty};
      ++*totals[state];
      ++look.slots[use.slot.kind() == v1::Slot::CUDA ? 1 : 0][state];
    }
  }
  overview.agent_sessions = static_cast<int64_t>(agents_.size());
  overview.worker_sessions = static_cast<int64_t>(workers_.size());
  overview.store_errors = store_errors_;
  overview.history_errors = history_errors_;
  if (const LiveJob* first = queued_.empty() ? nullptr : Find(*queued_.begin())) overview.queue_waits_since_ms = first->row.submitted_ms;
  overview.now_ms = unix_ms_;
  overview.decisions = decisions_;
  overview.commits = commits_;
  return overview;
}

}  // namespace hierad
