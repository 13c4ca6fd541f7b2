#include "server/exporter.h"

#include <prometheus/exposer.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <iterator>
#include <limits>
#include <mutex>
#include <optional>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/text.h"
#include "server/config.h"
#include "server/metric_table.h"

namespace hierad {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;
using Labels = std::vector<ClientMetric::Label>;

constexpr size_t kLabelBytes = 128;

// Lower case, without the enum's prefix: REASON_CUDA_OOM -> cuda_oom.
std::string Word(std::string name, const std::string& prefix = "") {
  if (name.rfind(prefix, 0) == 0) name = name.substr(prefix.size());
  for (char& c : name) c = static_cast<char>(c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c);
  return name;
}

class Families {
 public:
  // `jobs`: room for so many series of each metric of jobs and ranks, or they are moved again and again.
  explicit Families(size_t jobs) : jobs_(jobs) {}
  void Add(Metric metric, Labels labels, double value) {
    ClientMetric& out = FamilyOf(metric).metric.emplace_back();
    out.label = std::move(labels);
    (InfoOf(metric).kind == MetricKind::kCounter ? out.counter.value : out.gauge.value) = value;
  }
  void Add(Metric metric, Labels labels, const Latency& latency) {
    ClientMetric& out = FamilyOf(metric).metric.emplace_back();
    out.label = std::move(labels);
    uint64_t below = 0;
    for (size_t i = 0; i < latency.counts.size(); ++i) {
      below += latency.counts[i];
      const double bound = i < Latency::kBounds.size() ? Latency::kBounds[i] : std::numeric_limits<double>::infinity();
      out.histogram.bucket.push_back({below, bound});
    }
    out.histogram.sample_count = below;
    out.histogram.sample_sum = latency.sum_s;
  }
  // In the table's order, without those that have no value now.
  std::vector<MetricFamily> Take() {
    std::vector<MetricFamily> all;
    for (const MetricGroup& group : MetricGroups()) {
      for (const MetricInfo& info : group.metrics) {
        MetricFamily& family = families_[static_cast<size_t>(info.id)];
        if (!family.metric.empty()) all.push_back(std::move(family));
      }
    }
    return all;
  }

