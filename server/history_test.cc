#include "server/history.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <random>

#include "absl/strings/str_cat.h"

namespace hierad {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

v1::StepMetrics Step(int64_t step, double loss = 0.5) {
  v1::StepMetrics m;
  m.set_step(step);
  m.set_loss(loss);
  m.set_time_ms(1'700'000'000'000 + step * 13);
  m.set_samples(64);
  return m;
}

std::vector<v1::StepMetrics> Steps(int64_t first, int64_t last, double loss = 0.5) {
  std::vector<v1::StepMetrics> steps;
  for (int64_t s = first; s <= last; ++s) steps.push_back(Step(s, loss));
  return steps;
}

class HistoryTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string path = testing::TempDir() + "/hierad_history_XXXXXX";
    folder_ = mkdtemp(path.data());
    Open({});
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  void Open(History::Limits limits) {
    auto history = History::Open(folder_ + "/history", limits);
    ASSERT_TRUE(history.ok()) << history.status();
    history_ = *std::move(history);
  }
  std::vector<int64_t> Numbers(uint64_t job, HistoryQuery query = {}) {
    const auto read = history_->Read(job, query);
    EXPECT_TRUE(read.ok()) << read.status();
    std::vector<int64_t> numbers;
    for (const auto& m : read->steps) numbers.push_back(m.step());
    return numbers;
  }
  std::string File(uint64_t job) const { return absl::StrCat(folder_, "/history/", job, ".steps"); }
  int64_t Size(uint64_t job) const { return int64_t(std::filesystem::file_size(File(job))); }

  std::string folder_;
  std::unique_ptr<History> history_;
};

// Every bit of every field, whatever its value, in reports of any length.
TEST_F(HistoryTest, KeepsEveryBit) {
  const uint64_t seed = std::random_device()();
  RecordProperty("seed", absl::StrCat(seed));
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  std::mt19937_64 random(seed);
  const auto any = [&random]() -> double {
    switch (random() % 8) {
      case 0: return 0;
      case 1: return std::numeric_limits<double>::infinity();
      case 2: return -std::numeric_limits<double>::infinity();
      case 3: return std::bit_cast<double>(uint64_t{0x7FF8000000000000} | random() % 1000);   // NaN with a payload
      case 4: return float(random() % 100000) / 7.0f;
      case 5: return -0.0;
      default: return std::bit_cast<double>(random());
    }
  };
  std::vector<v1::StepMetrics> all;
  while (all.size() < 3000) {
    std::vector<v1::StepMetrics> report(1 + random() % 512);
    for (auto& m : report) {
      m.set_step(int64_t(all.size()) + 1);
      m.set_epoch(any());
      m.set_loss(any());
      m.set_grad_norm(any());
      m.set_lr(any());
      m.set_samples(int64_t(random() >> (random() % 64)));
      m.set_step_s(any());
      m.set_data_wait_s(any());
      m.set_forward_s(any());
      m.set_backward_s(any());
      m.set_communication_s(any());
      m.set_optimizer_s(any());
      m.set_time_ms(int64_t(random()));
      m.set_skipped(random() % 2 != 0);
      if (random() % 3 == 0) m.set_eval_loss(any());
      if (random() % 3 == 0) m.set_loss_scale(any());
      all.push_back(m);
    }
    ASSERT_TRUE(history_->Append(1, report).ok());
  }
  const auto read = history_->Read(1, {});
  ASSERT_TRUE(read.ok());
  ASSERT_EQ(read->steps.size(), all.size());
  for (size_t i = 0; i < all.size(); ++i) ASSERT_EQ(read->steps[i].SerializeAsString(), all[i].SerializeAsString()) << "step " << i + 1;
}

TEST_F(HistoryTest, IsCompact) {
  std::mt19937_64 random(1);
  std::vector<v1::StepMetrics> steps = Steps(1, 500);
  for (auto& m : steps) {
    m.set_loss(float(random() % 1000000) / 7.0f);   // the step's own precision
    m.set_grad_norm(float(random() % 1000000) / 7.0f);
    m.set_step_s(double(random() % 1000000) / 1e9);
  }
  ASSERT_TRUE(history_->Append(1, steps).ok());
  EXPECT_LT(Size(1), 500 * 50);   // a line of metrics.jsonl has some 300 bytes
}

