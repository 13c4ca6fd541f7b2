// hiera-bench: the training step on random input, timed. Prints one line of JSON. Each full step is what a run does:
// draws, copy to the device, forward, backward, norm, clip, update, the loss read back as the trainer reads it (on a GPU a step
// later); wall clock between returns.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <fstream>
#include <iterator>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include <unistd.h>

#include "CLI/CLI.hpp"
#include "base/job_yaml.h"
#include "base/plan/geometry.h"
#include "base/plan/parameters.h"
#include "base/random.h"
#include "base/status.h"
#include "hierad/version.h"
#include "nlohmann/json.hpp"
#include "worker/comm/communicator.h"
#include "worker/step/step.h"

namespace hierad {
namespace {

struct Arguments {
  std::string config, variant = "base", task = "mae", mode = "auto", precision = "fp32", device = "auto", sdpa = "auto";
  std::vector<int> input{224, 224};
  int batch = 8, accumulation = 1, chans = 3, q_pool = -1, steps = 30, warmup = 5, threads = 2, short_batch = 0;
  double lr = 1e-4, drop_path = 0;
  bool tf32 = false, tune = false, one_stream = false, no_epilogues = false, no_prefetch = false, sync = false;
};

absl::StatusOr<v1::JobSpec> JobOf(const Arguments& arguments) {
  v1::JobSpec spec;
  if (!arguments.config.empty()) {
    ASSIGN_OR_RETURN(spec, ReadJobYaml(arguments.config));
  } else {
    v1::ModelSpec* model = spec.mutable_model();
    model->set_variant(arguments.variant);
    model->set_task(arguments.task);
    for (int size : arguments.input) model->add_input_size(size);
    model->set_in_chans(arguments.chans);
    model->set_drop_path_rate(arguments.drop_path);
    if (arguments.q_pool >= 0) model->set_q_pool(arguments.q_pool);
    spec.mutable_step()->set_batch_per_rank(arguments.batch);
    spec.mutable_step()->set_accumulation(arguments.accumulation);
    spec.mutable_step()->set_mode(arguments.mode);
    spec.mutable_step()->set_precision(arguments.precision);
    spec.mutable_step()->set_sdpa_backend(arguments.sdpa);
    spec.mutable_step()->set_tf32(arguments.tf32);
  }
  FillDefaults(&spec);
  return spec;
}

// A pool of random samples; each step takes other rows of it.
std::vector<float> RandomSamples(int64_t count, int64_t size) {
  std::vector<float> samples(count * size);
  for (int64_t i = 0; i < count; ++i) {
    const RandomStream stream{1, Draw::kSynthetic, 0, uint64_t(i)};
    for (int64_t j = 0; j < size; ++j) samples[i * size + j] = 2 * stream.Uniform(j) - 1;
  }
  return samples;
}

// Seconds since this process was started, loading of its libraries included.
double SecondsSinceStart() {
  std::ifstream file("/proc/self/stat");
  std::string text((std::istreambuf_iterator<char>(file)), {});
  std::istringstream fields(text.substr(text.rfind(')') + 1));   // the name before it may hold anything
  std::string field;
  for (int i = 3; i <= 22; ++i) fields >> field;                 // starttime, in ticks since boot
  timespec now{};
  clock_gettime(CLOCK_BOOTTIME, &now);
  return double(now.tv_sec) + 1e-9 * double(now.tv_nsec) - std::strtod(field.c_str(), nullptr) / double(sysconf(_SC_CLK_TCK));
}

absl::StatusOr<nlohmann::json> Bench(const Arguments& arguments) {
  ASSIGN_OR_RETURN(const v1::JobSpec spec, JobOf(arguments));
  ASSIGN_OR_RETURN(const Geometry geometry, Geometry::From(spec.model()));
  const ParameterTable table = ParameterTable::For(geometry);
  const std::unique_ptr<Communicator> communicator = MakeSelfCommunicator();
  const bool cuda = arguments.device == "cuda" || (arguments.device == "auto" && CudaDeviceCount() > 0);
  ASSIGN_OR_RETURN(const std::unique_ptr<Step> step,
                   MakeStep({spec, cuda, arguments.threads, arguments.tune, !arguments.one_stream, !arguments.no_epilogues}, geometry, table, communicator.get()));
  RETURN_IF_ERROR(step->Initialize());
  int64_t sample_size = geometry.spec.in_chans();
  for (int64_t size : geometry.input_size) sample_size *= size;
  const int64_t batch = spec.step().batch_per_rank(), micro_steps = spec.step().accumulation();
  const std::vector<float> drawn = RandomSamples(2 * batch, sample_size);
  // As the loader would hold them.
  const HostMemory memory = BatchMemory(cuda);
  const float* samples = drawn.data();
  if (memory.allocate) {
    void* pinned = memory.allocate(drawn.size() * sizeof(float));
    if (pinned != nullptr) samples = static_cast<const float*>(std::memcpy(pinned, drawn.data(), drawn.size() * sizeof(float)));
  }
  std::vector<uint64_t> visits(batch * 2 * micro_steps);
  std::vector<int64_t> labels(batch);
  for (int64_t i = 0; i < batch; ++i) labels[i] = i % geometry.spec.num_classes();

  std::vector<double> times_ms;
  std::clock_t processor_time = 0;
  double first_step_s = 0;
  std::vector<double> losses;
  std::vector<StepResult::Times> times;
  int under_way = 0;
  auto batch_of = [&](int64_t number) {   // ids live for two steps
    uint64_t* ids = visits.data() + number % (2 * micro_steps) * batch;
    for (int64_t i = 0; i < batch; ++i) ids[i] = uint64_t(number) * batch + i;
    return MicroBatch{samples + number % 2 * batch * sample_size, labels.data(), ids, int32_t(batch), 0};   // two halves in turn
  };
  for (int s = 0; s < arguments.warmup + arguments.steps; ++s) {
    std::vector<MicroBatch> micro_batches;
    for (int64_t m = 0; m < micro_steps; ++m) micro_batches.push_back(batch_of(s * micro_steps + m));
    const MicroBatch next = batch_of((s + 1) * micro_steps);
    if (s == arguments.warmup) processor_time = std::clock();
    const auto begin = std::chrono::steady_clock::now();
    if (!arguments.no_prefetch) step->Prefetch(next);
    RETURN_IF_ERROR(step->Run(micro_batches, batch * micro_steps, arguments.lr, {}));
    for (under_way += 1; under_way > (arguments.sync ? 0 : step->records_behind()); --under_way) {
      ASSIGN_OR_RETURN(const StepResult result, step->Take());
      losses.push_back(result.loss);
      if (losses.size() == 1) first_step_s = SecondsSinceStart();
      if (s >= arguments.warmup && result.times.has_value()) times.push_back(*result.times);
    }
    const std::chrono::duration<double, std::milli> elapsed = std::chrono::steady_clock::now() - begin;
    if (s >= arguments.warmup) times_ms.push_back(elapsed.count());
  }
  processor_time = std::clock() - processor_time;   // of all threads; includes what the driver spins
  std::sort(times_ms.begin(), times_ms.end());
  auto median_ms = [&](double StepResult::Times::* part) {
    std::vector<double> values;
    for (const StepResult::Times& t : times) values.push_back(1e3 * (t.*part));
    std::sort(values.begin(), values.end());
    return values.empty() ? nlohmann::json() : nlohmann::json(values[values.size() / 2]);
  };
  return nlohmann::json{{"commit", Commit()},
                        {"idle_median_ms", median_ms(&StepResult::Times::idle_s)},
                        {"forward_median_ms", median_ms(&StepResult::Times::forward_s)},
                        {"backward_median_ms", median_ms(&StepResult::Times::backward_s)},
                        {"communication_median_ms", median_ms(&StepResult::Times::communication_s)},
                        {"optimizer_median_ms", median_ms(&StepResult::Times::optimizer_s)},
                        {"step", step->Describe()},
                        {"variant", geometry.spec.variant()},
                        {"input", geometry.input_size},
                        {"chans", geometry.spec.in_chans()},
                        {"parameters", table.num_elements},
                        {"batch", batch},
                        {"accumulation", micro_steps},
                        {"steps", times_ms.size()},
                        {"full_step_median_ms", times_ms[times_ms.size() / 2]},
                        {"full_step_min_ms", times_ms.front()},
                        {"processor_ms_per_step", 1e3 * double(processor_time) / CLOCKS_PER_SEC / double(times_ms.size())},
                        {"samples_per_s", 1000.0 * double(batch * micro_steps) / times_ms[times_ms.size() / 2]},
                        {"peak_memory_gib", double(step->peak_memory_bytes()) / double(int64_t{1} << 30)},
                        {"first_step_s", first_step_s},
                        {"loss_first", losses.front()},
                        {"loss_last", losses.back()}};
}

int Main(int argc, char** argv) {
  Arguments arguments;
  CLI::App app{"Times the training step on random input"};
  app.add_option("--config", arguments.config, "job.yaml instead of the options below");
  app.add_option("--variant", arguments.variant, "tiny|small|base|base_plus|large|huge");
  app.add_option("--task", arguments.task, "mae|classify");
  app.add_option("--input", arguments.input, "input_size, comma-separated")->delimiter(',');
  app.add_option("--chans", arguments.chans, "in_chans");
  app.add_option("--q-pool", arguments.q_pool, "q_pool (default: the task's)");
  app.add_option("--drop-path", arguments.drop_path, "drop_path_rate");
  app.add_option("--batch", arguments.batch, "samples per micro-step");
  app.add_option("--accumulation", arguments.accumulation, "micro-steps per step");
  app.add_option("--mode", arguments.mode, "auto|eager|optimized|graph_safe|fused");
  app.add_option("--precision", arguments.precision, "fp32|bf16");
  app.add_flag("--tf32", arguments.tf32, "TF32 products in fp32");
  app.add_flag("--tune", arguments.tune, "fused on a GPU: time the candidates of every product first");
  app.add_flag("--no-epilogues", arguments.no_epilogues, "fused on a GPU: GELU by kernels of its own");
  app.add_flag("--one-stream", arguments.one_stream, "fused on a GPU: weight gradients in the chain, not beside it");
  app.add_flag("--no-prefetch", arguments.no_prefetch, "do not copy the next step's batch behind this one");
  app.add_flag("--sync", arguments.sync, "wait for each step's loss before the next step is given");
  app.add_option("--sdpa", arguments.sdpa, "auto|math|flash|mem_efficient|cudnn");
  app.add_option("--device", arguments.device, "auto|cpu|cuda");
  app.add_option("--threads", arguments.threads, "compute threads on a CPU");
  app.add_option("--steps", arguments.steps, "timed steps")->check(CLI::Range(1, 1000000));
  app.add_option("--warmup", arguments.warmup, "steps before them")->check(CLI::Range(1, 1000000));
  app.add_option("--lr", arguments.lr, "learning rate");
  app.set_version_flag("--version", std::string(Version()) + " (" + std::string(Commit()) + ")");
  CLI11_PARSE(app, argc, argv);
  const auto result = Bench(arguments);
  if (!result.ok()) {
    std::fprintf(stderr, "hiera-bench: %s\n", std::string(result.status().message()).c_str());
    return 1;
  }
  std::printf("%s\n", result->dump().c_str());
  return 0;
}

}  // namespace
}  // namespace hierad

int main(int argc, char** argv) { return hierad::Main(argc, argv); }
