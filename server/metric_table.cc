#include "server/metric_table.h"

#include <array>

#include "absl/strings/str_cat.h"

namespace hierad {
namespace {

constexpr MetricKind kGauge = MetricKind::kGauge, kCounter = MetricKind::kCounter, kHistogram = MetricKind::kHistogram;

std::vector<MetricGroup> MakeGroups() {
  return {
      {"hierad itself",
       {
           {Metric::kBuildInfo, "hierad_build_info", kGauge, "version, commit", "The running hierad; always 1."},
           {Metric::kResidentBytes, "process_resident_memory_bytes", kGauge, "", "Resident memory of hierad."},
           {Metric::kJobs, "hierad_jobs", kGauge, "state", "Jobs by state, ended ones included; every state is always there. queued is the queue's depth."},
           {Metric::kQueueWaitSeconds, "hierad_queue_wait_seconds", kGauge, "", "How long the first in the queue has waited since its submission; 0: the queue is empty."},
           {Metric::kSlots, "hierad_slots", kGauge, "state: free, busy, lost, faulty", "Places for ranks; lost: on a node that is not connected; faulty: out of use for a fault of its card until hierctl undrain NODE, whether a rank still runs there or not."},
           {Metric::kNodes, "hierad_nodes", kGauge, "state: connected, lost", "Nodes by state."},
           {Metric::kSessions, "hierad_sessions", kGauge, "kind: agent, worker", "Open sessions."},
           {Metric::kDecisionSeconds, "hierad_decision_seconds", kHistogram, "", "From taking requests and reports to the decisions on them, the commit left out."},
           {Metric::kCommitSeconds, "hierad_commit_seconds", kHistogram, "", "One transaction of the store, durable."},
           {Metric::kStoreErrors, "hierad_store_errors_total", kCounter, "", "Commits that the store refused since hierad started (disk full, locked)."},
           {Metric::kHistoryErrors, "hierad_history_errors_total", kCounter, "", "Reports whose steps the history could not take since hierad started."},
           {Metric::kDiskFreeBytes, "hierad_disk_free_bytes", kGauge, "folder: state, runs", "Free space where hierad's state and, by default, the runs lie."},
           {Metric::kDiskSizeBytes, "hierad_disk_size_bytes", kGauge, "folder: state, runs", "Size of that file system."},
           {Metric::kScrapes, "hierad_scrapes_total", kCounter, "", "Scrapes answered since hierad started."},
           {Metric::kScrapeSeconds, "hierad_scrape_seconds_total", kCounter, "", "Time spent on collecting for them."},
       }},
      {"Nodes",
       {
           {Metric::kNodeUp, "hierad_node_up", kGauge, "node", "1: its agent is connected."},
           {Metric::kNodeReportAge, "hierad_node_report_age_seconds", kGauge, "node", "Since its agent's last report; agents report once a second."},
           {Metric::kNodeSlots, "hierad_node_slots", kGauge, "node, kind: cpu, cuda, state: free, busy, lost, faulty", "Slots of the node, states as of hierad_slots; kinds that it never had are left out."},
       }},
      {"Jobs, from submission on",
       {
           {Metric::kJobInfo, "hierad_job_info", kGauge, "job_id, name, submitter, state, data", "Always 1: the only place of names; join it on job_id. data is data.source."},
           {Metric::kJobAttempts, "hierad_job_attempts_total", kCounter, "job_id", "Attempts begun; more than one: something was retried."},
           {Metric::kJobRestarts, "hierad_job_restarts_total", kCounter, "job_id, class", "Attempts that were lost and followed by another, by reason."},
           {Metric::kJobSubmitted, "hierad_job_submitted_timestamp_seconds", kGauge, "job_id", "Unix time."},
           {Metric::kJobStarted, "hierad_job_started_timestamp_seconds", kGauge, "job_id", "Start of the newest attempt, Unix time."},
           {Metric::kJobFinished, "hierad_job_finished_timestamp_seconds", kGauge, "job_id", "Unix time; only of a job that has ended."},
           {Metric::kJobRanks, "hierad_job_ranks", kGauge, "job_id", "Ranks it asks for."},
           {Metric::kJobStepFlops, "hierad_job_step_flops", kGauge, "job_id", "Floating-point operations of an optimizer step, all ranks, by the plan."},
           {Metric::kJobStepFloor, "hierad_job_step_floor_seconds", kGauge, "job_id", "The least that a step can take on this card, by the plan; cards without measured rates have none."},
       }},
      {"Jobs, from the first attempt on",
       {
           {Metric::kJobStep, "hierad_job_step", kGauge, "job_id", "Optimizer steps completed."},
           {Metric::kJobTotalSteps, "hierad_job_total_steps", kGauge, "job_id", "Optimizer steps of the whole run; 0: not known yet."},
           {Metric::kJobEpoch, "hierad_job_epoch", kGauge, "job_id", "Epochs completed, with fraction."},
           {Metric::kJobLoss, "hierad_job_loss", kGauge, "job_id", "Loss of the newest step; NaN where it was not finite."},
           {Metric::kJobGradNorm, "hierad_job_grad_norm", kGauge, "job_id", "Global gradient norm of the newest step, before clipping."},
           {Metric::kJobLearningRate, "hierad_job_learning_rate", kGauge, "job_id", "Learning rate of the newest step."},
           {Metric::kJobLossScale, "hierad_job_loss_scale", kGauge, "job_id", "Factor of the gradients of the newest step; only with step.precision fp16."},
           {Metric::kJobStepSeconds, "hierad_job_step_seconds", kGauge, "job_id", "Wall time of the newest step."},
           {Metric::kJobPhaseSeconds, "hierad_job_phase_seconds", kGauge, "job_id, phase: data_wait, forward, backward, comm, optimizer, other",
            "Parts of the newest step on rank 0; comm: all-reduce that nothing hides. Steps that do not tell them apart show data_wait and other."},
           {Metric::kJobSamplesPerSecond, "hierad_job_samples_per_second", kGauge, "job_id", "Samples per second, all ranks; 0: not known or not running."},
           {Metric::kJobMfu, "hierad_job_mfu_ratio", kGauge, "job_id", "The plan's operations over what the cards reach at best in the newest step's time; only for cards with measured rates."},
           {Metric::kJobFloorRatio, "hierad_job_floor_ratio", kGauge, "job_id", "Newest step's time over the plan's floor: 1 is as fast as can be."},
           {Metric::kJobNanSteps, "hierad_job_nan_steps", kGauge, "job_id", "Steps of this attempt skipped for a non-finite loss or gradient."},
           {Metric::kJobBestEvalLoss, "hierad_job_best_eval_loss", kGauge, "job_id", "Least loss of an evaluation; only once there was one."},
           {Metric::kJobLastStepTime, "hierad_job_last_step_timestamp_seconds", kGauge, "job_id", "When the newest step ended, Unix time."},
           {Metric::kJobCheckpointTime, "hierad_job_checkpoint_timestamp_seconds", kGauge, "job_id", "When the newest good checkpoint was written, Unix time; only once there is one."},
           {Metric::kJobCheckpointSeconds, "hierad_job_checkpoint_seconds", kGauge, "job_id", "What the newest save of this attempt took; only after one."},
           {Metric::kJobCheckpointSaves, "hierad_job_checkpoint_saves", kGauge, "job_id", "Checkpoints saved in this attempt."},
           {Metric::kJobCheckpointsLeftOut, "hierad_job_checkpoints_left_out", kGauge, "job_id", "Checkpoints that were due in this attempt while the one before was still being written."},
           {Metric::kJobCheckpointEverySteps, "hierad_job_checkpoint_every_steps", kGauge, "job_id", "Steps between checkpoints, as the job asks."},
           {Metric::kJobEta, "hierad_job_eta_seconds", kGauge, "job_id", "Time to the end at the present rate; 0: not known."},
           {Metric::kJobAlerts, "hierad_job_alerts", kGauge, "job_id", "Sentences under alerts in hierctl describe."},
       }},
      {"Ranks, while their attempt lasts",
       {
           {Metric::kRankStep, "hierad_rank_step", kGauge, "job_id, rank", "Optimizer steps completed."},
           {Metric::kRankSteps, "hierad_rank_steps_total", kCounter, "job_id, rank", "Steps of this attempt."},
           {Metric::kRankSamples, "hierad_rank_samples_total", kCounter, "job_id, rank", "Samples of this attempt."},
           {Metric::kRankStepSeconds, "hierad_rank_step_seconds_total", kCounter, "job_id, rank", "Time of this attempt's steps."},
           {Metric::kRankPhaseSeconds, "hierad_rank_phase_seconds_total", kCounter, "job_id, rank, phase: data_wait, forward, backward, comm, optimizer, other",
            "Its parts: the step budget is rate(this) over rate(hierad_rank_step_seconds_total)."},
           {Metric::kRankMemoryBytes, "hierad_rank_memory_bytes", kGauge, "job_id, rank", "Most memory so far: of the GPU, or of the process of a CPU rank."},
           {Metric::kRankReportAge, "hierad_rank_report_age_seconds", kGauge, "job_id, rank", "Since its last report; ranks report once a second."},
           {Metric::kRankDataWait, "hierad_rank_data_wait_seconds_total", kCounter, "job_id, rank", "Time that the rank's loop waited for its loader in this attempt, by the host's clock."},
           {Metric::kRankDataBytes, "hierad_rank_data_bytes_total", kCounter, "job_id, rank", "Bytes read from the files of the training set in this attempt."},
           {Metric::kRankDataSamples, "hierad_rank_data_samples_total", kCounter, "job_id, rank", "Samples read in this attempt, those read ahead included."},
           {Metric::kRankDataReaders, "hierad_rank_data_readers", kGauge, "job_id, rank", "Threads that read now, by measured need; at most data.workers."},
           {Metric::kRankDataSlowest, "hierad_rank_data_slowest_seconds", kGauge, "job_id, rank", "What the slowest sample of this attempt took to read; hierctl describe names it."},
           {Metric::kRankSkippedSamples, "hierad_rank_skipped_samples_total", kCounter, "job_id, rank", "Unreadable samples left out in this attempt (data.on_error: skip)."},
       }},
  };
}

}  // namespace

const std::vector<MetricGroup>& MetricGroups() {
  static const std::vector<MetricGroup>& groups = *new std::vector<MetricGroup>(MakeGroups());
  return groups;
}

const MetricInfo& InfoOf(Metric metric) {
  static const auto& by_id = *new auto([] {
    std::array<const MetricInfo*, size_t(Metric::kCount)> table{};
    for (const MetricGroup& group : MetricGroups()) {
      for (const MetricInfo& info : group.metrics) table[size_t(info.id)] = &info;
    }
    return table;
  }());
  return *by_id[size_t(metric)];
}

std::string MetricTables() {
  std::string text;
  for (const MetricGroup& group : MetricGroups()) {
    absl::StrAppend(&text, "### ", group.title, "\n\n| metric | kind | labels | what |\n|---|---|---|---|\n");
    for (const MetricInfo& info : group.metrics) {
      const char* kind = info.kind == kGauge ? "gauge" : info.kind == kCounter ? "counter" : "histogram";
      absl::StrAppend(&text, "| `", info.name, "` | ", kind, " | ", info.labels, " | ", info.about, " |\n");
    }
    absl::StrAppend(&text, "\n");
  }
  text.pop_back();
  return text;
}

}  // namespace hierad
