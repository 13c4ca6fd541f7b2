#include "worker/checkpoint/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <fcntl.h>
#include <fstream>
#include <limits>
#include <random>
#include <string>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include "base/fs.h"
#include "base/status.h"
#include "worker/checkpoint/manifest.h"
#include "worker/checkpoint/safetensors.h"

namespace hierad {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

ParameterTable Table(int64_t width = 100) {
  ParameterTable table;
  table.parameters.push_back({"blocks.0.w", {3, width}, Init::kZero, 1, 0, true, false, 0, 3 * width, 0});
  table.parameters.push_back({"norm.bias", {5}, Init::kZero, 1, 0, false, false, 0, 5, (3 * width + 63) / 64 * 64});
  table.flat_size = table.parameters[1].offset + 64;
  table.num_elements = 3 * width + 5;
  return table;
}

CheckpointContents Contents(const ParameterTable& table, int64_t step, std::optional<double> eval_loss = std::nullopt) {
  CheckpointContents c;
  c.state.step = step;
  c.state.updates = step - 1;
  c.state.nan_steps_in_row = 1;
  c.state.loss_scale = {8192, 1999};
  c.statistics.mean = {0.1, -2.5e-300};
  c.statistics.std = {1.0 / 3, 7};
  c.eval_loss = eval_loss;
  c.has_best = eval_loss.has_value();
  c.best_eval_loss = eval_loss.value_or(0);
  c.algorithms = "card.cublasLt-1 0123";
  int k = 0;
  for (auto* flat : {&c.state.parameters, &c.state.exp_avg, &c.state.exp_avg_sq}) {
    flat->assign(size_t(table.flat_size), 0.0f);
    ++k;
    for (const Parameter& p : table.parameters) {
      for (int64_t i = 0; i < p.size; ++i) (*flat)[size_t(p.offset + i)] = float(step * 1000 + i) / float(k + 2);
    }
  }
  return c;
}

void Put(const std::string& path, const std::string& data) { std::ofstream(path, std::ios::binary) << data; }

v1::CheckpointSpec Keep(int last, bool best) {
  v1::CheckpointSpec spec;
  spec.set_keep_last(last);
  spec.set_keep_best(best);
  return spec;
}

class Checkpoints : public ::testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/checkpoint-test-XXXXXX";
    run_ = mkdtemp(name);
    spec_.set_seed(7);
  }
  void TearDown() override { EXPECT_TRUE(RemoveTree(run_).ok()); }

  void Write(int64_t step, std::optional<double> eval_loss = std::nullopt) {
    auto folder = CheckpointFolder::Open(run_);
    ASSERT_TRUE(folder.ok());
    const auto info = folder->Write(Contents(table_, step, eval_loss), table_, spec_);
    ASSERT_TRUE(info.ok()) << info.status();
  }
  std::string PathOf(int64_t step) const { return run_ + "/checkpoints/" + CheckpointName(step); }
  std::vector<int64_t> Steps() {
    auto folder = CheckpointFolder::Open(run_);
    std::vector<int64_t> steps;
    const auto list = folder->List();
    for (const auto& info : *list) steps.push_back(info.step());
    return steps;
  }
  void ExpectIs(const CheckpointContents& c, int64_t step) {
    const auto expected = Contents(table_, step);
    EXPECT_EQ(c.state.step, step);
    EXPECT_EQ(c.state.updates, expected.state.updates);
    EXPECT_EQ(c.state.nan_steps_in_row, 1);
    EXPECT_EQ(c.state.loss_scale.value, 8192);
    EXPECT_EQ(c.state.loss_scale.good_steps, 1999);
    EXPECT_EQ(c.algorithms, "card.cublasLt-1 0123");
    EXPECT_EQ(c.state.parameters, expected.state.parameters);
    EXPECT_EQ(c.state.exp_avg, expected.state.exp_avg);
    EXPECT_EQ(c.state.exp_avg_sq, expected.state.exp_avg_sq);
    EXPECT_EQ(c.statistics.mean, expected.statistics.mean);
    EXPECT_EQ(c.statistics.std, expected.statistics.std);
  }

  std::string run_;
  v1::JobSpec spec_;
  const ParameterTable table_ = Table();
};

