#include "server/control_service.h"

#include <future>

#include "absl/strings/str_cat.h"
#include "base/fs.h"
#include "base/limits.h"
#include "base/text.h"
#include "server/job_log.h"
#include "server/rpc_status.h"
#include "server/run_folder.h"
#include "server/submission.h"

namespace hierad {
namespace {

constexpr std::chrono::milliseconds kWatchPause{100};   // at most ten messages a second
constexpr std::chrono::milliseconds kLogPause{200};

// Posts by `ask` and waits; the coordinator answers every question, also while it stops.
template <typename T, typename AskFunction>
absl::StatusOr<T> Await(AskFunction ask) {
  auto promise = std::make_shared<std::promise<absl::StatusOr<T>>>();
  std::future<absl::StatusOr<T>> future = promise->get_future();
  ask([promise](absl::StatusOr<T> answer) { promise->set_value(std::move(answer)); });
  return future.get();
}

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

bool ControlService::Pause(grpc::ServerContext* context, std::chrono::milliseconds wait) {
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

grpc::Status ControlService::Submit(grpc::ServerContext* context, const v1::SubmitRequest* request, v1::SubmitReply* reply) {
  auto caller = authz_->CallerOf(*context);
  if (!caller.ok()) return ToRpc(caller.status());
  if (absl::Status s = CheckClientKey(request->client_key()); !s.ok()) return ToRpc(s);
  // A known key first: by now the job itself may have made what the checks below would refuse.
  auto known = Await<v1::SubmitReply>([&](auto done) { coordinator_->FindByClientKey(request->client_key(), caller->name, done); });
  if (known.ok() || !absl::IsNotFound(known.status())) return Answer(std::move(known), reply);
  v1::SubmitRequest checked = *request;
  if (absl::Status s = AsStatus(PrepareSpec(checked.mutable_spec())); !s.ok()) return ToRpc(s);
  const std::string& folder = checked.spec().output().folder();
  const absl::Status folder_check = folder.empty() ? absl::OkStatus() : CheckOutputFolder(folder);
  return Answer(Await<v1::SubmitReply>([&](auto done) { coordinator_->Submit(std::move(checked), caller->name, folder_check, done); }), reply);
}

grpc::Status ControlService::Validate(grpc::ServerContext*, const v1::ValidateRequest* request, v1::ValidateReply* reply) {
  v1::JobSpec spec = request->spec();
  for (const std::string& problem : PrepareSpec(&spec)) reply->add_problems(problem);
  if (reply->problems_size() > 0) return grpc::Status::OK;
  if (!spec.output().folder().empty()) {
    if (absl::Status s = CheckOutputFolder(spec.output().folder()); !s.ok()) reply->add_problems(std::string(s.message()));
  }
  auto nodes = Await<v1::NodesReply>([&](auto done) { coordinator_->Nodes(done); });
  if (!nodes.ok()) return ToRpc(nodes.status());
  std::vector<NodeSlots> known;
  for (const v1::Node& node : nodes->nodes()) {
    NodeSlots& slots = known.emplace_back();
    slots.name = node.name();
    slots.connected = node.connected();
    for (const v1::SlotUse& use : node.slots()) slots.slots.push_back({use.slot(), false});
  }
  QueuedJob job;
  job.ranks = spec.resources().ranks();
  job.device = spec.resources().device();
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
  return Answer(Await<v1::ListReply>([&](auto done) { coordinator_->List(*request, caller->AllJobs() ? "" : caller->name, done); }), reply);
}

grpc::Status ControlService::Watch(grpc::ServerContext* context, const v1::WatchRequest* request, grpc::ServerWriter<v1::WatchReply>* writer) {
  StreamSlot slot(this);
  if (!slot.status().ok()) return ToRpc(slot.status());
  if (absl::Status own = CheckOwn(*context, request->job_id()); !own.ok()) return ToRpc(own);
  WatchPlace place;
  place.job_id = request->job_id();
  place.after_step = request->after_step();
  while (true) {
    auto view = Await<WatchView>([&](auto done) { coordinator_->Watch(place, done); });
    if (!view.ok()) return ToRpc(view.status());
    // Answered because time is up, with nothing new: not told.
    const bool news = !place.version || *place.version != view->version || view->more || view->done;
    if (news && !writer->Write(view->reply)) return grpc::Status::CANCELLED;
    if (view->done) return grpc::Status::OK;
    place.version = view->version;
    place.cursor = view->cursor;
    if (!Pause(context, news ? kWatchPause : std::chrono::milliseconds(0))) {
      return context->IsCancelled() ? grpc::Status::CANCELLED : ToRpc(absl::UnavailableError("hierad is stopping; watch again when it is back"));
    }
  }
}

grpc::Status ControlService::Logs(grpc::ServerContext* context, const v1::LogsRequest* request, grpc::ServerWriter<v1::LogsReply>* writer) {
  StreamSlot slot(this);
  if (!slot.status().ok()) return ToRpc(slot.status());
  if (absl::Status own = CheckOwn(*context, request->job_id()); !own.ok()) return ToRpc(own);
  const auto get = [&] { return Await<v1::Job>([&](auto done) { coordinator_->Get(request->job_id(), done); }); };
  auto job = get();
  if (!job.ok()) return ToRpc(job.status());
  const int ranks = job->spec().resources().ranks();
  if (request->rank() < 0 || request->rank() >= ranks) {
    return ToRpc(absl::InvalidArgumentError(absl::StrCat("rank: job ", request->job_id(), " has ranks 0 to ", ranks - 1, ", not ", request->rank())));
  }
  JobLog log(JoinPath(job->run_folder(), absl::StrCat("rank-", request->rank(), ".log")), request->tail_lines());
  while (true) {
    const bool terminal = IsTerminal(job->state());   // asked before reading: what is read after it is all there is
    while (true) {
      auto chunk = log.Read();
      if (!chunk.ok() && absl::IsNotFound(chunk.status())) {
        if (request->follow() && !terminal) break;
        return ToRpc(absl::NotFoundError(absl::StrCat("rank ", request->rank(), " of job ", request->job_id(), " has no log", terminal ? "" : " yet")));
      }
      if (!chunk.ok()) return ToRpc(chunk.status());
      if (chunk->empty()) break;
      v1::LogsReply reply;
      *reply.mutable_chunk() = *std::move(chunk);
      if (!writer->Write(reply)) return grpc::Status::CANCELLED;
    }
    if (!request->follow() || terminal) return grpc::Status::OK;
    if (!Pause(context, kLogPause)) {
      return context->IsCancelled() ? grpc::Status::CANCELLED : ToRpc(absl::UnavailableError("hierad is stopping; follow again when it is back"));
    }
    job = get();
    if (!job.ok()) return ToRpc(job.status());
  }
}

grpc::Status ControlService::Cancel(grpc::ServerContext* context, const v1::CancelRequest* request, v1::Job* reply) {
  if (absl::Status own = CheckOwn(*context, request->job_id()); !own.ok()) return ToRpc(own);
  return Answer(Await<v1::Job>([&](auto done) { coordinator_->Cancel(request->job_id(), done); }), reply);
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
