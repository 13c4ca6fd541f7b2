#include "base/plan/parameters.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace hierad {
namespace {

using ::testing::ElementsAre;

v1::ModelSpec Spec(std::vector<int> input_size, const char* variant, const char* task = "mae") {
  v1::ModelSpec spec;
  spec.set_variant(variant);
  spec.set_task(task);
  for (int size : input_size) spec.add_input_size(size);
  return spec;
}

ParameterTable Table(const v1::ModelSpec& spec) {
  auto geometry = Geometry::From(spec);
  EXPECT_TRUE(geometry.ok()) << geometry.status();
  return ParameterTable::For(*geometry);
}

// Counts printed by FAIR's constructors.
TEST(ParametersTest, CountsAreFairs) {
  v1::ModelSpec eight_channels = Spec({224, 224}, "base");
  eight_channels.set_in_chans(8);
  struct Row { v1::ModelSpec spec; size_t tensors; int64_t elements; };
  for (const Row& row : {Row{eight_channels, 407, 79315808}, Row{Spec({224, 224}, "tiny"), 263, 55020896},
                         Row{Spec({224, 224}, "base", "classify"), 301, 51524968},
                         Row{Spec({16, 224, 224}, "base"), 408, 79367104}, Row{Spec({224, 224}, "huge"), 695, 710081792}}) {
    const ParameterTable table = Table(row.spec);
    EXPECT_EQ(table.parameters.size(), row.tensors);
    EXPECT_EQ(table.num_elements, row.elements);
  }
}

TEST(ParametersTest, OrderOfABlockThatChangesWidth) {
  const ParameterTable table = Table(Spec({224, 224}, "base"));
  std::vector<std::string> names;
  for (const Parameter& p : table.parameters) {
    if (p.name.starts_with("blocks.2.")) names.push_back(p.name.substr(9));
  }
  EXPECT_THAT(names, ElementsAre("norm1.weight", "norm1.bias", "attn.qkv.weight", "attn.qkv.bias", "attn.proj.weight",
                                 "attn.proj.bias", "norm2.weight", "norm2.bias", "mlp.fc1.weight", "mlp.fc1.bias",
                                 "mlp.fc2.weight", "mlp.fc2.bias", "proj.weight", "proj.bias"));
  EXPECT_EQ(table.parameters[0].name, "pos_embed");
  EXPECT_EQ(table.parameters[1].name, "mask_token");
  EXPECT_EQ(table.parameters[2].name, "decoder_pos_embed");
  EXPECT_EQ(table.parameters[3].name, "patch_embed.proj.weight");
  EXPECT_EQ(table.parameters.back().name, "decoder_pred.bias");
}

TEST(ParametersTest, DecayGroupsAreTimms) {
  const ParameterTable mae = Table(Spec({224, 224}, "base"));
  for (const char* name : {"mask_token", "decoder_pos_embed", "patch_embed.proj.weight", "blocks.0.attn.qkv.weight",
                           "multi_scale_fusion_heads.1.weight", "decoder_pred.weight"}) {
    ASSERT_NE(mae.Find(name), nullptr) << name;
    EXPECT_TRUE(mae.Find(name)->decay) << name;
  }
  for (const char* name : {"pos_embed", "patch_embed.proj.bias", "blocks.0.norm1.weight", "encoder_norm.bias"}) {
    ASSERT_NE(mae.Find(name), nullptr) << name;
    EXPECT_FALSE(mae.Find(name)->decay) << name;
  }
  const ParameterTable video = Table(Spec({16, 224, 224}, "base"));
  EXPECT_FALSE(video.Find("pos_embed_spatial")->decay);
  EXPECT_FALSE(video.Find("pos_embed_temporal")->decay);
  EXPECT_EQ(video.Find("pos_embed"), nullptr);
}

TEST(ParametersTest, InitialisationIsFairs) {
  const ParameterTable mae = Table(Spec({224, 224}, "base"));
  EXPECT_EQ(mae.Find("patch_embed.proj.weight")->init, Init::kXavierUniform);
  EXPECT_EQ(mae.Find("patch_embed.proj.bias")->init, Init::kTorchUniform);
  EXPECT_EQ(mae.Find("patch_embed.proj.bias")->fan_in, 3 * 49);
  EXPECT_EQ(mae.Find("multi_scale_fusion_heads.0.weight")->init, Init::kTorchUniform);
  EXPECT_EQ(mae.Find("multi_scale_fusion_heads.0.weight")->fan_in, 96 * 16);
  EXPECT_EQ(mae.Find("blocks.0.attn.qkv.bias")->init, Init::kZero);
  EXPECT_EQ(mae.Find("decoder_pos_embed")->init, Init::kTruncatedNormal02);
  const ParameterTable classify = Table(Spec({224, 224}, "base", "classify"));
  EXPECT_EQ(classify.Find("blocks.0.attn.qkv.weight")->init, Init::kTruncatedNormal02);
  EXPECT_EQ(classify.Find("blocks.0.norm1.bias")->init, Init::kConstant02);
  EXPECT_EQ(classify.Find("patch_embed.proj.bias")->init, Init::kTorchUniform);
  EXPECT_EQ(classify.Find("head.projection.weight")->init_scale, 0.001);
  EXPECT_EQ(classify.Find("head.projection.bias")->init_scale, 0.001);
}

TEST(ParametersTest, OffsetsAreAlignedAndDoNotOverlap) {
  const ParameterTable table = Table(Spec({256}, "tiny"));
  int64_t end = 0;
  for (const Parameter& p : table.parameters) {
    EXPECT_EQ(p.offset % kParameterAlign, 0);
    EXPECT_GE(p.offset, end);
    EXPECT_LT(p.offset - end, kParameterAlign);
    end = p.offset + p.size;
  }
  EXPECT_GE(table.flat_size, end);
  EXPECT_LT(table.flat_size - end, kParameterAlign);
}

}  // namespace
}  // namespace hierad
