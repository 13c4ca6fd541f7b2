#include "worker/data/loader.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <map>
#include <mutex>
#include <memory>
#include <set>
#include <thread>

#include "absl/strings/str_cat.h"
#include "base/limits.h"
#include "base/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace hierad {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// Sample i is (i, visit id, epoch); those in `bad` cannot be read.
class CountingDataset : public Dataset {
 public:
  explicit CountingDataset(int64_t count, std::set<uint64_t> bad = {}) : count_(count), bad_(std::move(bad)) {}
  int64_t count() const override { return count_; }
  int64_t num_classes() const override { return 10; }
  std::string class_name(int64_t) const override { return ""; }
  int64_t label(uint64_t sample) const override { return sample % 10; }
  std::string SampleName(uint64_t sample) const override { return absl::StrCat("file ", sample); }
  std::string Describe() const override { return ""; }
  absl::Status ReadRow(const Visit& visit, void* row) const override {
    auto* const x = static_cast<float*>(row);
    {
      std::unique_lock<std::mutex> lock(mutex);
      ++reads;
      changed.notify_all();
      changed.wait(lock, [&] { return !held; });
    }
    x[0] = 77;   // a failed read may leave anything behind
    if (bad_.contains(visit.sample)) return ErrorOf(v1::REASON_DATA_ERROR, absl::StrCat("file ", visit.sample, " is damaged"));
    x[0] = visit.sample, x[1] = visit.id, x[2] = visit.epoch;
    return absl::OkStatus();
  }
  mutable std::mutex mutex;
  mutable std::condition_variable changed;
  mutable int64_t reads = 0;
  bool held = false;

 private:
  const int64_t count_;
  const std::set<uint64_t> bad_;
};

v1::JobSpec Spec(int ranks, int batch, int accumulation, int epochs, int repeat = 1, const char* last = "pad") {
  v1::JobSpec spec;
  spec.set_seed(5);
  spec.mutable_model()->set_in_chans(1);
  spec.mutable_model()->add_input_size(3);
  spec.mutable_resources()->set_ranks(ranks);
  spec.mutable_step()->set_batch_per_rank(batch);
  spec.mutable_step()->set_accumulation(accumulation);
  spec.mutable_schedule()->set_epochs(epochs);
  spec.mutable_data()->set_repeat(repeat);
  spec.mutable_data()->set_last_batch(last);
  spec.mutable_data()->set_on_error("fail");
  spec.mutable_data()->set_max_skipped(100);
  return spec;
}

using Row = std::vector<float>;   // sample, id, epoch

// Rows of each step, over all ranks, in the order of the effective batch.
std::vector<std::vector<Row>> RunAll(std::shared_ptr<const Dataset> dataset, const v1::JobSpec& spec, int64_t first_step = 0) {
  const int world = spec.resources().ranks(), accumulation = spec.step().accumulation(), batch = spec.step().batch_per_rank();
  const RunLength length = *RunLength::For(spec, dataset->count());
  std::vector<std::unique_ptr<Loader>> loaders;
  for (int rank = 0; rank < world; ++rank) {
    Loader::Options options;
    options.spec = spec;
    options.rank = rank;
    options.world_size = world;
    options.first_step = first_step;
    options.threads = 3;
    auto loader = MakeLoader(dataset, options);
    EXPECT_TRUE(loader.ok()) << loader.status();
    loaders.push_back(*std::move(loader));
  }
  std::vector<std::vector<Row>> steps;
  for (int64_t step = first_step; step < length.total_steps; ++step) {
    steps.emplace_back();
    for (int micro = 0; micro < accumulation; ++micro) {
      for (auto& loader : loaders) {
        const auto got = loader->Next();
        EXPECT_TRUE(got.ok()) << got.status();
        for (int b = 0; b < batch; ++b) {
          const float* x = static_cast<const float*>(got->x_BCS) + b * 3;
          if (b < got->real) {
            steps.back().push_back({x[0], x[1], x[2]});
            EXPECT_EQ(got->visit_ids_B[b], uint64_t(x[1]));
            EXPECT_EQ(got->labels_B[b], int64_t(x[0]) % 10);
            EXPECT_EQ(got->epoch, x[2]);
          } else {
            EXPECT_TRUE(x[0] == 0 && x[1] == 0 && x[2] == 0);
            EXPECT_EQ(got->labels_B[b], -1);
          }
        }
      }
    }
  }
  for (auto& loader : loaders) EXPECT_TRUE(absl::IsOutOfRange(loader->Next().status()));
  return steps;
}

