#include "worker/model/draws.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <vector>

#include "base/job_yaml.h"
#include "gtest/gtest.h"
#include "worker/model/initialize.h"
#include "worker/model/test_models.h"

namespace hierad {
namespace {

TEST(DrawsTest, MaskUnitsAreThoseOfLeastNoise) {
  constexpr int64_t kCount = 49, kKept = 19;
  std::vector<int64_t> units(kCount), rank(kCount);
  const RandomStream stream{7, Draw::kMask, 3, 1234};
  DrawMaskUnits(stream, kCount, kKept, units.data(), rank.data());
  uint32_t most_kept = 0;
  for (int64_t i = 0; i < kKept; ++i) most_kept = std::max(most_kept, stream.Word(units[i]));
  for (int64_t i = kKept; i < kCount; ++i) EXPECT_GT(stream.Word(units[i]), most_kept);
  EXPECT_TRUE(std::is_sorted(units.begin(), units.begin() + kKept));
  EXPECT_TRUE(std::is_sorted(units.begin() + kKept, units.end()));
  for (int64_t i = 0; i < kCount; ++i) EXPECT_EQ(units[rank[i]], i);
}

TEST(DrawsTest, EveryUnitIsKeptAsOftenAndSetsDiffer) {
  constexpr int64_t kCount = 14, kKept = 5, kVisits = 20000;
  std::vector<int64_t> units(kCount), rank(kCount);
  std::vector<double> kept(kCount);
  std::set<std::vector<int64_t>> sets;
  for (uint64_t visit = 0; visit < kVisits; ++visit) {
    DrawMaskUnits({0, Draw::kMask, 0, visit}, kCount, kKept, units.data(), rank.data());
    for (int64_t i = 0; i < kKept; ++i) ++kept[units[i]];
    sets.insert(std::vector<int64_t>(units.begin(), units.begin() + kKept));
  }
  const double p = double(kKept) / kCount, sigma = std::sqrt(kVisits * p * (1 - p));
  for (double count : kept) EXPECT_NEAR(count, kVisits * p, 5 * sigma);
  EXPECT_GT(sets.size(), 1900u);   // of 2002
}

TEST(DrawsTest, DropPathKeepsTheMeanAndRisesWithDepth) {
  v1::ModelSpec spec = SmallModel(2);
  spec.set_drop_path_rate(0.4);
  const Geometry g = *Geometry::From(spec);
  constexpr int kVisits = 20000;
  std::vector<double> sum(2 * g.blocks.size()), dropped(2 * g.blocks.size());
  std::vector<float> factors(sum.size());
  for (uint64_t visit = 0; visit < kVisits; ++visit) {
    DrawDropPath(0, 0, visit, g, factors.data(), 1);
    for (size_t i = 0; i < sum.size(); ++i) {
      sum[i] += factors[i] / kVisits;
      dropped[i] += (factors[i] == 0) / double(kVisits);
    }
  }
  for (size_t i = 0; i < sum.size(); ++i) {
    EXPECT_NEAR(dropped[i], 0.4 * double(i / 2) / double(g.blocks.size() - 1), 0.02) << i;
    EXPECT_NEAR(sum[i], 1.0, 0.03) << i;
  }
}

TEST(DrawsTest, DropoutKeepsTheMean) {
  std::vector<float> factors(100000);
  DrawDropout(0, 0, 0, 0.25, int64_t(factors.size()), factors.data());
  double sum = 0;
  for (float factor : factors) sum += factor / double(factors.size());
  EXPECT_NEAR(sum, 1.0, 0.01);
}

TEST(InitializeTest, ValuesFollowTheTable) {
  const Geometry g = *Geometry::From(SmallModel(2));
  const ParameterTable table = ParameterTable::For(g);
  std::vector<float> flat(table.flat_size, -1.0f), again(table.flat_size), other(table.flat_size);
  InitializeParameters(table, 5, flat.data());
  InitializeParameters(table, 5, again.data());
  InitializeParameters(table, 6, other.data());
  EXPECT_EQ(flat, again);
  EXPECT_NE(flat, other);
  auto moments = [&](const char* name) {
    const Parameter* p = table.Find(name);
    double mean = 0, square = 0, largest = 0;
    for (int64_t i = 0; i < p->size; ++i) {
      const double v = flat[p->offset + i];
      mean += v / double(p->size);
      square += v * v / double(p->size);
      largest = std::max(largest, std::abs(v));
    }
    return std::vector<double>{mean, std::sqrt(square), largest};
  };
  const double xavier = std::sqrt(6.0 / (16 + 64));
  EXPECT_NEAR(moments("decoder_blocks.0.mlp.fc1.weight")[1], xavier / std::sqrt(3.0), 0.02 * xavier);
  EXPECT_LE(moments("decoder_blocks.0.mlp.fc1.weight")[2], xavier);
  EXPECT_NEAR(moments("decoder_pos_embed")[1], 0.02, 0.002);
  EXPECT_NEAR(moments("decoder_pos_embed")[0], 0.0, 0.003);
  EXPECT_EQ(moments("blocks.0.norm1.weight")[0], 1.0);
  EXPECT_EQ(moments("blocks.0.norm1.bias")[2], 0.0);
  EXPECT_LE(moments("patch_embed.proj.bias")[2], 1 / std::sqrt(2.0 * 49));
  for (size_t i = 1; i < table.parameters.size(); ++i) {   // padding stays zero
    const Parameter& p = table.parameters[i - 1];
    for (int64_t j = p.offset + p.size; j < table.parameters[i].offset; ++j) ASSERT_EQ(flat[j], 0.0f);
  }
}

// Enough parameters for several threads: whoever draws one, its values are those of its own stream.
TEST(InitializeTest, ManyParametersAreDrawnAsFew) {
  v1::ModelSpec spec;
  spec.set_variant("tiny");
  spec.set_in_chans(3);
  for (int i = 0; i < 2; ++i) spec.add_input_size(224);
  v1::JobSpec job;
  *job.mutable_model() = spec;
  FillDefaults(&job);
  const ParameterTable table = ParameterTable::For(*Geometry::From(job.model()));
  ASSERT_GT(table.flat_size, 16 << 20);
  std::vector<float> flat(table.flat_size, -1.0f);
  InitializeParameters(table, 9, flat.data());
  int64_t end = 0, uniform = 0;
  for (size_t index = 0; index < table.parameters.size(); ++index) {
    const Parameter& p = table.parameters[index];
    for (; end < p.offset; ++end) ASSERT_EQ(flat[end], 0.0f) << "padding before " << p.name;
    end = p.offset + p.size;
    if (p.init != Init::kXavierUniform) continue;
    const RandomStream stream{9, Draw::kInit, 0, index};
    const double bound = std::sqrt(6.0 / double(p.shape[0] + p.size / p.shape[0]));
    for (int64_t i : {int64_t{0}, p.size / 2, p.size - 1}) {
      ASSERT_EQ(flat[p.offset + i], float((2.0 * stream.Uniform(i) - 1.0) * bound * p.init_scale)) << p.name << " " << i;
    }
    ++uniform;
  }
  EXPECT_GT(uniform, 50);
}

}  // namespace
}  // namespace hierad
