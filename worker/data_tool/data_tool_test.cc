#include "worker/data_tool/data_tool.h"

#include <cmath>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "base/job_yaml.h"
#include "base/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/data/edf_test_files.h"
#include "worker/data/signal_source.h"
#include "worker/data/test_files.h"

namespace hierad {
namespace {

using testing::AllOf;
using testing::Contains;
using testing::HasSubstr;

std::vector<std::string> Findings(const Report& report) { return report["findings"].get<std::vector<std::string>>(); }

TEST(Inspect, ArraysSayWhatIsOdd) {
  TestFolder folder;
  std::vector<float> x(6 * 3 * 50);
  for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin(float(i * i % 977));
  for (int s = 0; s < 6; ++s) std::fill_n(x.data() + s * 150 + 50, 50, 4.0f);   // channel 1 is flat
  std::copy_n(x.data(), 150, x.data() + 2 * 150);                               // sample 2 is sample 0
  x[5 * 150 + 120] = NAN;
  const std::string path = folder.Write("x.npy", NpyBytes("{'descr': '<f4', 'fortran_order': False, 'shape': (6, 3, 50)}", {reinterpret_cast<const char*>(x.data()), x.size() * 4}));
  const auto report = Inspect({path, 1000});
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ((*report)["samples"], 6);
  EXPECT_EQ((*report)["channels"], 3);
  EXPECT_THAT(Findings(*report), AllOf(Contains(HasSubstr("channel 1 is flat: always 4")), Contains(HasSubstr("sample 2 equals sample 0")), Contains(HasSubstr("channel 2 has 1 NaN"))));
  EXPECT_THAT(ReportText(*report), AllOf(HasSubstr("in_chans: 3\n    input_size: [50]"), HasSubstr("source: npy"), HasSubstr("missing: zero   # or hold")));
  EXPECT_FALSE(Inspect({folder.Path("none.npy"), 10}).ok());
  EXPECT_FALSE(Inspect({folder.Write("x.csv", "1"), 10}).ok());
}

TEST(Inspect, RecordingsSayWhatIsOdd) {
  TestFolder folder;
  TestRecording recording;
  recording.records = 20;
  recording.signals = {{"Fp1"}, {"C3"}, {"Cz"}, {"O1"}, {"Pz", "V"}};
  for (TestSignal& signal : recording.signals) signal.samples = 200;
  recording.value = [](int signal, int64_t sample) {
    const double t = double(sample) / 200;
    const double noise = double((uint64_t(sample + 1) * 2654435761u >> 8) % 2001) - 1000;
    if (signal == 3) return 7;                                                            // flat
    if (signal == 2) return int32_t(std::lround(3000 * std::sin(2 * M_PI * 50 * t) + noise));   // line noise
    return int32_t(std::lround(noise + 300 * std::sin(2 * M_PI * 9 * t)));                // Fp1 and C3 are one signal
  };
  folder.Write("a.edf", recording.Bytes());
  recording.announced = "-1";
  recording.signals[1].label = "F3";
  folder.Write("b.edf", recording.Bytes());
  const auto report = Inspect({folder.Path(""), 20});
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ((*report)["recordings"], 2);
  const std::vector<std::string> findings = Findings(*report);
  EXPECT_THAT(findings, AllOf(Contains(HasSubstr("b.edf: the header announces -1")), Contains(HasSubstr("channel O1 is flat")), Contains(HasSubstr("channel Cz: line noise at 50 Hz"))));
  EXPECT_THAT(findings, AllOf(Contains(HasSubstr("channels Fp1 and C3 show one signal")), Contains(HasSubstr("channel Pz has a standard deviation")), Contains(HasSubstr("montage: 1 recordings"))));
  EXPECT_THAT(ReportText(*report), AllOf(HasSubstr("source: edf"), HasSubstr("notch: [50]")));
}

TEST(Inspect, ImagesSayWhatIsOdd) {
  TestFolder folder;
  RunPython(folder, R"(
import os, shutil, sys
import numpy as np
from PIL import Image
out = sys.argv[1] + '/images'
os.makedirs(out + '/cat'), os.makedirs(out + '/dog')
rng = np.random.default_rng(0)
for i in range(3):
    Image.fromarray(rng.integers(0, 256, (20 + i, 30, 3), dtype=np.uint8)).save(f'{out}/cat/{i}.png')
shutil.copy(out + '/cat/1.png', out + '/dog/copy.png')
Image.fromarray(rng.integers(0, 65536, (25, 25), dtype=np.uint16)).save(out + '/dog/deep.png')
data = open(out + '/cat/0.png', 'rb').read()
open(out + '/dog/cut.png', 'wb').write(data[:len(data) // 2])
open(out + '/dog/empty.jpg', 'wb')
)");
  const auto report = Inspect({folder.Path("images"), 1000});
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ((*report)["samples"], 7);
  EXPECT_EQ((*report)["unreadable"], 2);
  EXPECT_EQ((*report)["copies"], 1);
  EXPECT_EQ((*report)["of_16_bits"], 1);
  EXPECT_EQ((*report)["least_size"], "25 x 20");
  EXPECT_EQ((*report)["greatest_size"], "30 x 25");
  EXPECT_EQ((*report)["classes"].size(), 2u);
  EXPECT_THAT(Findings(*report), AllOf(Contains(HasSubstr("dog/cut.png: ")), Contains(HasSubstr("dog/empty.jpg: ")), Contains("dog/copy.png is a copy of cat/1.png"),
                                       Contains(HasSubstr("different numbers of channels")), Contains(HasSubstr("8 and of 16 bits"))));
  EXPECT_THAT(ReportText(*report), AllOf(HasSubstr("in_chans: 3"), HasSubstr("source: images")));
}

v1::JobSpec Job(const std::string& path, const std::string& more = "") {
  auto spec = ParseJobYaml(absl::StrCat("name: a\nmodel: {input_size: [128], in_chans: 1, variant: tiny, q_pool: 2, patch_kernel: [4], patch_padding: [0], patch_stride: [4]}\n"
                                        "data: {source: edf, path: ", path, ", band_pass: [1, 40], sample_rate: 100, stride_s: 0.5, labels: [left, right]", more, "}\nschedule: {epochs: 1}\nstep: {batch_per_rank: 4}\n"), {});
  EXPECT_TRUE(spec.ok()) << spec.status();
  FillDefaults(&*spec);
  return *spec;
}

TEST(Prepare, ShardsEqualTheChainOnTheFlyAndAnInterruptedCallGoesOn) {
  TestFolder folder;
  TestRecording recording;
  recording.records = 30;
  recording.reserved = "EDF+C";
  for (int r = 0; r < 30; ++r) recording.annotations.push_back(absl::StrCat("+", r, "\x14\x14", std::string(1, '\0'), "+", r, "\x15", "1\x14", r % 3 ? "left" : "right", "\x14"));
  for (const char* name : {"in/a.edf", "in/b.edf", "in/c.edf"}) folder.Write(name, recording.Bytes());
  PrepareOptions options;
  options.spec = Job(folder.Path("in"), ", held_out: 0.34");
  options.out = folder.Path("out");
  options.shard_bytes = 20 * 128 * 4;
  const auto report = Prepare(options);
  ASSERT_TRUE(report.ok()) << report.status();
  const Geometry geometry = InputGeometry(1, {128});
  for (const auto& [subset, name] : {std::pair{Subset::kTraining, "out/training"}, std::pair{Subset::kHeldOut, "out/held_out"}}) {
    const auto live = OpenRecordings(options.spec.data(), folder.Path("in"), geometry, subset);
    const auto shards = OpenNpy(folder.Path(name), 1, 1);
    ASSERT_TRUE(live.ok() && shards.ok()) << live.status() << shards.status();
    ASSERT_EQ((*live)->count(), (*shards)->count());
    EXPECT_EQ((*shards)->class_name(1), "right");
    for (int64_t i = 0; i < (*live)->count(); ++i) {
      float a[128], b[128];
      ASSERT_TRUE((*live)->Read(i, a).ok() && (*shards)->Read(i, b).ok());
      ASSERT_TRUE(std::equal(a, a + 128, b)) << i;
      EXPECT_EQ((*live)->label(i), (*shards)->label(i));
    }
  }
  const auto again = Prepare(options);
  ASSERT_TRUE(again.ok()) << again.status();
  const int64_t shards = (*again)["training"][0]["shards"];
  EXPECT_GT(shards, 3);
  EXPECT_EQ((*again)["training"][0]["kept_from_before"], shards);
  // Damage the third: it and those after it are made again.
  const std::string third = folder.Path("out/training/shard-000002.npy"), before = *ReadFile(third, 1 << 20);
  { std::fstream(third, std::ios::in | std::ios::out | std::ios::binary).seekp(200) << 'x'; }
  const auto mended = Prepare(options);
  ASSERT_TRUE(mended.ok()) << mended.status();
  EXPECT_EQ((*mended)["training"][0]["kept_from_before"], 2);
  EXPECT_EQ(*ReadFile(third, 1 << 20), before);
  options.spec.mutable_data()->set_sample_rate(99);
  EXPECT_THAT(std::string(Prepare(options).status().message()), HasSubstr("holds shards of other inputs or of another data: section"));
  options.spec.mutable_data()->set_source("npy");
  EXPECT_THAT(std::string(Prepare(options).status().message()), HasSubstr("prepare takes edf"));
}

TEST(Rates, CountSamplesBytesAndStages) {
  TestFolder folder;
  RateOptions options;
  options.spec = Job(folder.Write("a.edf", TestRecording().Bytes()));
  options.seconds = 0.1;
  options.threads = {1, 2};
  options.step_ms = 1e6;
  const auto report = MeasureRates(options);
  ASSERT_TRUE(report.ok()) << report.status();
  ASSERT_EQ((*report)["rates"].size(), 2u);
  EXPECT_GT((*report)["rates"][1]["samples_per_s"], 0.0);
  EXPECT_GT((*report)["rates"][1]["mb_per_s"], 0.0);
  EXPECT_GT((*report)["rates"][1]["rows_mb_per_s"], 0.0);
  EXPECT_THAT(std::string((*report)["row"]), HasSubstr("f32, "));
  EXPECT_NEAR(double((*report)["rates"][0]["read_share"]) + double((*report)["rates"][0]["prepare_share"]), 1, 1e-6);
  EXPECT_THAT(ReportText(*report), HasSubstr("the loader keeps pace with the step"));
  options.step_ms = 1e-9;
  EXPECT_THAT(ReportText(*MeasureRates(options)), HasSubstr("the step waits"));
}

}  // namespace
}  // namespace hierad