TEST(RunLength, CountsStepsAndRealSamples) {
  const auto padded = RunLength::For(Spec(2, 4, 1, 3, 2), 11);
  ASSERT_TRUE(padded.ok());
  EXPECT_EQ(padded->visits_per_epoch, 22);
  EXPECT_EQ(padded->steps_per_epoch, 3);
  EXPECT_EQ(padded->total_steps, 9);
  EXPECT_EQ(padded->RealSamples(1), 8);
  EXPECT_EQ(padded->RealSamples(2), 6);
  EXPECT_EQ(padded->RealSamples(3), 8);
  const auto dropped = RunLength::For(Spec(2, 4, 1, 3, 2, "drop"), 11);
  EXPECT_EQ(dropped->steps_per_epoch, 2);
  EXPECT_EQ(dropped->RealSamples(3), 8);
  v1::JobSpec by_steps = Spec(2, 4, 1, 3);
  by_steps.mutable_schedule()->clear_epochs();
  by_steps.mutable_schedule()->set_steps(7);
  EXPECT_EQ(RunLength::For(by_steps, 11)->total_steps, 7);
}

TEST(RunLength, RefusesWithTheNumbers) {
  EXPECT_THAT(std::string(RunLength::For(Spec(4, 4, 1, 3, 1, "drop"), 11).status().message()),
              testing::AllOf(HasSubstr("11 visits"), HasSubstr("effective batch 16")));
  EXPECT_FALSE(RunLength::For(Spec(1, 4, 1, 3), 0).ok());
  EXPECT_FALSE(RunLength::For(Spec(1, 4, 1, 3, 1000), int64_t{1} << 60).ok());
  EXPECT_FALSE(RunLength::For(Spec(1, 4, 1, 3), limits::kVisitsPerEpoch + 1).ok());
}

TEST(EpochOrder, IsAPermutationAndDiffersByEpochAndSeed) {
  const auto order = EpochOrder(1, 0, 1000);
  EXPECT_EQ(std::set<uint64_t>(order.begin(), order.end()).size(), 1000u);
  EXPECT_EQ(*std::max_element(order.begin(), order.end()), 999u);
  EXPECT_EQ(order, EpochOrder(1, 0, 1000));
  EXPECT_NE(order, EpochOrder(1, 1, 1000));
  EXPECT_NE(order, EpochOrder(2, 0, 1000));
  int64_t distance = 0;   // of a uniform permutation: n^2 / 3 in the mean
  for (int64_t i = 0; i < 1000; ++i) distance += std::abs(int64_t(order[i]) - i);
  EXPECT_NEAR(distance, 333333, 30000);
}

TEST(Loader, EveryWorldSizeSeesTheSameSteps) {
  const auto dataset = std::make_shared<CountingDataset>(53);
  const auto alone = RunAll(dataset, Spec(1, 8, 1, 2, 2));
  EXPECT_EQ(alone, RunAll(dataset, Spec(2, 4, 1, 2, 2)));
  EXPECT_EQ(alone, RunAll(dataset, Spec(4, 2, 1, 2, 2)));
  EXPECT_EQ(alone, RunAll(dataset, Spec(2, 2, 2, 2, 2)));
  EXPECT_EQ(alone, RunAll(dataset, Spec(1, 1, 8, 2, 2)));
  EXPECT_EQ(alone, RunAll(dataset, Spec(8, 1, 1, 2, 2)));
}

TEST(Loader, EverySampleExactlyRepeatTimesAnEpochEachWithItsOwnId) {
  const auto dataset = std::make_shared<CountingDataset>(53);
  std::map<std::pair<float, float>, std::set<float>> ids;   // epoch, sample
  size_t rows = 0;
  for (const auto& step : RunAll(dataset, Spec(2, 4, 1, 2, 3)))
    for (const Row& row : step) {
      ids[{row[2], row[0]}].insert(row[1]);
      EXPECT_EQ(int64_t(row[1]) % 53, row[0]);
      ++rows;
    }
  EXPECT_EQ(rows, 2u * 53 * 3);
  EXPECT_EQ(ids.size(), 2u * 53);
  for (const auto& [key, set] : ids) EXPECT_EQ(set.size(), 3u);
}

