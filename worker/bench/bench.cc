#include "worker/bench/bench.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <ctime>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <sstream>
#include <thread>

#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "base/job_yaml.h"
#include "base/plan/geometry.h"
#include "base/plan/parameters.h"
#include "base/plan/row_format.h"
#include "base/random.h"
#include "base/status.h"
#include "hierad/version.h"
#include "worker/step/step.h"

namespace hierad {
namespace {

constexpr int kRarely = 32;   // fewer than the ring of records holds

absl::StatusOr<v1::JobSpec> JobOf(const BenchArguments& arguments) {
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
    v1::StepSpec* step = spec.mutable_step();
    step->set_batch_per_rank(arguments.batch);
    step->set_accumulation(arguments.accumulation);
    step->set_mode(arguments.mode);
    step->set_precision(arguments.precision);
    step->set_sdpa_backend(arguments.sdpa);
    step->set_tf32(arguments.tf32);
    step->set_reduce_dtype(arguments.reduce_dtype);
    step->set_shard_optimizer(arguments.shard);
    for (int stage : arguments.checkpoint_stages) step->add_checkpoint_stages(stage);
    if (arguments.checkpoint_decoder) step->set_checkpoint_decoder(true);
    spec.mutable_optimizer()->set_name(arguments.optimizer);
  }
  spec.mutable_resources()->set_ranks(arguments.world);
  FillDefaults(&spec);
  return spec;
}

constexpr int64_t kSyntheticSamples = 1 << 16;

// Rows of the type asked for, which the model sees as numbers in [-1, 1].
RowFormat FormatOf(const std::string& type, const Geometry& geometry) {
  RowFormat format = RowFormat::Plain(geometry);
  if (type == "synthetic") format.rules.synthetic = kSyntheticSamples;
  format.type = type == "u8" ? DType::kU8 : type == "i16" ? DType::kI16 : type == "f16" ? DType::kF16 : DType::kF32;
  const float offset = type == "u8" ? 127.5f : type == "i16" ? -0.5f : 0.0f, scale = type == "u8" ? 1 / 127.5f : type == "i16" ? 1 / 32767.5f : 1.0f;
  format.offset.assign(format.offset.size(), offset);
  format.scale.assign(format.scale.size(), scale);
  return format;
}

// Sample number `number` into `row`.
void DrawSample(int64_t number, const RowFormat& format, std::byte* row) {
  const int64_t size = format.rules.channels * format.rules.samples;
  const RandomStream stream{1, Draw::kSynthetic, 0, uint64_t(number)};
  for (int64_t j = 0; j < size; j += 4) {
    const Random4 block = stream.At(uint32_t(j >> 2));
    for (int64_t k = 0; k < 4 && j + k < size; ++k) {
      const uint32_t word = block.v[k];
      const auto half = uint16_t((word & 0x83FF) | 14 << 10);   // 1/2 to 1, either sign
      switch (format.type) {
        case DType::kU8: row[j + k] = std::byte(word >> 24); break;
        case DType::kI16: reinterpret_cast<uint16_t*>(row)[j + k] = uint16_t(word >> 16); break;
        case DType::kF16: reinterpret_cast<uint16_t*>(row)[j + k] = half; break;
        default: reinterpret_cast<float*>(row)[j + k] = 2 * (float(word >> 8) * (1.0f / 16777216.0f)) - 1; break;
      }
    }
  }
}

// `count` random samples from number `first` on, by as many threads as help: a start is timed too.
void DrawSamples(int64_t first, int64_t count, const RowFormat& format, std::byte* samples) {
  std::atomic<int64_t> next{0};
  auto work = [&] {
    for (int64_t i; (i = next++) < count;) DrawSample(first + i, format, samples + i * format.row_bytes());
  };
  std::vector<std::thread> others;
  for (unsigned t = 1; t < std::min(8u, std::thread::hardware_concurrency()); ++t) others.emplace_back(work);
  work();
  for (std::thread& other : others) other.join();
}

// Seconds since this process was started, loading of its libraries included (a forked rank: since its parent was).
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

nlohmann::json Median(std::vector<double> values) {
  if (values.empty()) return {};
  std::nth_element(values.begin(), values.begin() + std::ptrdiff_t(values.size() / 2), values.end());
  return values[values.size() / 2];
}

// Random samples in two halves, as the loader would hold them; each step takes the other half under ids of its own.
class Batches {
 public:
  Batches(const v1::JobSpec& spec, const Geometry& geometry, const RowFormat& rows, int rank, int world, bool cuda)
      : row_bytes_(rows.row_bytes()), batch_(spec.step().batch_per_rank()), micro_steps_(spec.step().accumulation()), rank_(rank), world_(world), memory_(BatchMemory(cuda)) {
    const size_t bytes = std::max<size_t>(1, size_t(2 * batch_ * row_bytes_));
    auto* memory = static_cast<std::byte*>(memory_.allocate ? memory_.allocate(bytes) : nullptr);
    if (memory == nullptr) drawn_.resize(bytes), memory = drawn_.data();
    if (row_bytes_ > 0) DrawSamples(2 * batch_ * rank, 2 * batch_, rows, memory);
    samples_ = memory;
    visits_.resize(2 * micro_steps_ * batch_);   // ids live for two steps
    for (int64_t i = 0; i < batch_; ++i) labels_.push_back(i % geometry.spec.num_classes());
  }

