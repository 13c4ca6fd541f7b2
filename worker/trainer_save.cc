// The trainer's checkpoints: when they are made, by whom they are written, and what follows where one fails.
#include "worker/trainer.h"

#include <future>
#include <utility>

#include <spdlog/spdlog.h>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/failpoint.h"
#include "base/status.h"

namespace hierad {
namespace {

constexpr int kSaveTries = 5;                    // failures in a row that end the attempt; 1, 2, 4, 8 s apart

double Seconds(std::chrono::nanoseconds t) { return std::chrono::duration<double>(t).count(); }

std::chrono::nanoseconds Now() { return Clock::System().Monotonic(); }

}  // namespace

// Rank 0 saves; the others give what they alone hold.
bool Trainer::TakesPartInSaving() const { return options_.rank == 0 || step_->shared_state(); }

// A step never waits for a file: where the snapshot or the writing of the checkpoint before is still under way, one that the
// schedule wants is left out, and one that was asked for comes as soon as it can.
absl::Status Trainer::SaveIfDue() {
  const bool all = step_->shared_state();
  bool retry = save_failures_ > 0 && Now() >= retry_save_at_;
  if (all && retry) {   // the others hear of it as of any wish of rank 0
    save_asked_ = save_asked_ || (!writing_.valid() && !snapshot_.has_value());
    retry = false;
  }
  const bool scheduled = (all || save_failures_ == 0) && given_ % spec_.checkpoint().every_steps() == 0;
  if (!checkpoint_agreed_ && !scheduled && !retry) return absl::OkStatus();
  // What follows another rate must not be repeated with the one before: that checkpoint is waited for, from its beginning to its end.
  if (wait_for_save_) RETURN_IF_ERROR(EndSave(/*wait=*/true));
  bool busy = snapshot_.has_value() || writing_.valid();
  if (all) RETURN_IF_ERROR(communicator_->BroadcastHost(&busy, sizeof busy, 0));   // rank 0 alone writes
  if (busy) {
    if (scheduled && !checkpoint_agreed_ && options_.rank == 0) LeaveOut();
    return absl::OkStatus();
  }
  checkpoint_agreed_ = false;
  if (const absl::Status taken = TakeSnapshot(/*retain=*/true); !taken.ok()) return TakeWritten(taken);
  RETURN_IF_ERROR(TakeResults(int(under_way_.size())));
  return std::exchange(wait_for_save_, false) ? EndSave(/*wait=*/true) : absl::OkStatus();
}

void Trainer::LeaveOut() {
  totals_.set_checkpoints_left_out(totals_.checkpoints_left_out() + 1);
  if (std::exchange(left_out_said_, true)) return;   // once a checkpoint
  const int64_t before = snapshot_.has_value() ? snapshot_->step : writing_step_;
  spdlog::warn("no checkpoint of step {}: that of step {} is still being written, after {:.1f} s; raise checkpoint.every_steps, or use a faster disk",
               given_, before, Seconds(Now() - (snapshot_.has_value() ? snapshot_->began : writing_began_)));
}

absl::Status Trainer::TakeSnapshot(bool retain) {
  const v1::Phase before = phase_;
  Phase(v1::PHASE_CHECKPOINTING);
  Activity(absl::StrCat("the checkpoint of step ", given_));
  Saving saving{given_, retain, Now(), nullptr, {}};
  saving.contents.statistics = statistics_;
  saving.contents.eval_loss = eval_loss_;
  saving.contents.has_best = has_best_;
  saving.contents.best_eval_loss = best_eval_loss_;
  saving.contents.algorithms = step_->algorithms();
  left_out_said_ = false;
  auto snapshot = step_->Snapshot();
  HIERAD_FAILPOINT("worker.save");   // after what the others wait for
  if (snapshot.ok()) {
    saving.snapshot = *std::move(snapshot);
    snapshot_ = std::move(saving);
  }
  Phase(before);
  return snapshot.status();
}

std::function<absl::StatusOr<v1::CheckpointInfo>()> Trainer::WritingOfSnapshot() {
  if (events_) Events(events_->Flush());   // no step that the checkpoint stands for is lost with a buffer
  writing_step_ = snapshot_->step;
  writing_began_ = snapshot_->began;
  return [this, saving = *std::exchange(snapshot_, std::nullopt), flushed = metrics_->Flush()]() mutable -> absl::StatusOr<v1::CheckpointInfo> {
    ASSIGN_OR_RETURN(saving.contents.state, saving.snapshot->Read());
    saving.snapshot.reset();
    saving.contents.state.step = saving.step;
    if (saving.forget_nan) saving.contents.state.nan_steps_in_row = 0;
    absl::Status synced = flushed.ok() ? metrics_->SyncFlushed() : flushed;
    if (!synced.ok()) {
      return ErrorOf(v1::REASON_CHECKPOINT, absl::StrCat("metrics.jsonl could not be written: ", std::string(synced.message())));
    }
    auto written = checkpoints_->Write(saving.contents, table_, spec_);
    if (!written.ok() || !saving.retain) return written;
    if (absl::Status status = checkpoints_->Retain(spec_.checkpoint()); !status.ok()) {
      spdlog::warn("an old checkpoint could not be removed: {}", std::string(status.message()));
    }
    return written;
  };
}

absl::Status Trainer::EndSave(bool wait) {
  if (!writing_.valid() || (!wait && writing_.wait_for(std::chrono::seconds(0)) != std::future_status::ready)) return absl::OkStatus();
  return TakeWritten(writing_.get());
}

absl::Status Trainer::TakeWritten(const absl::StatusOr<v1::CheckpointInfo>& written) {
  if (written.ok()) {
    HIERAD_FAILPOINT("worker.saved");
    save_failures_ = 0;
    saved_ = writing_step_;
    const auto infos = checkpoints_->List();
    if (infos.ok()) session_->SetCheckpoints(*infos);
    totals_.set_checkpoint_count(totals_.checkpoint_count() + 1);
    totals_.set_checkpoint_s(Seconds(Now() - writing_began_));
    session_->SetTotals(totals_);
    spdlog::info("checkpoint of step {}: {} MB in {:.2f} s", saved_, written->bytes() / 1'000'000, Seconds(Now() - writing_began_));
    return absl::OkStatus();
  }
  spdlog::error("{}", std::string(written.status().message()));
  // Weights that are already lost: the next steps say so themselves.
  if (ReasonOf(written.status()) == v1::REASON_NUMERICS) return absl::OkStatus();
  // It may pass (a shared file system, a disk being cleared): training goes on and tries again.
  if (++save_failures_ >= kSaveTries) return written.status();
  retry_save_at_ = Now() + std::chrono::seconds(1 << (save_failures_ - 1));
  return absl::OkStatus();
}

// The checkpoint of step done_, written before this returns. `halted`: steps under way beyond it change nothing; who resumes it
// starts counting non-finite steps anew.
absl::Status Trainer::SaveNow(bool halted) {
  if (writing_.valid()) (void)TakeWritten(writing_.get());
  snapshot_.reset();
  bool needed = saved_ != done_;
  if (step_->shared_state()) RETURN_IF_ERROR(communicator_->BroadcastHost(&needed, sizeof needed, 0));
  if (!needed) return absl::OkStatus();
  const v1::Phase before = phase_;
  Phase(v1::PHASE_CHECKPOINTING);
  absl::Status status = TakeSnapshot(/*retain=*/!halted);
  if (options_.rank != 0) snapshot_.reset();
  if (status.ok() && snapshot_.has_value()) {
    snapshot_->step = done_;
    snapshot_->forget_nan = halted;
    const auto written = WritingOfSnapshot()();
    status = written.status();
    if (written.ok()) (void)TakeWritten(written);
  }
  Phase(before);
  return status;
}

// The last checkpoint and, at the end of the schedule, the export; the other ranks wait, so that none goes before it stands.
absl::Status Trainer::Finish() {
  HIERAD_FAILPOINT("worker.finish");
  const auto finish = [this]() -> absl::Status {
    if (!TakesPartInSaving()) return absl::OkStatus();
    if (events_) Events(events_->Flush());
    const auto save = [this] {
      const absl::Status saved = SaveNow(/*halted=*/false);
      return step_->shared_state() ? Agree(communicator_.get(), saved) : saved;
    };
    absl::Status status = save();
    // Once more: this one is not made again at a later step.
    if (!status.ok() && ReasonOf(status) == v1::REASON_CHECKPOINT) status = save();
    RETURN_IF_ERROR(status);
    if (done_ < length_.total_steps) return absl::OkStatus();
    ASSIGN_OR_RETURN(const TrainState state, step_->Save());
    if (options_.rank != 0) return absl::OkStatus();
    ASSIGN_OR_RETURN(const std::string path, ExportModel(options_.run_folder, state, table_, spec_));
    spdlog::info("exported {}", Printable(path));
    return absl::OkStatus();
  };
  return Agree(communicator_.get(), finish());
}

}  // namespace hierad