TEST_F(Checkpoints, ReadBackWhatWasWritten) {
  EXPECT_TRUE(absl::IsNotFound(ReadNewest(run_, table_, nullptr).status()));
  Write(12, 0.25);
  const auto newest = ReadNewest(run_, table_, nullptr);
  ASSERT_TRUE(newest.ok()) << newest.status();
  ExpectIs(*newest, 12);
  EXPECT_EQ(newest->eval_loss, 0.25);
  EXPECT_TRUE(newest->has_best);
  auto folder = CheckpointFolder::Open(run_);
  const auto list = folder->List();
  ASSERT_EQ(list->size(), 1u);
  const v1::CheckpointInfo& info = list->front();
  EXPECT_EQ(info.path(), PathOf(12));
  EXPECT_TRUE(info.best());
  EXPECT_FALSE(info.damaged());
  EXPECT_EQ(info.sha256().size(), 64u);
  int64_t bytes = 0;
  for (const char* name : {kModelFile, kOptimizerFile, kStateFile, kManifestFile}) {
    struct stat s{};
    ASSERT_EQ(stat((PathOf(12) + "/" + name).c_str(), &s), 0);
    bytes += s.st_size;
  }
  EXPECT_EQ(info.bytes(), bytes);
}

TEST_F(Checkpoints, RetentionKeepsTheNewestAndTheBest) {
  Write(10, 0.5);
  Write(20, 0.3);
  Write(30, 0.4);
  Write(40, std::numeric_limits<double>::quiet_NaN());
  Write(50);
  auto folder = CheckpointFolder::Open(run_);
  ASSERT_TRUE(folder->Retain(Keep(2, true)).ok());
  EXPECT_THAT(Steps(), ElementsAre(50, 40, 20));
  ASSERT_TRUE(folder->Retain(Keep(1, false)).ok());
  EXPECT_THAT(Steps(), ElementsAre(50));
}

TEST_F(Checkpoints, NonFiniteWeightsAreRefused) {
  auto folder = CheckpointFolder::Open(run_);
  auto contents = Contents(table_, 5);
  contents.state.parameters[3] = std::numeric_limits<float>::quiet_NaN();
  const auto status = folder->Write(contents, table_, spec_).status();
  EXPECT_EQ(ReasonOf(status), v1::REASON_NUMERICS);
  EXPECT_THAT(std::string(status.message()), HasSubstr("blocks.0.w"));
  EXPECT_THAT(Steps(), IsEmpty());
}

// Kills a child at the k-th change to the disk, for every k: a whole checkpoint is there each time, and what the next
// process finds is the old or the new one, to the bit.
TEST_F(Checkpoints, AreWholeAtEveryInstant) {
  Write(10);
  Write(20);
  int stages = 0;
  for (bool killed = true; killed; ++stages) {
    const pid_t child = fork();
    if (child == 0) {
      auto folder = CheckpointFolder::Open(run_);
      int left = stages;
      folder->set_stage_hook([&](const char*) {
        if (left-- == 0) kill(getpid(), SIGKILL);
      });
      const bool done = folder->Write(Contents(table_, 30), table_, spec_).ok() && folder->Retain(Keep(1, false)).ok();
      _exit(done ? 0 : 1);
    }
    int status = 0;
    waitpid(child, &status, 0);
    killed = WIFSIGNALED(status);
    ASSERT_TRUE(killed || WEXITSTATUS(status) == 0);
    std::vector<std::string> damaged;
    const auto newest = ReadNewest(run_, table_, &damaged);
    ASSERT_TRUE(newest.ok()) << "stage " << stages << ": " << newest.status();
    EXPECT_THAT(damaged, IsEmpty()) << stages;
    ExpectIs(*newest, newest->state.step == 30 ? 30 : 20);
  }
  EXPECT_GT(stages, 12);
  EXPECT_THAT(Steps(), ElementsAre(30));
  EXPECT_THAT(*ListFolder(run_ + "/checkpoints"), ElementsAre(CheckpointName(30)));
}