 private:
  MetricFamily& FamilyOf(Metric metric) {
    MetricFamily& family = families_[static_cast<size_t>(metric)];
    if (family.name.empty()) {
      const MetricInfo& info = InfoOf(metric);
      family.name = info.name;
      family.help = info.about;
      if (metric >= Metric::kJobInfo) family.metric.reserve(jobs_ * (metric == Metric::kJobPhaseSeconds || metric == Metric::kRankPhaseSeconds ? 6 : 1));
      family.type = info.kind == MetricKind::kGauge ? MetricType::Gauge : info.kind == MetricKind::kCounter ? MetricType::Counter : MetricType::Histogram;
    }
    return family;
  }
  const size_t jobs_;
  std::array<MetricFamily, static_cast<size_t>(Metric::kCount)> families_;
};

double ResidentBytes() {
  std::ifstream statm("/proc/self/statm");
  double size = 0, resident = 0;
  statm >> size >> resident;
  return resident * static_cast<double>(sysconf(_SC_PAGESIZE));
}

double Seconds(int64_t ms) { return static_cast<double>(ms) / 1000; }

// Of StepMetrics or RankTotals: the parts of its step_s.
template <typename Times, typename AddPart>
void AddPhases(const Times& t, const AddPart& add) {
  const double told = t.data_wait_s() + t.forward_s() + t.backward_s() + t.communication_s() + t.optimizer_s();
  add("data_wait", t.data_wait_s());
  add("forward", t.forward_s());
  add("backward", t.backward_s());
  add("comm", t.communication_s());
  add("optimizer", t.optimizer_s());
  add("other", std::max(0.0, t.step_s() - told));
}

void AddRanks(Families* f, const v1::Job& job, int64_t now_ms) {
  for (const v1::RankView& rank : job.ranks()) {
    if (rank.last_seen_ms() == 0) continue;   // its worker has not dialled in yet
    const Labels id = {{"job_id", absl::StrCat(job.id())}, {"rank", absl::StrCat(rank.rank())}};
    const v1::RankTotals& totals = rank.totals();
    f->Add(Metric::kRankStep, id, static_cast<double>(rank.step()));
    f->Add(Metric::kRankSteps, id, static_cast<double>(totals.step_count()));
    f->Add(Metric::kRankSamples, id, static_cast<double>(totals.samples()));
    f->Add(Metric::kRankStepSeconds, id, totals.step_s());
    AddPhases(totals, [&](const char* phase, double seconds) {
      Labels labels = id;
      labels.push_back({"phase", phase});
      f->Add(Metric::kRankPhaseSeconds, std::move(labels), seconds);
    });
    f->Add(Metric::kRankMemoryBytes, id, static_cast<double>(totals.memory_bytes()));
    f->Add(Metric::kRankReportAge, id, Seconds(std::max<int64_t>(0, now_ms - rank.last_seen_ms())));
    const v1::DataCounters& data = rank.data();
    f->Add(Metric::kRankDataWait, id, data.wait_s());
    f->Add(Metric::kRankDataBytes, id, static_cast<double>(data.bytes()));
    f->Add(Metric::kRankDataSamples, id, static_cast<double>(data.samples()));
    f->Add(Metric::kRankDataReaders, id, data.threads());
    f->Add(Metric::kRankDataSlowest, id, data.slowest_s());
    f->Add(Metric::kRankSkippedSamples, id, static_cast<double>(data.skipped_samples()));
  }
}

void AddLast(Families* f, const v1::Job& job, const Labels& id, const std::optional<JobCost>& cost) {
  const v1::StepMetrics& last = job.last();
  f->Add(Metric::kJobEpoch, id, last.epoch());
  f->Add(Metric::kJobLoss, id, last.loss());
  f->Add(Metric::kJobGradNorm, id, last.grad_norm());
  f->Add(Metric::kJobLearningRate, id, last.lr());
  if (last.has_loss_scale()) f->Add(Metric::kJobLossScale, id, last.loss_scale());
  f->Add(Metric::kJobLastStepTime, id, Seconds(last.time_ms()));
  if (IsTerminal(job.state())) return;
  f->Add(Metric::kJobStepSeconds, id, last.step_s());
  AddPhases(last, [&](const char* phase, double seconds) {
    Labels labels = id;
    labels.push_back({"phase", phase});
    f->Add(Metric::kJobPhaseSeconds, std::move(labels), seconds);
  });
  if (!cost || cost->floor_s <= 0 || last.step_s() <= 0) return;
  f->Add(Metric::kJobMfu, id, cost->flops / (last.step_s() * cost->flops_per_s * job.spec().resources().ranks()));
  f->Add(Metric::kJobFloorRatio, id, last.step_s() / cost->floor_s);
}

void AddJob(Families* f, const Overview::JobLook& look, int64_t now_ms, const std::optional<JobCost>& cost) {
  const v1::Job& job = look.job;
  const Labels id = {{"job_id", absl::StrCat(job.id())}};
  const auto add = [&](Metric metric, double value) { f->Add(metric, id, value); };
  f->Add(Metric::kJobInfo, {{"job_id", absl::StrCat(job.id())}, {"name", CleanLabel(job.spec().name())}, {"submitter", CleanLabel(job.submitter())},
                            {"state", Word(v1::JobState_Name(job.state()))}, {"data", CleanLabel(job.spec().data().source())}}, 1);
  add(Metric::kJobAttempts, job.attempt());
  for (const v1::Restart& restart : job.restarts()) {
    f->Add(Metric::kJobRestarts, {{"job_id", absl::StrCat(job.id())}, {"class", Word(v1::Reason_Name(restart.reason()), "REASON_")}},
           static_cast<double>(restart.count()));
  }
  add(Metric::kJobSubmitted, Seconds(job.submitted_ms()));
  if (job.started_ms() > 0) add(Metric::kJobStarted, Seconds(job.started_ms()));
  if (IsTerminal(job.state())) add(Metric::kJobFinished, Seconds(job.finished_ms()));
  add(Metric::kJobRanks, job.spec().resources().ranks());
  if (cost) add(Metric::kJobStepFlops, cost->flops);
  if (cost && cost->floor_s > 0) add(Metric::kJobStepFloor, cost->floor_s);
  if (job.attempt() == 0) return;
  add(Metric::kJobStep, static_cast<double>(job.step()));
  add(Metric::kJobTotalSteps, static_cast<double>(job.total_steps()));
  add(Metric::kJobNanSteps, static_cast<double>(job.nan_steps()));
  if (job.has_last()) AddLast(f, job, id, cost);
  if (job.has_best_eval_loss()) add(Metric::kJobBestEvalLoss, job.best_eval_loss());
  if (job.checkpoint_ms() > 0) add(Metric::kJobCheckpointTime, Seconds(job.checkpoint_ms()));
  if (IsTerminal(job.state())) return;
  add(Metric::kJobSamplesPerSecond, job.samples_per_s());
  add(Metric::kJobEta, job.eta_s());
  add(Metric::kJobAlerts, job.alerts_size());
  add(Metric::kJobCheckpointEverySteps, static_cast<double>(job.spec().checkpoint().every_steps()));
  if (job.ranks_size() > 0) {
    add(Metric::kJobCheckpointSaves, static_cast<double>(job.ranks(0).totals().checkpoint_count()));
    add(Metric::kJobCheckpointsLeftOut, static_cast<double>(job.ranks(0).totals().checkpoints_left_out()));
    if (job.ranks(0).totals().checkpoint_s() > 0) add(Metric::kJobCheckpointSeconds, job.ranks(0).totals().checkpoint_s());
  }
  AddRanks(f, job, now_ms);
}

void AddNodes(Families* f, const Overview& overview) {
  static constexpr const char* kKinds[] = {"cpu", "cuda"};
  static constexpr const char* kStates[] = {"free", "busy", "lost", "faulty"};
  for (const Overview::NodeLook& node : overview.nodes) {
    const Labels id = {{"node", CleanLabel(node.name)}};
    f->Add(Metric::kNodeUp, id, node.connected ? 1 : 0);
    if (node.last_seen_ms > 0) f->Add(Metric::kNodeReportAge, id, Seconds(std::max<int64_t>(0, overview.now_ms - node.last_seen_ms)));
    for (int kind = 0; kind < 2; ++kind) {
      if (std::all_of(std::begin(node.slots[kind]), std::end(node.slots[kind]), [](int64_t count) { return count == 0; })) continue;
      for (int state = 0; state < 4; ++state) {
        f->Add(Metric::kNodeSlots, {{"node", CleanLabel(node.name)}, {"kind", kKinds[kind]}, {"state", kStates[state]}},
               static_cast<double>(node.slots[kind][state]));
      }
    }
  }
}

void AddDisk(Families* f, const char* folder, const std::string& path) {
  struct statvfs disk;
  if (path.empty() || statvfs(path.c_str(), &disk) != 0) return;
  f->Add(Metric::kDiskFreeBytes, {{"folder", folder}}, static_cast<double>(disk.f_bavail) * static_cast<double>(disk.f_frsize));
  f->Add(Metric::kDiskSizeBytes, {{"folder", folder}}, static_cast<double>(disk.f_blocks) * static_cast<double>(disk.f_frsize));
}

class Collector : public prometheus::Collectable {
 public:
  Collector(std::function<absl::StatusOr<Overview>()> look, ExporterOptions options)
      : look_(std::move(look)), options_(std::move(options)), costs_(&Clock::System()) {}

