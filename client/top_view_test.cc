#include "client/top_view.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "base/text.h"
#include "client/render.h"

namespace hierad {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

class TopViewTest : public testing::Test {
 protected:
  TopViewTest() { context_.clock = &clock_; }

  static v1::Job Job(uint64_t id, v1::JobState state) {
    v1::Job job;
    job.set_id(id);
    job.mutable_spec()->set_name("eeg-pre-training-with-a-long-name");
    job.set_state(state);
    job.set_step(410);
    job.set_total_steps(1000);
    job.set_samples_per_s(12345);
    job.set_eta_s(3700);
    job.mutable_last()->set_loss(0.168312);
    v1::RankTotals& totals = *job.add_ranks()->mutable_totals();
    totals.set_step_count(100);
    totals.set_step_s(10);
    totals.set_data_wait_s(2.5);
    totals.set_forward_s(2.5);
    totals.set_backward_s(5);
    return job;
  }
  static std::vector<std::string> Lines(const std::string& text) {
    std::vector<std::string> lines = Split(text, '\n');
    lines.pop_back();
    return lines;
  }
  static std::vector<v1::StepMetrics> Steps(int64_t first, int64_t last) {
    std::vector<v1::StepMetrics> steps;
    for (int64_t s = first; s <= last; ++s) {
      steps.emplace_back().set_step(s);
      steps.back().set_loss(1.0 / double(s));
    }
    return steps;
  }

