// hierctl top: what runs now, drawn again and again on a terminal; once, as plain lines, elsewhere.
#include <algorithm>
#include <set>

#include "client/commands.h"
#include "client/job_json.h"
#include "client/top_view.h"
#include "client/watch_view.h"

namespace hierad {
namespace {

constexpr uint32_t kJobs = 200;
constexpr size_t kCurves = 40;              // of the first jobs shown
constexpr int64_t kCurvePoints = 64;        // asked for at first, of a run however long
constexpr int kPlainRows = 1000;

absl::Status AddCurve(Connection& connection, const v1::Job& job, TopView* view) {
  v1::MetricsRequest request;
  request.set_job_id(job.id());
  request.set_from_step(view->NextStep(job.id()));
  if (request.from_step() == 0) request.set_every(std::max<int64_t>(1, job.step() / kCurvePoints));
  grpc::ClientContext call;
  Connection::SetDeadline(&call, kCallTimeout);
  const auto reader = connection.stub().Metrics(&call, request);
  v1::MetricsReply reply;
  while (reader->Read(&reply)) view->AddSteps(job.id(), {reply.metrics().begin(), reply.metrics().end()});
  const grpc::Status status = reader->Finish();
  return status.ok() ? absl::OkStatus() : connection.ErrorFrom(status);
}

absl::Status Refresh(Connection& connection, TopView* view, v1::ListReply* jobs, v1::NodesReply* nodes) {
  // Those with workers, however old, then the newest.
  v1::ListRequest request, working;
  request.set_limit(kJobs);
  working.set_limit(kJobs);
  for (const v1::JobState state : {v1::STARTING, v1::RUNNING, v1::STOPPING}) working.add_states(state);
  auto listed = connection.Call(&Connection::Stub::List, working);
  if (!listed.ok()) return listed.status();
  auto newest = connection.Call(&Connection::Stub::List, request);
  if (!newest.ok()) return newest.status();
  std::set<uint64_t> seen;
  for (const v1::Job& job : listed->jobs()) seen.insert(job.id());
  for (v1::Job& job : *newest->mutable_jobs()) {
    if (seen.insert(job.id()).second) *listed->add_jobs() = std::move(job);
  }
  auto places = connection.Call(&Connection::Stub::Nodes, v1::NodesRequest());
  if (!places.ok()) return places.status();
  *jobs = *listed;
  *nodes = *places;
  view->SetJobs(*jobs);
  view->SetNodes(*nodes);
  for (const v1::Job& job : view->Shown(kCurves)) {
    if (job.step() == 0) continue;
    if (IsEnd(job.state()) && view->NextStep(job.id()) > 0) continue;
    if (const absl::Status added = AddCurve(connection, job, view); !added.ok()) return added;
  }
  return absl::OkStatus();
}

}  // namespace

int Top(const TopOptions& options, const Context& context) {
  auto connection = Connection::Open(context.server);
  if (!connection.ok()) return Fail(connection.status(), context);
  TopView view(context);
  const bool redraw = context.live && !context.json && !options.once;
  for (int lines = 0;;) {
    v1::ListReply jobs;
    v1::NodesReply nodes;
    if (const absl::Status fresh = Refresh(**connection, &view, &jobs, &nodes); !fresh.ok()) return Fail(fresh, context);
    if (context.json) {
      Json list = Json::array(), places = Json::array();
      for (const v1::Job& job : jobs.jobs()) list.push_back(JsonOf(job));
      for (const v1::Node& node : nodes.nodes()) places.push_back(JsonOf(node));
      *context.out << JsonText({{"jobs", std::move(list)}, {"nodes", std::move(places)}});
      return kExitOk;
    }
    if (!redraw) {
      *context.out << view.Block(kPlainRows);
      return kExitOk;
    }
    const std::string block = view.Block(context.rows() - 1);
    *context.out << WatchView::Rewind(lines) << block;
    context.out->flush();
    if (!context.out->good()) return kExitUsage;
    lines = int(std::count(block.begin(), block.end(), '\n'));
    SleepFor(std::chrono::nanoseconds(int64_t(options.every_s * 1e9)));
  }
}

}  // namespace hierad
