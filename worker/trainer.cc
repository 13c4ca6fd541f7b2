#include "worker/trainer.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <fcntl.h>
#include <sys/file.h>
#include <system_error>
#include <thread>
#include <unistd.h>
#include <utility>

#include <spdlog/spdlog.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/clock.h"
#include "base/failpoint.h"
#include "base/fs.h"
#include "base/job_validate.h"
#include "base/status.h"
#include "worker/data/image_dataset.h"
#include "worker/metrics/picture.h"
#include "worker/optim/schedule.h"
#include "worker/resume.h"

namespace hierad {
namespace {

constexpr size_t kRecentMetrics = 4096;          // sent once more after a resume: hierad may lack them
constexpr std::chrono::seconds kSpeedWindow{10};
constexpr std::chrono::seconds kMemoryEvery{1};
constexpr std::chrono::milliseconds kLockRetry{100};
constexpr std::chrono::seconds kAbortWait{5};
constexpr int kEvaluationBatchesPerLook = 32;    // between two looks for a stop

double Seconds(std::chrono::nanoseconds t) { return std::chrono::duration<double>(t).count(); }

std::chrono::nanoseconds Now() { return Clock::System().Monotonic(); }

// For a process that is about to leave, which may not wait for long: a GPU that hangs does not answer this either.
void AbortCollectives(Communicator* communicator) {
  const auto done = std::make_shared<std::promise<void>>();
  std::future<void> aborted = done->get_future();
  std::thread([communicator, done] {
    communicator->Abort();
    done->set_value();
  }).detach();
  (void)aborted.wait_for(kAbortWait);
}

bool IsSet(const std::atomic<bool>* flag) { return flag != nullptr && flag->load(); }

}  // namespace

Trainer::Trainer(TrainerOptions options, TrainerParts parts, Session* session)
    : options_(std::move(options)), spec_(options_.spec), parts_(std::move(parts)), session_(session) {}

Trainer::~Trainer() {
  session_->AbandonOnStop(nullptr);
  session_->SetWaitingIn(nullptr);
}

TrainEnd Trainer::Run() {
  const auto run = [this]() -> absl::StatusOr<TrainEnd> {
    RETURN_IF_ERROR(Prepare());
    RETURN_IF_ERROR(Join());
    RETURN_IF_ERROR(Load());
    return Train();
  };
  absl::StatusOr<TrainEnd> end = run();
  if (given_up_) std::promise<void>().get_future().wait();   // the watch's thread has the last word, and ends the process
  if (!end.ok()) end = TrainEnd{ReasonOf(end.status()), std::string(end.status().message())};
  // A checkpoint that is being written is worth the wait: leaving the process would tear it.
  if (writing_.valid()) (void)EndSave(/*wait=*/true);
  // A stop that ended a wait, rather than a step.
  if (end->reason == v1::REASON_CANCELLED && session_->want() != Session::Want::kCancel) end->reason = v1::REASON_PREEMPTED;
  return *std::move(end);
}

absl::Status Trainer::Prepare() {
  v1::StepSpec& step = *spec_.mutable_step();
  step.set_mode(ResolvedMode(step, options_.cuda));
  RETURN_IF_ERROR(CheckJob(spec_));   // the mode that auto stood for may not be able to do all that the job asks
  spec_.mutable_resources()->set_device(options_.cuda ? "cuda" : "cpu");
  ASSIGN_OR_RETURN(geometry_, Geometry::From(spec_.model()));
  table_ = ParameterTable::For(*geometry_);
  RETURN_IF_ERROR(MakeFolders(options_.run_folder));
  if (options_.rank == 0) {
    // The agent keeps each rank's output as rank-N.log.
    const std::string link = JoinPath(options_.run_folder, "train.log");
    if (symlink("rank-0.log", link.c_str()) != 0 && errno != EEXIST) spdlog::warn("cannot make the link train.log: {}", errno);
  }
  return absl::OkStatus();
}

absl::Status Trainer::Join() {
  HIERAD_FAILPOINT("worker.join");
  Phase(v1::PHASE_RENDEZVOUS);
  if (options_.world_size == 1) {
    communicator_ = MakeSelfCommunicator();
    return absl::OkStatus();
  }
  CommunicatorOptions limits = parts_.communicator;
  limits.rank = options_.rank;
  limits.size = options_.world_size;
  limits.abandon = &abandon_;
  limits.max_channels = spec_.step().reduce_channels();
  session_->AbandonOnStop(&abandon_);
  std::string rendezvous;
  if (options_.rank == 0) {
    ASSIGN_OR_RETURN(rendezvous, options_.cuda ? MakeNcclRendezvous()
                                 : !options_.collective_address.empty()
                                     ? MakeTcpRendezvous(options_.collective_address)
                                     : MakeSharedMemoryRendezvous(limits, options_.unique_name,
                                                                  table_.flat_size * int64_t(sizeof(float))));
    session_->OfferRendezvous(rendezvous);
  } else {
    ASSIGN_OR_RETURN(rendezvous, session_->AwaitRendezvous(parts_.rendezvous_timeout));
  }
  ASSIGN_OR_RETURN(communicator_, options_.cuda ? JoinNccl(limits, rendezvous) : JoinCpu(limits, rendezvous));
  // From here on a stop is agreed at a step boundary.
  session_->AbandonOnStop(nullptr);
  abandon_ = false;
  session_->SetWaitingIn([this] { return communicator_->WaitingIn(); });
  return absl::OkStatus();
}

absl::Status Trainer::Load() {
  HIERAD_FAILPOINT("worker.load");
  Phase(v1::PHASE_LOADING);
  Activity("loading");
  RETURN_IF_ERROR(Agree(communicator_.get(), options_.rank == 0 ? LockFolder() : absl::OkStatus()));
  ASSIGN_OR_RETURN(StartingPoint start,
                   ReadStartingPoint(options_.run_folder, table_, options_.known_checkpoint_step, communicator_.get()));
  for (const std::string& path : start.damaged) spdlog::error("damaged checkpoint, not used: {}", Printable(path));
  CheckpointContents& contents = start.contents;
  if (start.resumed) {
    statistics_ = contents.statistics;
    done_ = contents.state.step;
    eval_loss_ = contents.eval_loss;
    has_best_ = contents.has_best;
    best_eval_loss_ = contents.best_eval_loss;
    saved_ = done_;
    spdlog::info("resuming after step {}", done_);
  }
  first_done_ = given_ = done_;
  RETURN_IF_ERROR(Agree(communicator_.get(), OpenRun(done_)));
  const auto make = [&]() -> absl::Status {
    StepOptions step_options;
    step_options.spec = spec_;
    step_options.cuda = options_.cuda;
    step_options.threads = options_.threads;
    step_options.rows = dataset_->row_format();
    ASSIGN_OR_RETURN(step_, parts_.make_step(step_options, *geometry_, table_, communicator_.get()));
    spdlog::info("step: {}", step_->Describe());
    if (const std::string now = step_->algorithms(); !contents.algorithms.empty() && contents.algorithms != now) {
      spdlog::warn("the checkpoint's matrix products were made by the algorithms {}, here they are {}: the run goes on, but not with the bits of an "
                   "undisturbed one", Printable(contents.algorithms, 200), now.empty() ? "the code's own" : now);
    }
    if (start.resumed) return step_->Load(contents.state);
    RETURN_IF_ERROR(step_->Initialize());
    if (spec_.model().init_from().empty()) return absl::OkStatus();
    ASSIGN_OR_RETURN(TrainState state, step_->Save());
    ASSIGN_OR_RETURN(const std::string line, ApplyInitialWeights(spec_.model().init_from(), table_, &state));
    spdlog::info("{}", line);
    return step_->Load(state);
  };
  RETURN_IF_ERROR(Agree(communicator_.get(), make()));
  return VerifyRanks();
}

// What every rank computes alike is alike, unless memory or arithmetic is at fault somewhere.
absl::Status Trainer::VerifyRanks() {
  if (options_.world_size == 1) return absl::OkStatus();
  Activity(absl::StrCat("the check of all ranks' parameters after step ", given_));
  const auto hash = step_->ParameterHash();
  uint64_t first = hash.value_or(0);
  RETURN_IF_ERROR(communicator_->BroadcastHost(&first, sizeof first, 0));
  absl::Status status = hash.status();
  if (status.ok() && *hash != first) {
    status = ErrorOf(v1::REASON_INTERNAL,
                     absl::StrFormat("rank %d: the parameters after step %d are not those of rank 0 (hashes %016x and %016x): memory or arithmetic "
                                     "of one of the two is at fault; the run goes on from the newest checkpoint", options_.rank, given_, *hash, first));
  }
  return Agree(communicator_.get(), status);
}

// Two writers would mix their metrics and remove each other's checkpoints. The kernel lets go when the process ends.
absl::Status Trainer::LockFolder() {
  lock_ = UniqueFd(open(options_.run_folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!lock_) return ErrnoStatus(errno, "cannot open the run folder", options_.run_folder);
  const auto deadline = Now() + parts_.folder_timeout;
  while (flock(lock_.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) {   // some network file systems
      spdlog::warn("the run folder cannot be locked ({}); start no second run in it", std::generic_category().message(errno));
      break;
    }
    if (Now() >= deadline) {
      return ErrorOf(v1::REASON_CHECKPOINT, absl::StrCat("another process still writes to \"", Printable(options_.run_folder),
                                                         "\"; end it, or use another output.folder"));
    }
    SleepFor(kLockRetry);
  }
  return absl::OkStatus();
}

absl::Status Trainer::OpenRun(int64_t first_step) {
  const bool split = spec_.data().held_out() > 0;
  ASSIGN_OR_RETURN(dataset_, OpenDataset(spec_.data(), spec_.data().path(), *geometry_, &statistics_, split ? Subset::kTraining : Subset::kAll));
  spdlog::info("data: {}", dataset_->Describe());
  if (split || !spec_.eval().path().empty()) {
    ChannelStatistics training = statistics_;
    ASSIGN_OR_RETURN(eval_dataset_, split ? OpenDataset(spec_.data(), spec_.data().path(), *geometry_, &training, Subset::kHeldOut)
                                          : OpenDataset(spec_.data(), spec_.eval().path(), *geometry_, &training));
    // One step takes both.
    if (eval_dataset_->row_format() != dataset_->row_format()) dataset_ = PreparedRows(dataset_), eval_dataset_ = PreparedRows(eval_dataset_);
    spdlog::info("held-out data: {}", eval_dataset_->Describe());
  }
  ASSIGN_OR_RETURN(length_, RunLength::For(spec_, dataset_->count()));
  if (first_step > length_.total_steps) {
    return ErrorOf(v1::REASON_USER_ERROR,
                   absl::StrCat("the newest checkpoint is of step ", first_step, ", but schedule ends after step ", length_.total_steps,
                                "; use another output.folder or a longer schedule"));
  }
  Loader::Options loader;
  loader.spec = spec_;
  loader.rank = options_.rank;
  loader.world_size = options_.world_size;
  loader.first_step = first_step;
  loader.threads = options_.loader_threads;
  loader.allocate = parts_.batch_memory.allocate;
  loader.release = parts_.batch_memory.release;
  if (first_step < length_.total_steps) {
    ASSIGN_OR_RETURN(loader_, MakeLoader(dataset_, loader));
  }
  if (options_.rank == 0) {
    ASSIGN_OR_RETURN(checkpoints_, CheckpointFolder::Open(options_.run_folder));
    checkpoints_->set_stage_hook(parts_.checkpoint_stage);
    ASSIGN_OR_RETURN(const auto infos, checkpoints_->List());
    session_->SetCheckpoints(infos);
    std::vector<v1::StepMetrics> recent;
    ASSIGN_OR_RETURN(metrics_, MetricsFile::Open(options_.run_folder, first_step, kRecentMetrics, &recent));
    for (const v1::StepMetrics& metrics : recent) session_->AddMetrics(metrics);
    if (spec_.output().tensorboard()) {
      auto events = EventFile::Open(options_.run_folder, first_step);
      if (events.ok()) events_ = *std::move(events);
      else Events(events.status());
    }
  }
  Report();
  return absl::OkStatus();
}

absl::StatusOr<TrainEnd> Trainer::Train() {
  if (options_.cuda) {
    watch_ = std::make_unique<StepWatch>(parts_.watch, [this](std::chrono::nanoseconds limit) {
      const std::string waiting = WaitingIn();
      given_up_ = true;
      AbortCollectives(communicator_.get());
      parts_.give_up(v1::REASON_HANG,
                     absl::StrFormat("rank %d: step %d did not finish within %.0f s%s: the GPU hangs or a peer is missing in the all-reduce; "
                                     "see the other ranks' logs", options_.rank, watched_step_.load(), Seconds(limit),
                                     waiting.empty() ? "" : absl::StrCat(" (in ", waiting, ")")));
    });
  }
  if (loader_) {
    session_->SetWaitingIn([this] {
      const std::string sample = loader_->WaitingIn();
      return sample.empty() ? WaitingIn() : absl::StrCat("reading ", sample);
    });
  }
  Phase(v1::PHASE_TRAINING);
  while (given_ < length_.total_steps) {
    ASSIGN_OR_RETURN(const After after, TrainStep());
    if (after == After::kStop && given_ < length_.total_steps) {
      Phase(v1::PHASE_STOPPING);
      RETURN_IF_ERROR(Finish());
      return Stopped();
    }
  }
  Phase(v1::PHASE_STOPPING);
  RETURN_IF_ERROR(Finish());
  Phase(v1::PHASE_DONE);
  const int64_t skipped = loader_ ? loader_->counters().skipped_samples() : 0;
  std::string message = absl::StrCat("completed ", done_, " steps");
  if (skipped > 0) absl::StrAppend(&message, "; rank ", options_.rank, " left out ", skipped, skipped == 1 ? " sample" : " samples", " that could not be read: its log names them");
  if (spec_.data().source() == "synthetic") absl::StrAppend(&message, "; its data were synthetic: random numbers");
  return TrainEnd{v1::REASON_COMPLETED, std::move(message)};
}

absl::StatusOr<Trainer::After> Trainer::TrainStep() {
  RETURN_IF_ERROR(GiveStep());
  // What looks at the weights after a step sees these, and no later ones.
  const bool wait = given_ == length_.total_steps || EvaluationAfter(given_) || PicturesAfter(given_);
  RETURN_IF_ERROR(TakeResults(wait ? 0 : step_->records_behind()));
  if (watch_) watch_->End();
  if (stop_agreed_) {
    RETURN_IF_ERROR(TakeResults(0));
    return After::kStop;
  }
  if (wishes_agreed_) {
    RETURN_IF_ERROR(TakeResults(0));
    RETURN_IF_ERROR(HearRankZero());
  }
  if (EvaluationAfter(given_)) {
    ASSIGN_OR_RETURN(const bool abandoned, Evaluate());
    if (eval_loss_) evaluated_->set_eval_loss(*eval_loss_);
    TakeMetrics(*std::exchange(evaluated_, std::nullopt));
    if (abandoned) return After::kStop;
  }
  const int64_t verify = spec_.step().verify_every_steps();
  if (verify > 0 && given_ % verify == 0) RETURN_IF_ERROR(VerifyRanks());
  if (TakesPartInSaving() && given_ < length_.total_steps) RETURN_IF_ERROR(SaveIfDue());
  return After::kGoOn;
}

absl::Status Trainer::GiveStep() {
  Given given{Now(), -loader_->data_wait_s(), {}, 0};
  // Told apart for the ranks that wait for this one: a slow reader is no dead peer.
  Activity(absl::StrCat("reading the data of step ", given_ + 1));
  std::vector<MicroBatch> batches;
  for (int i = 0; i < spec_.step().accumulation(); ++i) {
    ASSIGN_OR_RETURN(const MicroBatch batch, ahead_.has_value() ? *std::exchange(ahead_, std::nullopt) : loader_->Next());
    batches.push_back(batch);
  }
  // The next step's first batch goes to the GPU while this step computes; what ails it is that step's matter.
  if (options_.cuda && given_ + 1 < length_.total_steps) {
    ahead_ = loader_->Next();
    if (ahead_->ok()) step_->Prefetch(**ahead_);
  }
  given.data_wait_s += loader_->data_wait_s();
  for (const MicroBatch& batch : batches) given.own_samples += batch.real;
  ASSIGN_OR_RETURN(const int64_t samples, RealSamples(given.own_samples));
  const double lr = LearningRate(spec_, given_, length_.total_steps);
  given.metrics.set_samples(samples);
  given.metrics.set_lr(lr);
  Activity(absl::StrCat("step ", given_ + 1));
  watched_step_ = given_ + 1;
  if (const auto pace_ms = FailpointValue("worker.pace")) SleepFor(std::chrono::milliseconds(*pace_ms));
  HIERAD_FAILPOINT("worker.step");
  if (watch_) watch_->Begin();
  RETURN_IF_ERROR(step_->Run(batches, samples, lr, Signals()));
  ++given_;
  under_way_.push_back(std::move(given));
  eval_loss_.reset();
  return absl::OkStatus();
}

// Of the step, over all ranks: what the order says, less what could not be read.
absl::StatusOr<int64_t> Trainer::RealSamples(int64_t own_samples) {
  if (spec_.data().on_error() != "skip") return length_.RealSamples(given_);
  ASSIGN_OR_RETURN(const DoublePair sum, SumOverRanks(communicator_.get(), {double(own_samples), 0}));
  if (sum.first == 0) {
    return ErrorOf(v1::REASON_DATA_ERROR, absl::StrCat("step ", given_ + 1, ": none of its ", length_.RealSamples(given_),
                                                       " samples can be read; the log names them (data.on_error is skip)"));
  }
  return int64_t(sum.first);
}

absl::Status Trainer::TakeResults(int still_under_way) {
  while (int(under_way_.size()) > still_under_way) RETURN_IF_ERROR(TakeResult());
  if (options_.rank != 0) {
    if (snapshot_.has_value() && done_ >= snapshot_->step) snapshot_.reset();
    return absl::OkStatus();
  }
  if (snapshot_.has_value() && done_ >= snapshot_->step) writing_ = std::async(std::launch::async, WritingOfSnapshot());
  return EndSave(/*wait=*/false);
}

absl::Status Trainer::TakeResult() {
  ASSIGN_OR_RETURN(const StepResult result, step_->Take());
  RETURN_IF_ERROR(communicator_->CheckAsync());
  HIERAD_FAILPOINT("worker.stepped");
  const Given given = std::move(under_way_.front());
  under_way_.pop_front();
  if (done_ == first_done_) {
    spdlog::info("first step done {:.1f} s after the start of the process (step {}, loss {:.6g})", Seconds(Now() - options_.process_start),
                 done_ + 1, result.loss);
  }
  if (result.step != ++done_) {
    return ErrorOf(v1::REASON_INTERNAL, absl::StrCat("the result of step ", result.step, " came where that of step ", done_, " was awaited"));
  }
  v1::StepMetrics metrics = given.metrics;
  metrics.set_step(done_);
  metrics.set_epoch(double(done_) / double(length_.steps_per_epoch));
  metrics.set_loss(result.loss);
  metrics.set_grad_norm(result.grad_norm);
  const auto now = Now();
  metrics.set_step_s(Seconds(now - std::max(given.began, taken_at_)));
  metrics.set_data_wait_s(given.data_wait_s);
  taken_at_ = now;
  if (result.times.has_value()) {
    // What the device did not notice was hidden behind the step before.
    if (step_->records_behind() > 0) metrics.set_data_wait_s(std::min(given.data_wait_s, result.times->idle_s));
    metrics.set_forward_s(result.times->forward_s);
    metrics.set_backward_s(result.times->backward_s);
    metrics.set_communication_s(result.times->communication_s);
    metrics.set_optimizer_s(result.times->optimizer_s);
  }
  metrics.set_skipped(result.skipped);
  if (result.loss_scale > 0) metrics.set_loss_scale(result.loss_scale);
  metrics.set_time_ms(Clock::System().UnixMs());
  spdlog::debug("step {}: loss {:.6g}, gradient norm {:.6g}, rate {:.6g}, {:.2f} ms, {:.2f} of them waiting for data", done_, result.loss, result.grad_norm,
                metrics.lr(), 1e3 * metrics.step_s(), 1e3 * metrics.data_wait_s());
  WatchSpeed(metrics.samples());
  AddTotals(metrics, given.own_samples);
  stop_agreed_ |= result.signals.stop;
  wishes_agreed_ |= result.signals.checkpoint;
  if (result.input_not_finite) return NameNotFinite(result);
  const absl::Status numerics = CheckNumerics(result, metrics.lr());
  if (numerics.ok() && !stop_agreed_ && EvaluationAfter(done_)) {
    evaluated_ = metrics;
  } else {
    TakeMetrics(metrics);
  }
  // The weights are those before the first such step: worth keeping beside the older checkpoints.
  if (!numerics.ok() && TakesPartInSaving()) (void)SaveNow(/*halted=*/true);
  return numerics;
}

void Trainer::AddTotals(const v1::StepMetrics& metrics, int64_t own_samples) {
  totals_.set_step_count(totals_.step_count() + 1);
  totals_.set_samples(totals_.samples() + own_samples);
  totals_.set_step_s(totals_.step_s() + metrics.step_s());
  totals_.set_data_wait_s(totals_.data_wait_s() + metrics.data_wait_s());
  totals_.set_forward_s(totals_.forward_s() + metrics.forward_s());
  totals_.set_backward_s(totals_.backward_s() + metrics.backward_s());
  totals_.set_communication_s(totals_.communication_s() + metrics.communication_s());
  totals_.set_optimizer_s(totals_.optimizer_s() + metrics.optimizer_s());
  // A CPU step reads a file of the kernel's for it: now and then will do.
  if (totals_.step_count() == 1 || Now() - memory_asked_at_ >= kMemoryEvery) {
    memory_asked_at_ = Now();
    totals_.set_memory_bytes(step_->peak_memory_bytes());
  }
}

// Checkpoints and other rates are asked for by rank 0 alone: two ranks that heard of one wish at different steps would
// follow it at different steps.
StepSignals Trainer::Signals() {
  StepSignals signals;
  signals.stop = StopWanted();
  if (options_.rank != 0) return signals;
  const int64_t request = session_->checkpoint_request();
  save_asked_ = save_asked_ || request > requests_taken_;
  requests_taken_ = std::max(requests_taken_, request);
  const double lr = session_->peak_lr();
  if (lr > 0 && std::isfinite(lr) && lr != PeakLr(spec_)) lr_asked_ = lr;
  // Once for one wish: its result comes some steps later.
  signals.checkpoint = !wishes_raised_ && (save_asked_ || lr_asked_ > 0);
  wishes_raised_ |= signals.checkpoint;
  return signals;
}

// With no step under way, after one in which rank 0 has raised the checkpoint signal: what for. A new rate comes with a
// checkpoint, so that a later attempt goes on from where it began.
absl::Status Trainer::HearRankZero() {
  double lr = std::exchange(lr_asked_, 0.0);
  save_asked_ = wishes_raised_ = wishes_agreed_ = false;
  checkpoint_agreed_ = true;
  RETURN_IF_ERROR(communicator_->BroadcastHost(&lr, sizeof lr, 0));
  if (lr <= 0) return absl::OkStatus();
  spdlog::info("peak learning rate {:.6g}, until now {:.6g}, from step {} on", lr, PeakLr(spec_), done_ + 1);
  spec_.mutable_optimizer()->set_lr(lr);
  wait_for_save_ = true;
  return absl::OkStatus();
}

std::string Trainer::WaitingIn() const {
  const std::string here = communicator_->WaitingIn();
  return here.empty() && step_ ? step_->WaitingIn() : here;
}

bool Trainer::StopWanted() const { return IsSet(options_.terminate) || session_->want() != Session::Want::kRun; }

absl::Status Trainer::CheckNumerics(const StepResult& result, double lr) {
  if (!result.skipped) return absl::OkStatus();
  if (result.overflowed) {
    spdlog::info("step {}: the gradients overflowed at a loss scale of {:.6g}, no update; the scale is halved", done_, result.loss_scale);
    return absl::OkStatus();
  }
  ++nan_steps_;
  const std::string seen = absl::StrFormat("step %d: loss %g, gradient norm %g, lr %g", done_, result.loss, result.grad_norm, lr);
  spdlog::warn("non-finite, no update: {}", seen);
  if (!result.halted) return absl::OkStatus();
  const std::string why = spec_.step().on_nan() == "stop" ? "step.on_nan is stop"
                                                          : absl::StrCat(result.nan_in_row, " such steps in a row are step.max_nan_steps");
  return ErrorOf(v1::REASON_NUMERICS, absl::StrCat("non-finite loss or gradient at ", seen, "; ", why,
                                                   "; lower optimizer.lr or blr, or check the data"));
}

// The device says which visit; all ranks say what the one that has it finds in its file.
absl::Status Trainer::NameNotFinite(const StepResult& result) {
  absl::Status own;
  if (result.not_finite_visit.has_value()) own = dataset_->NotFinite(*result.not_finite_visit % uint64_t(dataset_->count()));
  RETURN_IF_ERROR(Agree(communicator_.get(), own));
  return ErrorOf(v1::REASON_DATA_ERROR, absl::StrCat("a sample of step ", result.step, " is not finite on another rank"));
}

bool Trainer::EvaluationAfter(int64_t step) const {
  if (!eval_dataset_) return false;
  return step % (length_.steps_per_epoch * spec_.eval().every_epochs()) == 0 || step == length_.total_steps;
}

absl::Status Trainer::EvaluateBatch(Loader* loader, DoublePair* sum) {
  ASSIGN_OR_RETURN(const MicroBatch batch, loader->Next());
  ASSIGN_OR_RETURN(const Step::LossSum here, step_->Evaluate(batch));
  if (here.not_finite_visit.has_value()) return eval_dataset_->NotFinite(*here.not_finite_visit);
  sum->first += here.numerator;
  sum->second += here.weight;
  return absl::OkStatus();
}

absl::StatusOr<bool> Trainer::Evaluate() {
  Phase(v1::PHASE_EVALUATING);
  Activity(absl::StrCat("evaluation after step ", done_));
  Loader::Options options;
  options.spec = spec_;
  options.rank = options_.rank;
  options.world_size = options_.world_size;
  options.threads = options_.loader_threads;
  options.one_pass = true;
  options.allocate = parts_.batch_memory.allocate;
  options.release = parts_.batch_memory.release;
  const int64_t per_batch = int64_t(spec_.step().batch_per_rank()) * options_.world_size;
  const int64_t batches = (eval_dataset_->count() + per_batch - 1) / per_batch;
  DoublePair own;
  bool ended = false;
  absl::StatusOr<std::unique_ptr<Loader>> loader = MakeLoader(eval_dataset_, options);
  absl::Status status = loader.status();
  // A rank that fails goes on counting batches, so that all look at the same ones.
  for (int64_t i = 1; i <= batches && !ended; ++i) {
    if (status.ok()) status = EvaluateBatch(loader->get(), &own);
    if (i % kEvaluationBatchesPerLook == 0) {
      ASSIGN_OR_RETURN(ended, AnyRank(communicator_.get(), StopWanted() || !status.ok()));
    }
  }
  RETURN_IF_ERROR(Agree(communicator_.get(), status));
  Phase(v1::PHASE_TRAINING);
  if (ended) return true;
  ASSIGN_OR_RETURN(const DoublePair sum, SumOverRanks(communicator_.get(), own));
  eval_loss_ = sum.first / sum.second;
  spdlog::info("step {}: eval loss {:.6g}", done_, *eval_loss_);
  if (std::isfinite(*eval_loss_) && (!has_best_ || *eval_loss_ < best_eval_loss_)) {
    has_best_ = true;
    best_eval_loss_ = *eval_loss_;
  }
  return false;
}

void Trainer::TakeMetrics(const v1::StepMetrics& metrics) {
  if (options_.rank == 0) {
    // What is not written is kept; if it lasts, the next checkpoint fails on it.
    absl::Status status = metrics_->Append(metrics);
    if (status.ok()) status = Failpoint("worker.metrics");
    if (!status.ok()) spdlog::warn("{}", std::string(status.message()));
    session_->AddMetrics(metrics);
    if (events_) Events(events_->Add(metrics));
    if (PicturesAfter(done_)) DrawPictures();
  }
  Report();
}

void Trainer::Events(const absl::Status& status) {
  if (status.ok()) return;
  spdlog::warn("no more TensorBoard events from this attempt: {}", std::string(status.message()));
  events_.reset();
}

bool Trainer::PicturesAfter(int64_t step) const {
  const int64_t every = spec_.output().pictures_every_epochs();
  if (every == 0 || geometry_->spec.task() != "mae") return false;
  return step % (length_.steps_per_epoch * every) == 0 || step == length_.total_steps;
}

// The first samples of the held-out set, or of the training set, in their deterministic form: always the same ones under
// the same masks, so that pictures of two steps can be compared. What fails here never ends a run.
void Trainer::DrawPictures() {
  const auto draw = [this]() -> absl::Status {
    Activity(absl::StrCat("the pictures of step ", done_));
    const Dataset& data = eval_dataset_ ? *eval_dataset_ : *dataset_;
    const int rows = spec_.step().batch_per_rank();
    MicroBatch batch;
    batch.real = int32_t(std::min<int64_t>({geometry_->dims == 3 ? 1 : kPictureSamples, rows, data.count()}));
    const int64_t row_bytes = data.row_format().rules.samples > 0 ? data.row_format().row_bytes() : RowFormat::Plain(*geometry_).row_bytes();
    std::vector<std::byte> x(size_t(rows * row_bytes));
    std::vector<int64_t> labels(size_t(rows), -1);
    std::vector<uint64_t> ids(size_t(rows), 0);
    for (int64_t row = 0; row < batch.real; ++row) {
      ids[size_t(row)] = uint64_t(row);
      RETURN_IF_ERROR(data.ReadRow({uint64_t(row), uint64_t(row), spec_.seed(), 0, /*augment=*/false}, x.data() + row * row_bytes));
    }
    batch.x_BCS = x.data();
    batch.labels_B = labels.data();
    batch.visit_ids_B = ids.data();
    ASSIGN_OR_RETURN(const Reconstruction r, step_->Reconstruct(batch));
    const auto& d = spec_.data();
    std::vector<double> mean, spread;
    if (d.source() == "images") {
      ImageStatistics(d, int(r.channels), &mean, &spread);
    } else {   // from the least value, black, to the largest
      const auto [low, high] = std::minmax_element(r.input.begin(), r.input.end());
      const double range = *high > *low ? double(*high) - double(*low) : 1;
      mean = {-double(*low) / range};
      spread = {1 / range};
    }
    const Picture picture = geometry_->dims == 1 ? DrawSignals(r) : DrawImages(r, mean, spread);
    ASSIGN_OR_RETURN(const std::string png, EncodePng(picture));
    const std::string folder = JoinPath(options_.run_folder, "pictures");
    RETURN_IF_ERROR(MakeFolders(folder));
    RETURN_IF_ERROR(WriteFileAtomic(JoinPath(folder, absl::StrFormat("step-%09d.png", done_)), png));
    ASSIGN_OR_RETURN(const std::vector<std::string> names, ListFolder(folder));
    for (size_t i = 0; i + kPicturesKept < names.size(); ++i) RETURN_IF_ERROR(RemoveTree(JoinPath(folder, names[i])));
    if (events_) Events(events_->AddPicture(done_, "reconstruction", picture.width, picture.height, png));
    return absl::OkStatus();
  };
  if (const absl::Status drawn = draw(); !drawn.ok()) spdlog::warn("no pictures of step {}: {}", done_, std::string(drawn.message()));
}

TrainEnd Trainer::Stopped() const {
  const bool cancelled = session_->want() == Session::Want::kCancel;
  return {cancelled ? v1::REASON_CANCELLED : v1::REASON_PREEMPTED, absl::StrCat("stopped after step ", done_, ", which is saved")};
}

void Trainer::Phase(v1::Phase phase) {
  phase_ = phase;
  session_->SetPhase(phase);
}

void Trainer::Activity(const std::string& activity) { communicator_->SetActivity(activity); }

void Trainer::Report() {
  session_->SetProgress(done_, length_.total_steps, first_done_ + 1);
  session_->SetCounters(nan_steps_, samples_per_s_);
  session_->SetTotals(totals_);
  if (loader_) session_->SetDataCounters(loader_->counters());
}

void Trainer::WatchSpeed(int64_t samples) {
  const auto now = Now();
  speed_.emplace_back(now, samples);
  while (speed_.size() > 2 && now - speed_.front().first > kSpeedWindow) speed_.pop_front();
  int64_t sum = 0;
  for (size_t i = 1; i < speed_.size(); ++i) sum += speed_[i].second;
  const double span = Seconds(now - speed_.front().first);
  samples_per_s_ = span > 0 ? double(sum) / span : 0;
}

}  // namespace hierad
