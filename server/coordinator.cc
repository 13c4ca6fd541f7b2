#include "server/coordinator.h"

#include <spdlog/spdlog.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/failpoint.h"
#include "base/fs.h"
#include "base/limits.h"
#include "base/text.h"

namespace hierad {
namespace {

absl::Status KeyOfAnother() { return absl::AlreadyExistsError("client_key: another user's job has it; choose another (hierctl does by itself)"); }

// Names of nodes have no spaces.
std::string NodesOf(const JobRow& row) {
  std::string nodes;
  for (const RankRow& rank : row.ranks) absl::StrAppend(&nodes, nodes.empty() ? "" : " ", rank.node);
  return nodes;
}

absl::Status NoSuchJob(uint64_t job_id) { return absl::NotFoundError(absl::StrCat("there is no job ", job_id)); }

}  // namespace

Coordinator::Coordinator(CoordinatorOptions options, std::unique_ptr<Store> store, const Clock* clock)
    : options_(std::move(options)), store_(std::move(store)), clock_(clock), disks_(options_.disk_reserve_bytes, options_.free_bytes) {}

Coordinator::~Coordinator() = default;

absl::StatusOr<std::unique_ptr<Coordinator>> Coordinator::Create(CoordinatorOptions options, std::unique_ptr<Store> store, const Clock* clock) {
  std::unique_ptr<Coordinator> coordinator(new Coordinator(std::move(options), std::move(store), clock));
  if (absl::Status s = coordinator->Recover(); !s.ok()) return s;
  return coordinator;
}

absl::Status Coordinator::Recover() {
  now_ = last_turn_ = started_ = clock_->Monotonic();
  unix_ms_ = clock_->UnixMs();
  auto epoch = store_->BeginEpoch(unix_ms_);
  if (!epoch.ok()) return epoch.status();
  sequence_ = *epoch << 32;
  next_job_id_ = store_->next_job_id();
  auto drained = store_->DrainedNodes();
  if (!drained.ok()) return drained.status();
  drained_.insert(drained->begin(), drained->end());
  auto faulty = store_->FaultySlots();
  if (!faulty.ok()) return faulty.status();
  for (const FaultySlot& slot : *faulty) faults_[slot.node][slot.slot] = slot.fault;
  auto rows = store_->LoadLive();
  if (!rows.ok()) return rows.status();
  for (JobRow& row : *rows) {
    auto job = std::make_unique<LiveJob>();
    job->row = std::move(row);
    job->ResetAttempt();
    job->stop_floor = sequence_;
    SetKillTime(job.get());
    job->moved_at = now_;
    // The wall clock may have been set since: never wait longer than a back-off can be.
    const double longest_s = RuleFor(job->row.spec.retry(), job->row.reason).backoff_s;
    job->retry_due = now_ + std::chrono::milliseconds(std::clamp<int64_t>(job->row.retry_at_ms - unix_ms_, 0, BackoffMs(longest_s, 100)));
    for (size_t r = 0; r < job->row.ranks.size(); ++r) {
      job->ranks[r].pid = job->row.ranks[r].pid;
      job->ranks[r].heard_at = now_;
      job->ranks[r].spoken = true;
      if (!IsActive(job->row.state) || job->row.ranks[r].gone) continue;
      Node& node = nodes_[job->row.ranks[r].node];
      node.name = job->row.ranks[r].node;
      node.last_seen = now_;   // it has node_lost_after from now to come back
      node.slots.push_back(job->row.ranks[r].slot);
    }
    by_key_[job->row.client_key] = job->row.id;
    auto attempts = store_->Attempts(job->row.id);
    if (!attempts.ok()) return attempts.status();
    for (const AttemptRow& attempt : *attempts) ++job->restarts[attempt.reason];
    if (options_.history != nullptr) {
      auto newest = options_.history->Read(job->row.id, {.last = 1});
      if (newest.ok() && !newest->steps.empty()) job->ring.Push(newest->steps.back());
    }
    Index(job.get());
    jobs_[job->row.id] = std::move(job);
  }
  if (!jobs_.empty()) spdlog::info("recovered {} jobs: {} with workers, {} queued", jobs_.size(), active_.size(), queued_.size());
  return absl::OkStatus();
}

void Coordinator::Post(std::function<void()> work, std::function<void()> refuse) {
  {
    std::lock_guard lock(mutex_);
    if (!stopped_) {
      inbox_.push_back({std::move(work), std::move(refuse)});
      wake_.notify_one();
      return;
    }
  }
  if (refuse) refuse();
}

void Coordinator::Run() {
  while (true) {
    Turn();
    std::unique_lock lock(mutex_);
    if (stopped_ && inbox_.empty()) break;
    if (!stopped_) wake_.wait_for(lock, NextWake(), [this] { return stopped_ || !inbox_.empty(); });
  }
  for (Parked& parked : std::exchange(parked_, {})) parked.reply(StoppedError());
}

void Coordinator::Stop() {
  std::lock_guard lock(mutex_);
  stopped_ = true;
  wake_.notify_all();
}

void Coordinator::BeginDrain() {
  Post([this] { draining_ = true; });
}

void Coordinator::EndSessions() {
  Post([this] {
    AfterCommit([this](const absl::Status&) {
      for (auto& [id, session] : agents_) session.link->Close(StoppedError());
      for (auto& [id, session] : workers_) session.link->Close(StoppedError());
    });
  });
}

std::chrono::nanoseconds Coordinator::NextWake() const {
  return parked_.empty() && active_.empty() ? std::chrono::milliseconds(500) : std::chrono::milliseconds(200);
}

void Coordinator::ReadClock() {
  now_ = clock_->Monotonic();
  unix_ms_ = clock_->UnixMs();
  // A stall of ours (a suspended machine, a disk that hung) is not counted against the nodes: their reports wait unread.
  const std::chrono::nanoseconds stall = now_ - last_turn_ - std::chrono::seconds(2);
  if (stall > std::chrono::nanoseconds(0)) {
    for (auto& [name, node] : nodes_) node.last_seen += stall;
    for (uint64_t id : active_) {
      LiveJob* job = Find(id);
      job->moved_at += stall;
      for (RankLive& live : job->ranks) {
        if (live.heard_at.count() != 0) live.heard_at += stall;
      }
    }
  }
  last_turn_ = now_;
}

void Coordinator::Turn() {
  std::vector<Posted> work;
  {
    std::lock_guard lock(mutex_);
    work.swap(inbox_);
  }
  ReadClock();
  (void)Failpoint("hierad.turn");
  ReloadUnsure();
  for (Posted& posted : work) posted.work();
  Tick();
  if (place_ && !draining_ && now_ >= store_rest_) Place();
  if (!work.empty()) decisions_.Add(clock_->Monotonic() - now_);
  CommitTurn();
  if (Failpoint("hierad.send").ok()) SendAll();
  AnswerWatches();
}

void Coordinator::CommitTurn() {
  absl::Status status;
  if (!undo_.empty()) {
    StoreBatch batch;
    for (const auto& [id, before] : undo_) {
      const JobRow& row = jobs_.at(id)->row;
      // A new one has nothing to clear; it may have been placed at once.
      batch.jobs.push_back({&row, before.has_value() || !row.ranks.empty(), before.has_value()});
    }
    // New rows in order of id.
    std::sort(batch.jobs.begin(), batch.jobs.end(), [](const auto& a, const auto& b) { return a.row->id < b.row->id; });
    batch.attempts = attempts_;
    const auto begin = clock_->Monotonic();
    status = store_->Commit(batch);
    commits_.Add(clock_->Monotonic() - begin);
    if (!status.ok()) {
      ++store_errors_;
      if (store_errors_ == 1 || now_ - store_said_ >= std::chrono::seconds(10)) {
        spdlog::error("the store refused a commit, nothing was changed: {}", std::string(status.message()));
        store_said_ = now_;
      }
      Undo();
      store_rest_ = now_ + std::chrono::seconds(1);
    }
  }
  if (!undo_.empty()) (void)Failpoint("hierad.committed");
  undo_.clear();
  attempts_.clear();
  for (auto& work : std::exchange(after_commit_, {})) work(status);
}

// A commit that failed may have happened none the less (an error of the disk at its end): what is stored counts. As long as
// that cannot be read, what was before.
void Coordinator::Undo() {
  for (auto& [id, before] : undo_) {
    auto stored = store_->Load(id);
    if (!stored.ok()) {
      unsure_.insert(id);
      TakeBack(id, std::move(before));
    } else {
      TakeBack(id, *std::move(stored));
    }
  }
  place_ = true;
}

void Coordinator::ReloadUnsure() {
  if (unsure_.empty() || now_ < store_rest_) return;
  for (auto at = unsure_.begin(); at != unsure_.end();) {
    auto stored = store_->Load(*at);
    if (!stored.ok()) return;
    if (*stored && jobs_.count(*at) == 0 && !IsTerminal((*stored)->state)) {
      auto job = std::make_unique<LiveJob>();
      job->row.id = *at;
      by_key_[(*stored)->client_key] = *at;
      jobs_[*at] = std::move(job);
    }
    if (jobs_.count(*at) != 0) TakeBack(*at, *std::move(stored));
    at = unsure_.erase(at);
  }
  place_ = true;
}

void Coordinator::TakeBack(uint64_t job_id, std::optional<JobRow> row) {
  if (!row) return Forget(job_id);
  LiveJob& job = *jobs_.at(job_id);
  const bool same_attempt = job.row.attempt == row->attempt && job.ranks.size() == row->ranks.size();
  MarkOrders(job);
  job.row = *std::move(row);
  if (!same_attempt) job.ResetAttempt();
  SetKillTime(&job);
  ++job.version;
  IsTerminal(job.row.state) ? (void)ended_.emplace(job_id, now_) : (void)ended_.erase(job_id);
  Index(&job);
  MarkOrders(job);
}

void Coordinator::Forget(uint64_t job_id) {
  const auto found = jobs_.find(job_id);
  if (found == jobs_.end()) return;
  queued_.erase(job_id);
  active_.erase(job_id);
  ended_.erase(job_id);
  by_key_.erase(found->second->row.client_key);
  jobs_.erase(found);
}

void Coordinator::Touch(const LiveJob& job) { undo_.try_emplace(job.row.id, job.row); }

void Coordinator::Index(LiveJob* job) {
  const uint64_t id = job->row.id;
  job->row.state == v1::QUEUED ? (void)queued_.insert(id) : (void)queued_.erase(id);
  IsActive(job->row.state) ? (void)active_.insert(id) : (void)active_.erase(id);
}

LiveJob* Coordinator::Find(uint64_t job_id) {
  const auto found = jobs_.find(job_id);
  return found == jobs_.end() ? nullptr : found->second.get();
}

void Coordinator::Change(LiveJob* job, const JobEvent& event) {
  JobStep step = Apply(job->row, event, unix_ms_);
  if (!step.changed) return;
  Touch(*job);
  const v1::JobState before = job->row.state;
  const int attempt_before = job->row.attempt;
  const bool same_words = job->row.message == step.row.message;
  MarkOrders(*job);
  job->row = std::move(step.row);
  const JobRow& row = job->row;
  ++job->version;
  if (step.stopping_began || (job->gentle && row.desired == v1::DESIRED_CANCEL)) {
    job->stop_floor = sequence_;
    SetKillTime(job);
  }
  if (step.attempt_over) {
    attempts_.push_back({row.id, row.attempt, row.started_ms, unix_ms_, step.attempt_reason, step.attempt_message, row.step, NodesOf(row)});
    job->retry_due = now_ + std::chrono::milliseconds(std::max<int64_t>(0, row.retry_at_ms - unix_ms_));
    job->samples_per_s = 0;
    if (row.state == v1::QUEUED) {
      AfterCommit([this, id = row.id, reason = step.attempt_reason](const absl::Status& status) {
        if (LiveJob* again = Find(id); again != nullptr && status.ok()) ++again->restarts[reason];
      });
    }
  }
  if (row.attempt != attempt_before) {
    job->ResetAttempt();
    job->begun_at = now_;
  }
  if (IsTerminal(row.state)) ended_[row.id] = now_;
  if (row.state != before) {
    Index(job);
    std::string line = absl::StrCat("job ", row.id, " (", row.spec.name(), "): ", v1::JobState_Name(before), " -> ", v1::JobState_Name(row.state));
    if (row.attempt > 0) absl::StrAppend(&line, ", attempt ", row.attempt);
    if (row.reason != v1::REASON_UNSPECIFIED) absl::StrAppend(&line, ", ", v1::Reason_Name(row.reason));
    if (!row.message.empty() && !same_words) absl::StrAppend(&line, ": ", row.message);
    AfterCommit([line](const absl::Status& status) {
      if (status.ok()) spdlog::info("{}", line);
    });
  }
  MarkOrders(*job);
  place_ = true;
}

// When what is left of an attempt that ends gets no more time. A cancelled job's agents have the user's grace.
void Coordinator::SetKillTime(LiveJob* job) {
  job->kill_at.reset();
  job->gentle = job->row.state == v1::STOPPING && job->row.desired == v1::DESIRED_PAUSE;
  if (job->row.state != v1::STOPPING || job->row.desired == v1::DESIRED_CANCEL) return;
  job->kill_at = now_ + (job->gentle ? options_.pause_grace : kPeersGrace);
}

void Coordinator::Submit(v1::SubmitRequest request, std::string submitter, absl::Status folder_check, Reply<v1::SubmitReply> reply) {
  auto work = [this, request = std::move(request), submitter = std::move(submitter), folder_check, reply]() mutable {
    const auto refuse = [this, reply](absl::Status status) {
      AfterCommit([reply, status](const absl::Status&) { reply(status); });
    };
    uint64_t id = 0;
    bool existed = true;
    if (const auto known = by_key_.find(request.client_key()); known != by_key_.end()) {
      id = known->second;
    } else {
      auto stored = store_->FindByClientKey(request.client_key());
      if (!stored.ok()) return refuse(stored.status());
      id = stored->value_or(0);
    }
    if (id == 0) {
      if (draining_) return refuse(StoppedError());
      if (!folder_check.ok()) return refuse(folder_check);
      if (jobs_.size() >= limits::kQueuedJobs) {
        return refuse(absl::ResourceExhaustedError(absl::StrCat("the queue is full: ", jobs_.size(), " jobs, at most ", limits::kQueuedJobs,
                                                                "; cancel some, or wait")));
      }
      existed = false;
      id = next_job_id_;
      auto job = std::make_unique<LiveJob>();
      JobRow& row = job->row;
      row.id = id;
      row.client_key = request.client_key();
      row.submitter = submitter;
      row.spec = std::move(*request.mutable_spec());
      row.submitted_ms = unix_ms_;
      row.run_folder = row.spec.output().folder();
      const bool given = !row.run_folder.empty();
      if (!given) row.run_folder = JoinPath(options_.runs_folder, absl::StrCat(id, "-", row.spec.name()));
      for (const std::string& folder : {options_.runs_folder, row.run_folder}) {
        if (const std::string problem = disks_.Problem(folder, now_); !problem.empty()) return refuse(absl::ResourceExhaustedError(problem));
      }
      // A folder that hierad names is nobody else's; looking through a long queue for each submission would take longer and longer.
      if (given) {
        for (const auto& [other_id, other] : jobs_) {
          if (other->row.run_folder != row.run_folder || IsTerminal(other->row.state)) continue;
          return refuse(absl::FailedPreconditionError(absl::StrCat("output.folder: ", Printable(row.run_folder), " is the folder of job ", other_id,
                                                                   ", which has not ended; give another, or none")));
        }
      }
      ++next_job_id_;
      undo_[id] = std::nullopt;
      by_key_[row.client_key] = id;
      Index(job.get());
      jobs_[id] = std::move(job);
      place_ = true;
    }
    AfterCommit([this, id, existed, submitter, reply](const absl::Status& status) {
      if (!status.ok()) return reply(status);
      auto view = ViewOf(id);
      if (!view.ok()) return reply(view.status());
      if (view->submitter() != submitter) return reply(KeyOfAnother());
      if (!existed) spdlog::info("job {} ({}) queued", id, view->spec().name());
      v1::SubmitReply answer;
      *answer.mutable_job() = *std::move(view);
      answer.set_existed(existed);
      reply(std::move(answer));
    });
  };
  Post(std::move(work), [reply] { reply(StoppedError()); });
}

void Coordinator::FindByClientKey(std::string key, std::string submitter, Reply<v1::SubmitReply> reply) {
  Ask<v1::SubmitReply>(reply, [this, key, submitter]() -> absl::StatusOr<v1::SubmitReply> {
    uint64_t id = 0;
    if (const auto known = by_key_.find(key); known != by_key_.end()) {
      id = known->second;
    } else {
      auto stored = store_->FindByClientKey(key);
      if (!stored.ok()) return stored.status();
      id = stored->value_or(0);
    }
    auto view = ViewOf(id);
    if (!view.ok()) return view.status();
    if (view->submitter() != submitter) return KeyOfAnother();
    v1::SubmitReply answer;
    *answer.mutable_job() = *std::move(view);
    answer.set_existed(true);
    return answer;
  });
}

void Coordinator::Get(uint64_t job_id, Reply<v1::Job> reply) {
  Ask<v1::Job>(reply, [this, job_id] { return ViewOf(job_id); });
}

void Coordinator::List(v1::ListRequest request, std::string submitter, Reply<v1::ListReply> reply) {
  Ask<v1::ListReply>(reply, [this, request, submitter]() -> absl::StatusOr<v1::ListReply> {
    ListFilter filter;
    filter.submitter = submitter;
    for (int state : request.states()) filter.states.push_back(static_cast<v1::JobState>(state));
    filter.before_id = request.before_id();
    filter.limit = request.limit() == 0 ? limits::kListLimit : static_cast<int>(std::min<uint32_t>(request.limit(), limits::kListLimit));
    auto rows = store_->List(filter);
    if (!rows.ok()) return rows.status();
    v1::ListReply answer;
    size_t bytes = 0;
    for (JobRow& row : *rows) {
      const LiveJob* live = Find(row.id);
      LiveJob rest;
      if (live == nullptr) rest.row = std::move(row);
      v1::Job view = View(live ? *live : rest);
      // A page that would not fit a message ends early: the client asks on with before_id.
      bytes += view.ByteSizeLong() + 8;
      if (bytes > limits::kGrpcMessageBytes * 3 / 4 && answer.jobs_size() > 0) break;
      *answer.add_jobs() = std::move(view);
    }
    return answer;
  });
}

void Coordinator::ListCheckpoints(uint64_t job_id, Reply<v1::ListCheckpointsReply> reply) {
  Ask<v1::ListCheckpointsReply>(reply, [this, job_id]() -> absl::StatusOr<v1::ListCheckpointsReply> {
    v1::ListCheckpointsReply answer;
    const auto fill = [&answer](const JobRow& row) {
      for (const v1::CheckpointInfo& info : row.checkpoints) *answer.add_checkpoints() = info;
    };
    if (const LiveJob* live = Find(job_id)) {
      fill(live->row);
      return answer;
    }
    auto row = store_->Load(job_id);
    if (!row.ok()) return row.status();
    if (!*row) return NoSuchJob(job_id);
    fill(**row);
    return answer;
  });
}

void Coordinator::Nodes(Reply<v1::NodesReply> reply) {
  Ask<v1::NodesReply>(reply, [this]() -> absl::StatusOr<v1::NodesReply> { return NodesNow(); });
}

v1::NodesReply Coordinator::NodesNow() {
  std::map<std::pair<std::string, std::string>, std::pair<const LiveJob*, int>> used;
  for (uint64_t id : active_) {
    const LiveJob* job = Find(id);
    for (const RankRow& rank : job->row.ranks) used[{rank.node, rank.slot.id()}] = {job, rank.rank};
  }
  v1::NodesReply answer;
  for (const auto& [name, node] : nodes_) {
    v1::Node* out = answer.add_nodes();
    out->set_name(name);
    out->set_connected(node.session != 0 && !node.lost);
    out->set_last_seen_ms(node.last_seen_ms);
    out->set_version(node.version);
    out->set_drained(node.drained);
    for (const v1::Slot& slot : node.slots) {
      v1::SlotUse* use = out->add_slots();
      *use->mutable_slot() = slot;
      if (const auto fault = node.faults.find(slot.id()); fault != node.faults.end()) use->set_fault(fault->second);
      const auto found = used.find({name, slot.id()});
      if (found == used.end()) continue;
      use->set_job_id(found->second.first->row.id);
      use->set_attempt(found->second.first->row.attempt);
      use->set_rank(found->second.second);
    }
  }
  return answer;
}

void Coordinator::Watch(WatchPlace place, Reply<WatchView> reply) {
  Post(
      [this, place, reply] {
        AfterCommit([this, place, reply](const absl::Status&) { parked_.push_back({place, now_ + kWatchPoll, reply}); });
      },
      [reply] { reply(StoppedError()); });
}

void Coordinator::Look(Reply<Overview> reply) {
  Ask<Overview>(reply, [this]() -> absl::StatusOr<Overview> { return LookNow(); });
}

}  // namespace hierad
