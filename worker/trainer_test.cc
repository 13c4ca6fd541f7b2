#include "worker/trainer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <csignal>
#include <cstring>
#include <limits>
#include <string>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/fs.h"
#include "base/status.h"
#include "worker/checkpoint/manifest.h"
#include "worker/checkpoint/safetensors.h"
#include "worker/trainer_harness.h"

namespace hierad {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

TEST_F(Trainers, TrainToTheEnd) {
  Attempt attempt;
  attempt.look = [](const FakeSession& s) {
    std::string phases;
    for (v1::Phase phase : s.phases) phases += v1::Phase_Name(phase).substr(6) + " ";
    return phases + std::to_string(s.step) + "/" + std::to_string(s.total_steps) + " first " + std::to_string(s.first_step) + " metrics " +
           std::to_string(s.metrics.size()) + " checkpoints " + std::to_string(s.checkpoints.size()) + (s.samples_per_s > 0 ? " fast" : "");
  };
  const auto ends = Run(1, attempt, folder_);
  // 41 samples / 4: 11 steps an epoch.
  EXPECT_THAT(ends[0], ::testing::MatchesRegex(
                           "REASON_COMPLETED completed 33 steps; its data were synthetic: random numbers RENDEZVOUS LOADING TRAINING (CHECKPOINTING TRAINING )+STOPPING "
                           "CHECKPOINTING STOPPING DONE 33/33 first 1 metrics 33 checkpoints 2 fast"));
  EXPECT_EQ(Saved(folder_).back(), CheckpointName(33));
  const std::string lines = Lines(folder_);
  EXPECT_EQ(std::count(lines.begin(), lines.end(), '\n'), 33);
  EXPECT_THAT(lines, HasSubstr("{\"step\":11,\"epoch\":1.0,"));
  EXPECT_THAT(lines, HasSubstr("\"samples\":1,"));
  char target[64] = {};
  EXPECT_GT(readlink((folder_ + "/train.log").c_str(), target, sizeof target), 0);
  EXPECT_STREQ(target, "rank-0.log");
  const auto model = ReadSafetensors(folder_ + "/exported/model.safetensors");
  ASSERT_TRUE(model.ok());
  EXPECT_EQ(model->tensors.count("pos_embed"), 1u);
}

INSTANTIATE_TEST_SUITE_P(Lag, TrainersBehind, ::testing::Values(0, 1, 3));

TEST_P(TrainersBehind, KilledAtAnyStepEndWithTheSameWeights) {
  const std::string undisturbed = NewFolder();
  ASSERT_THAT(Run(2, {}, undisturbed)[1], HasSubstr("REASON_COMPLETED completed 18 steps"));
  int attempts = 0;
  std::vector<std::string> ends = {"killed"};
  // Rank 0 or 1 dies some steps after it began: while training, and (rank 0) while saving.
  for (uint64_t k = 0; ends[0].find("COMPLETED") == std::string::npos; ++k) {
    ASSERT_LT(++attempts, 40);
    Attempt attempt;
    attempt.faults.records_behind = GetParam();
    const RandomStream draws{11, Draw::kOrder, uint32_t(k), 0};
    // In the middle of a checkpoint's writing, too.
    attempt.stage = [left = draws.Word(2) % 3 == 0 ? int(5 + draws.Word(3) % 20) : 1000](const char*) mutable {
      if (--left == 0) kill(getpid(), SIGKILL);
    };
    attempt.prepare = [draws](FakeSession* session, int rank) {
      if (rank != int(draws.Word(0) % 2)) return;
      const int64_t after = 3 + draws.Word(1) % 6;
      const bool saving = draws.Word(2) % 2 == 0;
      session->on_step = [=](FakeSession* s, int64_t step) {
        if (step >= s->first_step - 1 + after && !(saving && rank == 0)) kill(getpid(), SIGKILL);
      };
      session->on_phase = [=](v1::Phase phase, int64_t step) {
        if (saving && rank == 0 && phase == v1::PHASE_CHECKPOINTING && step >= session->first_step - 1 + after) kill(getpid(), SIGKILL);
      };
    };
    if (attempts > 12) attempt.prepare = [](FakeSession*, int) {}, attempt.stage = nullptr;
    ends = Run(2, attempt, folder_);
  }
  EXPECT_GT(attempts, 3);
  EXPECT_EQ(Weights(folder_), Weights(undisturbed));
  EXPECT_EQ(Lines(folder_), Lines(undisturbed));
}

TEST_F(Trainers, AStopThatOneRankHearsIsSavedAtOneStepByAll) {
  const std::string undisturbed = NewFolder();
  ASSERT_THAT(Run(2, {}, undisturbed)[0], HasSubstr("COMPLETED"));
  Attempt attempt;
  attempt.prepare = [](FakeSession* session, int rank) {
    session->on_step = [rank](FakeSession* s, int64_t step) {
      if (rank == 1 && step == 6) s->wanted = Session::Want::kPause;
    };
  };
  const auto ends = Run(2, attempt, folder_);
  for (const std::string& end : ends) EXPECT_THAT(end, HasSubstr("REASON_PREEMPTED stopped after step 7, which is saved"));
  EXPECT_THAT(Saved(folder_), ElementsAre(CheckpointName(4), CheckpointName(7)));
  EXPECT_FALSE(Exists(folder_ + "/exported/model.safetensors"));
  Attempt rest;
  rest.look = [](const FakeSession& s) { return "first " + std::to_string(s.first_step) + " sent again " + std::to_string(s.metrics.empty() ? 0 : s.metrics.front().step()); };
  EXPECT_THAT(Run(2, rest, folder_)[0], HasSubstr("synthetic: random numbers first 8 sent again 1"));
  EXPECT_EQ(Weights(folder_), Weights(undisturbed));
  EXPECT_EQ(Lines(folder_), Lines(undisturbed));
  // Once more: there is nothing left to do.
  EXPECT_THAT(Run(2, rest, folder_)[0], HasSubstr("completed 18 steps"));
}

TEST_F(Trainers, AShardedRunResumesExactlyAndIsAWholeOnes) {
  Attempt whole;
  whole.fused = true;
  whole.change = [](TrainerOptions* options) { options->spec.mutable_optimizer()->set_clip_norm(0); };
  const std::string undisturbed = NewFolder();
  for (const std::string& end : Run(3, whole, undisturbed)) ASSERT_THAT(end, HasSubstr("COMPLETED"));
  Attempt sharded = whole;
  sharded.change = [&](TrainerOptions* options) {
    whole.change(options);
    options->spec.mutable_step()->set_mode("fused");
    options->spec.mutable_step()->set_shard_optimizer(true);
  };
  Attempt killed = sharded;
  const std::string folder = folder_;
  killed.prepare = [folder](FakeSession* session, int rank) {
    session->on_step = [folder, rank](FakeSession*, int64_t step) {
      if (step == 6 && rank == 0) AwaitCheckpoint(folder, 4), kill(getpid(), SIGKILL);
    };
  };
  EXPECT_THAT(Run(3, killed, folder_), Contains("killed"));
  EXPECT_THAT(Saved(folder_), Contains(CheckpointName(4)));
  for (const std::string& end : Run(3, sharded, folder_)) EXPECT_THAT(end, HasSubstr("COMPLETED"));
  EXPECT_EQ(Weights(folder_), Weights(undisturbed));
}

TEST_F(Trainers, SignalsAndCancellation) {
  static std::atomic<bool> terminate{true};
  Attempt attempt;
  attempt.change = [](TrainerOptions* options) {
    if (options->rank == 1) options->terminate = &terminate;
  };
  for (const std::string& end : Run(2, attempt, folder_)) EXPECT_THAT(end, HasSubstr("REASON_PREEMPTED stopped after step 1,"));
  Attempt cancel;
  cancel.prepare = [](FakeSession* session, int) { session->wanted = Session::Want::kCancel; };
  for (const std::string& end : Run(2, cancel, folder_)) EXPECT_THAT(end, HasSubstr("REASON_CANCELLED stopped after step 2,"));
}

// Results that come late do not make pictures of later weights.
TEST_P(TrainersBehind, PicturesShowTheWeightsOfTheirStep) {
  Attempt attempt;
  std::string seen;
  attempt.faults.records_behind = GetParam();
  attempt.faults.see_picture = [&](int64_t step) { absl::StrAppend(&seen, " ", step); };
  attempt.change = [](TrainerOptions* options) { options->spec.mutable_output()->set_pictures_every_epochs(1); };
  attempt.look = [&](const FakeSession&) { return absl::StrCat("pictures", seen, "."); };
  EXPECT_THAT(Run(2, attempt, folder_)[0], AllOf(HasSubstr("completed 18 steps"), HasSubstr("pictures 6 12 18.")));
}

// What auto stands for on this machine has to do what the job asks.
TEST_F(Trainers, AModeThatCannotDoWhatIsAskedIsRefused) {
  Attempt attempt;
  attempt.change = [](TrainerOptions* options) {
    options->spec.mutable_resources()->set_device("auto");
    options->spec.mutable_step()->set_mode("auto");
    options->spec.mutable_step()->set_checkpoint_decoder(true);
  };
  EXPECT_THAT(Run(1, attempt, folder_)[0], HasSubstr("REASON_USER_ERROR step.checkpoint_decoder: true is for step.mode fused; the mode is optimized"));
}

TEST_F(Trainers, AnotherRateIsTakenOnByAllRanksAtOneStepAndSurvivesAKill) {
  // Each rank's rates, step by step.
  const auto rates = [&](Attempt attempt, const std::string& folder) {
    std::string seen;
    attempt.faults.see_rate = [&](int64_t step, double lr) { seen += " " + std::to_string(step) + ":" + std::to_string(lr); };
    attempt.look = [&](const FakeSession&) { return seen; };
    return Run(2, attempt, folder);
  };
  Attempt change;
  change.prepare = [](FakeSession* session, int rank) {
    session->on_step = [rank](FakeSession* s, int64_t step) {
      if (step == 5 && rank == 0) s->wanted_lr = 0.02;
    };
  };
  const auto whole = rates(change, folder_);
  EXPECT_EQ(whole[0], whole[1]);
  // Heard of after step 5, told in step 6, which is saved.
  EXPECT_THAT(Saved(folder_), Contains(CheckpointName(18)));
  EXPECT_THAT(whole[0], HasSubstr("completed 18 steps"));

  const std::string other = NewFolder();
  Attempt killed = change;
  killed.prepare = [](FakeSession* session, int rank) {
    session->on_step = [rank](FakeSession* s, int64_t step) {
      if (step == 5 && rank == 0) s->wanted_lr = 0.02;
      if (step == 7) kill(getpid(), SIGKILL);
    };
  };
  EXPECT_THAT(rates(killed, other), Contains("killed"));
  EXPECT_THAT(Saved(other), ElementsAre(CheckpointName(4), CheckpointName(6)));
  Attempt again;
  again.change = [](TrainerOptions* options) { options->spec.mutable_optimizer()->set_lr(0.02); };
  EXPECT_THAT(rates(again, other)[0], HasSubstr("completed 18 steps"));
  EXPECT_EQ(Weights(other), Weights(folder_));
  Attempt unchanged;
  const std::string third = NewFolder();
  rates(unchanged, third);
  EXPECT_NE(Weights(third), Weights(folder_));
}

TEST_F(Trainers, NonFiniteStepsAreSkippedUpToTheLimit) {
  Attempt attempt;
  attempt.faults.non_finite = [](int64_t step) { return step == 2 || step == 3 || step >= 9; };   // 0-based
  attempt.look = [](const FakeSession& s) { return std::to_string(s.nan_steps); };
  const auto ends = Run(2, attempt, folder_);
  for (const std::string& end : ends) {
    EXPECT_THAT(end, AllOf(HasSubstr("REASON_NUMERICS non-finite loss or gradient at step 12"), HasSubstr("3 such steps in a row"), HasSubstr(" 5")));
  }
  EXPECT_THAT(Lines(folder_), HasSubstr("{\"step\":3,\"epoch\":0.5,\"loss\":\"NaN\""));
  // What is left can be resumed, and starts counting anew.
  EXPECT_THAT(Saved(folder_), Contains(CheckpointName(12)));
  EXPECT_THAT(Run(2, {}, folder_)[0], HasSubstr("completed 18 steps"));
}

// They are no business of step.on_nan, however many.
TEST_F(Trainers, OverflowsOfTheLossScaleAreNotCountedAsNonFinite) {
  Attempt attempt;
  attempt.faults.overflows = [](int64_t step) { return step >= 2 && step < 9; };   // 0-based; max_nan_steps is 3
  attempt.look = [](const FakeSession& s) { return absl::StrCat("nan ", s.nan_steps); };
  for (const std::string& end : Run(2, attempt, folder_)) EXPECT_THAT(end, AllOf(HasSubstr("completed 18 steps"), HasSubstr("nan 0")));
  EXPECT_THAT(Lines(folder_), AllOf(HasSubstr("\"loss_scale\":1024.0"), HasSubstr("\"skipped\":true"), Not(HasSubstr("NaN"))));
}

// What is under way when a step halts the run changes nothing: the same end, file and checkpoint as without a lag.
TEST_P(TrainersBehind, DecisionsThatLagChangeNothing) {
  Attempt attempt;
  attempt.faults.records_behind = GetParam();
  attempt.faults.non_finite = [](int64_t step) { return step == 2 || (step >= 9 && step < 12); };
  attempt.change = [](TrainerOptions* options) { options->spec.mutable_checkpoint()->set_every_steps(1); };
  for (const std::string& end : Run(2, attempt, folder_)) EXPECT_THAT(end, HasSubstr("REASON_NUMERICS non-finite loss or gradient at step 12"));
  EXPECT_THAT(Saved(folder_), Contains(CheckpointName(12)));
  const std::string lines = Lines(folder_);
  EXPECT_EQ(std::count(lines.begin(), lines.end(), '\n'), 12);
  attempt.faults.non_finite = [](int64_t) { return false; };
  EXPECT_THAT(Run(2, attempt, folder_)[0], HasSubstr("completed 18 steps"));
  const std::string at_once = NewFolder();
  attempt.faults.non_finite = [](int64_t step) { return step == 2 || (step >= 9 && step < 12); };
  attempt.faults.records_behind = 0;
  (void)Run(2, attempt, at_once);
  attempt.faults.non_finite = [](int64_t) { return false; };
  EXPECT_THAT(Run(2, attempt, at_once)[0], HasSubstr("completed 18 steps"));
  EXPECT_EQ(Weights(folder_), Weights(at_once));
  EXPECT_EQ(Lines(folder_), Lines(at_once));
}

// A stop that one rank hears is agreed on by all at one step, however late the results are looked at.
TEST_P(TrainersBehind, AStopIsAgreedAtOneStep) {
  Attempt attempt;
  attempt.faults.records_behind = GetParam();
  attempt.prepare = [](FakeSession* session, int rank) {
    session->on_step = [rank](FakeSession* s, int64_t step) {
      if (rank == 1 && step == 4) s->wanted = Session::Want::kPause;
    };
  };
  const std::string wanted = absl::StrCat("REASON_PREEMPTED stopped after step ", 5 + 2 * GetParam(), ", which is saved");
  for (const std::string& end : Run(2, attempt, folder_)) EXPECT_THAT(end, HasSubstr(wanted));
  attempt.prepare = [](FakeSession*, int) {};
  EXPECT_THAT(Run(2, attempt, folder_)[0], HasSubstr("completed 18 steps"));
  const std::string undisturbed = NewFolder();
  ASSERT_THAT(Run(2, {}, undisturbed)[0], HasSubstr("COMPLETED"));
  EXPECT_EQ(Weights(folder_), Weights(undisturbed));
  EXPECT_EQ(Lines(folder_), Lines(undisturbed));
}

// The loss is divided by the samples that were read, on all ranks: one that is skipped weighs nothing.
TEST_F(Trainers, SkippedSamplesWeighNothing) {
  const std::string data = NewFolder();
  const auto write = [&](const std::string& name, const std::vector<float>& samples) {
    std::string header = "{'descr': '<f4', 'fortran_order': False, 'shape': (" + std::to_string(samples.size()) + ", 2, 64), }";
    header.resize(117, ' ');
    std::string file = std::string("\x93NUMPY\x01\x00\x76\x00", 10) + header + "\n";
    for (const float value : samples)
      for (int i = 0; i < 128; ++i) file.append(reinterpret_cast<const char*>(&value), sizeof value);
    EXPECT_TRUE(WriteFileAtomic(data + name, file).ok());
  };
  write("/damaged.npy", {1, NAN, 3, 5, 7, NAN, 9, 11});
  write("/lost.npy", {NAN, NAN});
  Attempt attempt;
  std::string path = data + "/damaged.npy";
  attempt.change = [&](TrainerOptions* options) {
    options->spec.mutable_data()->set_source("npy");
    options->spec.mutable_data()->set_path(path);
    options->spec.mutable_data()->set_on_error("skip");
    options->spec.mutable_schedule()->set_epochs(1);
  };
  attempt.look = [](const FakeSession& s) { return absl::StrCat("skipped ", s.data.skipped_samples(), " samples ", s.metrics.empty() ? 0 : s.metrics[0].samples(), " loss ", s.metrics.empty() ? 0 : s.metrics[0].loss()); };
  const std::string two = Run(2, attempt, folder_)[0];
  EXPECT_THAT(two, AllOf(HasSubstr("REASON_COMPLETED completed 1 steps; rank 0 left out 1 sample that could not be read"), HasSubstr(" samples 6 ")));
  attempt.change = [&, change = attempt.change](TrainerOptions* options) {
    change(options);
    options->spec.mutable_step()->set_batch_per_rank(8);
  };
  const std::string one = Run(1, attempt, NewFolder())[0];
  EXPECT_THAT(one, HasSubstr("skipped 2 samples 6 "));
  const auto loss = [](const std::string& text) { return text.substr(text.find("loss")); };
  EXPECT_EQ(loss(one), loss(two));
  EXPECT_THAT(one, HasSubstr("completed 1 steps; rank 0 left out 2 samples that could not be read"));
  path = data + "/lost.npy";
  EXPECT_THAT(Run(1, attempt, NewFolder())[0], AllOf(HasSubstr("REASON_DATA_ERROR"), HasSubstr("none of its 2 samples can be read")));
}

// Found where the sample is converted, told by the rank that has it to all.
TEST_F(Trainers, ASampleThatIsNotFiniteIsNamedByAllRanks) {
  const std::string data = folder_ + "/spoilt.npy";
  WriteNpy(data, 24);
  auto file = ReadFile(data, 1 << 20);
  ASSERT_TRUE(file.ok());
  const float missing = std::numeric_limits<float>::quiet_NaN();
  std::memcpy(file->data() + 128 + (7 * 128 + 64 + 5) * sizeof(float), &missing, sizeof missing);   // sample 7, channel 1, point 5
  ASSERT_TRUE(WriteFileAtomic(data, *file).ok());
  Attempt attempt;
  attempt.change = [&](TrainerOptions* options) {
    options->spec.mutable_data()->set_source("npy");
    options->spec.mutable_data()->set_path(data);
  };
  int first = 0;
  for (const std::string& end : Run(2, attempt, NewFolder())) {
    EXPECT_THAT(end, StartsWith("REASON_DATA_ERROR"));
    EXPECT_THAT(end, HasSubstr("spoilt.npy, sample 7: value nan at channel 1, point 5"));
    first += end.find("rank ") == std::string::npos;
  }
  EXPECT_EQ(first, 1) << "one rank has the sample itself";
  attempt.change = [&](TrainerOptions* options) {
    options->spec.mutable_data()->set_source("npy");
    options->spec.mutable_data()->set_path(data);
    options->spec.mutable_data()->set_on_error("skip");
  };
  EXPECT_THAT(Run(1, attempt, NewFolder())[0], StartsWith("REASON_COMPLETED"));
}

// Held-out rows of another type: both sets come as prepared numbers.
TEST_F(Trainers, SetsOfTwoTypesAreEvaluatedAsOfOne) {
  const auto array = [&](const char* name, const char* descr, int bytes) {
    std::string header = absl::StrCat("{'descr': '", descr, "', 'fortran_order': False, 'shape': (8, 2, 64), }");
    header.resize(117, ' ');
    std::string file = std::string("\x93NUMPY\x01\x00\x76\x00", 10) + header + "\n";
    for (int i = 0; i < 8 * 128; ++i) {
      const auto byte = uint8_t(i * 7 % 251);
      const float number = byte;
      file.append(bytes == 1 ? reinterpret_cast<const char*>(&byte) : reinterpret_cast<const char*>(&number), size_t(bytes));
    }
    EXPECT_TRUE(WriteFileAtomic(folder_ + name, file).ok());
    return folder_ + name;
  };
  const std::string bytes = array("/u8.npy", "|u1", 1), numbers = array("/f32.npy", "<f4", 4);
  Attempt attempt;
  std::vector<std::string> lines;
  for (const std::string& training : {bytes, numbers}) {
    attempt.change = [&](TrainerOptions* options) {
      options->spec.mutable_data()->set_source("npy");
      options->spec.mutable_data()->set_path(training);
      options->spec.mutable_eval()->set_path(numbers);
    };
    const std::string folder = NewFolder();
    EXPECT_THAT(Run(1, attempt, folder)[0], StartsWith("REASON_COMPLETED"));
    lines.push_back(Lines(folder));
  }
  EXPECT_THAT(lines[0], HasSubstr("eval_loss"));
  EXPECT_EQ(lines[0], lines[1]);
}

TEST_F(Trainers, NonFiniteStopsAtOnceWhereAsked) {
  Attempt attempt;
  attempt.faults.non_finite = [](int64_t step) { return step == 2; };
  attempt.change = [](TrainerOptions* options) { options->spec.mutable_step()->set_on_nan("stop"); };
  EXPECT_THAT(Run(1, attempt, folder_)[0], HasSubstr("REASON_NUMERICS non-finite loss or gradient at step 3"));
}

TEST_F(Trainers, TheCountOfNonFiniteStepsSurvivesAResume) {
  Attempt attempt;
  attempt.faults.non_finite = [](int64_t step) { return step >= 2; };
  attempt.prepare = [](FakeSession* session, int) {
    session->on_step = [](FakeSession* s, int64_t step) {
      if (step == 3) s->wanted = Session::Want::kPause;   // ends after step 4: two in a row
    };
  };
  EXPECT_THAT(Run(1, attempt, folder_)[0], HasSubstr("PREEMPTED stopped after step 4"));
  attempt.prepare = [](FakeSession*, int) {};
  EXPECT_THAT(Run(1, attempt, folder_)[0], HasSubstr("NUMERICS non-finite loss or gradient at step 5"));
}

TEST_F(Trainers, ASecondWriterOfAFolderIsRefused) {
  Attempt outer;
  std::string inner;
  const std::string folder = folder_;
  outer.prepare = [&](FakeSession* session, int) {
    session->on_step = [&](FakeSession* s, int64_t step) {
      if (step != 2) return;
      inner = Run(1, {}, folder)[0];
      s->wanted = Session::Want::kPause;
    };
  };
  outer.look = [&](const FakeSession&) { return inner; };
  EXPECT_THAT(Run(1, outer, folder_)[0],
              AllOf(HasSubstr("REASON_PREEMPTED"), HasSubstr("REASON_CHECKPOINT another process still writes to")));
  EXPECT_THAT(Run(1, {}, folder_)[0], HasSubstr("COMPLETED"));
}

TEST_F(Trainers, DoNotStartAnewWhereHieradKnowsACheckpoint) {
  Attempt attempt;
  attempt.change = [](TrainerOptions* options) { options->known_checkpoint_step = 40; };
  for (const std::string& end : Run(2, attempt, folder_)) EXPECT_THAT(end, AllOf(HasSubstr("REASON_CHECKPOINT"), HasSubstr("step 40")));
}

TEST_F(Trainers, OneRanksErrorEndsTheOthersSoon) {
  Attempt attempt;
  attempt.faults.error = [](int64_t step, int rank) {
    return step == 5 && rank == 1 ? ErrorOf(v1::REASON_DATA_ERROR, "bad sample") : absl::OkStatus();
  };
  const auto ends = Run(2, attempt, folder_);
  EXPECT_THAT(ends[0], AllOf(HasSubstr("REASON_PEER_LOST"), HasSubstr("step 6"), HasSubstr("rank 1")));
  EXPECT_THAT(ends[1], HasSubstr("REASON_DATA_ERROR bad sample"));
}

TEST_F(Trainers, WrongJobsEndAsUserErrors) {
  Attempt attempt;
  attempt.change = [](TrainerOptions* options) { options->spec.mutable_model()->set_init_from("/nowhere.safetensors"); };
  EXPECT_THAT(Run(1, attempt, folder_)[0], HasSubstr("REASON_USER_ERROR model.init_from"));
  ASSERT_THAT(Run(1, {}, folder_)[0], HasSubstr("COMPLETED"));
  attempt.change = [](TrainerOptions* options) { options->spec.mutable_schedule()->set_epochs(1); };
  EXPECT_THAT(Run(1, attempt, folder_)[0], AllOf(HasSubstr("REASON_USER_ERROR"), HasSubstr("step 33"), HasSubstr("ends after step 11")));
}

TEST_F(Trainers, StartFromGivenWeights) {
  ASSERT_THAT(Run(1, {}, folder_)[0], HasSubstr("COMPLETED"));
  Attempt attempt;
  const std::string weights = folder_ + "/exported/model.safetensors", next = NewFolder();
  attempt.change = [&](TrainerOptions* options) { options->spec.mutable_model()->set_init_from(weights); };
  attempt.look = [](const FakeSession& s) { return MetricsLine(s.metrics.front()); };
  const std::string warm = Run(1, attempt, next)[0];
  EXPECT_THAT(warm, HasSubstr("COMPLETED"));
  EXPECT_NE(Weights(next), Weights(folder_));
  attempt.change = [](TrainerOptions*) {};
  EXPECT_NE(warm, Run(1, attempt, NewFolder())[0]);
}

}  // namespace
}  // namespace hierad
