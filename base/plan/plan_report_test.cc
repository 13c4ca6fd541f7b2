#include "base/plan/plan_report.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "base/job_yaml.h"
#include "nlohmann/json.hpp"

namespace hierad {
namespace {

using ::testing::HasSubstr;

v1::JobSpec Base() {
  v1::JobSpec job;
  job.set_name("base");
  job.mutable_data()->set_source("synthetic");
  job.mutable_model()->set_in_chans(8);
  job.mutable_step()->set_batch_per_rank(128);
  job.mutable_step()->set_precision("bf16");
  FillDefaults(&job);
  return job;
}

PlanReport Report(const v1::JobSpec& job, const PlanReportOptions& options = {}) {
  auto report = ReportPlan(job, options);
  EXPECT_TRUE(report.ok()) << report.status();
  return report.ok() ? *report : PlanReport{};
}

TEST(PlanReportTest, JsonHasTheDocumentedKeys) {
  v1::JobSpec job = Base();
  job.mutable_resources()->set_ranks(4);
  const PlanReport report = Report(job);
  const auto json = nlohmann::json::parse(report.Json());
  for (const char* key : {"step_mode", "exact", "precision", "batch_per_rank", "ranks", "accumulation", "parameters", "arena_bytes",
                          "peak_device_bytes", "flops_per_step", "bytes_per_step", "kernels_per_step", "parts", "communication_bytes",
                          "buckets", "card", "floor_ms", "memory_gib", "largest_batch", "steps_per_epoch", "epoch_floor_s"}) {
    EXPECT_TRUE(json.contains(key)) << key;
  }
  int64_t bytes = 0;
  for (const auto& [name, size] : json["arena_bytes"].items()) bytes += size.get<int64_t>();
  EXPECT_EQ(json["peak_device_bytes"], bytes);
  double flops = 0, floor = 0;
  for (const auto& part : json["parts"]) flops += part["flops"].get<double>(), floor += part["floor_ms"].get<double>();
  EXPECT_NEAR(flops, json["flops_per_step"].get<double>(), 1);
  EXPECT_NEAR(floor, json["floor_ms"].get<double>(), 1e-9);
  EXPECT_EQ(json["communication_bytes"], int64_t(1.5 * double(json["arena_bytes"]["gradients"].get<int64_t>())));
  EXPECT_EQ(json["steps_per_epoch"], 65536 / (4 * 128));
}

TEST(PlanReportTest, FloorOfBaseOnAnH200) {
  const PlanReport report = Report(Base());
  EXPECT_NEAR(report.flops_per_step, 7.96e12, 0.1e12);
  EXPECT_GT(report.floor_ms, report.flops_per_step / 735e12 * 1e3);
  EXPECT_NEAR(report.floor_ms, 19.5, 3.5);
  EXPECT_THAT(report.Table(), HasSubstr("decoder"));
}

TEST(PlanReportTest, AccumulationRepeatsAllButTheUpdate) {
  v1::JobSpec job = Base();
  const PlanReport once = Report(job);
  job.mutable_step()->set_accumulation(4);
  const PlanReport four = Report(job);
  EXPECT_DOUBLE_EQ(four.flops_per_step, 4 * once.flops_per_step);
  EXPECT_EQ(four.kernels_per_step - 2, 4 * (once.kernels_per_step - 2));
}

TEST(PlanReportTest, LargestBatchIsTheLastThatFits) {
  v1::JobSpec job = Base();
  const PlanReport report = Report(job, {.memory_gib = 10});
  EXPECT_GT(report.largest_batch, 128);
  job.mutable_step()->set_batch_per_rank(int32_t(report.largest_batch));
  EXPECT_LE(double(Report(job).peak_device_bytes), 10.0 * (1 << 30));
  job.mutable_step()->set_batch_per_rank(int32_t(report.largest_batch + 1));
  EXPECT_GT(double(Report(job).peak_device_bytes), 10.0 * (1 << 30));
  EXPECT_EQ(Report(job, {.memory_gib = 1}).largest_batch, 0);
}

TEST(PlanReportTest, SaysWhatIsNotExact) {
  v1::JobSpec job = Base();
  job.mutable_step()->set_mode("graph_safe");
  EXPECT_FALSE(Report(job).exact);
  EXPECT_THAT(Report(job).Table(), HasSubstr("mode graph_safe takes more memory"));
  job.mutable_step()->set_mode("fused");
  EXPECT_TRUE(Report(job).exact);
}

TEST(PlanReportTest, UnknownCardIsNamedWithTheKnown) {
  const auto report = ReportPlan(Base(), {.card = "X9"});
  EXPECT_THAT(std::string(report.status().message()), HasSubstr("'X9' is not known; known are H200"));
}

}  // namespace
}  // namespace hierad
