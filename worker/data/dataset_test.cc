#include "worker/data/dataset.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/data/test_files.h"

namespace hierad {
namespace {

using testing::ElementsAre;
using testing::FloatEq;
using testing::HasSubstr;

constexpr char kHead[] = "@classLabel true a b\n@data\n";

v1::DataSpec Ts(int pool, const char* pad, const char* normalize) {
  v1::DataSpec data;
  data.set_source("ts");
  data.set_mean_pool(pool);
  data.set_pad(pad);
  data.set_normalize(normalize);
  return data;
}

std::vector<float> Read(const Dataset& dataset, uint64_t sample, int64_t size) {
  std::vector<float> x(size);
  const absl::Status status = dataset.Read({sample, sample, 0, 0, true}, x.data());
  EXPECT_TRUE(status.ok()) << status;
  return x;
}

TEST(SignalDataset, PoolsThenPads) {
  TestFolder folder;
  const std::string path = folder.Write("x.ts", std::string(kHead) + "1,3,5,7,20:2,4,6,8,30:a\n");
  ChannelStatistics none;
  const auto edge = OpenDataset(Ts(2, "edge", "none"), path, InputGeometry(2, {5}), &none);
  ASSERT_TRUE(edge.ok()) << edge.status();
  EXPECT_THAT(Read(**edge, 0, 10), ElementsAre(2, 6, 20, 20, 20, 3, 7, 30, 30, 30));   // the last group is short
  const auto zero = OpenDataset(Ts(2, "zero", "none"), path, InputGeometry(2, {4}), &none);
  ASSERT_TRUE(zero.ok());
  EXPECT_THAT(Read(**zero, 0, 8), ElementsAre(2, 6, 20, 0, 3, 7, 30, 0));
  v1::DataSpec reshape = Ts(1, "zero", "none");
  EXPECT_THAT(std::string(OpenDataset(reshape, path, InputGeometry(2, {2, 3}), &none).status().message()), HasSubstr("set data.raw_reshape: true"));
  reshape.set_raw_reshape(true);
  const auto reshaped = OpenDataset(reshape, path, InputGeometry(2, {2, 3}), &none);
  ASSERT_TRUE(reshaped.ok()) << reshaped.status();
  EXPECT_THAT(Read(**reshaped, 0, 12), ElementsAre(1, 3, 5, 7, 20, 0, 2, 4, 6, 8, 30, 0));
  EXPECT_TRUE(none.mean.empty());
}

TEST(SignalDataset, ChannelStatisticsAreTheTrainingSets) {
  TestFolder folder;
  const std::string train = folder.Write("train.ts", std::string(kHead) + "1,2:10,10:a\n3,6:10,10:b\n");
  const std::string test = folder.Write("test.ts", std::string(kHead) + "3,5:11,12:b\n");
  ChannelStatistics statistics;
  const auto dataset = OpenDataset(Ts(1, "none", "channel"), train, InputGeometry(2, {2}), &statistics);
  ASSERT_TRUE(dataset.ok()) << dataset.status();
  const double std = std::sqrt((4 + 1 + 0 + 9) / 4.0);   // of 1, 2, 3, 6 about 3
  ASSERT_THAT(statistics.mean, ElementsAre(3, 10));
  EXPECT_NEAR(statistics.std[0], std, 1e-12);
  EXPECT_EQ(statistics.std[1], 1);   // constant: becomes zeros
  EXPECT_THAT(Read(**dataset, 1, 4), ElementsAre(0, FloatEq(float(3 / std)), 0, 0));
  const ChannelStatistics before = statistics;
  const auto held_out = OpenDataset(Ts(1, "none", "channel"), test, InputGeometry(2, {2}), &statistics);
  ASSERT_TRUE(held_out.ok());
  EXPECT_EQ(statistics.mean, before.mean);
  EXPECT_THAT(Read(**held_out, 0, 4), ElementsAre(0, FloatEq(float(2 / std)), 1, 2));
  statistics.mean.resize(1), statistics.std.resize(1);
  EXPECT_FALSE(OpenDataset(Ts(1, "none", "channel"), test, InputGeometry(2, {2}), &statistics).ok());
}

TEST(SignalDataset, WindowNormalisesEachSampleAndPadsAfterwards) {
  TestFolder folder;
  const std::string path = folder.Write("x.ts", std::string(kHead) + "1,3:7,7:a\n");
  ChannelStatistics none;
  const auto dataset = OpenDataset(Ts(1, "zero", "window"), path, InputGeometry(2, {3}), &none);
  ASSERT_TRUE(dataset.ok());
  EXPECT_THAT(Read(**dataset, 0, 6), ElementsAre(-1, 1, 0, 0, 0, 0));
}

TEST(SignalDataset, MismatchesSayBothNumbers) {
  TestFolder folder;
  const std::string path = folder.Write("x.ts", std::string(kHead) + "1,2,3,4:5,6,7,8:a\n");
  ChannelStatistics none;
  const auto refusal = [&](const v1::DataSpec& data, int chans, std::vector<int64_t> size) {
    const auto dataset = OpenDataset(data, path, InputGeometry(chans, std::move(size)), &none);
    EXPECT_FALSE(dataset.ok());
    EXPECT_EQ(ReasonOf(dataset.status()), v1::REASON_USER_ERROR);
    return std::string(dataset.status().message());
  };
  EXPECT_THAT(refusal(Ts(1, "none", "none"), 8, {4}), HasSubstr("2 channels, model.in_chans is 8"));
  EXPECT_THAT(refusal(Ts(2, "none", "none"), 2, {4}), HasSubstr("4 points, 2 after data.mean_pool 2; model.input_size [4] needs 4"));
  EXPECT_THAT(refusal(Ts(1, "edge", "none"), 2, {3}), HasSubstr("4 points; model.input_size [3] takes 3"));
}

TEST(SignalDataset, CropsClipsAndScales) {
  TestFolder folder;
  const std::string path = folder.Write("x.ts", std::string(kHead) + "1,2,3,4,500,-600,7:10,20,30,40,50,60,70:a\n");
  ChannelStatistics none;
  v1::DataSpec data = Ts(1, "none", "none");
  data.set_clip(50);
  data.set_scale(10);
  const auto read = [&](const char* crop, std::vector<int64_t> size) {
    data.set_crop(crop);
    data.set_raw_reshape(size.size() > 1);
    const auto dataset = OpenDataset(data, path, InputGeometry(2, size), &none);
    EXPECT_TRUE(dataset.ok()) << dataset.status();
    return Read(**dataset, 0, 2 * size[0] * (size.size() > 1 ? size[1] : 1));
  };
  EXPECT_THAT(read("start", {3}), ElementsAre(0.1f, 0.2f, 0.3f, 1, 2, 3));
  EXPECT_THAT(read("center", {3}), ElementsAre(0.3f, 0.4f, 5, 3, 4, 5));
  EXPECT_THAT(read("center", {2, 2}), ElementsAre(0.2f, 0.3f, 0.4f, 5, 2, 3, 4, 5));
  data.set_crop("none");
  data.set_raw_reshape(false);
  EXPECT_THAT(std::string(OpenDataset(data, path, InputGeometry(2, {3}), &none).status().message()), HasSubstr("7 points; model.input_size [3] takes 3: set data.crop"));
}

TEST(SignalDataset, MissingValues) {
  TestFolder folder;
  const std::string path = folder.Write("x.ts", std::string(kHead) + "?,2,?,?,5:?,?,?,?,?:a\n");
  ChannelStatistics none;
  v1::DataSpec data = Ts(1, "none", "none");
  const auto read = [&](const char* missing) {
    data.set_missing(missing);
    const auto dataset = OpenDataset(data, path, InputGeometry(2, {5}), &none);
    EXPECT_TRUE(dataset.ok()) << dataset.status();
    return Read(**dataset, 0, 10);
  };
  EXPECT_THAT(read("zero"), ElementsAre(0, 2, 0, 0, 5, 0, 0, 0, 0, 0));
  EXPECT_THAT(read("hold"), ElementsAre(2, 2, 2, 2, 5, 0, 0, 0, 0, 0));
  data.set_missing("refuse");
  EXPECT_THAT(std::string(OpenDataset(data, path, InputGeometry(2, {5}), &none).status().message()), HasSubstr("x.ts:3: column 1 (channel 1): missing value '?'"));
}

// Each draw is a function of the visit alone, reaches what it may reach, and leaves evaluation alone.
TEST(SignalDataset, TransformsAreDrawnByTheVisit) {
  TestFolder folder;
  std::string line;
  for (int c = 0; c < 3; ++c)
    for (int t = 0; t < 20; ++t) absl::StrAppend(&line, t ? "," : c ? ":" : "", 100 * (c + 1) + t);
  const std::string path = folder.Write("x.ts", "@classLabel false\n@data\n" + line + "\n");
  ChannelStatistics none;
  v1::DataSpec data = Ts(1, "none", "none");
  data.set_crop("random");
  data.set_shift(2);
  data.set_channel_drop(0.25);
  data.add_amplitude(0.5), data.add_amplitude(2);
  const auto dataset = OpenDataset(data, path, InputGeometry(3, {15}), &none);
  ASSERT_TRUE(dataset.ok()) << dataset.status();
  std::set<int> starts, shifts;
  int dropped = 0;
  double least = 9, most = 0;
  for (uint64_t id = 0; id < 400; ++id) {
    const Visit visit{0, id, 11, 2, true};
    float x[45], again[45];
    ASSERT_TRUE((*dataset)->Read(visit, x).ok());
    ASSERT_TRUE((*dataset)->Read(visit, again).ok());
    EXPECT_TRUE(std::equal(x, x + 45, again));
    int kept = -1;
    for (int c = 0; c < 3; ++c) {
      if (std::all_of(x + 15 * c, x + 15 * c + 15, [](float v) { return v == 0; })) ++dropped;
      else kept = c;
    }
    if (kept < 0) continue;
    const float* row = x + 15 * kept;
    const int left = std::find_if(row, row + 15, [](float v) { return v != 0; }) - row, right = std::find_if(row, row + 15, [](float v) { return v != 0; }) == row ? std::find(row, row + 15, 0.0f) - row : 15;
    const float factor = row[left + 1] - row[left];   // neighbours differ by one
    const int first = static_cast<int>(std::lround(row[left] / factor)) - 100 * (kept + 1);
    const int shift = left > 0 ? left : right - 15;
    for (int t = left; t < right; ++t) ASSERT_NEAR(row[t], factor * (100 * (kept + 1) + first + t - left), 0.02);
    starts.insert(shift >= 0 ? first : first + shift);
    shifts.insert(shift);
    least = std::min<double>(least, factor), most = std::max<double>(most, factor);
  }
  EXPECT_EQ(starts, (std::set<int>{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(shifts, (std::set<int>{-2, -1, 0, 1, 2}));
  EXPECT_NEAR(dropped, 300, 60);
  EXPECT_TRUE(least > 0.49 && least < 0.55 && most > 1.9 && most < 2.01) << least << " " << most;
  float plain[45];
  ASSERT_TRUE((*dataset)->Read({0, 7, 11, 2, false}, plain).ok());
  for (int i = 0; i < 45; ++i) EXPECT_EQ(plain[i], 100 * (i / 15 + 1) + 2 + i % 15);
}

TEST(SignalDataset, NonFiniteValuesNameTheSample) {
  TestFolder folder;
  const float values[] = {1, 2, 3, 4, NAN, 6, 7, 8};
  const std::string path = folder.Write("x.npy", NpyBytes("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 2, 2)}",
                                                          {reinterpret_cast<const char*>(values), sizeof values}));
  v1::DataSpec data = Ts(1, "none", "channel");
  data.set_source("npy");
  ChannelStatistics statistics;
  const auto refused = OpenDataset(data, path, InputGeometry(2, {2}), &statistics);
  EXPECT_EQ(ReasonOf(refused.status()), v1::REASON_DATA_ERROR);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("sample 1: value nan at channel 0, point 0"));
  data.set_on_error("skip");
  const auto dataset = OpenDataset(data, path, InputGeometry(2, {2}), &statistics);
  ASSERT_TRUE(dataset.ok()) << dataset.status();
  EXPECT_THAT(statistics.mean, ElementsAre(1.5, 3.5));
  float x[4];
  EXPECT_EQ(ReasonOf((*dataset)->Read({1, 1, 0, 0, true}, x)), v1::REASON_DATA_ERROR);
}

TEST(OpenDataset, MissingFilesAreDataErrorsWithThePath) {
  v1::DataSpec data = Ts(1, "none", "none");
  for (const char* source : {"ts", "npy", "images"}) {
    data.set_source(source);
    const auto dataset = OpenDataset(data, "/nowhere/x", InputGeometry(1, {2, 2}), nullptr);
    EXPECT_EQ(ReasonOf(dataset.status()), v1::REASON_DATA_ERROR) << source;
    EXPECT_THAT(std::string(dataset.status().message()), HasSubstr("/nowhere/x"));
  }
}

TEST(Synthetic, HasMeanZeroAndVarianceOneAndIsTheSameEachTime) {
  v1::DataSpec data;
  data.set_source("synthetic");
  data.set_synthetic_samples(100);
  Geometry geometry = InputGeometry(8, {1 << 15});
  const auto dataset = OpenDataset(data, "", geometry, nullptr);
  ASSERT_TRUE(dataset.ok());
  EXPECT_EQ((*dataset)->row_format().row_bytes(), 0);
  const auto read = [&](const Visit& visit) {
    std::vector<float> x(8 << 15, NAN);
    EXPECT_TRUE((*dataset)->Read(visit, x.data()).ok());
    return x;
  };
  const std::vector<float> x = read({3, 3, 7, 0});
  EXPECT_EQ(x, read({3, 203, 7, 5})) << "a repetition, in another epoch, is of the same sample";
  EXPECT_NE(x, read({4, 4, 7, 0}));
  EXPECT_NE(x, read({3, 3, 8, 0}));
  double mean = 0, square = 0, tail = 0, covariance = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    mean += x[i] / double(x.size()), square += double(x[i]) * x[i] / double(x.size());
    tail += (std::abs(x[i]) < 1) / double(x.size());
    if (i > 0) covariance += double(x[i]) * x[i - 1] / double(x.size());
  }
  EXPECT_NEAR(mean, 0, 0.008);
  EXPECT_NEAR(square, 1, 0.01);
  EXPECT_NEAR(tail, 0.68, 0.02);   // a uniform number of that variance: 0.58
  EXPECT_NEAR(covariance, 0, 0.008);
}

}  // namespace
}  // namespace hierad
