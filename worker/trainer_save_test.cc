// What the trainer saves, when, and what it does where saving fails.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <memory>
#include <sstream>
#include <string>
#include <unistd.h>
#include <utility>
#include <vector>

#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/clock.h"
#include "base/fs.h"
#include "worker/trainer_harness.h"

namespace hierad {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

// step.shard_optimizer: every checkpoint, the failed and the last ones too, is made by all ranks at one step.
TEST_F(Trainers, AStateThatRanksShareIsSavedByAllAtOneStep) {
  for (const int behind : {0, 1}) {
    const std::string undisturbed = NewFolder(), paused = NewFolder(), failing = NewFolder(), halted = NewFolder(), alone = NewFolder();
    Attempt plain;
    plain.faults.records_behind = behind;
    ASSERT_THAT(Run(2, plain, undisturbed)[0], HasSubstr("COMPLETED"));
    Attempt shared = plain;
    shared.faults.shared = true;
    Attempt pause = shared;
    pause.prepare = [](FakeSession* session, int rank) {
      session->on_step = [rank](FakeSession* s, int64_t step) {
        if (rank == 1 && step == 6) s->wanted = Session::Want::kPause;
        if (rank == 0 && step == 2) s->request = 1;
      };
    };
    for (const std::string& end : Run(2, pause, paused)) EXPECT_THAT(end, HasSubstr("REASON_PREEMPTED stopped after step"));
    for (const std::string& end : Run(2, shared, paused)) EXPECT_THAT(end, HasSubstr("completed 18 steps"));
    EXPECT_EQ(Weights(paused), Weights(undisturbed));
    EXPECT_EQ(Lines(paused), Lines(undisturbed));
    // A checkpoint that cannot be written: the next ones are made, and the last.
    Attempt fails = shared;
    bool removed = false;
    fails.stage = [&](const char*) {
      if (!std::exchange(removed, true)) (void)RemoveTree(failing + "/checkpoints");   // from under the writer
    };
    for (const std::string& end : Run(2, fails, failing)) EXPECT_THAT(end, HasSubstr("completed 18 steps"));
    EXPECT_EQ(Weights(failing), Weights(undisturbed));
    EXPECT_THAT(Saved(failing), Contains(CheckpointName(18)));
    // Steps that are not finite end the run on all ranks, with a checkpoint.
    for (const auto& [folder, base] : {std::pair{halted, shared}, std::pair{alone, plain}}) {
      Attempt nan = base;
      nan.faults.non_finite = [](int64_t step) { return step >= 9; };
      for (const std::string& end : Run(2, nan, folder)) EXPECT_THAT(end, HasSubstr("REASON_NUMERICS"));
    }
    EXPECT_EQ(Saved(halted).back(), Saved(alone).back());
  }
}

TEST_F(Trainers, ACheckpointIsTakenOnRequestOnce) {
  Attempt attempt;
  const std::string folder = folder_;
  attempt.change = [](TrainerOptions* options) { options->spec.mutable_checkpoint()->set_every_steps(1000); };
  attempt.prepare = [folder](FakeSession* session, int rank) {
    session->on_step = [folder, rank](FakeSession* s, int64_t step) {
      if (rank != 0) return;
      if (step == 5) s->request = 1;
      if (step == 7) AwaitCheckpoint(folder, 6), kill(getpid(), SIGKILL);
    };
  };
  EXPECT_THAT(Run(2, attempt, folder_), Contains("killed"));
  EXPECT_THAT(Saved(folder_), ElementsAre(CheckpointName(6)));
}

// The first checkpoint's writing lasts until step 14: no step waits for it.
TEST_F(Trainers, AStepNeverWaitsForACheckpointThatIsBeingWritten) {
  for (const auto& [asked, shared] : {std::pair{false, false}, {true, false}, {true, true}}) {
    SCOPED_TRACE(absl::StrCat(asked, shared));
    const std::string folder = NewFolder();
    static std::atomic<int64_t> at{0};
    static std::atomic<bool> held{false};
    Attempt attempt;
    attempt.faults.shared = shared;
    attempt.faults.records_behind = 1;
    attempt.change = [](TrainerOptions* options) { options->spec.mutable_checkpoint()->set_keep_last(10); };
    attempt.stage = [&, first = true](const char*) mutable {
      if (!std::exchange(first, false)) return;
      const auto deadline = Clock::System().Monotonic() + std::chrono::seconds(10);
      while (at < 14 && !held) {
        held = Clock::System().Monotonic() > deadline;
        SleepFor(std::chrono::milliseconds(1));
      }
    };
    attempt.prepare = [asked = asked, folder](FakeSession* session, int rank) {
      session->on_step = [=](FakeSession* s, int64_t step) {
        at = step;
        if (asked && rank == 0 && step == 4) s->request = 1;
        if (rank == 0 && step == 15) AwaitCheckpoint(folder, 4);
        if (step >= 15) SleepFor(std::chrono::milliseconds(50));
      };
    };
    attempt.look = [](const FakeSession& s) { return absl::StrCat(held ? "held" : "free", " left out ", s.totals.checkpoints_left_out()); };
    // Of steps 8, 12 and 16 none waits its turn; what was asked for after step 4 comes once the first one stands.
    const std::string end = Run(2, attempt, folder)[0];
    EXPECT_THAT(end, AllOf(HasSubstr("completed 18 steps"), HasSubstr(asked ? "free left out 0" : "free left out 2")));
    const std::vector<std::string> saved = Saved(folder);
    ASSERT_EQ(saved.size(), 3u) << absl::StrJoin(saved, " ");
    EXPECT_EQ(saved[0], CheckpointName(4));
    EXPECT_GE(saved[1], CheckpointName(asked ? 15 : 16));
    EXPECT_EQ(saved[2], CheckpointName(18));
  }
}

TEST_F(Trainers, SayWhereOtherAlgorithmsMakeOtherBits) {
  const auto warned = [&](const std::string& algorithms) {
    Attempt attempt;
    std::ostringstream warnings;
    attempt.faults.algorithms = algorithms;
    attempt.prepare = [&](FakeSession* session, int) {
      spdlog::set_default_logger(std::make_shared<spdlog::logger>("test", std::make_shared<spdlog::sinks::ostream_sink_mt>(warnings)));
      spdlog::set_level(spdlog::level::warn);
      session->on_step = [](FakeSession* s, int64_t step) {
        if (step >= s->first_step) s->wanted = Session::Want::kPause;
      };
    };
    attempt.look = [&](const FakeSession&) { return warnings.str(); };
    return Run(1, attempt, folder_)[0];
  };
  EXPECT_THAT(warned("card.cublasLt-1 aa"), Not(HasSubstr("algorithms")));
  EXPECT_THAT(warned("card.cublasLt-1 aa"), Not(HasSubstr("algorithms")));
  EXPECT_THAT(warned("card.cublasLt-1 bb"), HasSubstr("made by the algorithms card.cublasLt-1 aa, here they are card.cublasLt-1 bb"));
}

TEST_F(Trainers, EvaluateEveryEpochAndKeepTheBest) {
  Attempt attempt;
  const std::string train = folder_ + "/train.npy", held_out = folder_ + "/held_out.npy";
  WriteNpy(train, 41);
  WriteNpy(held_out, 3);   // fewer than ranks x batch: the second rank has none
  attempt.change = [&](TrainerOptions* options) {
    options->spec.mutable_data()->set_source("npy");
    options->spec.mutable_data()->set_path(train);
    options->spec.mutable_eval()->set_path(held_out);
    options->spec.mutable_checkpoint()->set_every_steps(1);
    options->spec.mutable_checkpoint()->set_keep_last(1);
  };
  attempt.look = [](const FakeSession& s) {
    std::string steps;
    for (const auto& m : s.metrics) {
      if (m.has_eval_loss()) steps += std::to_string(m.step()) + " ";
    }
    int best = 0;
    for (const auto& info : s.checkpoints) best += info.best();
    return steps + "best " + std::to_string(best);
  };
  const auto two = Run(2, attempt, folder_);
  EXPECT_THAT(two[0], HasSubstr("completed 18 steps 6 12 18 best 1"));
  EXPECT_LE(Saved(folder_).size(), 2u);
}

TEST_F(Trainers, ADamagedNewestCheckpointIsPassedOver) {
  const std::string undisturbed = NewFolder();
  ASSERT_THAT(Run(2, {}, undisturbed)[0], HasSubstr("COMPLETED"));
  Attempt killed;
  const std::string folder = folder_;
  killed.prepare = [folder](FakeSession* session, int rank) {
    session->on_step = [folder, rank](FakeSession*, int64_t step) {
      if (rank != 0) return;
      if (step == 5) AwaitCheckpoint(folder, 4);
      if (step > 5 && step < 8) SleepFor(std::chrono::milliseconds(50));   // until its writer has ended, too
      if (step == 10) AwaitCheckpoint(folder, 8), kill(getpid(), SIGKILL);
    };
  };
  EXPECT_THAT(Run(2, killed, folder_), Contains("killed"));
  const std::string model = folder_ + "/checkpoints/" + CheckpointName(8) + "/model.safetensors";
  ASSERT_EQ(truncate(model.c_str(), 100), 0);
  Attempt rest;
  rest.look = [](const FakeSession& s) { return "first " + std::to_string(s.first_step); };
  EXPECT_THAT(Run(2, rest, folder_)[0], HasSubstr("synthetic: random numbers first 5"));
  EXPECT_EQ(Weights(folder_), Weights(undisturbed));
  EXPECT_EQ(Lines(folder_), Lines(undisturbed));
  for (const std::string& name : Saved(folder_)) ASSERT_EQ(unlink((folder_ + "/checkpoints/" + name + "/state.json").c_str()), 0);
  for (const std::string& end : Run(2, {}, folder_)) EXPECT_THAT(end, AllOf(HasSubstr("REASON_CHECKPOINT"), HasSubstr("are damaged")));
}

TEST_F(Trainers, GoOnWhenTheCheckpointsFolderIsRemoved) {
  Attempt attempt;
  const std::string folder = folder_;
  attempt.prepare = [folder](FakeSession* session, int) {
    session->on_step = [folder](FakeSession*, int64_t step) {
      if (step == 6) (void)RemoveTree(folder + "/checkpoints");
    };
  };
  EXPECT_THAT(Run(1, attempt, folder_)[0], HasSubstr("COMPLETED"));
  EXPECT_THAT(Saved(folder_), Contains(CheckpointName(33)));
}

}  // namespace
}  // namespace hierad
