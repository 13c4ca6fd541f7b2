// What a user asks of a job or a node beyond its submission.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <optional>

#include "base/text.h"
#include "client/commands.h"
#include "client/job_json.h"
#include "client/job_text.h"
#include "client/render.h"

namespace hierad {
namespace {

// Asks one thing of one job and says `sentence(job)`.
template <typename Request, typename Method, typename Sentence>
int AskJob(uint64_t job_id, Request request, Method method, const Context& context, const Sentence& sentence) {
  auto connection = Connection::Open(context.server);
  if (!connection.ok()) return Fail(connection.status(), context);
  request.set_job_id(job_id);
  const auto job = (*connection)->Call(method, request);
  if (!job.ok()) return Fail(job.status(), context);
  if (context.json) *context.out << JsonText({{"job", JsonOf(*job)}});
  else *context.out << "job " << job_id << " " << sentence(*job) << "\n";
  return kExitOk;
}

struct Changes {
  std::optional<double> rate;
  std::string log_level;   // empty: as it is
};

absl::StatusOr<Changes> ParseChanges(const std::vector<std::string>& assignments) {
  Changes changes;
  for (const std::string& assignment : assignments) {
    const size_t equals = assignment.find('=');
    const std::string key = assignment.substr(0, equals), text = equals == std::string::npos ? "" : assignment.substr(equals + 1);
    if (key == "log_level" || key == "output.log_level") {
      if (text.empty()) return absl::InvalidArgumentError("log_level= needs debug, info, warn or error");
      changes.log_level = text;
    } else if (key == "lr" || key == "optimizer.lr") {
      double value = 0;
      const auto parsed = std::from_chars(text.data(), text.data() + text.size(), value);
      if (parsed.ec != std::errc() || parsed.ptr != text.data() + text.size() || !std::isfinite(value) || value <= 0) {
        return absl::InvalidArgumentError("lr=" + Printable(text, 80) + " is not a number above 0");
      }
      changes.rate = value;
    } else {
      return absl::InvalidArgumentError("\"" + Printable(assignment, 80) + "\" cannot be changed in a job that lives; lr=VALUE can (the peak rate), and "
                                        "log_level=debug, info, warn or error (of its ranks)");
    }
  }
  return changes;
}

absl::StatusOr<int64_t> NewestCheckpoint(Connection& connection, uint64_t job_id) {
  v1::ListCheckpointsRequest request;
  request.set_job_id(job_id);
  const auto reply = connection.Call(&Connection::Stub::ListCheckpoints, request);
  if (!reply.ok()) return reply.status();
  int64_t newest = -1;
  for (const v1::CheckpointInfo& c : reply->checkpoints()) {
    if (!c.damaged()) newest = std::max(newest, c.step());
  }
  return newest;
}

}  // namespace

int Cancel(uint64_t job_id, bool now, const Context& context) {
  v1::CancelRequest request;
  request.set_now(now);
  return AskJob(job_id, request, &Connection::Stub::Cancel, context, [&](const v1::Job& job) -> std::string {
    if (job.state() == v1::CANCELLED) return "is cancelled";
    if (IsEnd(job.state())) return "had ended already: " + StateText(job.state(), context.color);
    return (now ? "is being killed" : "will end after its current step") + ("; hierctl wait " + std::to_string(job_id) + " waits for it");
  });
}

int Pause(uint64_t job_id, const Context& context) {
  return AskJob(job_id, v1::PauseRequest(), &Connection::Stub::Pause, context, [&](const v1::Job& job) -> std::string {
    if (job.state() == v1::PAUSED) return "is paused; hierctl resume " + std::to_string(job_id) + " goes on with it";
    return "will save a checkpoint after its current step and give its slots back";
  });
}

int Resume(uint64_t job_id, const Context& context) {
  return AskJob(job_id, v1::ResumeRequest(), &Connection::Stub::Resume, context,
                [&](const v1::Job& job) { return "is " + StateText(job.state(), context.color); });
}

int SetKeys(uint64_t job_id, const std::vector<std::string>& assignments, const Context& context) {
  const auto changes = ParseChanges(assignments);
  if (!changes.ok()) return Fail(changes.status(), context);
  auto connection = Connection::Open(context.server);
  if (!connection.ok()) return Fail(connection.status(), context);
  v1::Job job;
  std::string said;
  if (changes->rate.has_value()) {
    v1::SetLrRequest request;
    request.set_job_id(job_id);
    request.set_lr(*changes->rate);
    auto changed = (*connection)->Call(&Connection::Stub::SetLr, request);
    if (!changed.ok()) return Fail(changed.status(), context);
    job = *std::move(changed);
    said = "has the peak rate " + NumberText(job.spec().optimizer().lr()) + (job.state() == v1::RUNNING ? " from its next step on" : "");
  }
  if (!changes->log_level.empty()) {
    v1::SetLogLevelRequest request;
    request.set_job_id(job_id);
    request.set_level(changes->log_level);
    auto changed = (*connection)->Call(&Connection::Stub::SetLogLevel, request);
    if (!changed.ok()) return Fail(changed.status(), context);
    job = *std::move(changed);
    said += (said.empty() ? "" : ", and ") + ("logs lines of level " + job.spec().output().log_level() + " and above");
  }
  if (context.json) *context.out << JsonText({{"job", JsonOf(job)}});
  else *context.out << "job " << job_id << " " << said << "\n";
  return kExitOk;
}

int MakeCheckpoint(uint64_t job_id, const CheckpointOptions& options, const Context& context) {
  auto connection = Connection::Open(context.server);
  if (!connection.ok()) return Fail(connection.status(), context);
  const auto before = NewestCheckpoint(**connection, job_id);
  if (!before.ok()) return Fail(before.status(), context);
  v1::CheckpointRequest request;
  request.set_job_id(job_id);
  auto job = (*connection)->Call(&Connection::Stub::Checkpoint, request);
  if (!job.ok()) return Fail(job.status(), context);
  const auto deadline = context.clock->Monotonic() + std::chrono::milliseconds(int64_t(options.timeout_s * 1000));
  int64_t newest = *before;
  while (options.wait && newest <= *before) {
    const bool late = context.clock->Monotonic() >= deadline;
    if (late || job->state() != v1::RUNNING) {
      *context.err << "hierctl: job " << job_id << " was asked for a checkpoint, but "
                   << (late ? "none is there yet" : "is now " + StateName(job->state())) << "\n";
      return kExitNotFinished;
    }
    SleepFor(std::chrono::milliseconds(100));
    const auto now = NewestCheckpoint(**connection, job_id);
    if (!now.ok()) return Fail(now.status(), context);
    newest = *now;
    v1::GetRequest get;
    get.set_job_id(job_id);
    job = (*connection)->Call(&Connection::Stub::Get, get);
    if (!job.ok()) return Fail(job.status(), context);
  }
  if (context.json) *context.out << JsonText({{"job", JsonOf(*job)}, {"checkpoint_step", options.wait ? Json(newest) : Json()}});
  else if (options.wait) *context.out << "job " << job_id << " has a checkpoint of step " << newest << "\n";
  else *context.out << "job " << job_id << " will save a checkpoint after its current step\n";
  return kExitOk;
}

int DrainNode(const std::string& node, bool drained, const Context& context) {
  auto connection = Connection::Open(context.server);
  if (!connection.ok()) return Fail(connection.status(), context);
  v1::DrainNodeRequest request;
  request.set_node(node);
  request.set_drained(drained);
  const auto reply = (*connection)->Call(&Connection::Stub::DrainNode, request);
  if (!reply.ok()) return Fail(reply.status(), context);
  if (context.json) {
    Json nodes = Json::array();
    for (const v1::Node& known : reply->nodes()) nodes.push_back(JsonOf(known));
    *context.out << JsonText({{"nodes", std::move(nodes)}});
    return kExitOk;
  }
  int busy = 0;
  for (const v1::Node& known : reply->nodes()) {
    for (const v1::SlotUse& use : known.slots()) busy += known.name() == node && use.job_id() != 0;
  }
  *context.out << "node " << PrintableSentence(node) << (drained ? " gets no more work" : " gets work again");
  if (drained) *context.out << "; " << (busy == 0 ? "nothing runs there" : std::to_string(busy) + " of its slots are still at work");
  *context.out << "\n";
  return kExitOk;
}

int CollectGarbage(const GarbageOptions& options, const Context& context) {
  auto connection = Connection::Open(context.server);
  if (!connection.ok()) return Fail(connection.status(), context);
  v1::CollectGarbageRequest request;
  request.set_dry_run(options.dry_run);
  request.set_older_than_s(int64_t(options.older_than_days * 86400));
  request.set_whole_runs(options.whole_runs);
  const auto reply = (*connection)->Call(&Connection::Stub::CollectGarbage, request, std::chrono::hours(1));
  if (!reply.ok()) return Fail(reply.status(), context);
  int64_t bytes = 0;
  bool failed = false;
  Json list = Json::array();
  Table table({"JOB", "SIZE", "FOLDER", ""});
  table.AlignRight({0, 1});
  for (const v1::Garbage& g : reply->found()) {
    if (options.dry_run || g.removed()) bytes += g.bytes();
    failed = failed || !g.problem().empty();
    list.push_back({{"job_id", g.job_id()}, {"path", g.path()}, {"bytes", g.bytes()}, {"removed", g.removed()}, {"problem", g.problem()}});
    table.Add({std::to_string(g.job_id()), BytesText(g.bytes()), PrintableSentence(g.path()),
               g.removed() ? "removed" : PrintableSentence(g.problem())});
  }
  if (context.json) {
    *context.out << JsonText({{"found", std::move(list)}, {"more", reply->more()}});
  } else if (reply->found().empty()) {
    *context.out << "nothing to remove: no job that ended so long ago has left a folder\n";
  } else {
    *context.out << table.Text() << BytesText(bytes) << (options.dry_run ? " would be freed" : " freed")
                 << (reply->more() ? "; there is more: run it again" : "") << "\n";
  }
  return failed ? kExitUsage : kExitOk;
}

}  // namespace hierad