TEST(Loader, FewerSamplesThanRanks) {
  const auto steps = RunAll(std::make_shared<CountingDataset>(5), Spec(8, 1, 1, 3));
  ASSERT_EQ(steps.size(), 3u);
  for (const auto& step : steps) EXPECT_EQ(step.size(), 5u);
}

TEST(Loader, ResumesAtAnyStepWithTheSameBatches) {
  const auto dataset = std::make_shared<CountingDataset>(53);
  const v1::JobSpec spec = Spec(2, 4, 2, 3);
  const auto whole = RunAll(dataset, spec);
  ASSERT_EQ(whole.size(), 12u);
  for (int64_t first : {1, 3, 4, 5, 11, 12}) {
    dataset->reads = 0;
    const auto rest = RunAll(dataset, spec, first);
    int64_t samples = 0;
    for (const auto& step : rest) samples += int64_t(step.size());
    EXPECT_EQ(dataset->reads, samples) << "what was done before is not read";
    EXPECT_TRUE(std::equal(rest.begin(), rest.end(), whole.begin() + first, whole.end())) << first;
  }
}

TEST(Loader, DropLeavesTheShortBatchOut) {
  const auto steps = RunAll(std::make_shared<CountingDataset>(53), Spec(2, 4, 1, 2, 1, "drop"));
  EXPECT_EQ(steps.size(), 12u);
  for (const auto& step : steps) EXPECT_EQ(step.size(), 8u);
}

TEST(Loader, FailNamesTheSampleAtItsPlaceInTheOrder) {
  const auto order = EpochOrder(5, 0, 40);
  const auto dataset = std::make_shared<CountingDataset>(40, std::set<uint64_t>{order[9], order[10]});
  Loader::Options options;
  options.spec = Spec(1, 4, 1, 1);
  options.threads = 4;
  auto loader = *MakeLoader(dataset, options);
  EXPECT_TRUE(loader->Next().ok());
  EXPECT_TRUE(loader->Next().ok());
  for (int i = 0; i < 2; ++i) {
    const auto failed = loader->Next();
    EXPECT_EQ(ReasonOf(failed.status()), v1::REASON_DATA_ERROR);
    EXPECT_EQ(failed.status().message(), absl::StrCat("file ", order[9], " is damaged"));
  }
}

TEST(Loader, SkipKeepsBatchSizesAndDoublesNothing) {
  const std::set<uint64_t> bad = {3, 17, 41};
  const auto clean = std::make_shared<CountingDataset>(53);
  const auto damaged = std::make_shared<CountingDataset>(53, bad);
  for (int ranks : {1, 4}) {
    v1::JobSpec spec = Spec(ranks, 8 / ranks, 1, 3);
    spec.mutable_data()->set_on_error("skip");
    auto expected = RunAll(clean, spec);
    for (auto& step : expected) std::erase_if(step, [&](const Row& row) { return bad.contains(row[0]); });
    EXPECT_EQ(RunAll(damaged, spec), expected) << ranks;
  }
}

TEST(Loader, SkipCountsDistinctSamplesAndEndsBeyondTheLimit) {
  v1::JobSpec spec = Spec(1, 8, 1, 5);
  spec.mutable_data()->set_on_error("skip");
  spec.mutable_data()->set_max_skipped(3);
  Loader::Options options;
  options.spec = spec;
  options.threads = 2;
  auto three = *MakeLoader(std::make_shared<CountingDataset>(16, std::set<uint64_t>{3, 7, 11}), options);
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(three->Next().ok());
  EXPECT_EQ(three->counters().skipped_samples(), 3);
  auto four = *MakeLoader(std::make_shared<CountingDataset>(16, std::set<uint64_t>{3, 7, 11, 12}), options);
  absl::Status status;
  for (int i = 0; i < 10 && status.ok(); ++i) status = four->Next().status();
  EXPECT_EQ(ReasonOf(status), v1::REASON_DATA_ERROR);
  EXPECT_THAT(std::string(status.message()), HasSubstr("4 samples could not be read, data.max_skipped allows 3"));
}

