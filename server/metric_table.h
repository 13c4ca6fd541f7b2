// The one list of what hierad exports. The exporter adds values by these names, and docs/metrics.md is made from it.
#pragma once

#include <string>
#include <vector>

namespace hierad {

enum class Metric {   // those of hierad and nodes, then those of jobs and ranks
  kBuildInfo, kResidentBytes, kJobs, kQueueWaitSeconds, kSlots, kNodes, kSessions, kDecisionSeconds, kCommitSeconds, kStoreErrors,
  kHistoryErrors, kDiskFreeBytes, kDiskSizeBytes, kScrapes, kScrapeSeconds,
  kNodeUp, kNodeReportAge, kNodeSlots,
  kJobInfo, kJobAttempts, kJobRestarts, kJobSubmitted, kJobStarted, kJobFinished, kJobRanks, kJobStepFlops, kJobStepFloor,
  kJobStep, kJobTotalSteps, kJobEpoch, kJobLoss, kJobGradNorm, kJobLearningRate, kJobLossScale, kJobStepSeconds, kJobPhaseSeconds, kJobSamplesPerSecond,
  kJobMfu, kJobFloorRatio, kJobNanSteps, kJobBestEvalLoss, kJobLastStepTime, kJobCheckpointTime, kJobCheckpointSeconds, kJobCheckpointSaves, kJobCheckpointsLeftOut,
  kJobCheckpointEverySteps, kJobEta, kJobAlerts,
  kRankStep, kRankSteps, kRankSamples, kRankStepSeconds, kRankPhaseSeconds, kRankMemoryBytes, kRankReportAge,
  kRankDataWait, kRankDataBytes, kRankDataSamples, kRankDataReaders, kRankDataSlowest, kRankSkippedSamples,
  kCount,
};

enum class MetricKind { kGauge, kCounter, kHistogram };

struct MetricInfo {
  Metric id;
  const char* name;
  MetricKind kind;
  const char* labels;   // "job_id, phase: data_wait, forward, ..."; empty: none
  const char* about;    // one sentence: the help text
};
struct MetricGroup {
  const char* title;
  std::vector<MetricInfo> metrics;
};

const std::vector<MetricGroup>& MetricGroups();
const MetricInfo& InfoOf(Metric metric);

// The tables of docs/metrics.md.
std::string MetricTables();

}  // namespace hierad
