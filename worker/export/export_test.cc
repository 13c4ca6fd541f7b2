#include "worker/export/export.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <unistd.h>

#include "base/fs.h"
#include "base/job_yaml.h"
#include "base/status.h"
#include "worker/checkpoint/checkpoint.h"
#include "worker/checkpoint/manifest.h"
#include "worker/export/python_model.h"

namespace hierad {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

v1::JobSpec Job(const std::string& task) {
  auto spec = ParseJobYaml("name: a\nmodel: {task: " + task + R"(, variant: tiny, input_size: [64, 96], in_chans: 5, embed_dim: 8, num_heads: 1,
    stages: [1, 1, 2, 1], q_pool: 2, decoder_embed_dim: 16, decoder_depth: 2, decoder_num_heads: 2, num_classes: 7}
data: {source: synthetic}
schedule: {steps: 10}
)", {});
  EXPECT_TRUE(spec.ok()) << spec.status();
  FillDefaults(&*spec);
  return *spec;
}

class ExportTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = testing::TempDir() + "/export_test_XXXXXX";
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    run_ = std::filesystem::canonical(pattern);   // as the report says it
  }
  void TearDown() override { EXPECT_TRUE(RemoveTree(run_).ok()); }

  // A run as the trainer leaves it; every number tells its parameter and step.
  void MakeRun(const v1::JobSpec& spec, std::initializer_list<int64_t> steps) {
    const auto geometry = Geometry::From(spec.model());
    ASSERT_TRUE(geometry.ok()) << geometry.status();
    table_ = ParameterTable::For(*geometry);
    ASSERT_TRUE(WriteFileAtomic(run_ + "/job.yaml", ToJobYaml(spec)).ok());
    auto folder = CheckpointFolder::Open(run_);
    ASSERT_TRUE(folder.ok());
    for (const int64_t step : steps) {
      CheckpointContents contents;
      contents.state.step = step;
      for (auto* flat : {&contents.state.parameters, &contents.state.exp_avg, &contents.state.exp_avg_sq}) flat->assign(size_t(table_.flat_size), 0);
      for (size_t k = 0; k < table_.parameters.size(); ++k) {
        const Parameter& p = table_.parameters[k];
        for (int64_t i = 0; i < p.size; ++i) contents.state.parameters[size_t(p.offset + i)] = ValueOf(k, step, i);
      }
      ASSERT_TRUE(folder->Write(contents, table_, spec).ok());
    }
  }
  static float ValueOf(size_t parameter, int64_t step, int64_t i) { return float(parameter) + float(step) / 1024 + float(i % 7) / 65536; }
  ExportReport MustExport(const ExportOptions& options) {
    auto report = Export(options);
    EXPECT_TRUE(report.ok()) << report.status();
    return report.ok() ? *report : ExportReport();
  }

  std::string run_;
  ParameterTable table_{};
};

TEST_F(ExportTest, FairsNamesOfTheNewestCheckpoint) {
  MakeRun(Job("mae"), {10, 20});
  const ExportReport report = MustExport({run_});
  EXPECT_EQ(report.path, run_ + "/exported/model.safetensors");
  EXPECT_EQ(report.step, 20);
  EXPECT_EQ(report.left_out, 0u);
  const auto file = ReadSafetensors(report.path);
  ASSERT_TRUE(file.ok()) << file.status();
  ASSERT_EQ(file->tensors.size(), table_.parameters.size());
  for (size_t k = 0; k < table_.parameters.size(); ++k) {
    const Tensor& tensor = file->tensors.at(table_.parameters[k].name);
    EXPECT_EQ(tensor.shape, table_.parameters[k].shape);
    EXPECT_EQ(tensor.data.back(), ValueOf(k, 20, table_.parameters[k].size - 1)) << table_.parameters[k].name;
  }
  EXPECT_EQ(file->metadata.at("hierad.step"), "20");
  EXPECT_EQ(file->metadata.at("hierad.model"), report.model);
  EXPECT_EQ(report.model,
            "hiera.MaskedAutoencoderHiera(input_size=(64, 96), in_chans=5, embed_dim=8, stages=(1, 1, 2, 1), q_pool=2, "
            "decoder_embed_dim=16, decoder_depth=2, decoder_num_heads=2)");
  EXPECT_THAT(*ListFolder(run_ + "/exported"), ElementsAre("model.safetensors"));
}

