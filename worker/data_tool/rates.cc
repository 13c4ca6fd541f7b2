#include <algorithm>
#include <memory>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/status.h"
#include "worker/data/dataset.h"
#include "worker/data/loader.h"
#include "worker/data_tool/data_tool.h"

namespace hierad {
namespace {

double Now() { return std::chrono::duration<double>(Clock::System().Monotonic()).count(); }

struct Rate {
  double samples_per_s = 0, mb_per_s = 0, wait_share = 0;
};

absl::StatusOr<Rate> LoaderRate(const std::shared_ptr<const Dataset>& dataset, const RateOptions& options, int threads) {
  Loader::Options loader_options;
  loader_options.spec = options.spec;
  loader_options.threads = threads;
  ASSIGN_OR_RETURN(const std::unique_ptr<Loader> loader, MakeLoader(dataset, loader_options));
  const int64_t bytes_before = dataset->bytes_read();
  const double begin = Now();
  int64_t samples = 0;
  do {
    ASSIGN_OR_RETURN(const MicroBatch batch, loader->Next());
    samples += batch.real;
  } while (Now() - begin < options.seconds);
  const double seconds = Now() - begin;
  return Rate{double(samples) / seconds, double(dataset->bytes_read() - bytes_before) / 1e6 / seconds, loader->data_wait_s() / seconds};
}

}  // namespace

absl::StatusOr<Report> MeasureRates(const RateOptions& asked) {
  RateOptions options = asked;
  v1::JobSpec& spec = options.spec;
  // One rank of a run that does not end.
  spec.mutable_resources()->set_ranks(1);
  spec.mutable_schedule()->clear_epochs();
  spec.mutable_schedule()->set_steps(1'000'000'000);
  ASSIGN_OR_RETURN(const Geometry geometry, Geometry::From(spec.model()));
  ChannelStatistics statistics;
  const double opening = Now();
  ASSIGN_OR_RETURN(std::unique_ptr<Dataset> opened, OpenDataset(spec.data(), spec.data().path(), geometry, &statistics, spec.data().held_out() > 0 ? Subset::kTraining : Subset::kAll));
  const std::shared_ptr<const Dataset> dataset = std::move(opened);
  Report report;
  report["data"] = dataset->Describe();
  report["row"] = absl::StrCat(RowsName(dataset->row_format()), ", ", dataset->row_format().row_bytes(), " bytes");
  report["opened_in_s"] = Now() - opening;
  const int cores = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  std::vector<int> threads = options.threads;
  if (threads.empty()) threads = cores > 1 ? std::vector<int>{1, cores} : std::vector<int>{1};
  double best = 0;
  for (const int count : threads) {
    const auto before = dataset->stages();
    ASSIGN_OR_RETURN(const Rate rate, LoaderRate(dataset, options, count));
    best = std::max(best, rate.samples_per_s);
    Report row = {{"readers", count}, {"samples_per_s", rate.samples_per_s}, {"mb_per_s", rate.mb_per_s}, {"rows_mb_per_s", rate.samples_per_s * double(dataset->row_format().row_bytes()) / 1e6}};
    // Where the readers' time went.
    double sum = 0;
    const auto after = dataset->stages();
    for (size_t i = 0; i < after.size(); ++i) sum += after[i].second - before[i].second;
    for (size_t i = 0; i < after.size(); ++i) row[absl::StrCat(after[i].first, "_share")] = sum > 0 ? (after[i].second - before[i].second) / sum : 0;
    report["rates"].push_back(row);
  }
  if (options.step_ms > 0) {
    const double need = double(spec.step().batch_per_rank()) * std::max(1, spec.step().accumulation()) * 1000 / options.step_ms;
    report["step_needs_samples_per_s"] = need;
    report["verdict"] = best >= need ? "the loader keeps pace with the step" : absl::StrCat("the step waits: ", best / need, " of what it needs; more readers (data.workers), data prepared once, or smaller files");
  }
  return report;
}

}  // namespace hierad
