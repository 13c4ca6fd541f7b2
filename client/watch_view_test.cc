#include "client/watch_view.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "base/text.h"
#include "client/render.h"

namespace hierad {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::HasSubstr;
using testing::Not;

class WatchViewTest : public testing::Test {
 protected:
  WatchViewTest() { context_.clock = &clock_; }

  static v1::WatchReply Reply(int64_t step, double loss) {
    v1::WatchReply reply;
    v1::Job& job = *reply.mutable_job();
    job.set_id(12);
    job.mutable_spec()->set_name("eeg");
    job.set_state(v1::RUNNING);
    job.set_attempt(1);
    job.set_step(step);
    job.set_total_steps(1000);
    job.set_samples_per_s(1234);
    job.set_eta_s(192);
    v1::StepMetrics& m = *reply.add_metrics();
    m.set_step(step);
    m.set_loss(loss);
    *job.mutable_last() = m;
    return reply;
  }

  FakeClock clock_;
  Context context_;
};

TEST_F(WatchViewTest, TheBlockShowsProgress) {
  WatchView view(context_, 0);
  view.Update(Reply(1, 2.0));
  v1::WatchReply reply = Reply(450, 0.1432);
  v1::RankView& rank = *reply.mutable_job()->add_ranks();
  rank.set_phase(v1::PHASE_TRAINING);
  rank.set_step(450);
  rank.set_slot_id("cpu-0");
  rank.set_node("n1");
  view.Update(reply);
  const std::string block = view.Block();
  EXPECT_THAT(block, HasSubstr("job 12  eeg  RUNNING"));
  EXPECT_THAT(block, HasSubstr("#############-----------------  45.0%  step 450 of 1000"));
  EXPECT_THAT(block, HasSubstr("loss 0.1432  #_\n"));
  EXPECT_THAT(block, HasSubstr("1,234 samples/s  ETA 3 min 12 s"));
  EXPECT_THAT(block, HasSubstr("rank 0  TRAINING  step 450  cpu-0 on n1"));
  EXPECT_THAT(block, Not(HasSubstr("\x1b"))) << "no colour unless asked";
}

TEST_F(WatchViewTest, SyntheticDataAreNamed) {
  WatchView view(context_, 0);
  v1::WatchReply reply = Reply(1, 2.0);
  view.Update(reply);
  EXPECT_THAT(view.Block(), Not(HasSubstr("data:")));
  reply.mutable_job()->mutable_spec()->mutable_data()->set_source("synthetic");
  view.Update(reply);
  EXPECT_THAT(view.Block(), HasSubstr("data: synthetic (random numbers)\n"));
}

TEST_F(WatchViewTest, NoLineIsWiderThanTheTerminal) {
  context_.columns = [] { return 40; };
  context_.color = true;
  context_.unicode = true;
  WatchView view(context_, 0);
  v1::WatchReply reply = Reply(450, NAN);
  reply.mutable_job()->set_message(std::string(300, 'x'));
  view.Update(reply);
  for (const std::string& line : Split(view.Block(), '\n')) EXPECT_LE(Columns(line), 39u) << line;
  EXPECT_THAT(view.Block(), HasSubstr("loss NaN  ×"));
}

TEST_F(WatchViewTest, WhatOthersWroteCannotDriveTheTerminal) {
  WatchView view(context_, 0);
  v1::WatchReply reply = Reply(1, 1);
  reply.mutable_job()->mutable_spec()->set_name("a\x1b[2J\nb");
  reply.mutable_job()->set_message("m\x1b]0;x\x07");
  view.Update(reply);
  EXPECT_THAT(view.Block(), HasSubstr("a\\x1b[2J\\x0ab"));
  EXPECT_THAT(view.Block(), Not(HasSubstr("\x1b")));
  EXPECT_THAT(view.PlainLines(), Not(HasSubstr("\x1b")));
}

TEST_F(WatchViewTest, ManyRanksAreCounted) {
  WatchView view(context_, 0);
  v1::WatchReply reply = Reply(100, 1);
  for (int i = 0; i < 64; ++i) {
    v1::RankView& rank = *reply.mutable_job()->add_ranks();
    rank.set_rank(i);
    rank.set_step(i == 17 ? 90 : 100);
    rank.set_phase(i < 60 ? v1::PHASE_TRAINING : v1::PHASE_CHECKPOINTING);
  }
  view.Update(reply);
  EXPECT_THAT(view.Block(), HasSubstr("64 ranks: 4 CHECKPOINTING 60 TRAINING; rank 17 is at step 90"));
}

TEST_F(WatchViewTest, PlainLinesComeAboutEveryTwoSecondsAndAtChanges) {
  WatchView view(context_, 0);
  view.Update(Reply(1, 2.0));
  EXPECT_THAT(view.PlainLines(), HasSubstr("job 12  RUNNING  step 1/1000 (0.1%)  loss 2  "));
  EXPECT_EQ(view.PlainLines(), "") << "nothing new";
  clock_.Advance(milliseconds(500));
  view.Update(Reply(2, 1.9));
  EXPECT_EQ(view.PlainLines(), "") << "too soon";
  clock_.Advance(milliseconds(1600));
  view.Update(Reply(3, 1.8));
  EXPECT_THAT(view.PlainLines(), HasSubstr("step 3/1000"));
  v1::WatchReply end = Reply(4, 1.7);
  end.mutable_job()->set_state(v1::FAILED);
  end.mutable_job()->set_message("rank 0 was killed");
  view.Update(end);
  EXPECT_THAT(view.PlainLines(), HasSubstr("FAILED  step 4/1000 (0.4%)  loss 1.7  rate 0  rank 0 was killed\n"));
}

TEST_F(WatchViewTest, AJobThatDoesNotMoveGivesASignOfLifeLessAndLessOften) {
  WatchView view(context_, 0);
  v1::WatchReply reply = Reply(0, 2.0);
  view.Update(reply);
  EXPECT_NE(view.PlainLines(), "");
  std::vector<int> signs;
  for (int second = 1; second <= 1200; ++second) {
    clock_.Advance(seconds(1));
    view.Update(reply);   // the same again, as hierad sends it
    const std::string lines = view.PlainLines();
    if (second == 10) {
      EXPECT_THAT(lines, HasSubstr("step 0/1000 (0.0%)"));
      EXPECT_THAT(lines, HasSubstr("unchanged for 10 s\n"));
    }
    if (!lines.empty()) signs.push_back(second);
  }
  EXPECT_THAT(signs, testing::ElementsAre(10, 20, 40, 80, 160, 320, 620, 920));
  view.Update(Reply(1, 1.5));
  EXPECT_THAT(view.PlainLines(), testing::Not(HasSubstr("unchanged")));
  clock_.Advance(seconds(9));
  EXPECT_EQ(view.PlainLines(), "");
  clock_.Advance(seconds(1));
  EXPECT_THAT(view.PlainLines(), HasSubstr("unchanged for 10 s"));
}

TEST_F(WatchViewTest, PlainLinesOfChosenSteps) {
  WatchView view(context_, 10);
  view.Update(Reply(1, 2.0));
  view.PlainLines();
  v1::WatchReply reply = Reply(30, 1.0);
  reply.clear_metrics();
  for (int step = 2; step <= 30; ++step) {
    v1::StepMetrics& m = *reply.add_metrics();
    m.set_step(step);
    m.set_loss(step);
  }
  view.Update(reply);
  const std::string lines = view.PlainLines();
  EXPECT_EQ(std::count(lines.begin(), lines.end(), '\n'), 3) << lines;
  EXPECT_THAT(lines, HasSubstr("step 20/1000 (2.0%)  loss 20"));
  view.Update(reply);
  EXPECT_EQ(view.PlainLines(), "") << "sent again after a reconnect, printed once";
}

TEST_F(WatchViewTest, LongRunsKeepABoundedHistory) {
  context_.unicode = true;
  WatchView view(context_, 0);
  v1::WatchReply reply = Reply(1, 0);
  for (int step = 1; step <= 100000; ++step) {
    reply.mutable_metrics(0)->set_step(step);
    reply.mutable_metrics(0)->set_loss(100000 - step);
    view.Update(reply);
  }
  EXPECT_THAT(view.Block(), HasSubstr("██"));
  EXPECT_THAT(view.Block(), HasSubstr("▁\n")) << "falls from left to right";
}

TEST_F(WatchViewTest, RewindGoesToTheTopOfTheBlock) {
  EXPECT_EQ(WatchView::Rewind(0), "");
  EXPECT_EQ(WatchView::Rewind(3), "\x1b[3F\x1b[J");
}

}  // namespace
}  // namespace hierad
