#include "worker/probe/probe.h"

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "base/fs.h"
#include "base/job_yaml.h"
#include "base/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/checkpoint/checkpoint.h"
#include "worker/probe/probe_samples.h"

namespace hierad {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// Two features per sample: the second moment, once weights of step 7 are loaded (what a straight line on the raw signal
// cannot see), and a constant.
class FakeStep : public Step {
 public:
  explicit FakeStep(int64_t size) : size_(size) {}
  absl::Status Initialize() override { return trained_ = false, absl::OkStatus(); }
  absl::Status Load(const TrainState& state) override { return trained_ = state.step == 7, absl::OkStatus(); }
  absl::StatusOr<TrainState> Save() override { return absl::UnimplementedError(""); }
  absl::Status Run(absl::Span<const MicroBatch>, int64_t, double, StepSignals) override { return absl::UnimplementedError(""); }
  absl::StatusOr<StepResult> Take() override { return absl::UnimplementedError(""); }
  absl::StatusOr<LossSum> Evaluate(const MicroBatch&) override { return absl::UnimplementedError(""); }
  absl::StatusOr<std::vector<float>> Features(const MicroBatch& batch) override {
    std::vector<float> features;
    for (int b = 0; b < batch.real; ++b) {
      const auto* const x = static_cast<const float*>(batch.x_BCS);
      float squares = 0;
      for (int64_t i = 0; i < size_; ++i) squares += x[b * size_ + i] * x[b * size_ + i];
      features.push_back(trained_ ? squares : 0);
      features.push_back(1);
    }
    return features;
  }
  std::string Describe() const override { return "fake"; }

 private:
  const int64_t size_;
  bool trained_ = false;
};

absl::StatusOr<std::unique_ptr<Step>> MakeFake(const StepOptions& options, const Geometry& geometry, const ParameterTable&, Communicator*) {
  EXPECT_EQ(options.spec.step().mode(), "optimized");
  EXPECT_FALSE(options.cuda);
  return std::make_unique<FakeStep>(geometry.spec.in_chans() * geometry.input_size[0]);
}

class ProbeTest : public testing::Test {
 protected:
  ProbeTest() {
    std::string name = testing::TempDir() + "hierad-probe-XXXXXX";
    EXPECT_NE(mkdtemp(name.data()), nullptr);
    folder_ = name;
  }
  ~ProbeTest() override { std::filesystem::remove_all(folder_); }

  std::string Path(const std::string& name) const { return folder_ + "/" + name; }
  void Write(const std::string& name, const std::string& text) const { std::ofstream(Path(name)) << text; }

  // Alternating signs of amplitude 1 ("calm") or 2 ("wild"), first sign by turns, and a small number that makes each
  // sample unlike the others. `shift` is added to the wild ones: then the raw signal's mean tells the class, too.
  static std::string Trials(int count, const std::string& names, double shift, int from) {
    std::string text = "@classLabel true " + names + "\n@data\n";
    for (int n = from; n < from + count; ++n) {
      const bool wild = n % 2;
      for (int t = 0; t < 32; ++t)
        absl::StrAppend(&text, t ? "," : "", ((t + n / 2) % 2 ? 1 : -1) * (wild ? 2 : 1) + (wild ? shift : 0) + n * 1e-4);
      absl::StrAppend(&text, wild ? ":wild\n" : ":calm\n");
    }
    return text;
  }

  void WriteRun(double shift = 0) {
    Write("x_TRAIN.ts", Trials(60, "calm wild", shift, 0));
    Write("x_TEST.ts", Trials(40, "wild calm", shift, 100));   // the other order of classes
    Write("job.yaml", absl::StrCat("name: p\nmodel: {input_size: [32], in_chans: 1, embed_dim: 8, num_heads: 1, stages: [1, 1], q_stride: [2], "
                                   "q_pool: 1, mask_unit_attn: [true, false], patch_kernel: [4], patch_stride: [4], patch_padding: [0], mask_unit_size: [2], decoder_embed_dim: 8, decoder_depth: 1, "
                                   "decoder_num_heads: 1}\ndata: {source: ts, path: ", Path("x_TRAIN.ts"), "}\nschedule: {steps: 7}\n"));
    auto spec = ReadJobYaml(Path("job.yaml"));
    ASSERT_TRUE(spec.ok()) << spec.status();
    FillDefaults(&*spec);
    const auto geometry = Geometry::From(spec->model());
    ASSERT_TRUE(geometry.ok()) << geometry.status();
    const ParameterTable table = ParameterTable::For(*geometry);
    CheckpointContents contents;
    contents.state.step = 7;
    contents.state.parameters.resize(table.flat_size);
    contents.state.exp_avg.resize(table.flat_size);
    contents.state.exp_avg_sq.resize(table.flat_size);
    auto checkpoints = CheckpointFolder::Open(folder_);
    ASSERT_TRUE(checkpoints.ok()) << checkpoints.status();
    const auto written = checkpoints->Write(contents, table, *spec);
    ASSERT_TRUE(written.ok()) << written.status();
  }

