#include "server/exporter.h"

#include <prometheus/exposer.h>
#include <unistd.h>

#include <fstream>

#include "absl/strings/str_cat.h"
#include "base/text.h"
#include "server/config.h"

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
  void Add(const std::string& name, const std::string& help, MetricType type, Labels labels, double value) {
    MetricFamily* family = nullptr;
    for (MetricFamily& known : all) {
      if (known.name == name) family = &known;
    }
    if (family == nullptr) {
      family = &all.emplace_back();
      family->name = name;
      family->help = help;
      family->type = type;
    }
    ClientMetric& metric = family->metric.emplace_back();
    metric.label = std::move(labels);
    (type == MetricType::Counter ? metric.counter.value : metric.gauge.value) = value;
  }
  void Gauge(const std::string& name, const std::string& help, Labels labels, double value) {
    Add(name, help, MetricType::Gauge, std::move(labels), value);
  }
  void Counter(const std::string& name, const std::string& help, Labels labels, double value) {
    Add(name, help, MetricType::Counter, std::move(labels), value);
  }
  std::vector<MetricFamily> all;
};

double ResidentBytes() {
  std::ifstream statm("/proc/self/statm");
  double size = 0, resident = 0;
  statm >> size >> resident;
  return resident * static_cast<double>(sysconf(_SC_PAGESIZE));
}

void AddJob(Families* f, const v1::Job& job) {
  const Labels id = {{"job_id", absl::StrCat(job.id())}};
  f->Gauge("hierad_job_info", "A job that has not ended: its name, submitter and state.",
           {{"job_id", absl::StrCat(job.id())}, {"name", CleanLabel(job.spec().name())}, {"submitter", CleanLabel(job.submitter())},
            {"state", Word(v1::JobState_Name(job.state()))}}, 1);
  f->Counter("hierad_job_attempts_total", "Attempts begun.", id, job.attempt());
  f->Gauge("hierad_job_submitted_timestamp_seconds", "When it was submitted, Unix time.", id, static_cast<double>(job.submitted_ms()) / 1000);
  f->Gauge("hierad_job_ranks", "Ranks it asks for.", id, job.spec().resources().ranks());
  if (job.attempt() == 0) return;
  f->Gauge("hierad_job_step", "Optimizer steps completed.", id, static_cast<double>(job.step()));
  f->Gauge("hierad_job_total_steps", "Optimizer steps of the whole run; 0: not known yet.", id, static_cast<double>(job.total_steps()));
  f->Gauge("hierad_job_nan_steps", "Steps of this attempt skipped for a non-finite loss or gradient.", id, static_cast<double>(job.nan_steps()));
  if (job.has_last()) {
    f->Gauge("hierad_job_epoch", "Epochs completed.", id, job.last().epoch());
    f->Gauge("hierad_job_loss", "Loss of the newest step; NaN where the step was skipped for it.", id, job.last().loss());
    f->Gauge("hierad_job_grad_norm", "Global gradient norm of the newest step, before clipping.", id, job.last().grad_norm());
    f->Gauge("hierad_job_learning_rate", "Learning rate of the newest step.", id, job.last().lr());
    f->Gauge("hierad_job_step_seconds", "Wall time of the newest step.", id, job.last().step_s());
    f->Gauge("hierad_job_data_wait_seconds", "Of which waiting for input.", id, job.last().data_wait_s());
  }
  if (job.has_best_eval_loss()) f->Gauge("hierad_job_best_eval_loss", "Least loss of an evaluation so far.", id, job.best_eval_loss());
  f->Gauge("hierad_job_samples_per_second", "Samples per second, all ranks; 0: not known or not running.", id, job.samples_per_s());
}

class Collector : public prometheus::Collectable {
 public:
  Collector(std::function<absl::StatusOr<Overview>()> look, std::string version, std::string commit)
      : look_(std::move(look)), version_(std::move(version)), commit_(std::move(commit)) {}
  std::vector<MetricFamily> Collect() const override {
    absl::StatusOr<Overview> overview = look_();
    if (!overview.ok()) return {};
    return FamiliesOf(*overview, version_, commit_);
  }

 private:
  const std::function<absl::StatusOr<Overview>()> look_;
  const std::string version_, commit_;
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

std::vector<MetricFamily> FamiliesOf(const Overview& overview, const std::string& version, const std::string& commit) {
  Families f;
  f.Gauge("hierad_build_info", "The running hierad.", {{"version", CleanLabel(version)}, {"commit", CleanLabel(commit)}}, 1);
  // Every state, also where there is none: a series that comes and goes breaks rates and alerts.
  for (v1::JobState state : {v1::QUEUED, v1::STARTING, v1::RUNNING, v1::STOPPING, v1::PAUSED, v1::SUCCEEDED, v1::FAILED, v1::CANCELLED}) {
    double count = 0;
    for (const auto& [known, jobs] : overview.jobs_by_state) {
      if (known == state) count = static_cast<double>(jobs);
    }
    f.Gauge("hierad_jobs", "Jobs by state, ended ones included.", {{"state", Word(v1::JobState_Name(state))}}, count);
  }
  const char* slots_help = "Slots by state: free, busy, or on a node that is not connected.";
  f.Gauge("hierad_slots", slots_help, {{"state", "free"}}, static_cast<double>(overview.slots_free));
  f.Gauge("hierad_slots", slots_help, {{"state", "busy"}}, static_cast<double>(overview.slots_busy));
  f.Gauge("hierad_slots", slots_help, {{"state", "lost"}}, static_cast<double>(overview.slots_lost));
  f.Gauge("hierad_nodes", "Nodes by state.", {{"state", "connected"}}, static_cast<double>(overview.nodes_connected));
  f.Gauge("hierad_nodes", "Nodes by state.", {{"state", "lost"}}, static_cast<double>(overview.nodes_lost));
  f.Counter("hierad_store_errors_total", "Commits that the store refused since hierad started.", {}, static_cast<double>(overview.store_errors));
  f.Gauge("process_resident_memory_bytes", "Resident memory of hierad.", {}, ResidentBytes());
  for (const v1::Job& job : overview.live) AddJob(&f, job);
  return std::move(f.all);
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

void Exporter::Serve(std::function<absl::StatusOr<Overview>()> look, std::string version, std::string commit) {
  collectable_ = std::make_shared<Collector>(std::move(look), std::move(version), std::move(commit));
  exposer_->RegisterCollectable(collectable_);
}

int Exporter::port() const {
  const std::vector<int> ports = exposer_->GetListeningPorts();
  return ports.empty() ? 0 : ports[0];
}

}  // namespace hierad
