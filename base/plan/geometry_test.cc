#include "base/plan/geometry.h"

#include <algorithm>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "base/status.h"

namespace hierad {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

v1::ModelSpec Spec(std::vector<int> input_size) {
  v1::ModelSpec spec;
  for (int size : input_size) spec.add_input_size(size);
  return spec;
}

Geometry Make(const v1::ModelSpec& spec) {
  auto g = Geometry::From(spec);
  EXPECT_TRUE(g.ok()) << g.status();
  return g.ok() ? *g : Geometry{};
}

std::string Refusal(const v1::ModelSpec& spec) {
  auto g = Geometry::From(spec);
  EXPECT_FALSE(g.ok());
  if (g.ok()) return "";
  EXPECT_EQ(ReasonOf(g.status()), v1::REASON_USER_ERROR);
  return std::string(g.status().message());
}

TEST(GeometryTest, Base224) {
  v1::ModelSpec spec = Spec({224, 224});
  spec.set_in_chans(8);
  const Geometry g = Make(spec);
  EXPECT_EQ(g.num_tokens, 56 * 56);
  EXPECT_EQ(g.num_mask_units, 49);
  EXPECT_EQ(g.num_kept, 19);
  EXPECT_EQ(g.mask_unit_tokens, 64);
  EXPECT_EQ(g.mask_unit_final_tokens, 4);
  EXPECT_EQ(g.num_tokens_final, 196);
  EXPECT_EQ(g.encoder_dim_out, 768);
  EXPECT_EQ(g.pred_stride, 16);
  EXPECT_EQ(g.pred_dim, 16 * 16 * 8);
  EXPECT_THAT(g.stage_ends, ElementsAre(1, 4, 20, 23));
  EXPECT_THAT(g.fusion_stages, ElementsAre(0, 1, 3));
  ASSERT_EQ(g.fusion_kernels.size(), 2u);
  EXPECT_THAT(g.fusion_kernels[0], ElementsAre(4, 4));
  EXPECT_THAT(g.fusion_kernels[1], ElementsAre(2, 2));
  ASSERT_EQ(g.blocks.size(), 24u);
  // index, stage, dim_in, dim_out, heads, q_stride, mask unit attention, window, tokens at entry
  struct Row { int i, stage; int64_t in, out, heads, stride; bool windowed; int64_t window, tokens; };
  for (const Row& r : {Row{0, 0, 96, 96, 1, 1, true, 64, 3136}, Row{1, 0, 96, 96, 1, 1, true, 64, 3136},
                       Row{2, 1, 96, 192, 2, 4, true, 64, 3136}, Row{3, 1, 192, 192, 2, 1, true, 16, 784},
                       Row{5, 2, 192, 384, 4, 4, true, 16, 784},  // still inside windows: the switch lags by a block
                       Row{6, 2, 384, 384, 4, 1, false, 4, 196}, Row{20, 2, 384, 384, 4, 1, false, 4, 196},
                       Row{21, 3, 384, 768, 8, 1, false, 4, 196}, Row{23, 3, 768, 768, 8, 1, false, 4, 196}}) {
    const BlockShape& b = g.blocks[r.i];
    EXPECT_EQ(b.stage, r.stage) << r.i;
    EXPECT_EQ(b.dim_in, r.in) << r.i;
    EXPECT_EQ(b.dim_out, r.out) << r.i;
    EXPECT_EQ(b.heads, r.heads) << r.i;
    EXPECT_EQ(b.q_stride, r.stride) << r.i;
    EXPECT_EQ(b.mask_unit_attn, r.windowed) << r.i;
    EXPECT_EQ(b.window_tokens, r.window) << r.i;
    EXPECT_EQ(b.tokens_full_in, r.tokens) << r.i;
  }
}

TEST(GeometryTest, VideoTakesFairsDefaults) {
  const Geometry g = Make(Spec({16, 224, 224}));
  EXPECT_THAT(g.patch_kernel, ElementsAre(3, 7, 7));
  EXPECT_THAT(g.q_stride, ElementsAre(1, 2, 2));
  EXPECT_THAT(g.mask_unit_size, ElementsAre(1, 8, 8));
  EXPECT_THAT(g.mask_units, ElementsAre(8, 7, 7));
  EXPECT_EQ(g.num_tokens, 8 * 56 * 56);
  EXPECT_EQ(g.pred_dim, 16 * 16 * 3);   // one frame of each token
  EXPECT_TRUE(g.separate_pos_embed);
}

TEST(GeometryTest, QuickstartSignal) {
  v1::ModelSpec spec = Spec({224});
  spec.set_in_chans(6);
  spec.add_patch_kernel(4);
  spec.add_patch_stride(4);
  spec.add_patch_padding(0);
  for (int blocks : {1, 1, 2}) spec.add_stages(blocks);
  spec.set_embed_dim(32);
  spec.set_decoder_embed_dim(64);
  spec.set_decoder_num_heads(4);
  const Geometry g = Make(spec);
  EXPECT_EQ(g.num_tokens, 56);
  EXPECT_EQ(g.num_mask_units, 14);
  EXPECT_EQ(g.num_kept, 5);
  EXPECT_EQ(g.encoder_dim_out, 128);
  EXPECT_EQ(g.pred_stride, 16);
  EXPECT_EQ(g.pred_dim, 96);
  EXPECT_EQ(g.spec.q_pool(), 2);
}

TEST(GeometryTest, ClassifyPoolsThreeTimes) {
  v1::ModelSpec spec = Spec({224, 224});
  spec.set_task("classify");
  const Geometry g = Make(spec);
  EXPECT_EQ(g.spec.q_pool(), 3);
  EXPECT_EQ(g.num_kept, g.num_mask_units);
  EXPECT_EQ(g.num_tokens_final, 49);
}

TEST(GeometryTest, KeptIsPythonsArithmetic) {
  EXPECT_EQ(KeptMaskUnits(49, 0.6), 19);
  EXPECT_EQ(KeptMaskUnits(20, 0.8), 3);    // 3.9999999999999991
  EXPECT_EQ(KeptMaskUnits(10, 0.9), 0);
}

TEST(GeometryTest, StochasticDepthRisesLinearly) {
  v1::ModelSpec spec = Spec({224, 224});
  spec.set_drop_path_rate(0.2);
  const Geometry g = Make(spec);
  EXPECT_EQ(g.blocks.front().drop_path, 0);
  EXPECT_EQ(g.blocks.back().drop_path, double(0.2f));
  EXPECT_NEAR(g.blocks[12].drop_path, 0.2 * 12 / 23, 1e-7);
}

TEST(GeometryTest, UnrollOrderPoolsNeighboursAndKeepsWindowsTogether) {
  for (const auto& size : {std::vector<int>{256}, {64, 96}, {4, 64, 32}}) {
    const Geometry g = Make(Spec(size));
    const std::vector<int64_t> order = g.UnrollOrder();
    std::vector<int64_t> sorted = order;
    std::sort(sorted.begin(), sorted.end());
    for (int64_t i = 0; i < g.num_tokens; ++i) ASSERT_EQ(sorted[i], i);
    auto coordinates = [&](int64_t position) {
      std::vector<int64_t> c(g.dims);
      for (int d = g.dims - 1; d >= 0; --d) {
        c[d] = position % g.tokens[d];
        position /= g.tokens[d];
      }
      return c;
    };
    const int64_t group = g.num_tokens / g.flat_q_stride;
    for (int64_t n = 0; n < g.num_tokens; ++n) {
      const std::vector<int64_t> c = coordinates(order[n]);
      int64_t window = 0;
      for (int d = 0; d < g.dims; ++d) window = window * g.mask_units[d] + c[d] / g.mask_unit_size[d];
      ASSERT_EQ(window, n % g.num_mask_units);
      // Max over the slowest stride axis is max over a q_stride cell of neighbours.
      const std::vector<int64_t> first = coordinates(order[n % group]);
      for (int d = 0; d < g.dims; ++d) ASSERT_EQ(c[d] / g.q_stride[d], first[d] / g.q_stride[d]);
    }
  }
}

// 8 tokens of one axis, mask units of 4: position of n = t * 2 + w, t = (s_1, s_2), is 4 w + 2 s_2 + s_1.
TEST(GeometryTest, UnrollOrderByHand) {
  v1::ModelSpec spec = Spec({8});
  spec.set_mask_ratio(0.5);
  spec.add_patch_kernel(1);
  spec.add_patch_stride(1);
  spec.add_patch_padding(0);
  for (int blocks : {1, 1, 1}) spec.add_stages(blocks);
  EXPECT_THAT(Make(spec).UnrollOrder(), ElementsAre(0, 4, 2, 6, 1, 5, 3, 7));
}

TEST(GeometryTest, RefusalsNameTheNearestLegalSizes) {
  EXPECT_THAT(Refusal(Spec({225, 224})),
              AllOf(HasSubstr("model.input_size: 225 on axis 0"), HasSubstr("32"), HasSubstr("224 and 256")));
  EXPECT_THAT(Refusal(Spec({1000})), HasSubstr("992 and 1024"));
  EXPECT_THAT(Refusal(Spec({7, 224, 224})), HasSubstr("6 and 8"));
  EXPECT_THAT(Refusal(Spec({16})), HasSubstr("nearest legal size is 32"));
  EXPECT_THAT(Refusal(Spec({32, 32})), HasSubstr("single mask unit"));
}

TEST(GeometryTest, FlagsBeyondTheStagesAreUnreadAsInFair) {
  v1::ModelSpec spec = Spec({224, 224});
  for (int i = 0; i < 6; ++i) spec.add_mask_unit_attn(i < 3);
  const absl::StatusOr<Geometry> g = Geometry::From(spec);
  ASSERT_TRUE(g.ok()) << g.status();
  EXPECT_THAT(g->spec.mask_unit_attn(), ElementsAre(true, true, true, false));
}

TEST(GeometryTest, EveryRuleIsChecked) {
  auto with = [](auto change) {
    v1::ModelSpec spec = Spec({224, 224});
    change(&spec);
    return Refusal(spec);
  };
  EXPECT_THAT(with([](auto* s) { s->set_mask_ratio(0.999); }), HasSubstr("at most 0.979"));
  EXPECT_THAT(with([](auto* s) { s->set_mask_ratio(1e-18); }), HasSubstr("keeps 49 of 49"));
  EXPECT_THAT(with([](auto* s) { s->set_mask_ratio(-0.1); }), HasSubstr("between 0 and 1"));
  EXPECT_THAT(with([](auto* s) { s->set_num_heads(5); }), HasSubstr("multiple of heads"));
  EXPECT_THAT(with([](auto* s) { s->set_decoder_num_heads(7); }), HasSubstr("the decoder has 512 channels and 7"));
  EXPECT_THAT(with([](auto* s) { s->set_q_pool(4); }), HasSubstr("0 to 3"));
  EXPECT_THAT(with([](auto* s) { s->set_sep_pos_embed(true); }), HasSubstr("three axes"));
  EXPECT_THAT(with([](auto* s) { s->set_task("segment"); }), HasSubstr("mae and classify"));
  EXPECT_THAT(with([](auto* s) { s->set_variant("giant"); }), HasSubstr("base_plus"));
  EXPECT_THAT(with([](auto* s) { s->set_in_chans(0); }), HasSubstr("model.in_chans: 0"));
  EXPECT_THAT(with([](auto* s) { s->set_mlp_ratio(0.001); }), HasSubstr("mlp_ratio"));
  EXPECT_THAT(with([](auto* s) { s->add_q_stride(2); }), HasSubstr("1 numbers for the 2 axes"));
  EXPECT_THAT(with([](auto* s) { for (int i = 0; i < 2; ++i) s->add_mask_unit_size(4); }), HasSubstr("2^3 = 8"));
  EXPECT_THAT(with([](auto* s) { for (int i = 0; i < 2; ++i) s->add_patch_padding(1); }),
              HasSubstr("legal paddings are 2 to 3"));
  EXPECT_THAT(with([](auto* s) { s->add_mask_unit_attn(true); }), HasSubstr("1 flags for 4 stages"));
  EXPECT_THAT(with([](auto* s) {
                for (int stride : {4, 2}) s->add_patch_stride(stride);
                for (int kernel : {7, 3}) s->add_patch_kernel(kernel);
                for (int padding : {3, 1}) s->add_patch_padding(padding);
              }), HasSubstr("last two must be equal"));
  v1::ModelSpec video = Spec({16, 224, 224});
  for (int i = 0; i < 3; ++i) video.add_q_stride(2);
  EXPECT_THAT(Refusal(video), HasSubstr("1 on the time axis"));
  v1::ModelSpec huge = Spec({65536, 65536, 65536});
  EXPECT_THAT(Refusal(huge), HasSubstr("tokens"));
}

TEST(GeometryTest, ResolvingTwiceChangesNothing) {
  const Geometry g = Make(Spec({16, 224, 224}));
  EXPECT_EQ(Make(g.spec).spec.SerializeAsString(), g.spec.SerializeAsString());
}

}  // namespace
}  // namespace hierad
