#include "server/control_service.h"

#include <algorithm>
#include <future>
#include <optional>

#include "absl/container/btree_set.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "base/fs.h"
#include "base/limits.h"
#include "base/status.h"
#include "base/text.h"
#include "base/plan/plan_report.h"
#include "server/await.h"
#include "server/garbage.h"
#include "server/rank_log.h"
#include "server/rpc_status.h"
#include "server/run_folder.h"
#include "server/submission.h"

namespace hierad {
namespace {

constexpr std::chrono::milliseconds kWatchPause{100};   // at most ten messages a second
constexpr std::chrono::seconds kWatchSign{5};           // nothing new: the job is told all the same, so that a client can say how long
constexpr std::chrono::milliseconds kLogPause{200};
constexpr uid_t kNobody = 65534;
constexpr size_t kStepsInMessage = 8192;   // some 150 bytes each, within limits::kGrpcMessageBytes

template <typename T>
grpc::Status Answer(absl::StatusOr<T> answer, T* reply) {
  if (!answer.ok()) return ToRpc(answer.status());
  *reply = *std::move(answer);
  return grpc::Status::OK;
}

}  // namespace

// One of the kStreams places, while it lives.
class ControlService::StreamSlot {
 public:
  explicit StreamSlot(ControlService* service) : service_(service), taken_(++service->streams_ <= kStreams) {}
  ~StreamSlot() { --service_->streams_; }
  absl::Status status() const {
    if (taken_) return absl::OkStatus();
    return absl::ResourceExhaustedError(absl::StrCat("at most ", kStreams, " watches and logs are followed at a time; end some"));
  }