TEST_F(ExportTest, TimmsNamesWithoutTheDecoder) {
  MakeRun(Job("mae"), {10});
  const ExportReport report = MustExport({run_, "timm"});
  EXPECT_EQ(report.path, run_ + "/exported/model.timm.safetensors");
  const auto file = ReadSafetensors(report.path);
  ASSERT_TRUE(file.ok());
  EXPECT_EQ(file->tensors.size() + report.left_out, table_.parameters.size());
  for (const auto& [name, tensor] : file->tensors) {
    EXPECT_THAT(name, AllOf(Not(HasSubstr("decoder")), Not(HasSubstr("mask_token")), Not(HasSubstr("fusion")), Not(HasSubstr("encoder_norm"))));
  }
  size_t norm = 0;
  while (table_.parameters[norm].name != "encoder_norm.weight") ++norm;
  EXPECT_EQ(file->tensors.at("head.norm.weight").data[0], ValueOf(norm, 10, 0));
  EXPECT_EQ(report.model,
            "timm.create_model(\"hiera_tiny_224\", img_size=(64, 96), in_chans=5, embed_dim=8, num_classes=0, "
            "stages=(1, 1, 2, 1), q_pool=2)");
  EXPECT_THAT(report.Text(), AllOf(HasSubstr("left out"), HasSubstr("import timm, safetensors.torch\n    model = timm.create_model("),
                                   HasSubstr("load_state_dict(safetensors.torch.load_file(\"" + report.path + "\"))")));
  const auto json = nlohmann::json::parse(report.Json());
  EXPECT_EQ(json["left_out"], report.left_out);
  EXPECT_EQ(json["python"].size(), 3u);
}

TEST_F(ExportTest, AClassifierKeepsItsHead) {
  MakeRun(Job("classify"), {10});
  const ExportReport report = MustExport({run_, "timm"});
  EXPECT_EQ(report.left_out, 0u);
  const auto file = ReadSafetensors(report.path);
  EXPECT_EQ(file->tensors.at("head.fc.weight").shape, (std::vector<int64_t>{7, 64}));
  EXPECT_EQ(file->tensors.count("head.norm.bias"), 1u);
  EXPECT_THAT(report.model, HasSubstr("num_classes=7"));
  EXPECT_THAT(MustExport({run_}).model, AllOf(HasSubstr("hiera.Hiera("), HasSubstr("num_classes=7"), Not(HasSubstr("decoder"))));
}

TEST_F(ExportTest, OneCheckpointIntoItsRunOrWhereOneSays) {
  MakeRun(Job("mae"), {10, 20});
  const std::string checkpoint = run_ + "/checkpoints/" + CheckpointName(10);
  const ExportReport report = MustExport({checkpoint + "/"});
  EXPECT_EQ(report.step, 10);
  EXPECT_EQ(report.path, run_ + "/exported/step-000000010.safetensors");
  EXPECT_EQ(MustExport({checkpoint, "timm"}).path, run_ + "/exported/step-000000010.timm.safetensors");

  const std::string away = run_ + "/away";
  ASSERT_TRUE(MakeFolders(away).ok());
  ASSERT_EQ(rename(checkpoint.c_str(), (away + "/" + CheckpointName(10)).c_str()), 0);
  ExportOptions options{away + "/" + CheckpointName(10)};
  EXPECT_THAT(std::string(Export(options).status().message()), HasSubstr("--out"));
  options.out = run_ + "/new/deep/weights.safetensors";
  EXPECT_EQ(MustExport(options).step, 10);
  EXPECT_TRUE(Exists(options.out));
  options.out = run_ + "/json";
  EXPECT_THAT(std::string(Export(options).status().message()), HasSubstr("must end in .safetensors"));
  EXPECT_FALSE(Exists(options.out));
}

TEST_F(ExportTest, ADamagedCheckpointIsSaidAndTheOneBeforeTaken) {
  MakeRun(Job("mae"), {10, 20});
  const std::string newest = run_ + "/checkpoints/" + CheckpointName(20);
  std::string bytes = *ReadFile(newest + "/" + kModelFile, 1 << 28);
  bytes[bytes.size() / 2] ^= 1;
  ASSERT_TRUE(WriteFileAtomic(newest + "/" + kModelFile, bytes).ok());
  const ExportReport report = MustExport({run_});
  EXPECT_EQ(report.step, 10);
  EXPECT_THAT(report.damaged, ElementsAre(newest));
  EXPECT_THAT(report.Text(), HasSubstr("not used, damaged"));
  const auto direct = Export({newest});
  EXPECT_THAT(std::string(direct.status().message()), AllOf(HasSubstr(newest), HasSubstr("SHA-256")));
}

TEST_F(ExportTest, WhatIsNoRunIsRefusedWithASentence) {
  EXPECT_THAT(std::string(Export({run_}).status().message()), HasSubstr("neither a run's folder"));
  EXPECT_THAT(std::string(Export({run_ + "/none"}).status().message()), HasSubstr(run_ + "/none"));
  MakeRun(Job("mae"), {});
  EXPECT_THAT(std::string(Export({run_}).status().message()), AllOf(HasSubstr("no checkpoint in"), HasSubstr("every_steps is 1000")));
}

TEST_F(ExportTest, NoFileIsMadeOfWeightsThatAreNotFinite) {
  const float values[] = {1, std::numeric_limits<float>::quiet_NaN()};
  const std::string path = run_ + "/w.safetensors";
  const absl::Status status = WriteModel(path, {{"a.weight", {2}, values}}, 3, {});
  EXPECT_EQ(ReasonOf(status), v1::REASON_NUMERICS);
  EXPECT_FALSE(Exists(path));
  EXPECT_FALSE(Exists(path + ".writing"));
}

}  // namespace
}  // namespace hierad
