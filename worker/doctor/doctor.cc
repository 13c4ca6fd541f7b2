#include "worker/doctor/doctor.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/gpu_cards.h"
#include "base/job_validate.h"
#include "base/plan/plan_report.h"
#include "base/status.h"
#include "worker/comm/communicator.h"
#include "worker/data/loader.h"
#include "worker/step/step.h"

namespace hierad {
namespace {

using Json = nlohmann::ordered_json;
using SteadyClock = std::chrono::steady_clock;

constexpr double kDataSeconds = 2;        // of reading
constexpr int kWarmSteps = 4, kTimedSteps = 5;   // graph_safe records behind its third
constexpr double kMostCpuFlops = 3e11;    // of one step: some 10 s on a slow CPU

double SecondsSince(SteadyClock::time_point begin) { return std::chrono::duration<double>(SteadyClock::now() - begin).count(); }

template <typename Value>
Json OrNull(const std::optional<Value>& value) { return value ? Json(*value) : Json(nullptr); }

Json JsonOf(const GpuCards& all) {
  Json cards = Json::array();
  for (const GpuCard& card : all.cards) {
    cards.push_back({{"index", card.index}, {"uuid", card.uuid}, {"name", card.name}, {"memory_bytes", card.memory_bytes}, {"free_bytes", card.free_bytes},
                     {"sm_mhz", OrNull(card.sm_mhz)}, {"most_sm_mhz", OrNull(card.most_sm_mhz)}, {"temperature_c", OrNull(card.temperature_c)},
                     {"slowed", OrNull(card.slowed)}, {"ecc", OrNull(card.ecc)}, {"uncorrected_errors", OrNull(card.uncorrected_errors)}});
  }
  return {{"library", all.library}, {"problem", all.problem}, {"driver", all.driver}, {"cuda", all.cuda}, {"silent", all.silent}, {"cards", std::move(cards)}};
}

Json Problem(const absl::Status& status) { return {{"problem", std::string(status.message())}}; }

// Reads as rank 0 of the job would.
absl::StatusOr<Json> MeasureData(const v1::JobSpec& job, const Geometry& geometry, bool cuda, int cores) {
  ChannelStatistics statistics;
  ASSIGN_OR_RETURN(std::shared_ptr<const Dataset> dataset, OpenDataset(job.data(), job.data().path(), geometry, &statistics));
  Loader::Options options;
  options.spec = job;
  options.world_size = job.resources().ranks();
  options.threads = LoaderThreads(job, cuda, std::max(1, cores / std::max(1, job.resources().ranks())));
  const auto begin = SteadyClock::now();
  ASSIGN_OR_RETURN(const std::unique_ptr<Loader> loader, MakeLoader(dataset, options));
  int64_t rows = 0;
  while (SecondsSince(begin) < kDataSeconds) {
    const auto batch = loader->Next();
    if (absl::IsOutOfRange(batch.status())) break;
    RETURN_IF_ERROR(batch.status());
    rows += batch->real;
  }
  return Json{{"samples", dataset->count()}, {"samples_per_s", double(rows) / SecondsSince(begin)}, {"threads", options.threads}};
}

absl::StatusOr<Json> MeasureStep(v1::JobSpec job, const Geometry& geometry, bool cuda, int cores) {
  job.mutable_step()->set_mode(ResolvedMode(job.step(), cuda));
  if (!cuda) {
    const auto plan = ReportPlan(job, {});
    const double flops = plan.ok() ? plan->flops_per_step : 0;
    if (flops > kMostCpuFlops) return Json{{"skipped", absl::StrCat("a step of ", int64_t(flops / 1e9), " GFLOP takes too long on a CPU to be timed here")}};
  }
  const ParameterTable table = ParameterTable::For(geometry);
  const std::unique_ptr<Communicator> communicator = MakeSelfCommunicator();
  ASSIGN_OR_RETURN(const std::unique_ptr<Step> step, MakeStep({job, cuda, cores}, geometry, table, communicator.get()));
  RETURN_IF_ERROR(step->Initialize());
  int64_t size = geometry.spec.in_chans();
  for (const int64_t axis : geometry.input_size) size *= axis;
  const int64_t batch = job.step().batch_per_rank();
  std::vector<float> x(size_t(batch * size));
  for (size_t i = 0; i < x.size(); ++i) x[i] = float(i % 251) / 251 - 0.5f;   // not constant: targets are normalised
  const std::vector<int64_t> labels(size_t(batch), 0);
  std::vector<uint64_t> visits;
  for (int64_t i = 0; i < batch; ++i) visits.push_back(uint64_t(i));
  const std::vector<MicroBatch> micro_batches(size_t(std::max(1, job.step().accumulation())), {x.data(), labels.data(), visits.data(), int32_t(batch), 0});
  SteadyClock::time_point begin;
  for (int s = 0; s < kWarmSteps + kTimedSteps; ++s) {
    if (s == kWarmSteps) begin = SteadyClock::now();
    RETURN_IF_ERROR(step->Run(micro_batches, batch * int64_t(micro_batches.size()), 1e-6, {}));
    RETURN_IF_ERROR(step->Take().status());
  }
  return Json{{"ms", 1e3 * SecondsSince(begin) / kTimedSteps}, {"peak_bytes", step->peak_memory_bytes()}, {"what", step->Describe()}};
}

}  // namespace

std::string DoctorFigures(const v1::JobSpec* job, const std::string& nvml) {
  const GpuCards cards = ReadGpuCards(nvml);
  const LibraryVersions versions = BuiltWith();
  Json figures = {{"gpus", JsonOf(cards)}, {"cuda_runtime", versions.cuda_runtime}, {"nccl", versions.nccl}};
  if (job != nullptr) {
    const int cores = std::max(1, int(std::thread::hardware_concurrency()));
    const bool cuda = UsesGpu(*job, !cards.cards.empty());
    const auto geometry = Geometry::From(job->model());
    const auto said = [&](const auto& measure) {
      if (!geometry.ok()) return Problem(geometry.status());
      const absl::StatusOr<Json> measured = measure(*job, *geometry, cuda, cores);
      return measured.ok() ? *measured : Problem(measured.status());
    };
    figures["data"] = said(MeasureData);
    figures["step"] = said(MeasureStep);
  }
  return figures.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace hierad