TEST(Loader, AWholeStepsBatchesStayValid) {
  Loader::Options options;
  options.spec = Spec(1, 1, 4, 1);
  options.threads = 3;
  auto loader = *MakeLoader(std::make_shared<CountingDataset>(64), options);
  const auto order = EpochOrder(5, 0, 64);
  std::vector<MicroBatch> held;
  for (int64_t i = 0; i < 64; ++i) {
    held.push_back(*loader->Next());
    for (int64_t j = std::max<int64_t>(0, i - 4); j <= i; ++j) {   // this one, and each for 4 further calls
      EXPECT_EQ(static_cast<const float*>(held[j].x_BCS)[0], order[j]);
      EXPECT_EQ(held[j].visit_ids_B[0], order[j]);
    }
  }
}

TEST(Loader, ReadsAheadAndNoFurther) {
  const auto dataset = std::make_shared<CountingDataset>(1000);
  Loader::Options options;
  options.spec = Spec(1, 10, 1, 1);
  options.threads = 4;
  auto loader = *MakeLoader(dataset, options);
  {
    std::unique_lock<std::mutex> lock(dataset->mutex);
    EXPECT_TRUE(dataset->changed.wait_for(lock, std::chrono::seconds(30), [&] { return dataset->reads == 30; }));   // this one and two ahead
  }
  ASSERT_TRUE(loader->Next().ok());
  ASSERT_TRUE(loader->Next().ok());
  std::unique_lock<std::mutex> lock(dataset->mutex);
  EXPECT_TRUE(dataset->changed.wait_for(lock, std::chrono::seconds(30), [&] { return dataset->reads >= 40; }));
  EXPECT_EQ(dataset->reads, 40);
}