TEST_F(Checkpoints, TruncatedOrFlippedOnesAreNeverLoaded) {
  Write(10);
  int tried = 0;
  for (const char* name : {kModelFile, kOptimizerFile, kStateFile, kManifestFile}) {
    Write(20);
    const std::string path = PathOf(20) + "/" + name;
    const std::string whole = *ReadFile(path, 1 << 20);
    std::vector<std::string> variants;
    for (size_t n = 0; n < whole.size(); n += whole.size() / 7 + 1) variants.push_back(whole.substr(0, n));
    for (size_t at = 0; at < whole.size(); at += whole.size() / 13 + 1) {
      variants.push_back(whole);
      variants.back()[at] ^= char(1 << (at % 8));
    }
    variants.push_back(whole + "x");
    for (const std::string& variant : variants) {
      Put(path, variant);
      const auto direct = ReadCheckpoint(PathOf(20), table_);
      // A manifest with other white space still says the same.
      if (direct.ok() && std::string(name) == kManifestFile) {
        ExpectIs(*direct, 20);
        continue;
      }
      EXPECT_EQ(ReasonOf(direct.status()), v1::REASON_CHECKPOINT) << direct.status();
      std::vector<std::string> damaged;
      const auto newest = ReadNewest(run_, table_, &damaged);
      ASSERT_TRUE(newest.ok()) << newest.status();
      ExpectIs(*newest, 10);
      EXPECT_THAT(damaged, ElementsAre(PathOf(20)));
      EXPECT_TRUE(Exists(PathOf(20) + "/" + kDamagedMark));
      ASSERT_EQ(unlink((PathOf(20) + "/" + kDamagedMark).c_str()), 0);
      ++tried;
    }
  }
  EXPECT_GT(tried, 60);
}

// As a crash of the machine or a bad disk leaves it: cut at every 4 KiB, and 10,000 single bits turned, wherever.
TEST_F(Checkpoints, CutAtEveryPageOrWithAnyBitTurnedThePreviousOneIsLoaded) {
  const uint64_t seed = uint64_t(std::chrono::steady_clock::now().time_since_epoch().count());
  RecordProperty("seed", std::to_string(seed));
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  const ParameterTable large = Table(20000);
  for (int64_t step : {10, 20}) {
    ASSERT_TRUE(CheckpointFolder::Open(run_)->Write(Contents(large, step), large, spec_).ok());
  }
  const auto is_previous = [&](const std::string& what) {
    std::vector<std::string> damaged;
    const auto newest = ReadNewest(run_, large, &damaged);
    ASSERT_TRUE(newest.ok()) << what << newest.status();
    ASSERT_EQ(newest->state.step, 10) << what;
    ASSERT_EQ(newest->state.parameters, Contents(large, 10).state.parameters) << what;
    ASSERT_THAT(damaged, ElementsAre(PathOf(20)));
    ASSERT_EQ(unlink((PathOf(20) + "/" + kDamagedMark).c_str()), 0);
  };
  int cuts = 0;
  for (const char* name : {kModelFile, kOptimizerFile, kStateFile, kManifestFile}) {
    const std::string path = PathOf(20) + "/" + name;
    const std::string whole = *ReadFile(path, 1 << 20);
    for (size_t size = 0; size < whole.size(); size += 4096, ++cuts) {
      Put(path, whole.substr(0, size));
      is_previous(std::string(name) + " cut at " + std::to_string(size));
      if (HasFatalFailure()) return;
    }
    Put(path, whole);
  }
  EXPECT_GT(cuts, 170);

  ASSERT_TRUE(RemoveTree(PathOf(20)).ok());
  Write(20);   // small: each bit is as likely as any other
  const CheckpointContents whole = Contents(table_, 20);
  struct File {
    std::string name, data;
    UniqueFd fd;
  };
  std::vector<File> files;
  size_t total = 0;
  for (const char* name : {kModelFile, kOptimizerFile, kStateFile, kManifestFile}) {
    const std::string path = PathOf(20) + "/" + name;
    files.push_back({name, *ReadFile(path, 1 << 20), UniqueFd(open(path.c_str(), O_WRONLY | O_CLOEXEC))});
    total += files.back().data.size();
  }
  int same = 0;
  for (int i = 0; i < 10000; ++i) {
    size_t at = random() % total;
    File* file = files.data();
    for (; at >= file->data.size(); ++file) at -= file->data.size();
    const char turned = char(file->data[at] ^ char(1 << (random() % 8)));
    ASSERT_EQ(pwrite(file->fd.get(), &turned, 1, off_t(at)), 1);
    const auto read = ReadCheckpoint(PathOf(20), table_);
    ASSERT_EQ(pwrite(file->fd.get(), &file->data[at], 1, off_t(at)), 1);
    if (!read.ok()) {
      ASSERT_EQ(ReasonOf(read.status()), v1::REASON_CHECKPOINT) << file->name << " " << at << ": " << read.status();
      continue;
    }
    // In the manifest alone, where it says nothing of the contents: white space, the time it was written.
    ASSERT_EQ(file->name, kManifestFile) << at;
    ASSERT_EQ(read->state.parameters, whole.state.parameters);
    ASSERT_EQ(read->state.exp_avg, whole.state.exp_avg);
    ASSERT_EQ(read->state.step, 20);
    ++same;
  }
  EXPECT_LT(same, 1000);
}

