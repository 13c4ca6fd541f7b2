#include <algorithm>
#include <functional>
#include <optional>

#include "base/text.h"
#include "client/commands.h"
#include "client/job_json.h"
#include "client/job_text.h"
#include "client/watch_view.h"

namespace hierad {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr seconds kPatience{60};   // hierad away: restarted, upgraded; the job goes on meanwhile

// The stream of one job, taken up again where it broke off while hierad is away.
class JobStream {
 public:
  using OnReply = std::function<void(const v1::WatchReply&)>;
  using OnAway = std::function<void(const std::string&)>;

  JobStream(Connection& connection, uint64_t job_id, const Context& context)
      : connection_(connection), job_id_(job_id), context_(context) {}

  // Until the job has ended (then it), or `deadline` passes (then as far as known, DeadlineExceeded if never seen).
  absl::StatusOr<v1::Job> Follow(std::optional<std::chrono::nanoseconds> deadline, const OnReply& on_reply,
                                 const OnAway& on_away) {
    std::optional<v1::Job> job;
    std::optional<std::chrono::nanoseconds> away_since;
    while (true) {
      const grpc::Status status = Read(deadline, [&](const v1::WatchReply& reply) {
        away_since.reset();
        job = reply.job();
        on_reply(reply);
      });
      if (job && IsEnd(job->state())) return *job;
      const auto now = context_.clock->Monotonic();
      if (deadline && now >= *deadline && job) return *job;
      const bool broken = status.ok() || status.error_code() == grpc::StatusCode::UNAVAILABLE ||
                          status.error_code() == grpc::StatusCode::CANCELLED;
      // A job never seen: the address is wrong rather than hierad away.
      if (!broken || !job) return status.ok() ? absl::InternalError("hierad ended the watch before the job did") : connection_.ErrorFrom(status);
      if (!away_since) {
        away_since = now;
        on_away("hierad is away; the job is not; trying for " + std::to_string(kPatience.count()) + " s");
      } else if (now - *away_since >= kPatience) {
        return connection_.ErrorFrom(status.ok() ? grpc::Status(grpc::StatusCode::UNAVAILABLE, "the stream ended") : status);
      }
      SleepFor(milliseconds(300));
    }
  }

 private:
  grpc::Status Read(std::optional<std::chrono::nanoseconds> deadline, const OnReply& on_reply) {
    grpc::ClientContext call;
    if (deadline) Connection::SetDeadline(&call, std::max(*deadline - context_.clock->Monotonic(), std::chrono::nanoseconds(0)));
    v1::WatchRequest request;
    request.set_job_id(job_id_);
    request.set_after_step(last_step_);
    const auto reader = connection_.stub().Watch(&call, request);
    v1::WatchReply reply;
    while (reader->Read(&reply)) {
      for (const v1::StepMetrics& m : reply.metrics()) last_step_ = std::max(last_step_, m.step());
      on_reply(reply);
    }
    return reader->Finish();
  }

  Connection& connection_;
  const uint64_t job_id_;
  const Context& context_;
  int64_t last_step_ = 0;
};

std::optional<std::chrono::nanoseconds> DeadlineAfter(double timeout_s, const Context& context) {
  if (timeout_s <= 0) return std::nullopt;
  return context.clock->Monotonic() + std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(timeout_s));
}

void WriteJson(const v1::WatchReply& reply, const Context& context) {
  Json metrics = Json::array();
  for (const v1::StepMetrics& m : reply.metrics()) metrics.push_back(JsonOf(m));
  *context.out << JsonText({{"job", JsonOf(reply.job())}, {"metrics", std::move(metrics)},
                            {"metrics_dropped", reply.metrics_dropped()}});
}

}  // namespace

int WatchJob(Connection& connection, uint64_t job_id, const WatchOptions& options, const Context& context) {
  WatchView view(context, options.every_steps);
  int lines = 0;
  const auto show = [&](const v1::WatchReply& reply) {
    if (context.json) {
      WriteJson(reply, context);
    } else {
      view.Update(reply);
      if (context.live) {
        const std::string block = view.Block();
        *context.out << WatchView::Rewind(lines) << block;
        lines = int(std::count(block.begin(), block.end(), '\n'));
      } else {
        *context.out << view.PlainLines();
      }
    }
    context.out->flush();
  };
  const auto away = [&](const std::string& sentence) {
    *context.err << "hierctl: " << sentence << "\n";
    lines = 0;   // the sentence stays; the block begins anew below it
  };
  const auto job = JobStream(connection, job_id, context).Follow(DeadlineAfter(options.timeout_s, context), show, away);
  if (!job.ok()) return Fail(job.status(), context);
  if (!context.json) *context.out << EndSentence(*job, context.color) << "\n";
  return ExitCodeOf(*job);
}

int Watch(uint64_t job_id, const WatchOptions& options, const Context& context) {
  auto connection = Connection::Open(context.server);
  if (!connection.ok()) return Fail(connection.status(), context);
  return WatchJob(**connection, job_id, options, context);
}

int Wait(const std::vector<uint64_t>& job_ids, double timeout_s, const Context& context) {
  auto connection = Connection::Open(context.server);
  if (!connection.ok()) return Fail(connection.status(), context);
  const auto deadline = DeadlineAfter(timeout_s, context);
  Json jobs = Json::array();
  int code = kExitOk;
  for (const uint64_t id : job_ids) {
    const auto job = JobStream(**connection, id, context).Follow(deadline, [](const v1::WatchReply&) {}, [&](const std::string& sentence) {
      *context.err << "hierctl: " << sentence << "\n";
    });
    if (!job.ok()) return Fail(job.status(), context);
    if (context.json) jobs.push_back(JsonOf(*job));
    else *context.out << EndSentence(*job, context.color) << "\n";
    context.out->flush();
    if (code == kExitOk) code = ExitCodeOf(*job);
  }
  if (context.json) *context.out << JsonText({{"jobs", std::move(jobs)}});
  return code;
}

}  // namespace hierad