  std::vector<MetricFamily> Collect() const override {
    std::lock_guard lock(mutex_);
    const auto begin = Clock::System().Monotonic();
    absl::StatusOr<Overview> overview = look_();
    if (!overview.ok()) return {};
    costs_.BeginScrape();
    auto families = FamiliesOf(*overview, options_, {scrapes_, seconds_}, &costs_);
    ++scrapes_;
    seconds_ += std::chrono::duration<double>(Clock::System().Monotonic() - begin).count();
    return families;
  }

 private:
  const std::function<absl::StatusOr<Overview>()> look_;
  const ExporterOptions options_;
  mutable std::mutex mutex_;   // one scrape at a time
  mutable JobCosts costs_;
  mutable int64_t scrapes_ = 0;
  mutable double seconds_ = 0;
};

}  // namespace

std::string CleanLabel(const std::string& text) {
  std::string clean;
  std::string_view rest = text;
  while (!rest.empty()) {
    const Rune rune = FirstRune(rest);
    const std::string piece = rune.code == 0xFFFFFFFF ? "\xEF\xBF\xBD" : std::string(rest.substr(0, rune.bytes));
    if (clean.size() + piece.size() > kLabelBytes) break;
    clean += piece;
    rest.remove_prefix(rune.bytes);
  }
  return clean;
}

