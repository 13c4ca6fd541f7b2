#include "base/text.h"
#include "client/commands.h"
#include "client/job_json.h"
#include "client/job_text.h"

namespace hierad {
namespace {

constexpr uint32_t kPage = 1000;   // the most that hierad gives at a time

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
  for (const std::string& word : options.states) {
    const auto state = ParseState(word);
    if (!state.ok()) return Fail(state.status(), context);
    request.add_states(*state);
  }
  const auto columns = ParseColumns(options.columns);
  if (!columns.ok()) return Fail(columns.status(), context);
  auto connection = Connection::Open(context.server);
  if (!connection.ok()) return Fail(connection.status(), context);
  const bool filtered = !options.name.empty() || !options.submitter.empty() || options.since_s > 0;
  const int64_t since_ms = options.since_s > 0 ? context.clock->UnixMs() - int64_t(options.since_s * 1000) : 0;
  request.set_limit(filtered ? kPage : options.limit);
  std::vector<v1::Job> jobs;
  while (jobs.size() < options.limit) {
    auto reply = (*connection)->Call(&Connection::Stub::List, request);
    if (!reply.ok()) return Fail(reply.status(), context);
    bool older = false;
    for (v1::Job& job : *reply->mutable_jobs()) {
      request.set_before_id(job.id());
      older = job.submitted_ms() < since_ms;
      const bool wanted = !older && job.spec().name().find(options.name) != std::string::npos &&
                          (options.submitter.empty() || job.submitter() == options.submitter);
      if (wanted && jobs.size() < options.limit) jobs.push_back(std::move(job));
    }
    // Newest first: what comes after an older one is older still.
    if (reply->jobs().empty() || older || !filtered) break;
  }
  if (context.json) {
    Json list = Json::array();
    for (const v1::Job& job : jobs) list.push_back(JsonOf(job));
    *context.out << JsonText({{"jobs", std::move(list)}});
  } else if (jobs.empty()) {
    *context.out << "no jobs\n";
  } else {
    *context.out << JobTable(jobs, *columns, context);
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