  FakeClock clock_;
  Context context_;
};

TEST_F(TopViewTest, ShowsAJobItsCurveItsBudgetAndItsAlerts) {
  TopView view(context_);
  v1::ListReply jobs;
  *jobs.add_jobs() = Job(7, v1::RUNNING);
  jobs.mutable_jobs(0)->add_alerts("25% of the step waits for input");
  view.SetJobs(jobs);
  view.AddSteps(7, Steps(1, 410));
  EXPECT_EQ(view.NextStep(7), 411);
  const std::string block = view.Block(24);
  EXPECT_THAT(block, AllOf(HasSubstr("    7 eeg-pre-train. RUNNING   ###-----  41%  0.1683 #"), HasSubstr(" 12,345  1h01m\n"), HasSubstr("1 alert")));
  EXPECT_THAT(block, HasSubstr("step 0.1 s wwwwwwffffffbbbbbbbbbbbb wait 25% fwd 25% bwd 50%\n"));
  EXPECT_THAT(block, HasSubstr("      ! 25% of the step waits for input\n"));
  for (const auto& line : Lines(block)) EXPECT_LE(Columns(line), 79u) << line;
  EXPECT_THAT(block, Not(HasSubstr("\x1b"))) << "no colour";
}

TEST_F(TopViewTest, SyntheticDataAreNamed) {
  TopView view(context_);
  v1::ListReply jobs;
  *jobs.add_jobs() = Job(7, v1::RUNNING);
  jobs.mutable_jobs(0)->mutable_spec()->mutable_data()->set_source("npy");
  view.SetJobs(jobs);
  EXPECT_THAT(view.Block(24), Not(HasSubstr("data:")));
  jobs.mutable_jobs(0)->mutable_spec()->mutable_data()->set_source("synthetic");
  view.SetJobs(jobs);
  EXPECT_THAT(view.Block(24), HasSubstr("      data: synthetic (random numbers)\n"));
}

TEST_F(TopViewTest, ColourAndUnicodeTakeNoColumns) {
  context_.color = context_.unicode = true;
  TopView view(context_);
  v1::ListReply jobs;
  *jobs.add_jobs() = Job(7, v1::RUNNING);
  view.SetJobs(jobs);
  view.AddSteps(7, Steps(1, 40));
  for (const auto& line : Lines(view.Block(24))) {
    EXPECT_LE(Columns(line), 79u) << line;
    EXPECT_TRUE(IsUtf8(line));
  }
}

TEST_F(TopViewTest, LiveJobsFirstAndNeverMoreLinesThanTheTerminalHas) {
  TopView view(context_);
  v1::ListReply jobs;
  *jobs.add_jobs() = Job(9, v1::SUCCEEDED);
  *jobs.add_jobs() = Job(8, v1::QUEUED);
  *jobs.add_jobs() = Job(7, v1::FAILED);
  *jobs.add_jobs() = Job(6, v1::RUNNING);
  view.SetJobs(jobs);
  std::vector<uint64_t> order;
  for (const v1::Job& job : view.Shown(10)) order.push_back(job.id());
  EXPECT_THAT(order, ElementsAre(6, 8, 9, 7));
  for (int i = 0; i < 100; ++i) *jobs.add_jobs() = Job(uint64_t(100 + i), v1::RUNNING);
  view.SetJobs(jobs);
  const auto lines = Lines(view.Block(24));
  EXPECT_LE(lines.size(), 24u);
  EXPECT_THAT(lines.back(), HasSubstr(" more; hierctl list shows them"));
}

TEST_F(TopViewTest, HostileNamesAndNumbersStayInTheirPlaces) {
  TopView view(context_);
  v1::ListReply jobs;
  v1::Job job = Job(7, v1::RUNNING);
  job.mutable_spec()->set_name("a\x1b[31m\nb\xff" + std::string(2000, 'x'));
  job.mutable_last()->set_loss(NAN);
  job.add_alerts("line\nbreak");
  *jobs.add_jobs() = job;
  view.SetJobs(jobs);
  const std::string block = view.Block(24);
  EXPECT_THAT(block, AllOf(Not(HasSubstr("\x1b[31m")), HasSubstr("NaN"), HasSubstr("line\\x0abreak")));
  EXPECT_EQ(Lines(block).size(), 6u);
  for (const auto& line : Lines(block)) EXPECT_LE(Columns(line), 79u) << line;
}

TEST_F(TopViewTest, SaysWhatReadingCostsWhereItCosts) {
  TopView view(context_);
  v1::ListReply jobs;
  v1::Job job = Job(7, v1::RUNNING);
  v1::RankView& rank = *job.add_ranks();
  rank.set_rank(1);
  rank.mutable_totals()->set_step_s(10);
  v1::DataCounters& data = *rank.mutable_data();
  data.set_samples(1000);
  data.set_wait_s(0.01);   // a thousandth: not worth a line
  data.set_threads(4);
  data.set_slowest("/a/long/folder/slow\n.png (sample 3)");
  data.set_slowest_s(0.5);
  *jobs.add_jobs() = job;
  view.SetJobs(jobs);
  EXPECT_THAT(view.Block(24), Not(HasSubstr("input")));
  data.set_wait_s(2);
  data.set_skipped_samples(2);
  *jobs.mutable_jobs(0) = job;
  view.SetJobs(jobs);
  const std::string block = view.Block(24);
  EXPECT_THAT(block, HasSubstr("      input 2 samples left out, rank 1 waited 2.0 s, 4 readers, slowest 0.5"));
  for (const auto& line : Lines(block)) EXPECT_LE(Columns(line), 79u) << line;
}

TEST(BudgetBar, FillsItsColumnsWhateverTheShares) {
  v1::RankTotals totals;
  EXPECT_EQ(BudgetBar(totals, 20, false), "");
  totals.set_step_count(1);
  totals.set_step_s(1);
  EXPECT_EQ(BudgetBar(totals, 20, false), std::string(20, '.'));
  totals.set_data_wait_s(0.001);
  totals.set_forward_s(0.333);
  totals.set_backward_s(0.333);
  totals.set_communication_s(0.2);
  totals.set_optimizer_s(0.3);   // more than the whole, by rounding
  EXPECT_EQ(BudgetBar(totals, 20, false).size(), 20u);
}

}  // namespace
}  // namespace hierad
