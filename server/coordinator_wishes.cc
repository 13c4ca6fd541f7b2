// What users ask of a job or a node: each wish is stored before it is answered.
#include <google/protobuf/util/message_differencer.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "base/job_validate.h"
#include "base/text.h"
#include "server/coordinator.h"

namespace hierad {
namespace {

absl::Status NotNow(const LiveJob& job, const std::string& what) {
  return absl::FailedPreconditionError(absl::StrCat("job ", job.row.id, " is ", v1::JobState_Name(job.row.state), "; ", what));
}

}  // namespace

// `act` is asked of a job that is in memory, ended a while ago or not; the answer is the job after the commit.
void Coordinator::Act(uint64_t job_id, std::function<absl::Status(LiveJob*)> act, Reply<v1::Job> reply) {
  Post(
      [this, job_id, act, reply] {
        absl::Status acted;
        if (LiveJob* job = Find(job_id)) {
          acted = act(job);
        } else if (auto ended = ViewOf(job_id); ended.ok()) {
          LiveJob rest;
          rest.row.id = job_id;
          rest.row.state = ended->state();
          rest.row.run_folder = ended->run_folder();
          acted = act(&rest);
        }
        AfterCommit([this, job_id, acted, reply](const absl::Status& status) {
          if (!acted.ok()) return reply(acted);
          if (!status.ok()) return reply(status);
          reply(ViewOf(job_id));
        });
      },
      [reply] { reply(StoppedError()); });
}

void Coordinator::Cancel(uint64_t job_id, bool now, Reply<v1::Job> reply) {
  Act(job_id, [this, now](LiveJob* job) {
    if (IsTerminal(job->row.state)) return absl::OkStatus();
    Change(job, CancelAsked{});
    if (now && IsActive(job->row.state)) {
      job->kill_at = now_;
      job->kill_sent = true;
      MarkOrders(*job);
    }
    return absl::OkStatus();
  }, reply);
}

void Coordinator::Pause(uint64_t job_id, Reply<v1::Job> reply) {
  Act(job_id, [this](LiveJob* job) {
    if (IsTerminal(job->row.state)) return NotNow(*job, "it has ended");
    if (job->row.desired == v1::DESIRED_CANCEL) return NotNow(*job, "it is being cancelled");
    Change(job, PauseAsked{});
    return absl::OkStatus();
  }, reply);
}

void Coordinator::Resume(uint64_t job_id, Reply<v1::Job> reply) {
  Act(job_id, [this](LiveJob* job) {
    if (IsTerminal(job->row.state)) return NotNow(*job, "it has ended; submit it again");
    if (job->row.desired == v1::DESIRED_CANCEL) return NotNow(*job, "it is being cancelled");
    Change(job, ResumeAsked{});
    return absl::OkStatus();
  }, reply);
}

void Coordinator::Checkpoint(uint64_t job_id, Reply<v1::Job> reply) {
  Act(job_id, [this](LiveJob* job) {
    if (job->row.state != v1::RUNNING) return NotNow(*job, "only a running job can save a checkpoint");
    // By time, so that a restarted hierad asks with a higher number than the one before it.
    job->checkpoint_request = std::max(job->checkpoint_request + 1, unix_ms_);
    MarkOrders(*job);
    return absl::OkStatus();
  }, reply);
}

// Another spec for a job that lives: its ranks hear of it by their orders, attempts to come by their assignment.
void Coordinator::AlterSpec(uint64_t job_id, std::function<void(v1::JobSpec*)> alter, std::string news, Reply<v1::Job> reply) {
  Act(job_id, [this, alter, news](LiveJob* job) -> absl::Status {
    if (IsTerminal(job->row.state)) return NotNow(*job, "it has ended");
    v1::JobSpec changed = job->row.spec;
    alter(&changed);
    if (absl::Status legal = CheckJob(changed); !legal.ok()) return absl::InvalidArgumentError(legal.message());
    if (google::protobuf::util::MessageDifferencer::Equals(changed, job->row.spec)) return absl::OkStatus();
    Touch(*job);
    job->row.spec = std::move(changed);
    ++job->version;
    spdlog::info("job {}: {}", job->row.id, news);
    MarkOrders(*job);
    return absl::OkStatus();
  }, reply);
}

void Coordinator::SetLr(uint64_t job_id, double lr, Reply<v1::Job> reply) {
  AlterSpec(job_id, [lr](v1::JobSpec* spec) { spec->mutable_optimizer()->set_lr(lr); }, absl::StrCat("peak rate ", lr, " from its next step on"), reply);
}

void Coordinator::SetLogLevel(uint64_t job_id, std::string level, Reply<v1::Job> reply) {
  AlterSpec(job_id, [level](v1::JobSpec* spec) { spec->mutable_output()->set_log_level(level); }, "log level " + Printable(level, 20), reply);
}

void Coordinator::DrainNode(std::string node, bool drained, Reply<v1::NodesReply> reply) {
  Post(
      [this, node, drained, reply] {
        absl::Status status;
        if (nodes_.count(node) == 0 && !((drained_.count(node) != 0 || faults_.count(node) != 0) && !drained)) {
          std::string known;
          for (const auto& [name, other] : nodes_) absl::StrAppend(&known, known.empty() ? "" : ", ", name);
          status = absl::NotFoundError(absl::StrCat("there is no node \"", Printable(node, 80), "\"", known.empty() ? "" : "; known are ", known));
        }
        if (status.ok()) status = store_->SetDrained(node, drained);
        if (status.ok() && !drained) status = store_->ForgetFaultySlots(node);
        if (status.ok()) {
          drained ? (void)drained_.insert(node) : (void)drained_.erase(node);
          if (const auto found = nodes_.find(node); found != nodes_.end()) {
            found->second.drained = drained;
            if (!drained) {
              found->second.faults.clear();
              found->second.mended_at = now_;
            }
          }
          if (!drained) faults_.erase(node);
          place_ = true;
          spdlog::info("node {} is {}", node, drained ? "drained: it gets no more work" : "no longer drained");
        }
        AfterCommit([this, status, reply](const absl::Status&) {
          if (!status.ok()) return reply(status);
          reply(NodesNow());
        });
      },
      [reply] { reply(StoppedError()); });
}

void Coordinator::ForgetCheckpoints(uint64_t job_id, Reply<v1::Job> reply) {
  Act(job_id, [this, job_id](LiveJob* job) -> absl::Status {
    if (!IsTerminal(job->row.state)) return NotNow(*job, "it has not ended");
    for (const auto& [id, other] : jobs_) {
      if (!IsTerminal(other->row.state) && other->row.run_folder == job->row.run_folder) return NotNow(*job, absl::StrCat("job ", id, " writes to its folder"));
    }
    job->row.checkpoints.clear();
    return store_->ForgetCheckpoints(job_id);
  }, reply);
}

}  // namespace hierad
