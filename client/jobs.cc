#include "base/text.h"
#include "client/commands.h"
#include "client/job_json.h"
#include "client/job_text.h"

namespace hierad {
namespace {

absl::StatusOr<v1::JobState> ParseState(const std::string& word) {
  std::string upper = word;
  for (char& c : upper) c = c >= 'a' && c <= 'z' ? char(c - 32) : c;
  v1::JobState state;
  if (v1::JobState_Parse(upper, &state) && state != v1::JOB_STATE_UNSPECIFIED) return state;
  std::string known;
  for (int i = 1; i < v1::JobState_ARRAYSIZE; ++i) known += (i > 1 ? ", " : "") + StateName(v1::JobState(i));
  return absl::InvalidArgumentError("--state " + Printable(word) + " is no state; allowed are " + known);
}

}  // namespace

int List(const ListOptions& options, const Context& context) {
  v1::ListRequest request;
  request.set_limit(options.limit);
  for (const std::string& word : options.states) {
    const auto state = ParseState(word);
    if (!state.ok()) return Fail(state.status(), context);
    request.add_states(*state);
  }
  auto connection = Connection::Open(context.server);
  if (!connection.ok()) return Fail(connection.status(), context);
  const auto reply = (*connection)->Call(&Connection::Stub::List, request);
  if (!reply.ok()) return Fail(reply.status(), context);
  if (context.json) {
    Json jobs = Json::array();
    for (const v1::Job& job : reply->jobs()) jobs.push_back(JsonOf(job));
    *context.out << JsonText({{"jobs", std::move(jobs)}});
  } else if (reply->jobs().empty()) {
    *context.out << "no jobs\n";
  } else {
    *context.out << JobTable({reply->jobs().begin(), reply->jobs().end()}, context);
  }
  return kExitOk;
}

int Describe(uint64_t job_id, const Context& context) {
  auto connection = Connection::Open(context.server);
  if (!connection.ok()) return Fail(connection.status(), context);
  v1::GetRequest request;
  request.set_job_id(job_id);
  const auto job = (*connection)->Call(&Connection::Stub::Get, request);
  if (!job.ok()) return Fail(job.status(), context);
  v1::ListCheckpointsRequest which;
  which.set_job_id(job_id);
  const auto checkpoints = (*connection)->Call(&Connection::Stub::ListCheckpoints, which);
  if (!checkpoints.ok()) return Fail(checkpoints.status(), context);
  if (context.json) {
    Json list = Json::array();
    for (const v1::CheckpointInfo& c : checkpoints->checkpoints()) list.push_back(JsonOf(c));
    *context.out << JsonText({{"job", JsonOf(*job)}, {"checkpoints", std::move(list)}});
  } else {
    *context.out << JobDetails(*job, {checkpoints->checkpoints().begin(), checkpoints->checkpoints().end()}, context);
  }
  return kExitOk;
}

int Cancel(uint64_t job_id, const Context& context) {
  auto connection = Connection::Open(context.server);
  if (!connection.ok()) return Fail(connection.status(), context);
  v1::CancelRequest request;
  request.set_job_id(job_id);
  const auto job = (*connection)->Call(&Connection::Stub::Cancel, request);
  if (!job.ok()) return Fail(job.status(), context);
  if (context.json) {
    *context.out << JsonText({{"job", JsonOf(*job)}});
  } else if (job->state() == v1::CANCELLED) {
    *context.out << "job " << job_id << " is cancelled\n";
  } else if (IsEnd(job->state())) {
    *context.out << "job " << job_id << " had ended already: " << StateText(job->state(), context.color) << "\n";
  } else {
    *context.out << "job " << job_id << " will end after its current step; hierctl wait " << job_id << " waits for it\n";
  }
  return kExitOk;
}

int Checkpoints(uint64_t job_id, const Context& context) {
  auto connection = Connection::Open(context.server);
  if (!connection.ok()) return Fail(connection.status(), context);
  v1::ListCheckpointsRequest request;
  request.set_job_id(job_id);
  const auto reply = (*connection)->Call(&Connection::Stub::ListCheckpoints, request);
  if (!reply.ok()) return Fail(reply.status(), context);
  if (context.json) {
    Json list = Json::array();
    for (const v1::CheckpointInfo& c : reply->checkpoints()) list.push_back(JsonOf(c));
    *context.out << JsonText({{"checkpoints", std::move(list)}});
  } else if (reply->checkpoints().empty()) {
    *context.out << "job " << job_id << " has no checkpoints yet\n";
  } else {
    *context.out << CheckpointTable({reply->checkpoints().begin(), reply->checkpoints().end()});
  }
  return kExitOk;
}

}  // namespace hierad