std::vector<MetricFamily> FamiliesOf(const Overview& overview, const ExporterOptions& options, const ScrapeCount& scrapes, JobCosts* costs) {
  Families f(overview.jobs.size());
  f.Add(Metric::kBuildInfo, {{"version", CleanLabel(options.version)}, {"commit", CleanLabel(options.commit)}}, 1);
  f.Add(Metric::kResidentBytes, {}, ResidentBytes());
  // Every state, also where there is none: a series that comes and goes breaks rates and alerts.
  for (v1::JobState state : {v1::QUEUED, v1::STARTING, v1::RUNNING, v1::STOPPING, v1::PAUSED, v1::SUCCEEDED, v1::FAILED, v1::CANCELLED}) {
    double count = 0;
    for (const auto& [known, jobs] : overview.jobs_by_state) {
      if (known == state) count = static_cast<double>(jobs);
    }
    f.Add(Metric::kJobs, {{"state", Word(v1::JobState_Name(state))}}, count);
  }
  const int64_t since = overview.queue_waits_since_ms;
  f.Add(Metric::kQueueWaitSeconds, {}, since > 0 ? Seconds(std::max<int64_t>(0, overview.now_ms - since)) : 0);
  f.Add(Metric::kSlots, {{"state", "free"}}, static_cast<double>(overview.slots_free));
  f.Add(Metric::kSlots, {{"state", "busy"}}, static_cast<double>(overview.slots_busy));
  f.Add(Metric::kSlots, {{"state", "lost"}}, static_cast<double>(overview.slots_lost));
  f.Add(Metric::kSlots, {{"state", "faulty"}}, static_cast<double>(overview.slots_faulty));
  f.Add(Metric::kNodes, {{"state", "connected"}}, static_cast<double>(overview.nodes_connected));
  f.Add(Metric::kNodes, {{"state", "lost"}}, static_cast<double>(overview.nodes_lost));
  f.Add(Metric::kSessions, {{"kind", "agent"}}, static_cast<double>(overview.agent_sessions));
  f.Add(Metric::kSessions, {{"kind", "worker"}}, static_cast<double>(overview.worker_sessions));
  f.Add(Metric::kDecisionSeconds, {}, overview.decisions);
  f.Add(Metric::kCommitSeconds, {}, overview.commits);
  f.Add(Metric::kStoreErrors, {}, static_cast<double>(overview.store_errors));
  f.Add(Metric::kHistoryErrors, {}, static_cast<double>(overview.history_errors));
  AddDisk(&f, "state", options.state_folder);
  AddDisk(&f, "runs", options.runs_folder);
  f.Add(Metric::kScrapes, {}, static_cast<double>(scrapes.scrapes));
  f.Add(Metric::kScrapeSeconds, {}, scrapes.seconds);
  AddNodes(&f, overview);
  for (const Overview::JobLook& look : overview.jobs) {
    AddJob(&f, look, overview.now_ms, costs != nullptr && !IsTerminal(look.job.state()) ? costs->Of(look.job.spec(), look.card) : std::nullopt);
  }
  return f.Take();
}

Exporter::Exporter() = default;
Exporter::~Exporter() = default;

absl::StatusOr<std::unique_ptr<Exporter>> Exporter::Listen(const std::string& address) {
  auto parsed = ParseHostPort(address);
  if (!parsed.ok()) return parsed.status();
  if (absl::Status free = CheckListen("metrics", *parsed); !free.ok()) return free;
  std::unique_ptr<Exporter> exporter(new Exporter());
  try {
    exporter->exposer_ = std::make_unique<prometheus::Exposer>(address, 2);
  } catch (const std::exception& error) {
    return absl::UnavailableError(absl::StrCat("metrics: cannot listen on ", Printable(address), ": ", error.what()));
  }
  return exporter;
}

void Exporter::Serve(std::function<absl::StatusOr<Overview>()> look, ExporterOptions options) {
  collectable_ = std::make_shared<Collector>(std::move(look), std::move(options));
  exposer_->RegisterCollectable(collectable_);
}

int Exporter::port() const {
  const std::vector<int> ports = exposer_->GetListeningPorts();
  return ports.empty() ? 0 : ports[0];
}

}  // namespace hierad