  MicroBatch Number(int64_t number) {
    uint64_t* ids = visits_.data() + number % (2 * micro_steps_) * batch_;
    for (int64_t i = 0; i < batch_; ++i) ids[i] = uint64_t((number * world_ + rank_) * batch_ + i);
    return MicroBatch{samples_ + number % 2 * batch_ * row_bytes_, labels_.data(), ids, int32_t(batch_), 0};
  }
  int64_t of_all_ranks() const { return batch_ * micro_steps_ * world_; }

 private:
  const int64_t row_bytes_, batch_, micro_steps_, rank_, world_;
  const HostMemory memory_;
  std::vector<std::byte> drawn_;
  const std::byte* samples_ = nullptr;
  std::vector<uint64_t> visits_;
  std::vector<int64_t> labels_;
};

class Timing {
 public:
  Timing(const BenchArguments& arguments, Step* step, Batches* batches, int64_t micro_steps)
      : arguments_(arguments), step_(*step), batches_(*batches), micro_steps_(micro_steps) {}

  // `count` steps whose results are read as `read` says; timed: not of the warm-up.
  absl::Status Run(int count, const std::string& read, bool timed) {
    const int behind = read == "now" ? 0 : step_.records_behind();
    const std::clock_t processor_before = std::clock();
    for (int s = 0; s < count; ++s, ++number_) {
      std::vector<MicroBatch> micro_batches;
      for (int64_t m = 0; m < micro_steps_; ++m) micro_batches.push_back(batches_.Number(number_ * micro_steps_ + m));
      const MicroBatch next = batches_.Number((number_ + 1) * micro_steps_);
      const auto begin = std::chrono::steady_clock::now();
      if (!arguments_.no_prefetch) step_.Prefetch(next);
      RETURN_IF_ERROR(step_.Run(micro_batches, batches_.of_all_ranks(), arguments_.lr, {}));
      ++under_way_;
      if (read != "rarely" || under_way_ >= kRarely) RETURN_IF_ERROR(Take(read == "rarely" ? 0 : behind, timed));
      const std::chrono::duration<double, std::milli> elapsed = std::chrono::steady_clock::now() - begin;
      if (timed) ms_[read].push_back(elapsed.count());
    }
    RETURN_IF_ERROR(Take(0, timed));
    if (timed) processor_time_ += std::clock() - processor_before;   // of all threads; includes what the driver spins
    return absl::OkStatus();
  }

  std::map<std::string, std::vector<double>> ms_;
  std::vector<double> losses_;
  std::vector<StepResult::Times> times_;
  double first_step_s_ = 0;
  std::clock_t processor_time_ = 0;

 private:
  absl::Status Take(int left, bool timed) {
    for (; under_way_ > left; --under_way_) {
      ASSIGN_OR_RETURN(const StepResult result, step_.Take());
      losses_.push_back(result.loss);
      if (losses_.size() == 1) first_step_s_ = SecondsSinceStart();
      if (timed && result.times.has_value()) times_.push_back(*result.times);
    }
    return absl::OkStatus();
  }

  const BenchArguments& arguments_;
  Step& step_;
  Batches& batches_;
  const int64_t micro_steps_;
  int64_t number_ = 0;
  int under_way_ = 0;
};

// Largest difference of any parameter from rank 0's.
absl::StatusOr<double> WeightDifference(Step* step, Communicator* communicator) {
  ASSIGN_OR_RETURN(const TrainState own, step->Save());
  std::vector<float> first = own.parameters;
  RETURN_IF_ERROR(communicator->BroadcastHost(first.data(), int64_t(first.size() * sizeof(float)), 0));
  double largest = 0;
  for (size_t i = 0; i < first.size(); ++i) {
    const double difference = std::abs(double(first[i]) - double(own.parameters[i]));
    if (std::isnan(difference)) return difference;
    largest = std::max(largest, difference);
  }
  return largest;
}

}  // namespace