TEST_F(Checkpoints, ADamagedOneIsNotTriedAgainAndIsReplaced) {
  Write(10);
  Write(20);
  const std::string model = PathOf(20) + "/" + kModelFile;
  const std::string whole = *ReadFile(model, 1 << 20);
  ASSERT_TRUE(WriteFileAtomic(model, whole.substr(0, whole.size() / 2)).ok());
  ASSERT_TRUE(ReadNewest(run_, table_, nullptr).ok());
  // Whole again, yet marked: the mark counts.
  ASSERT_TRUE(WriteFileAtomic(model, whole).ok());
  std::vector<std::string> damaged;
  EXPECT_EQ(ReadNewest(run_, table_, &damaged)->state.step, 10);
  EXPECT_THAT(damaged, ElementsAre(PathOf(20)));
  EXPECT_TRUE(CheckpointFolder::Open(run_)->List()->front().damaged());
  // The run comes to step 20 again.
  Write(20);
  EXPECT_EQ(ReadNewest(run_, table_, nullptr)->state.step, 20);
  EXPECT_FALSE(CheckpointFolder::Open(run_)->List()->front().damaged());
}

TEST_F(Checkpoints, AllDamagedEndsWithThatReason) {
  Write(10);
  Write(20);
  for (int64_t step : {10, 20}) ASSERT_EQ(unlink((PathOf(step) + "/" + kStateFile).c_str()), 0);
  for (int round = 0; round < 2; ++round) {
    std::vector<std::string> damaged;
    const auto newest = ReadNewest(run_, table_, &damaged);
    EXPECT_EQ(ReasonOf(newest.status()), v1::REASON_CHECKPOINT);
    EXPECT_THAT(std::string(newest.status().message()), HasSubstr("all 2 checkpoints"));
    EXPECT_EQ(damaged.size(), 2u);
  }
}

TEST_F(Checkpoints, OfAnotherModelAreRefusedButNotMarked) {
  Write(10);
  const auto newest = ReadNewest(run_, Table(101), nullptr);
  EXPECT_EQ(ReasonOf(newest.status()), v1::REASON_USER_ERROR);
  EXPECT_THAT(std::string(newest.status().message()), AllOf(HasSubstr("[3, 100]"), HasSubstr("[3, 101]"), HasSubstr("output.folder")));
  EXPECT_TRUE(ReadNewest(run_, table_, nullptr).ok());
}

// A limit on file size stands for a full disk: some bytes are written, then write() fails.
TEST_F(Checkpoints, AFullDiskLeavesTheLastOneUntouched) {
  Write(10);
  const pid_t child = fork();
  if (child == 0) {
    signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{2000, 2000};
    setrlimit(RLIMIT_FSIZE, &limit);
    auto folder = CheckpointFolder::Open(run_);
    const auto status = folder->Write(Contents(table_, 20), table_, spec_).status();
    const std::string message(status.message());
    const bool right = ReasonOf(status) == v1::REASON_CHECKPOINT && message.find(run_ + "/checkpoints") != std::string::npos &&
                       message.find("it needs 10") != std::string::npos && message.find("are free") != std::string::npos &&
                       message.find("File too large") != std::string::npos;
    _exit(right ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_THAT(*ListFolder(run_ + "/checkpoints"), ElementsAre(CheckpointName(10)));
  ExpectIs(*ReadNewest(run_, table_, nullptr), 10);
}

TEST_F(Checkpoints, ExportHoldsTheWeights) {
  const auto contents = Contents(table_, 9);
  const auto path = ExportModel(run_, contents.state, table_, spec_);
  ASSERT_TRUE(path.ok()) << path.status();
  EXPECT_EQ(*path, run_ + "/exported/model.safetensors");
  const auto file = ReadSafetensors(*path);
  ASSERT_TRUE(file.ok());
  EXPECT_EQ(file->tensors.size(), 2u);
  EXPECT_EQ(file->tensors.at("norm.bias").data[4], contents.state.parameters[size_t(table_.parameters[1].offset) + 4]);
  EXPECT_EQ(file->metadata.at("hierad.step"), "9");
  EXPECT_THAT(*ListFolder(run_ + "/exported"), ElementsAre("model.safetensors"));
}

}  // namespace
}  // namespace hierad
