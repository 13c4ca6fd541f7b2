#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <string>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/fs.h"
#include "worker/metrics/metrics_file.h"
#include "worker/metrics/metrics_queue.h"

namespace hierad {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

v1::StepMetrics Metrics(int64_t step, double loss = 0.1) {
  v1::StepMetrics m;
  m.set_step(step);
  m.set_loss(loss);
  m.set_lr(1e-3);
  m.set_samples(64);
  return m;
}

std::vector<int64_t> Steps(const std::vector<v1::StepMetrics>& metrics) {
  std::vector<int64_t> steps;
  for (const auto& m : metrics) steps.push_back(m.step());
  return steps;
}

class MetricsFiles : public ::testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/metrics-test-XXXXXX";
    run_ = mkdtemp(name);
  }
  void TearDown() override { EXPECT_TRUE(RemoveTree(run_).ok()); }
  std::string Text() const { return *ReadFile(run_ + "/metrics.jsonl", 1 << 20); }
  void Run(int64_t resume, int64_t until) {
    auto file = MetricsFile::Open(run_, resume, 100, nullptr);
    ASSERT_TRUE(file.ok()) << file.status();
    for (int64_t step = resume + 1; step <= until; ++step) ASSERT_TRUE(file->Append(Metrics(step)).ok());
    ASSERT_TRUE(file->Flush().ok() && file->SyncFlushed().ok());
  }
  std::vector<int64_t> FileSteps() {
    std::vector<v1::StepMetrics> all;
    EXPECT_TRUE(MetricsFile::Open(run_, 1 << 20, 1000, &all).ok());
    return Steps(all);
  }

  std::string run_;
};

TEST_F(MetricsFiles, HoldEachStepOnceOverAttempts) {
  Run(0, 5);
  Run(3, 6);   // the checkpoint of step 3 was the newest
  EXPECT_THAT(FileSteps(), ElementsAre(1, 2, 3, 4, 5, 6));
  std::ofstream(run_ + "/metrics.jsonl", std::ios::app) << "{\"step\":7,\"lo";   // killed while writing
  Run(6, 7);
  EXPECT_THAT(FileSteps(), ElementsAre(1, 2, 3, 4, 5, 6, 7));
  const std::string text = Text();
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 7);
  Run(0, 1);   // from the start again
  EXPECT_THAT(FileSteps(), ElementsAre(1));
}

// A limit on file size, lifted later, stands for a disk that is full for a while.
TEST_F(MetricsFiles, WriteLaterWhatCouldNotBeWritten) {
  const pid_t child = fork();
  if (child == 0) {
    signal(SIGXFSZ, SIG_IGN);
    rlimit limit{400, RLIM_INFINITY};
    setrlimit(RLIMIT_FSIZE, &limit);
    auto file = MetricsFile::Open(run_, 0, 0, nullptr);
    int failed = 0;
    for (int64_t step = 1; step <= 9; ++step) {
      if (step == 7) {
        limit.rlim_cur = RLIM_INFINITY;
        setrlimit(RLIMIT_FSIZE, &limit);
      }
      failed += !file->Append(Metrics(step)).ok();
    }
    _exit(failed > 1 && file->Flush().ok() && file->SyncFlushed().ok() ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_THAT(FileSteps(), ElementsAre(1, 2, 3, 4, 5, 6, 7, 8, 9));
}

// Whoever may write to the folder puts there what would hold the rank up, or lead it elsewhere.
TEST_F(MetricsFiles, AreFilesOnly) {
  const std::string path = run_ + "/metrics.jsonl";
  ASSERT_TRUE(WriteFileAtomic(run_ + "/victim", "kept").ok());
  for (const bool pipe : {false, true}) {
    ASSERT_EQ(pipe ? mkfifo(path.c_str(), 0600) : symlink("victim", path.c_str()), 0);
    const auto opened = MetricsFile::Open(run_, 0, 100, nullptr);
    EXPECT_EQ(opened.status().code(), absl::StatusCode::kFailedPrecondition) << opened.status();
    EXPECT_THAT(std::string(opened.status().message()), ::testing::HasSubstr("metrics.jsonl\" is not a file"));
    ASSERT_EQ(unlink(path.c_str()), 0);
  }
  EXPECT_EQ(*ReadFile(run_ + "/victim", 10), "kept");
}

TEST_F(MetricsFiles, GiveBackTheNewestLines) {
  Run(0, 9);
  std::vector<v1::StepMetrics> recent;
  ASSERT_TRUE(MetricsFile::Open(run_, 7, 3, &recent).ok());
  EXPECT_THAT(Steps(recent), ElementsAre(5, 6, 7));
}

TEST(MetricsLines, KeepEveryBitAndNonFiniteNumbersAsStrings) {
  v1::StepMetrics m = Metrics(3, 1.0 / 3);
  m.set_grad_norm(std::numeric_limits<double>::infinity());
  m.set_lr(std::nextafter(1e-3, 1));
  m.set_skipped(true);
  m.set_loss_scale(65536);
  m.set_time_ms(1'700'000'000'123);
  m.set_eval_loss(-std::numeric_limits<double>::infinity());
  v1::StepMetrics read;
  ASSERT_TRUE(ParseMetricsLine(MetricsLine(m), &read));
  EXPECT_EQ(read.SerializeAsString(), m.SerializeAsString());
  m.set_loss(std::nan(""));
  EXPECT_NE(MetricsLine(m).find("\"loss\":\"NaN\""), std::string::npos);
  ASSERT_TRUE(ParseMetricsLine(MetricsLine(m), &read));
  EXPECT_TRUE(std::isnan(read.loss()));
}

TEST(MetricsQueues, AreBoundedAndAcknowledged) {
  MetricsQueue queue(4);
  for (int64_t step = 1; step <= 6; ++step) queue.Add(Metrics(step));
  EXPECT_EQ(queue.dropped(), 2);
  EXPECT_THAT(Steps(queue.After(0, 3)), ElementsAre(3, 4, 5));
  EXPECT_THAT(Steps(queue.After(5, 3)), ElementsAre(6));
  queue.Acknowledge(4);
  EXPECT_THAT(Steps(queue.After(0, 10)), ElementsAre(5, 6));
  queue.Acknowledge(100);
  EXPECT_THAT(queue.After(0, 10), IsEmpty());
}

}  // namespace
}  // namespace hierad
