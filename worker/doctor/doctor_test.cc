#include "worker/doctor/doctor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "base/job_yaml.h"

namespace hierad {
namespace {

using testing::HasSubstr;

v1::JobSpec Job(const std::string& data, const std::string& more = "") {
  auto spec = ParseJobYaml("name: a\nmodel: {variant: tiny, input_size: [256], in_chans: 2, embed_dim: 16, stages: [1, 1, 1, 1],\n"
                           "  decoder_embed_dim: 16, decoder_depth: 1, decoder_num_heads: 2" + more + "}\ndata: " + data +
                           "\nschedule: {steps: 5}\nstep: {batch_per_rank: 4}\nresources: {device: cpu}\n", {});
  EXPECT_TRUE(spec.ok()) << spec.status();
  FillDefaults(&*spec);
  return *spec;
}

TEST(DoctorFiguresTest, WithoutAGpuItSaysNone) {
  const auto figures = nlohmann::json::parse(DoctorFigures(nullptr, "libno-such-library.so.1"));
  EXPECT_EQ(figures["gpus"]["library"], false);
  EXPECT_TRUE(figures["gpus"]["cards"].empty());
  EXPECT_FALSE(figures.contains("data"));
  EXPECT_EQ(figures["cuda_runtime"], BuiltWith().cuda_runtime);
}

TEST(DoctorFiguresTest, CardsAsTheLibraryTellsThem) {
  const auto figures = nlohmann::json::parse(DoctorFigures(nullptr, HIERAD_FAKE_NVML));
  ASSERT_EQ(figures["gpus"]["cards"].size(), 2u);
  EXPECT_EQ(figures["gpus"]["cards"][0]["uuid"], "GPU-aaaa-0");
  EXPECT_EQ(figures["gpus"]["cards"][1]["slowed"], 0x20);
  EXPECT_TRUE(figures["gpus"]["cards"][1]["uncorrected_errors"].is_null());
  EXPECT_EQ(figures["gpus"]["cuda"], 13000);
}

TEST(DoctorFiguresTest, DataAndStepOfAJob) {
  const v1::JobSpec job = Job("{source: synthetic, synthetic_samples: 16}");
  const auto figures = nlohmann::json::parse(DoctorFigures(&job, "libno-such-library.so.1"));
  EXPECT_EQ(figures["data"]["samples"], 16) << figures;
  EXPECT_GT(figures["data"]["samples_per_s"], 0);
  EXPECT_GT(figures["step"]["ms"], 0);
  EXPECT_GT(figures["step"]["peak_bytes"], 0);
}

TEST(DoctorFiguresTest, WhatFailsIsSaidNotThrown) {
  const v1::JobSpec missing = Job("{source: npy, path: /nonexistent/x.npy}");
  const auto figures = nlohmann::json::parse(DoctorFigures(&missing, "libno-such-library.so.1"));
  EXPECT_THAT(figures["data"]["problem"].get<std::string>(), HasSubstr("/nonexistent/x.npy"));
  EXPECT_GT(figures["step"]["ms"], 0);
  v1::JobSpec huge = Job("{source: synthetic}");
  huge.mutable_step()->set_batch_per_rank(65536);
  const auto skipped = nlohmann::json::parse(DoctorFigures(&huge, "libno-such-library.so.1"));
  EXPECT_THAT(skipped["step"]["skipped"].get<std::string>(), HasSubstr("GFLOP"));
}

}  // namespace
}  // namespace hierad