TEST_F(HistoryTest, AStepThatComesAgainReplacesItsLaterSelves) {
  ASSERT_TRUE(history_->Append(1, Steps(1, 10)).ok());
  ASSERT_TRUE(history_->Append(1, Steps(6, 8, 0.25)).ok());   // resumed after step 5
  EXPECT_THAT(Numbers(1), ElementsAre(1, 2, 3, 4, 5, 6, 7, 8));
  EXPECT_EQ(history_->Read(1, {.from = 6})->steps[0].loss(), 0.25);
  Open({});
  EXPECT_THAT(Numbers(1), ElementsAre(1, 2, 3, 4, 5, 6, 7, 8));
}

TEST_F(HistoryTest, AnswersWhatIsAskedFor) {
  ASSERT_TRUE(history_->Append(1, Steps(1, 23)).ok());
  EXPECT_THAT(Numbers(1, {.from = 5, .to = 7}), ElementsAre(5, 6, 7));
  EXPECT_THAT(Numbers(1, {.every = 10}), ElementsAre(10, 20, 23));
  EXPECT_THAT(Numbers(1, {.last = 2}), ElementsAre(22, 23));
  EXPECT_THAT(Numbers(1, {.to = 20, .every = 10, .last = 1}), ElementsAre(20));
  EXPECT_THAT(Numbers(1, {.from = 50}), IsEmpty());
  EXPECT_THAT(Numbers(2), IsEmpty());
}

TEST_F(HistoryTest, TheNewestOfALongFileAreReadFromItsEnd) {
  for (int64_t s = 1; s <= 20000; s += 100) ASSERT_TRUE(history_->Append(1, Steps(s, s + 99)).ok());
  EXPECT_THAT(Numbers(1, {.last = 3}), ElementsAre(19998, 19999, 20000));
  EXPECT_EQ(Numbers(1, {.last = 19000}).size(), 19000u);
}

TEST_F(HistoryTest, TornAndDamagedBlocksArePassedOver) {
  ASSERT_TRUE(history_->Append(1, Steps(1, 5)).ok());
  const int64_t first = Size(1);
  ASSERT_TRUE(history_->Append(1, Steps(6, 9)).ok());
  ASSERT_EQ(truncate(File(1).c_str(), Size(1) - 3), 0);   // killed in the writing
  EXPECT_THAT(Numbers(1), ElementsAre(1, 2, 3, 4, 5));
  ASSERT_TRUE(history_->Append(1, Steps(10, 11)).ok());
  EXPECT_THAT(Numbers(1), ElementsAre(1, 2, 3, 4, 5, 10, 11));
  std::fstream file(File(1), std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(first / 2);
  file.put('\x7f');
  file.close();
  EXPECT_THAT(Numbers(1), ElementsAre(10, 11));
}

TEST_F(HistoryTest, OneJobIsThinnedBeyondItsShare) {
  Open({.job_bytes = 100'000, .total_bytes = 1 << 30});
  std::mt19937_64 random(3);
  int64_t step = 0;
  for (int report = 0; report < 400; ++report) {
    std::vector<v1::StepMetrics> steps;
    for (int i = 0; i < 50; ++i) steps.push_back(Step(++step, std::bit_cast<double>(random() >> 12)));
    ASSERT_TRUE(history_->Append(1, steps).ok());
    ASSERT_LE(Size(1), 100'000 + 10'000);
  }
  const auto read = history_->Read(1, {});
  ASSERT_TRUE(read.ok());
  EXPECT_EQ(read->steps.back().step(), step);
  EXPECT_LE(read->steps.front().step(), 2);
  EXPECT_GT(read->thinned_before, 1);
  EXPECT_LT(read->thinned_before, step);
  // From there on nothing is missing.
  EXPECT_EQ(int64_t(history_->Read(1, {.from = read->thinned_before})->steps.size()), step - read->thinned_before + 1);
}

TEST_F(HistoryTest, TheLongestUntouchedJobsGoFirst) {
  for (uint64_t job = 1; job <= 8; ++job) {
    ASSERT_TRUE(history_->Append(job, Steps(1, 2000)).ok());
    const timespec times[2] = {{int64_t(job), 0}, {int64_t(job), 0}};
    ASSERT_EQ(utimensat(AT_FDCWD, File(job).c_str(), times, 0), 0);
  }
  const int64_t one = Size(1);
  Open({.job_bytes = 1 << 30, .total_bytes = 5 * one});
  EXPECT_THAT(Numbers(3), IsEmpty());
  EXPECT_EQ(Numbers(4).size(), 2000u);
  EXPECT_EQ(Numbers(8).size(), 2000u);
}

}  // namespace
}  // namespace hierad