TEST(Loader, WaitingInNamesTheSampleBeingRead) {
  const auto dataset = std::make_shared<CountingDataset>(4);
  dataset->held = true;
  Loader::Options options;
  options.spec = Spec(1, 1, 1, 1);
  auto loader = *MakeLoader(dataset, options);
  EXPECT_EQ(loader->WaitingIn(), "");
  std::thread next([&] { EXPECT_TRUE(loader->Next().ok()); });
  const std::string expected = absl::StrCat("reading file ", EpochOrder(5, 0, 4)[0]);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (loader->WaitingIn() != expected && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
  EXPECT_EQ(loader->WaitingIn(), expected);
  {
    const std::lock_guard<std::mutex> lock(dataset->mutex);
    dataset->held = false;
  }
  dataset->changed.notify_all();
  next.join();
  EXPECT_EQ(loader->WaitingIn(), "");
  EXPECT_GT(loader->data_wait_s(), 0);
}

TEST(Loader, OnePassGivesEverySampleOnceInOrderAndEqualBatchesPerRank) {
  for (int world : {1, 2, 4}) {
    std::vector<float> samples;
    std::vector<std::unique_ptr<Loader>> loaders;
    for (int rank = 0; rank < world; ++rank) {
      Loader::Options options;
      options.spec = Spec(1, 2, 3, 1);
      options.rank = rank;
      options.world_size = world;
      options.one_pass = true;
      options.threads = 2;
      loaders.push_back(*MakeLoader(std::make_shared<CountingDataset>(9), options));
    }
    for (int64_t batch = 0; batch < (9 + 2 * world - 1) / (2 * world); ++batch)
      for (auto& loader : loaders) {
        const auto got = loader->Next();
        ASSERT_TRUE(got.ok()) << got.status();
        for (int b = 0; b < got->real; ++b) samples.push_back(static_cast<const float*>(got->x_BCS)[b * 3]);
      }
    EXPECT_THAT(samples, ElementsAre(0, 1, 2, 3, 4, 5, 6, 7, 8));
    for (auto& loader : loaders) EXPECT_TRUE(absl::IsOutOfRange(loader->Next().status()));
  }
}

TEST(Loader, MemoryIsGivenFromOutsideAndGivenBack) {
  std::set<void*> live;
  Loader::Options options;
  options.spec = Spec(1, 2, 1, 1);
  options.allocate = [&](size_t bytes) { return *live.insert(std::malloc(bytes)).first; };
  options.release = [&](void* memory) { live.erase(memory), std::free(memory); };
  auto loader = *MakeLoader(std::make_shared<CountingDataset>(9), options);
  EXPECT_EQ(live.size(), 4u);
  EXPECT_TRUE(live.contains(const_cast<void*>(loader->Next()->x_BCS)));
  loader.reset();
  EXPECT_TRUE(live.empty());
  options.allocate = [](size_t) -> void* { return nullptr; };
  EXPECT_EQ(ReasonOf(MakeLoader(std::make_shared<CountingDataset>(9), options).status()), v1::REASON_HOST_OOM);
}

// Bytes, not numbers: rows of the data set's own type, closed up where a sample is left out.
TEST(Loader, RowsKeepTheirType) {
  class ByteDataset : public Dataset {
   public:
    ByteDataset() {
      format_.type = DType::kU8;
      format_.rules.samples = format_.rules.points = 3;
    }
    int64_t count() const override { return 7; }
    int64_t num_classes() const override { return 0; }
    std::string class_name(int64_t) const override { return ""; }
    int64_t label(uint64_t) const override { return -1; }
    std::string SampleName(uint64_t sample) const override { return absl::StrCat("file ", sample); }
    std::string Describe() const override { return ""; }
    const RowFormat& row_format() const override { return format_; }
    absl::Status ReadRow(const Visit& visit, void* row) const override {
      if (visit.sample == 1) return ErrorOf(v1::REASON_DATA_ERROR, "damaged");
      std::fill_n(static_cast<uint8_t*>(row), 3, uint8_t(100 + visit.sample));
      return absl::OkStatus();
    }

   private:
    RowFormat format_;
  };
  std::set<size_t> sizes;
  Loader::Options options;
  options.spec = Spec(1, 4, 1, 1);
  options.spec.mutable_data()->set_on_error("skip");
  options.one_pass = true;
  options.allocate = [&](size_t bytes) { return sizes.insert(bytes), std::malloc(bytes); };
  options.release = [](void* memory) { std::free(memory); };
  auto loader = *MakeLoader(std::make_shared<ByteDataset>(), options);
  std::vector<int> bytes;
  for (int real : {3, 3}) {
    const auto got = loader->Next();
    ASSERT_TRUE(got.ok()) << got.status();
    EXPECT_EQ(got->real, real);
    const auto* row = static_cast<const uint8_t*>(got->x_BCS);
    bytes.insert(bytes.end(), row, row + 12);
  }
  EXPECT_THAT(bytes, ElementsAre(100, 100, 100, 102, 102, 102, 103, 103, 103, 0, 0, 0, 104, 104, 104, 105, 105, 105, 106, 106, 106, 0, 0, 0));
  EXPECT_THAT(sizes, ElementsAre(12));
}

// A step far longer than its batch takes one reader; one that only reads takes all. The slowest sample is named.
TEST(Loader, ReadersFollowTheStepsPace) {
  const auto dataset = std::make_shared<CountingDataset>(64);
  Loader::Options options;
  options.spec = Spec(1, 8, 1, 20);
  options.threads = 4;
  auto loader = *MakeLoader(dataset, options);
  EXPECT_EQ(loader->counters().threads(), 4);
  for (int i = 0; i < 20; ++i) {
    ASSERT_TRUE(loader->Next().ok());
    // The step: nothing ends it early. Reads of microseconds beside it need few readers.
    std::unique_lock<std::mutex> lock(dataset->mutex);
    EXPECT_FALSE(dataset->changed.wait_for(lock, std::chrono::milliseconds(30), [] { return false; }));
  }
  const v1::DataCounters counters = loader->counters();
  EXPECT_LT(counters.threads(), 4);
  EXPECT_GE(counters.samples(), 20 * 8);
  EXPECT_THAT(counters.slowest(), HasSubstr("file "));
  EXPECT_GT(counters.slowest_s(), 0);
}

}  // namespace
}  // namespace hierad
