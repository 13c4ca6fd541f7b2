#include "base/plan/products.h"

#include <map>
#include <sstream>
#include <string>

#include "base/job_yaml.h"
#include "base/plan/plan_report.h"
#include "gtest/gtest.h"

namespace hierad {
namespace {

v1::JobSpec Base(int batch, const char* precision) {
  v1::JobSpec job;
  job.mutable_data()->set_source("synthetic");
  job.mutable_model()->set_in_chans(8);
  job.mutable_step()->set_batch_per_rank(batch);
  job.mutable_step()->set_precision(precision);
  job.mutable_step()->set_mode("fused");
  job.mutable_resources()->set_device("cuda");
  FillDefaults(&job);
  return job;
}

std::map<std::string, int64_t> MadeBy(const v1::JobSpec& job, const char* card) {
  const auto report = ReportPlan(job, {.card = card});
  EXPECT_TRUE(report.ok()) << report.status();
  std::map<std::string, int64_t> made;
  if (report.ok()) {
    for (const PlannedProduct& p : report->products) made[p.made_by.substr(0, p.made_by.find(' '))] += p.count;   // epilogues together
  }
  return made;
}

TEST(ProductsTest, TheTableHoldsThePlansShapes) {
  // 24 blocks and 8 of the decoder, both ways; all other products of the model that the table was made with.
  auto base = MadeBy(Base(128, "bf16"), "H200");
  EXPECT_EQ(base.at("epilogue"), 64);
  EXPECT_GT(base["table"] + base["resident"], 250);
  EXPECT_FALSE(base.contains("library"));
  EXPECT_TRUE(MadeBy(Base(77, "bf16"), "H200").contains("library")) << "no table knows every batch";
  EXPECT_FALSE(MadeBy(Base(128, "bf16"), "A100").contains("epilogue"));
  EXPECT_FALSE(MadeBy(Base(128, "bf16"), "A100").contains("table"));
  EXPECT_FALSE(MadeBy(Base(128, "fp32"), "H200").contains("epilogue"));
  EXPECT_GT(MadeBy(Base(128, "fp16"), "H200")["epilogue"], 0);
  v1::JobSpec on_cpu = Base(8, "fp32");
  on_cpu.mutable_resources()->set_device("cpu");
  EXPECT_TRUE(MadeBy(on_cpu, "H200").empty());
}

TEST(ProductsTest, ProductsAreMostOfThePlansWork) {
  v1::JobSpec job = Base(128, "bf16");
  job.mutable_step()->set_accumulation(3);
  const auto report = ReportPlan(job, {});
  ASSERT_TRUE(report.ok());
  double flops = 0;
  for (const PlannedProduct& p : report->products) flops += p.flops;
  EXPECT_LT(flops, report->flops_per_step);
  EXPECT_GT(flops, 0.9 * report->flops_per_step);
}

TEST(ProductsTest, CommittedTablesAreWhole) {
  const std::string name = NewestAlgorithmTable("h200");
  EXPECT_EQ(name.substr(0, 22), "NVIDIA-H200.cublasLt-1");
  std::istringstream table(CommittedAlgorithms(name));
  std::map<std::string, std::string> known;
  for (std::string key, algorithm; table >> key >> algorithm;) {
    EXPECT_TRUE(algorithm.size() == 128u || algorithm == kResidentAlgorithm) << key;
    EXPECT_TRUE(known.emplace(key, algorithm).second) << key << " stands there twice";
  }
  EXPECT_GT(known.size(), 100u);
  EXPECT_EQ(NewestAlgorithmTable("no such card"), "");
  EXPECT_EQ(CommittedAlgorithms("no such card"), "");
}

}  // namespace
}  // namespace hierad