absl::StatusOr<nlohmann::json> Bench(const BenchArguments& arguments, bool cuda, Communicator* communicator) {
  ASSIGN_OR_RETURN(const v1::JobSpec spec, JobOf(arguments));
  ASSIGN_OR_RETURN(const Geometry geometry, Geometry::From(spec.model()));
  const ParameterTable table = ParameterTable::For(geometry);
  const std::unique_ptr<Communicator> alone = MakeSelfCommunicator();
  if (communicator == nullptr) communicator = alone.get();
  StepOptions options{spec, cuda, arguments.threads, arguments.tune, !arguments.one_stream, !arguments.no_epilogues};
  options.priorities = !arguments.no_priorities, options.deterministic = !arguments.any_order;
  options.rows = FormatOf(arguments.rows, geometry);
  options.bucket_elements = int64_t{arguments.bucket_mib} << 18;
  ASSIGN_OR_RETURN(const std::unique_ptr<Step> step, MakeStep(options, geometry, table, communicator));
  RETURN_IF_ERROR(step->Initialize());
  Batches batches(spec, geometry, options.rows, communicator->rank(), communicator->size(), cuda);
  Timing timing(arguments, step.get(), &batches, spec.step().accumulation());
  RETURN_IF_ERROR(communicator->Barrier());
  RETURN_IF_ERROR(timing.Run(arguments.warmup, "behind", false));
  // In turns, so that a clock that moves moves all.
  const int turns = arguments.read.size() > 1 ? 3 : 1;
  for (int turn = 0; turn < turns; ++turn) {
    for (const std::string& read : arguments.read) {
      RETURN_IF_ERROR(timing.Run((arguments.steps + turns - 1) / turns, read, true));
    }
  }
  auto median_ms = [&](double StepResult::Times::* part) {
    std::vector<double> values;
    for (const StepResult::Times& t : timing.times_) values.push_back(1e3 * (t.*part));
    return Median(std::move(values));
  };
  std::vector<double>& first = timing.ms_[arguments.read.front()];
  const double median = Median(first);
  nlohmann::json json{{"commit", Commit()},
                      {"idle_median_ms", median_ms(&StepResult::Times::idle_s)},
                      {"forward_median_ms", median_ms(&StepResult::Times::forward_s)},
                      {"backward_median_ms", median_ms(&StepResult::Times::backward_s)},
                      {"communication_median_ms", median_ms(&StepResult::Times::communication_s)},
                      {"optimizer_median_ms", median_ms(&StepResult::Times::optimizer_s)},
                      {"step", step->Describe()},
                      {"variant", geometry.spec.variant()},
                      {"input", geometry.input_size},
                      {"chans", geometry.spec.in_chans()},
                      {"optimizer", spec.optimizer().name()},
                      {"parameters", table.num_elements},
                      {"batch", spec.step().batch_per_rank()},
                      {"rows", RowsName(options.rows)},
                      {"batch_bytes", spec.step().batch_per_rank() * options.rows.row_bytes()},
                      {"accumulation", spec.step().accumulation()},
                      {"world", communicator->size()},
                      {"channels", arguments.channels},
                      {"steps", first.size()},
                      {"full_step_median_ms", median},
                      {"full_step_min_ms", *std::min_element(first.begin(), first.end())},
                      {"processor_ms_per_step", 1e3 * double(timing.processor_time_) / CLOCKS_PER_SEC / double(timing.times_.empty() ? first.size() : timing.times_.size())},
                      {"samples_per_s", 1000.0 * double(batches.of_all_ranks()) / median},
                      {"peak_memory_gib", double(step->peak_memory_bytes()) / double(int64_t{1} << 30)},
                      {"first_step_s", timing.first_step_s_},
                      {"loss_first", timing.losses_.front()},
                      {"loss_last", timing.losses_.back()}};
  for (const auto& [read, values] : timing.ms_) json[absl::StrCat("read_", read, "_median_ms")] = Median(values);
  if (communicator->size() == 1) return json;
  ASSIGN_OR_RETURN(const uint64_t hash, step->ParameterHash());
  json["parameter_hash"] = absl::StrCat(absl::Hex(hash, absl::kZeroPad16));
  ASSIGN_OR_RETURN(const double difference, WeightDifference(step.get(), communicator));
  if (std::isnan(difference)) json["weight_difference"] = "NaN";   // JSON has no such number
  else json["weight_difference"] = difference;
  return json;
}

}  // namespace hierad