  absl::StatusOr<ProbeReport> Probe() const {
    ProbeOptions options;
    options.run_folder = folder_;
    options.threads = 2;
    return RunProbe(options, MakeFake);
  }

  std::string folder_;
};

TEST_F(ProbeTest, MeasuresTheEncoderAndItsControlsOnTheSameSplit) {
  WriteRun();
  const auto report = Probe();
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->step, 7);
  EXPECT_EQ(report->train_samples, 60);
  EXPECT_EQ(report->test_samples, 40);
  EXPECT_EQ(report->test_path, Path("x_TEST.ts"));
  ASSERT_EQ(report->rows.size(), 4u);
  EXPECT_EQ(report->rows[0].name, "pre-trained");
  EXPECT_EQ(report->rows[0].test_accuracy, 1);   // also: TEST's classes are matched by name
  EXPECT_EQ(report->rows[0].cv_accuracy, 1);
  EXPECT_EQ(report->rows[1].name, "random encoder");
  EXPECT_EQ(report->rows[1].test_accuracy, 0.5);
  EXPECT_EQ(report->rows[2].name, "raw linear");
  EXPECT_EQ(report->rows[2].features, 16);
  EXPECT_LT(report->rows[2].test_accuracy, 0.9);
  EXPECT_EQ(report->rows[3].test_accuracy, 0.5);
  EXPECT_THAT(report->verdict, HasSubstr("100.0% of 40 TEST samples"));
  EXPECT_THAT(report->verdict, testing::Not(HasSubstr("control")));
  EXPECT_THAT(report->Table(), HasSubstr("pre-trained"));
  const auto json = nlohmann::json::parse(report->Json());
  EXPECT_EQ(json["rows"][0]["test_accuracy"], 1.0);
  EXPECT_EQ(json["rows"].size(), 4u);
}

TEST_F(ProbeTest, SaysWhenAControlIsAsGoodOrWins) {
  WriteRun(3);   // now the mean tells the class
  auto report = Probe();
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->rows[2].test_accuracy, 1);
  EXPECT_THAT(report->verdict, HasSubstr("A control (raw linear) is as good, so pre-training did not pay off"));
  ProbeOptions options;
  options.run_folder = folder_;
  const auto untrained = [](const StepOptions&, const Geometry& geometry, const ParameterTable&, Communicator*) -> absl::StatusOr<std::unique_ptr<Step>> {
    return std::make_unique<FakeStep>(geometry.spec.in_chans());   // sees one point of each sample
  };
  report = RunProbe(options, untrained);
  ASSERT_TRUE(report.ok());
  EXPECT_THAT(report->verdict, HasSubstr("A control wins: raw linear is better by"));
}

TEST_F(ProbeTest, LeavesCopiesOut) {
  WriteRun();
  std::string test = Trials(40, "calm wild", 0, 40);   // 40 to 59 are in TRAIN as well
  Write("x_TEST.ts", test);
  const auto report = Probe();
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->test_copies, 20);
  EXPECT_EQ(report->test_samples, 20);
  EXPECT_THAT(report->Table(), HasSubstr("0 of TRAIN, 20 of TEST"));
}

TEST_F(ProbeTest, RefusesWithASentence) {
  const auto refusal = [&] {
    const auto report = Probe();
    EXPECT_FALSE(report.ok());
    return std::string(report.status().message());
  };
  EXPECT_THAT(refusal(), HasSubstr("is not a run: no job.yaml"));
  WriteRun();
  Write("x_TEST.ts", "@classLabel true other\n@data\n" + std::string("1") + [] { std::string s; for (int i = 1; i < 32; ++i) s += ",1"; return s; }() + ":other\n");
  EXPECT_THAT(refusal(), HasSubstr("class 'other' of TEST is not a class of TRAIN"));
  std::filesystem::remove(Path("x_TEST.ts"));
  EXPECT_THAT(refusal(), HasSubstr("--test"));
  std::filesystem::remove_all(Path("checkpoints"));
  Write("x_TEST.ts", Trials(4, "calm wild", 0, 100));
  EXPECT_THAT(refusal(), HasSubstr("checkpoint"));
}

TEST(RawRows, MeansOfSixteenParts) {
  Geometry series{};
  series.spec.set_in_chans(2);
  series.input_size = {32};
  ProbeSamples samples;
  samples.size = 64;
  samples.labels_N = {0};
  for (int i = 0; i < 64; ++i) samples.x_NCS.push_back(i);
  const LabelledRows rows = RawRows(samples, series, 1);
  ASSERT_EQ(rows.width, 32);
  for (int i = 0; i < 32; ++i) EXPECT_EQ(rows.x_NF[i], 2 * i + 0.5);

  Geometry image{};
  image.spec.set_in_chans(1);
  image.input_size = {8, 8};
  const LabelledRows parts = RawRows(samples, image, 1);
  ASSERT_EQ(parts.width, 16);
  EXPECT_EQ(parts.x_NF[0], (0 + 1 + 8 + 9) / 4.0);
  EXPECT_EQ(parts.x_NF[5], (18 + 19 + 26 + 27) / 4.0);
}

}  // namespace
}  // namespace hierad
