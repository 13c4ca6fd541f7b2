// One rank's run from its first state to its end: joins the others, finds the newest checkpoint, trains, evaluates, saves.
// Free of torch and gRPC: the step and the session are given. Run() is called once, by one thread. The communicator lives
// until the trainer goes: say the end to hierad before, so that this rank's reason is heard before its peers'.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/fs.h"
#include "base/plan/geometry.h"
#include "base/plan/parameters.h"
#include "hierad/v1/job.pb.h"
#include "worker/checkpoint/checkpoint.h"
#include "worker/comm/agree.h"
#include "worker/comm/communicator.h"
#include "worker/data/dataset.h"
#include "worker/data/loader.h"
#include "worker/metrics/event_file.h"
#include "worker/metrics/metrics_file.h"
#include "worker/session.h"
#include "worker/step/step.h"
#include "worker/step_watch.h"

namespace hierad {

struct TrainerOptions {
  v1::JobSpec spec;                // defaults filled in
  std::string run_folder;          // absolute
  std::string unique_name = "hierad";   // of the attempt
  int rank = 0, world_size = 1;
  std::string collective_address;  // CPU ranks on several nodes: where rank 0 listens for the others; empty: all are here
  bool cuda = false;               // device 0 of the process
  int threads = 1;                 // compute threads
  int loader_threads = 1;
  int64_t known_checkpoint_step = 0;    // newest that hierad knows of; 0: none
  const std::atomic<bool>* terminate = nullptr;   // set by SIGTERM
  std::chrono::nanoseconds process_start{0};      // monotonic; for the time to the first step
};

// What tests replace.
struct TrainerParts {
  std::function<absl::StatusOr<std::unique_ptr<Step>>(const StepOptions&, const Geometry&, const ParameterTable&, Communicator*)> make_step;
  HostMemory batch_memory;             // where the loaders' batches live
  std::chrono::milliseconds rendezvous_timeout{180'000};
  std::chrono::milliseconds folder_timeout{20'000};    // for a former attempt to let go of the run folder
  CommunicatorOptions communicator;    // its limits
  CheckpointFolder::StageHook checkpoint_stage;        // CheckpointFolder's
  StepWatch::Limits watch;
  // Ends the process: called from the watch's thread, does not return.
  std::function<void(v1::Reason, const std::string&)> give_up;
};

struct TrainEnd {
  v1::Reason reason = v1::REASON_INTERNAL;
  std::string message;
};

class Trainer {
 public:
  static constexpr int kPictureSamples = 4;
  static constexpr size_t kPicturesKept = 100;

  Trainer(TrainerOptions options, TrainerParts parts, Session* session);
  ~Trainer();

  TrainEnd Run();

 private:
  enum class After { kGoOn, kStop };

  // The parts of Run, in order.
  absl::Status Prepare();
  absl::Status Join();
  absl::Status Load();
  absl::Status LockFolder();
  absl::Status OpenRun(int64_t first_step);
  absl::StatusOr<TrainEnd> Train();

  // One optimizer step and all that follows it. A step is given, and its result taken some steps later (Step::records_behind):
  // on every rank the same number of steps, so that all act on a result at the same step.
  absl::StatusOr<After> TrainStep();
  absl::Status GiveStep();
  absl::Status TakeResults(int still_under_way);
  absl::Status TakeResult();
  absl::StatusOr<int64_t> RealSamples(int64_t own_samples);
  StepSignals Signals();
  absl::Status HearRankZero();
  absl::Status CheckNumerics(const StepResult& result, double lr);
  absl::Status NameNotFinite(const StepResult& result);
  absl::Status VerifyRanks();
  // True: abandoned, because a stop is wanted.
  absl::StatusOr<bool> Evaluate();
  absl::Status EvaluateBatch(Loader* loader, DoublePair* sum);
  void AddTotals(const v1::StepMetrics& metrics, int64_t own_samples);
  void TakeMetrics(const v1::StepMetrics& metrics);
  void Events(const absl::Status& status);
  bool PicturesAfter(int64_t step) const;
  void DrawPictures();
  // A checkpoint: a snapshot between two steps, and once the results up to it are in metrics.jsonl, a thread that writes it.
  bool TakesPartInSaving() const;
  absl::Status SaveIfDue();
  void LeaveOut();
  absl::Status TakeSnapshot(bool retain);
  std::function<absl::StatusOr<v1::CheckpointInfo>()> WritingOfSnapshot();
  absl::Status EndSave(bool wait);
  absl::Status TakeWritten(const absl::StatusOr<v1::CheckpointInfo>& written);
  absl::Status SaveNow(bool halted);
  absl::Status Finish();
  TrainEnd Stopped() const;

  std::string WaitingIn() const;   // the collective; any thread
  bool StopWanted() const;
  bool EvaluationAfter(int64_t step) const;
  void Phase(v1::Phase phase);
  void Activity(const std::string& activity);
  void Report();
  void WatchSpeed(int64_t samples);

  const TrainerOptions options_;
  v1::JobSpec spec_;               // mode resolved
  TrainerParts parts_;
  Session* const session_;
  std::atomic<bool> abandon_{false};
  v1::Phase phase_ = v1::PHASE_STARTING;

  std::optional<Geometry> geometry_;
  ParameterTable table_;
  std::unique_ptr<Communicator> communicator_;
  std::shared_ptr<Dataset> dataset_, eval_dataset_;
  std::unique_ptr<Loader> loader_;
  std::optional<absl::StatusOr<MicroBatch>> ahead_;   // read for the step to come (GPU)
  std::unique_ptr<Step> step_;
  UniqueFd lock_;                                 // rank 0: on the run folder
  std::optional<CheckpointFolder> checkpoints_;   // rank 0
  std::optional<MetricsFile> metrics_;            // rank 0
  std::optional<EventFile> events_;               // rank 0; for people only: what it cannot write is said once and let be
  RunLength length_{};

  // Kept by checkpoints.
  ChannelStatistics statistics_;
  int64_t done_ = 0;               // optimizer steps whose results are taken
  std::optional<double> eval_loss_;    // at step given_
  bool has_best_ = false;
  double best_eval_loss_ = 0;

  int64_t given_ = 0;              // optimizer steps given to the step
  struct Given {
    std::chrono::nanoseconds began;
    double data_wait_s;
    v1::StepMetrics metrics;       // as far as it is known before
    int64_t own_samples = 0;       // real ones of this rank
  };
  std::deque<Given> under_way_;    // steps done_ + 1 to given_
  std::chrono::nanoseconds taken_at_{0};
  std::optional<v1::StepMetrics> evaluated_;   // of a step whose evaluation is to come
  bool stop_agreed_ = false, checkpoint_agreed_ = false;
  bool wait_for_save_ = false;      // of the checkpoint that comes with another rate
  bool wishes_raised_ = false, wishes_agreed_ = false;   // the checkpoint signal: given by this rank 0, come back in a result

  int64_t first_done_ = 0;         // at the start of this attempt
  int64_t saved_ = -1;             // newest step saved
  int64_t nan_steps_ = 0;
  // Rank 0: what hierad has asked for and all ranks are to hear of after the step under way.
  int64_t requests_taken_ = 0;     // checkpoint requests
  bool save_asked_ = false;
  double lr_asked_ = 0;            // 0: no other rate
  v1::RankTotals totals_;          // of this attempt
  std::chrono::nanoseconds memory_asked_at_{0};
  bool left_out_said_ = false;     // since the newest snapshot
  int save_failures_ = 0;
  std::chrono::nanoseconds retry_save_at_{0};
  double samples_per_s_ = 0;
  std::deque<std::pair<std::chrono::nanoseconds, int64_t>> speed_;   // (end of step, samples)

  std::atomic<bool> given_up_{false};   // the watch's thread ends the process
  std::atomic<int64_t> watched_step_{0};
  std::unique_ptr<StepWatch> watch_;   // CUDA

  struct Saving {
    int64_t step;
    bool retain;
    std::chrono::nanoseconds began;
    std::shared_ptr<StateSnapshot> snapshot;
    CheckpointContents contents;       // but for the state
    bool forget_nan = false;
  };
  std::optional<Saving> snapshot_;     // its results are still to come; on other ranks than 0 only that one was given
  int64_t writing_step_ = 0;
  std::chrono::nanoseconds writing_began_{0};
  // Last: its end waits for the thread, which uses the members above.
  std::future<absl::StatusOr<v1::CheckpointInfo>> writing_;
};

}  // namespace hierad
