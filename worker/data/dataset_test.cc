#include "worker/data/dataset.h"

#include <cmath>

#include "base/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/data/test_files.h"

namespace hierad {
namespace {

using testing::ElementsAre;
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
  const auto reshaped = OpenDataset(Ts(1, "zero", "none"), path, InputGeometry(2, {2, 3}), &none);
  ASSERT_TRUE(reshaped.ok());
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
  EXPECT_THAT(Read(**dataset, 1, 4), ElementsAre(0, float(3 / std), 0, 0));
  const ChannelStatistics before = statistics;
  const auto held_out = OpenDataset(Ts(1, "none", "channel"), test, InputGeometry(2, {2}), &statistics);
  ASSERT_TRUE(held_out.ok());
  EXPECT_EQ(statistics.mean, before.mean);
  EXPECT_THAT(Read(**held_out, 0, 4), ElementsAre(0, float(2 / std), 1, 2));
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

TEST(Synthetic, IsStandardNormalAndTheSameEachTime) {
  v1::DataSpec data;
  data.set_source("synthetic");
  data.set_synthetic_samples(100);
  Geometry geometry = InputGeometry(8, {1 << 17});   // a sample as long as the table
  const auto dataset = OpenDataset(data, "", geometry, nullptr);
  ASSERT_TRUE(dataset.ok());
  const std::vector<float> x = Read(**dataset, 3, 8 << 17), again = Read(**dataset, 3, 8 << 17), other = Read(**dataset, 4, 8 << 17);
  EXPECT_EQ(x, again);
  EXPECT_NE(x, other);
  double mean = 0, square = 0;
  for (float v : x) mean += v / x.size(), square += double(v) * v / x.size();
  EXPECT_NEAR(mean, 0, 0.005);
  EXPECT_NEAR(square, 1, 0.01);
}

}  // namespace
}  // namespace hierad