 private:
  ControlService* const service_;
  const bool taken_;
};

void ControlService::EndStreams() {
  std::lock_guard lock(mutex_);
  ending_ = true;
  ended_.notify_all();
}

bool ControlService::Rest(grpc::ServerContext* context, std::chrono::milliseconds wait) {
  std::unique_lock lock(mutex_);
  ended_.wait_for(lock, wait, [this] { return ending_; });
  return !ending_ && !context->IsCancelled();
}

absl::Status ControlService::CheckOwn(const grpc::ServerContext& context, uint64_t job_id) const {
  auto caller = authz_->CallerOf(context);
  if (!caller.ok()) return caller.status();
  if (caller->AllJobs()) return absl::OkStatus();
  auto job = Await<v1::Job>([&](auto done) { coordinator_->Get(job_id, done); });
  if (!job.ok()) return job.status();
  if (job->submitter() == caller->name) return absl::OkStatus();
  return absl::PermissionDeniedError(absl::StrCat("job ", job_id, " is ", Printable(job->submitter()), "'s, and you are ", caller->name));
}

absl::Status ControlService::CheckAccount(const Caller& caller) const {
  // What only its machine knows (an account of another node) is said when the job begins there.
  if (const absl::Status account = coordinator_->AccountOf(caller.name).status(); absl::IsFailedPrecondition(account)) return account;
  const auto named = FindAccount(caller.name);
  if (caller.local || !named.ok() || named->uid != 0) return absl::OkStatus();
  return absl::PermissionDeniedError("a certificate's name is not root's word: give the certificate the name of another account");
}

std::optional<Account> ControlService::RightsFor(const std::string& user) const {
  auto account = coordinator_->AccountOf(user);
  return account.ok() ? *std::move(account) : Account{.uid = kNobody, .gid = kNobody, .name = "nobody", .home = "/"};
}

grpc::Status ControlService::Submit(grpc::ServerContext* context, const v1::SubmitRequest* request, v1::SubmitReply* reply) {
  auto caller = authz_->CallerOf(*context);
  if (!caller.ok()) return ToRpc(caller.status());
  if (absl::Status s = CheckClientKey(request->client_key()); !s.ok()) return ToRpc(s);
  // A known key first: by now the job itself may have made what the checks below would refuse.
  auto known = Await<v1::SubmitReply>([&](auto done) { coordinator_->FindByClientKey(request->client_key(), caller->name, done); });
  if (known.ok() || !absl::IsNotFound(known.status())) return Answer(std::move(known), reply);
  if (absl::Status account = CheckAccount(*caller); !account.ok()) return ToRpc(account);
  v1::SubmitRequest checked = *request;
  absl::Status folder_check;
  {
    const FilesAs rights(RightsFor(caller->name));
    if (!rights.status().ok()) return ToRpc(rights.status());
    if (absl::Status s = AsStatus(PrepareSpec(checked.mutable_spec(), allowed_roots_)); !s.ok()) return ToRpc(s);
    folder_check = CheckOutputFolder(checked.spec().output().folder());
  }
  return Answer(Await<v1::SubmitReply>([&](auto done) { coordinator_->Submit(std::move(checked), caller->name, folder_check, done); }), reply);
}

grpc::Status ControlService::Validate(grpc::ServerContext* context, const v1::ValidateRequest* request, v1::ValidateReply* reply) {
  auto caller = authz_->CallerOf(*context);
  if (!caller.ok()) return ToRpc(caller.status());
  v1::JobSpec spec = request->spec();
  if (const absl::Status account = CheckAccount(*caller); !account.ok()) reply->add_problems(std::string(account.message()));
  {
    const FilesAs rights(RightsFor(caller->name));
    if (!rights.status().ok()) return ToRpc(rights.status());
    for (const std::string& problem : PrepareSpec(&spec, allowed_roots_)) reply->add_problems(problem);
    if (reply->problems_size() > 0) return grpc::Status::OK;
    if (absl::Status s = CheckOutputFolder(spec.output().folder()); !s.ok()) reply->add_problems(std::string(s.message()));
  }
  auto nodes = Await<v1::NodesReply>([&](auto done) { coordinator_->Nodes(done); });
  if (!nodes.ok()) return ToRpc(nodes.status());
  std::vector<NodeSlots> known;
  for (const v1::Node& node : nodes->nodes()) {
    NodeSlots& slots = known.emplace_back();
    slots.name = node.name();
    slots.connected = node.connected();
    for (const v1::SlotUse& use : node.slots()) slots.slots.push_back({use.slot(), false, 0});
  }
  QueuedJob job;
  job.ranks = spec.resources().ranks();
  job.device = spec.resources().device();
  job.rank_bytes = LeastMemory(spec).value_or(0);
  const Scheduler::Decision decision = Scheduler(known).Consider(job);
  if (decision.verdict != Scheduler::Verdict::kPlaced) reply->add_warnings(absl::StrCat("resources: it ", decision.why));
  return grpc::Status::OK;
}

grpc::Status ControlService::Get(grpc::ServerContext* context, const v1::GetRequest* request, v1::Job* reply) {
  if (absl::Status own = CheckOwn(*context, request->job_id()); !own.ok()) return ToRpc(own);
  return Answer(Await<v1::Job>([&](auto done) { coordinator_->Get(request->job_id(), done); }), reply);
}

grpc::Status ControlService::List(grpc::ServerContext* context, const v1::ListRequest* request, v1::ListReply* reply) {
  auto caller = authz_->CallerOf(*context);
  if (!caller.ok()) return ToRpc(caller.status());
  if (request->states_size() > v1::JobState_ARRAYSIZE) return ToRpc(absl::InvalidArgumentError("states: the same state more than once"));
  for (int state : request->states()) {
    if (!v1::JobState_IsValid(state) || state == 0) return ToRpc(absl::InvalidArgumentError(absl::StrCat("states: ", state, " is no state")));
  }
  auto answer = Await<v1::ListReply>([&](auto done) { coordinator_->List(*request, caller->AllJobs() ? "" : caller->name, done); });
  if (!answer.ok()) return ToRpc(answer.status());
  // Jobs that have ended long ago are no longer in memory. Read here, not by the coordinator, which has other work.
  for (v1::Job& job : *answer->mutable_jobs()) {
    if (job.has_last() || history_ == nullptr) continue;
    const auto newest = history_->Read(job.id(), {.last = 1});
    if (!newest.ok() || newest->steps.empty()) continue;
    *job.mutable_last() = newest->steps.back();
    job.set_epoch(job.last().epoch());
  }
  return Answer(std::move(answer), reply);
}

grpc::Status ControlService::Watch(grpc::ServerContext* context, const v1::WatchRequest* request, grpc::ServerWriter<v1::WatchReply>* writer) {
  StreamSlot slot(this);
  if (!slot.status().ok()) return ToRpc(slot.status());
  if (absl::Status own = CheckOwn(*context, request->job_id()); !own.ok()) return ToRpc(own);
  WatchPlace place;
  place.job_id = request->job_id();
  place.after_step = request->after_step();
  int64_t told = request->after_step();
  auto told_at = std::chrono::steady_clock::now();
  while (true) {
    auto view = Await<WatchView>([&](auto done) { coordinator_->Watch(place, done); });
    if (!view.ok()) return ToRpc(view.status());
    // What is no longer in memory, at the beginning or because this client is slow.
    if (!place.version || view->reply.metrics_dropped() > 0) {
      int64_t found = 0;
      if (!WriteEarlier(*view, told, writer, &found)) return grpc::Status::CANCELLED;
      view->reply.set_metrics_dropped(std::max<int64_t>(0, view->reply.metrics_dropped() - found));
    }
    for (const v1::StepMetrics& m : view->reply.metrics()) told = m.step();
    // Answered because time is up, with nothing new: told now and then.
    const auto now = std::chrono::steady_clock::now();
    const bool news = !place.version || *place.version != view->version || view->more || view->done || now - told_at >= kWatchSign;
    if (news && !writer->Write(view->reply)) return grpc::Status::CANCELLED;
    if (news) told_at = now;
    if (view->done) return grpc::Status::OK;
    place.version = view->version;
    place.cursor = view->cursor;
    if (!Rest(context, news ? kWatchPause : std::chrono::milliseconds(0))) {
      return context->IsCancelled() ? grpc::Status::CANCELLED : ToRpc(absl::UnavailableError("hierad is stopping; watch again when it is back"));
    }
  }
}

// The steps between `after_step` and the view's own, from the history. False: the client has gone.
bool ControlService::WriteEarlier(const WatchView& view, int64_t after_step, grpc::ServerWriter<v1::WatchReply>* writer, int64_t* found) {
  if (history_ == nullptr) return true;
  HistoryQuery query;
  query.from = after_step + 1;
  if (view.reply.metrics_size() > 0) query.to = view.reply.metrics(0).step() - 1;
  if (view.reply.metrics_size() > 0 && query.to < query.from) return true;
  const auto earlier = history_->Read(view.reply.job().id(), query);
  if (!earlier.ok()) return true;   // a watch without its beginning is better than none
  *found = static_cast<int64_t>(earlier->steps.size());
  for (size_t at = 0; at < earlier->steps.size();) {
    v1::WatchReply reply;
    *reply.mutable_job() = view.reply.job();
    for (const size_t end = std::min(earlier->steps.size(), at + kStepsInMessage); at < end; ++at) *reply.add_metrics() = earlier->steps[at];
    if (!writer->Write(reply)) return false;
  }
  return true;
}

grpc::Status ControlService::Metrics(grpc::ServerContext* context, const v1::MetricsRequest* request, grpc::ServerWriter<v1::MetricsReply>* writer) {
  StreamSlot slot(this);
  if (!slot.status().ok()) return ToRpc(slot.status());
  if (request->from_step() < 0 || request->to_step() < 0 || request->every() < 0) {
    return ToRpc(absl::InvalidArgumentError("from_step, to_step and every are numbers of steps, 0 or more"));
  }
  if (absl::Status own = CheckOwn(*context, request->job_id()); !own.ok()) return ToRpc(own);
  auto job = Await<v1::Job>([&](auto done) { coordinator_->Get(request->job_id(), done); });
  if (!job.ok()) return ToRpc(job.status());
  if (history_ == nullptr) return grpc::Status::OK;
  auto steps = history_->Read(request->job_id(), {request->from_step(), request->to_step(), request->every(), request->last()});
  if (!steps.ok()) return ToRpc(steps.status());
  size_t at = 0;
  do {
    v1::MetricsReply reply;
    reply.set_thinned_before(steps->thinned_before);
    for (const size_t end = std::min(steps->steps.size(), at + kStepsInMessage); at < end; ++at) *reply.add_metrics() = std::move(steps->steps[at]);
    if (!writer->Write(reply)) return grpc::Status::CANCELLED;
  } while (at < steps->steps.size());
  return grpc::Status::OK;
}

grpc::Status ControlService::Logs(grpc::ServerContext* context, const v1::LogsRequest* request, grpc::ServerWriter<v1::LogsReply>* writer) {
  StreamSlot slot(this);
  if (!slot.status().ok()) return ToRpc(slot.status());
  if (absl::Status own = CheckOwn(*context, request->job_id()); !own.ok()) return ToRpc(own);
  auto job = Await<v1::Job>([&](auto done) { coordinator_->Get(request->job_id(), done); });
  if (!job.ok()) return ToRpc(job.status());
  const int ranks = job->spec().resources().ranks();
  if (request->rank() < 0 || request->rank() >= ranks) {
    return ToRpc(absl::InvalidArgumentError(absl::StrCat("rank: job ", request->job_id(), " has ranks 0 to ", ranks - 1, ", not ", request->rank())));
  }
  if (request->attempt() < 0) return ToRpc(absl::InvalidArgumentError(absl::StrCat("attempt: ", request->attempt(), " is below 0")));
  const auto account = coordinator_->AccountOf(job->submitter());
  if (!account.ok()) return ToRpc(account.status());
  RankLog log(coordinator_, *job, {request->rank(), request->tail_lines(), request->attempt(), request->follow()}, *account);
  while (true) {
    while (true) {
      auto text = log.Read();
      if (!text.ok()) return ToRpc(text.status());
      if (text->empty()) break;
      v1::LogsReply reply;
      *reply.mutable_chunk() = std::move(text->bytes);
      reply.set_notice(text->notice);
      reply.set_attempt(text->attempt);
      if (!writer->Write(reply)) return grpc::Status::CANCELLED;
    }
    if (!request->follow() || log.ended()) break;
    if (!Rest(context, kLogPause)) {
      return context->IsCancelled() ? grpc::Status::CANCELLED : ToRpc(absl::UnavailableError("hierad is stopping; follow again when it is back"));
    }
  }
  if (!log.missing().empty()) return ToRpc(absl::FailedPreconditionError(log.missing()));
  if (log.found()) return grpc::Status::OK;
  return ToRpc(absl::NotFoundError(absl::StrCat("rank ", request->rank(), " of job ", request->job_id(), " has no log",
                                                request->attempt() > 0 ? absl::StrCat(" of attempt ", request->attempt()) : "", IsTerminal(job->state()) ? "" : " yet")));
}

grpc::Status ControlService::Cancel(grpc::ServerContext* context, const v1::CancelRequest* request, v1::Job* reply) {
  if (absl::Status own = CheckOwn(*context, request->job_id()); !own.ok()) return ToRpc(own);
  return Answer(Await<v1::Job>([&](auto done) { coordinator_->Cancel(request->job_id(), request->now(), done); }), reply);
}

grpc::Status ControlService::Pause(grpc::ServerContext* context, const v1::PauseRequest* request, v1::Job* reply) {
  if (absl::Status own = CheckOwn(*context, request->job_id()); !own.ok()) return ToRpc(own);
  return Answer(Await<v1::Job>([&](auto done) { coordinator_->Pause(request->job_id(), done); }), reply);
}

grpc::Status ControlService::Resume(grpc::ServerContext* context, const v1::ResumeRequest* request, v1::Job* reply) {
  if (absl::Status own = CheckOwn(*context, request->job_id()); !own.ok()) return ToRpc(own);
  return Answer(Await<v1::Job>([&](auto done) { coordinator_->Resume(request->job_id(), done); }), reply);
}

grpc::Status ControlService::Checkpoint(grpc::ServerContext* context, const v1::CheckpointRequest* request, v1::Job* reply) {
  if (absl::Status own = CheckOwn(*context, request->job_id()); !own.ok()) return ToRpc(own);
  return Answer(Await<v1::Job>([&](auto done) { coordinator_->Checkpoint(request->job_id(), done); }), reply);
}

grpc::Status ControlService::SetLr(grpc::ServerContext* context, const v1::SetLrRequest* request, v1::Job* reply) {
  if (absl::Status own = CheckOwn(*context, request->job_id()); !own.ok()) return ToRpc(own);
  return Answer(Await<v1::Job>([&](auto done) { coordinator_->SetLr(request->job_id(), request->lr(), done); }), reply);
}

grpc::Status ControlService::SetLogLevel(grpc::ServerContext* context, const v1::SetLogLevelRequest* request, v1::Job* reply) {
  if (absl::Status own = CheckOwn(*context, request->job_id()); !own.ok()) return ToRpc(own);
  return Answer(Await<v1::Job>([&](auto done) { coordinator_->SetLogLevel(request->job_id(), request->level(), done); }), reply);
}

grpc::Status ControlService::DrainNode(grpc::ServerContext*, const v1::DrainNodeRequest* request, v1::NodesReply* reply) {
  return Answer(Await<v1::NodesReply>([&](auto done) { coordinator_->DrainNode(request->node(), request->drained(), done); }), reply);
}

// What a job needs that has not ended, or not long ago, is looked for after all has been measured, which may take minutes; a job that is
// submitted later still into the same folder, when a folder is removed.
grpc::Status ControlService::CollectGarbage(grpc::ServerContext* context, const v1::CollectGarbageRequest* request, v1::CollectGarbageReply* reply) {
  if (request->older_than_s() < 0) return ToRpc(absl::InvalidArgumentError(absl::StrCat("older_than_s: ", request->older_than_s(), " is below 0")));
  const int64_t before_ms = clock_->UnixMs() - 1000 * std::min<int64_t>(request->older_than_s(), INT64_MAX / 2000);
  struct Found {
    v1::Garbage garbage;
    std::optional<Account> account;
    std::string folder;
  };
  std::vector<Found> found;
  absl::btree_set<std::string> kept;   // folders: jobs may share one that they give, or give one inside another's
  absl::flat_hash_set<std::string> freed;
  absl::flat_hash_set<std::pair<std::string, std::string>> seen;   // with whose rights: that one user may not does not keep another from it
  const auto is_old = [&](const v1::Job& job) { return IsTerminal(job.state()) && job.finished_ms() <= before_ms; };
  const auto each_job = [&](const auto& visit) -> absl::Status {
    v1::ListRequest page;
    while (!context->IsCancelled()) {
      ASSIGN_OR_RETURN(const v1::ListReply jobs, Await<v1::ListReply>([&](auto done) { coordinator_->List(page, "", done); }));
      if (jobs.jobs().empty()) break;
      for (const v1::Job& job : jobs.jobs()) {
        page.set_before_id(job.id());
        visit(job);
      }
    }
    return absl::OkStatus();
  };
  const absl::Status looked = each_job([&](const v1::Job& job) {
    if (!is_old(job) || !seen.emplace(job.run_folder(), FolderIsGiven(job) ? job.submitter() : "").second) return;
    Found one;
    one.folder = job.run_folder();
    if (FolderIsGiven(job)) one.account = RightsFor(job.submitter());
    if (GarbageOf(job, request->whole_runs(), one.account, &one.garbage)) found.push_back(std::move(one));
  });
  if (!looked.ok()) return ToRpc(looked);
  const absl::Status needed = each_job([&](const v1::Job& job) {
    if (!is_old(job)) kept.insert(job.run_folder());
  });
  if (!needed.ok()) return ToRpc(needed);
  std::erase_if(found, [&](const Found& one) {
    const std::string inside = one.garbage.path() + "/";
    const auto within = kept.lower_bound(inside);
    return kept.contains(one.folder) || kept.contains(one.garbage.path()) || (within != kept.end() && within->starts_with(inside));
  });
  std::reverse(found.begin(), found.end());
  size_t problems = 0;
  for (auto& [garbage, account, folder] : found) {
    if (freed.contains(garbage.path())) continue;
    if (size_t(reply->found_size()) == kGarbage) {
      reply->set_more(true);
      break;
    }
    if (!request->dry_run() && !context->IsCancelled() && garbage.problem().empty()) Remove(account, &garbage);
    if (garbage.problem().empty()) freed.insert(garbage.path());
    else if (++problems > kGarbageProblems) continue;   // what cannot go hides nothing that can
    *reply->add_found() = std::move(garbage);
  }
  return grpc::Status::OK;
}

void ControlService::Remove(const std::optional<Account>& account, v1::Garbage* garbage) {
  auto forgotten = Await<v1::Job>([&](auto done) { coordinator_->ForgetCheckpoints(garbage->job_id(), done); });
  if (forgotten.ok()) return RemoveGarbage(account, garbage);
  garbage->set_problem(std::string(forgotten.status().message()));
}

grpc::Status ControlService::ListCheckpoints(grpc::ServerContext* context, const v1::ListCheckpointsRequest* request, v1::ListCheckpointsReply* reply) {
  if (absl::Status own = CheckOwn(*context, request->job_id()); !own.ok()) return ToRpc(own);
  return Answer(Await<v1::ListCheckpointsReply>([&](auto done) { coordinator_->ListCheckpoints(request->job_id(), done); }), reply);
}

grpc::Status ControlService::Nodes(grpc::ServerContext*, const v1::NodesRequest*, v1::NodesReply* reply) {
  return Answer(Await<v1::NodesReply>([&](auto done) { coordinator_->Nodes(done); }), reply);
}

grpc::Status ControlService::Version(grpc::ServerContext*, const v1::VersionRequest*, v1::VersionReply* reply) {
  reply->set_version(version_);
  reply->set_commit(commit_);
  reply->set_started_ms(started_ms_);
  return grpc::Status::OK;
}

}  // namespace hierad
