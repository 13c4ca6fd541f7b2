#include "base/plan/geometry.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"

namespace hierad {
namespace {

// More tokens than any attention of ours can hold; also keeps every product below 2^63.
constexpr int64_t kMaxTokens = int64_t{1} << 22;

struct Variant {
  const char* name;
  int embed_dim;
  int num_heads;
  std::vector<int> stages;
};

// FAIR's constructors mae_hiera_{tiny,...}_224.
const Variant* FindVariant(const std::string& name) {
  static const std::vector<Variant>& variants = *new std::vector<Variant>{
      {"tiny", 96, 1, {1, 2, 7, 2}},        {"small", 96, 1, {1, 2, 11, 2}}, {"base", 96, 1, {2, 3, 16, 3}},
      {"base_plus", 112, 2, {2, 3, 16, 3}}, {"large", 144, 2, {2, 6, 36, 4}}, {"huge", 256, 4, {2, 6, 36, 4}}};
  for (const Variant& variant : variants) {
    if (name == variant.name) return &variant;
  }
  return nullptr;
}

template <typename... Parts>
absl::Status Illegal(const Parts&... parts) {
  return ErrorOf(v1::REASON_USER_ERROR, absl::StrCat(parts...));
}

int64_t Product(const std::vector<int64_t>& v) {
  int64_t product = 1;
  for (int64_t x : v) product *= x;
  return product;
}

// Saturates at 2^31, far above any legal size, so that no product of two overflows.
int64_t Power(int64_t base, int exponent) {
  int64_t power = 1;
  for (int i = 0; i < exponent; ++i) power = std::min(power * base, int64_t{1} << 31);
  return power;
}

template <typename Field>
std::vector<int64_t> ToVector(const Field& field) {
  return std::vector<int64_t>(field.begin(), field.end());
}

template <typename Field, typename Values>
void Assign(Field* field, const Values& values) {
  field->Clear();
  for (auto value : values) field->Add(value);
}

std::string List(const std::vector<int64_t>& values) { return absl::StrCat("[", absl::StrJoin(values, ", "), "]"); }

// torch.linspace(0, rate, depth) in float, as FAIR's stochastic depth: the upper half counts back from the end.
double DropPathRate(double rate, int i, int depth) {
  if (depth == 1) return 0;
  const float end = float(rate);
  const float step = end / float(depth - 1);
  return i < depth / 2 ? step * float(i) : end - step * float(depth - 1 - i);
}

// Fills the keys that depend on the task, the number of axes and the number of stages.
absl::Status Resolve(v1::ModelSpec* spec) {
  if (!spec->has_task()) spec->set_task("mae");
  if (spec->task() != "mae" && spec->task() != "classify") {
    return Illegal("model.task: '", spec->task(), "' is not known; allowed are mae and classify.");
  }
  if (!spec->has_variant()) spec->set_variant("base");
  const Variant* variant = FindVariant(spec->variant());
  if (variant == nullptr) {
    return Illegal("model.variant: '", spec->variant(),
                   "' is not known; allowed are tiny, small, base, base_plus, large and huge.");
  }
  if (spec->input_size_size() == 0) Assign(spec->mutable_input_size(), std::vector<int>{224, 224});
  const int dims = spec->input_size_size();
  if (dims > 3) return Illegal("model.input_size: ", dims, " axes were given; 1 (signal), 2 (image) or 3 (video) are allowed.");
  const bool video = dims == 3;
  // Video treats time apart: (2, 4, 4) rather than 4 on each axis.
  auto per_axis = [&](auto* field, int value, int time_value) {
    if (field->empty()) {
      for (int d = 0; d < dims; ++d) field->Add(video && d == 0 ? time_value : value);
    }
  };
  if (!spec->has_in_chans()) spec->set_in_chans(3);
  if (!spec->has_embed_dim()) spec->set_embed_dim(variant->embed_dim);
  if (!spec->has_num_heads()) spec->set_num_heads(variant->num_heads);
  if (spec->stages().empty()) Assign(spec->mutable_stages(), variant->stages);
  const int stages = spec->stages_size();
  if (!spec->has_q_pool()) spec->set_q_pool(std::min(spec->task() == "mae" ? 2 : 3, stages - 1));
  per_axis(spec->mutable_q_stride(), 2, 1);
  per_axis(spec->mutable_patch_kernel(), 7, 3);
  per_axis(spec->mutable_patch_stride(), 4, 2);
  per_axis(spec->mutable_patch_padding(), 3, 1);
  if (spec->mask_unit_size().empty() && spec->q_stride_size() == dims) {
    for (int stride : spec->q_stride()) {
      spec->add_mask_unit_size(int(std::min<int64_t>(Power(std::max(stride, 1), stages - 1), INT32_MAX)));
    }
  }
  if (spec->mask_unit_attn().empty()) {
    for (int s = 0; s < stages; ++s) spec->add_mask_unit_attn(s < 2);
  }
  if (!spec->has_mlp_ratio()) spec->set_mlp_ratio(4.0);
  if (!spec->has_drop_path_rate()) spec->set_drop_path_rate(0.0);
  if (!spec->has_head_dropout()) spec->set_head_dropout(0.0);
  if (!spec->has_sep_pos_embed()) spec->set_sep_pos_embed(video);
  if (!spec->has_decoder_embed_dim()) spec->set_decoder_embed_dim(512);
  if (!spec->has_decoder_depth()) spec->set_decoder_depth(8);
  if (!spec->has_decoder_num_heads()) spec->set_decoder_num_heads(16);
  if (!spec->has_num_classes()) spec->set_num_classes(1000);
  if (!spec->has_mask_ratio()) spec->set_mask_ratio(0.6);
  if (!spec->has_norm_target()) spec->set_norm_target(true);
  return absl::OkStatus();
}

absl::Status CheckLengths(const v1::ModelSpec& spec) {
  const int dims = spec.input_size_size();
  const std::pair<const char*, int> per_axis[] = {{"q_stride", spec.q_stride_size()},
                                                  {"mask_unit_size", spec.mask_unit_size_size()},
                                                  {"patch_kernel", spec.patch_kernel_size()},
                                                  {"patch_stride", spec.patch_stride_size()},
                                                  {"patch_padding", spec.patch_padding_size()}};
  for (const auto& [key, length] : per_axis) {
    if (length != dims) {
      return Illegal("model.", key, ": ", length, " numbers for the ", dims, " axes of input_size; give ", dims, ".");
    }
  }
  if (spec.mask_unit_attn_size() < spec.stages_size()) {   // FAIR too leaves flags beyond the stages unread
    return Illegal("model.mask_unit_attn: ", spec.mask_unit_attn_size(), " flags for ", spec.stages_size(),
                   " stages; give ", spec.stages_size(), ".");
  }
  if (spec.q_pool() < 0 || spec.q_pool() >= spec.stages_size()) {
    return Illegal("model.q_pool: ", spec.q_pool(), " with ", spec.stages_size(), " stages; 0 to ",
                   spec.stages_size() - 1, " (one less than the stages) are allowed.");
  }
  if (spec.sep_pos_embed() && dims != 3) {
    return Illegal("model.sep_pos_embed: true needs three axes (video), input_size has ", dims, "; set it to false.");
  }
  return absl::OkStatus();
}

// Every number at least 1 (padding: 0), whoever filled the spec.
absl::Status CheckPositive(const v1::ModelSpec& spec) {
  auto all = [](const char* key, const auto& values, int least) {
    for (int value : values) {
      if (value < least) return Illegal("model.", key, ": ", value, " is below the least allowed, ", least, ".");
    }
    return absl::OkStatus();
  };
  RETURN_IF_ERROR(all("input_size", spec.input_size(), 1));
  RETURN_IF_ERROR(all("stages", spec.stages(), 1));
  RETURN_IF_ERROR(all("q_stride", spec.q_stride(), 1));
  RETURN_IF_ERROR(all("mask_unit_size", spec.mask_unit_size(), 1));
  RETURN_IF_ERROR(all("patch_kernel", spec.patch_kernel(), 1));
  RETURN_IF_ERROR(all("patch_stride", spec.patch_stride(), 1));
  RETURN_IF_ERROR(all("patch_padding", spec.patch_padding(), 0));
  const std::pair<const char*, int> numbers[] = {{"in_chans", spec.in_chans()},
                                                 {"embed_dim", spec.embed_dim()},
                                                 {"num_heads", spec.num_heads()},
                                                 {"decoder_embed_dim", spec.decoder_embed_dim()},
                                                 {"decoder_depth", spec.decoder_depth()},
                                                 {"decoder_num_heads", spec.decoder_num_heads()},
                                                 {"num_classes", spec.num_classes()}};
  for (const auto& [key, value] : numbers) RETURN_IF_ERROR(all(key, std::vector<int>{value}, 1));
  return absl::OkStatus();
}

std::string NearestMultiples(int64_t size, int64_t unit) {
  const int64_t below = size / unit * unit, above = below + unit;
  if (below == 0) return absl::StrCat("the nearest legal size is ", above);
  return absl::StrCat("the nearest legal sizes are ", below, " and ", above);
}

absl::Status CheckAxis(const Geometry& g, int d, int num_stages) {
  const int64_t unit = Power(g.q_stride[d], num_stages - 1);
  if (g.mask_unit_size[d] != unit) {
    return Illegal("model.mask_unit_size: ", g.mask_unit_size[d], " on axis ", d, " must equal q_stride^(stages - 1) = ",
                   g.q_stride[d], "^", num_stages - 1, " = ", unit, ".");
  }
  const int64_t step = g.patch_stride[d] * unit;
  if (g.input_size[d] % step != 0) {
    return Illegal("model.input_size: ", g.input_size[d], " on axis ", d, " is not a multiple of ", step,
                   " (patch_stride ", g.patch_stride[d], " x mask_unit_size ", unit, "); ",
                   NearestMultiples(g.input_size[d], step), ".");
  }
  // floor((size + 2 p - k) / s) + 1 == size / s, with s dividing size.
  const int64_t k = g.patch_kernel[d], s = g.patch_stride[d], p = g.patch_padding[d];
  if (2 * p - k >= 0 || 2 * p - k < -s) {
    const int64_t least = std::max<int64_t>(0, (k - s + 1) / 2), most = (k - 1) / 2;
    std::string allowed = least > most    ? absl::StrCat("no padding fits; use an odd kernel, ", k + 1)
                          : least == most ? absl::StrCat("the legal padding is ", least)
                                          : absl::StrCat("legal paddings are ", least, " to ", most);
    return Illegal("model.patch_padding: ", p, " on axis ", d, " with patch_kernel ", k, " and patch_stride ", s,
                   " makes ", (g.input_size[d] + 2 * p - k >= 0 ? (g.input_size[d] + 2 * p - k) / s + 1 : 0),
                   " tokens of ", g.input_size[d], " samples instead of ", g.input_size[d] / s, "; ", allowed, ".");
  }
  return absl::OkStatus();
}

absl::Status CheckSpace(const Geometry& g) {
  for (int d = 0; d < g.dims; ++d) RETURN_IF_ERROR(CheckAxis(g, d, g.spec.stages_size()));
  int64_t tokens = 1;
  for (int d = 0; d < g.dims; ++d) {
    tokens *= g.input_size[d] / g.patch_stride[d];
    if (tokens > kMaxTokens) {
      return Illegal("model.input_size: ", List(g.input_size), " with patch_stride ", List(g.patch_stride), " makes over ",
                     kMaxTokens, " tokens, the most allowed; use a smaller input or a larger stride.");
    }
  }
  if (g.spec.task() != "mae") return absl::OkStatus();
  const int last = g.dims - 1;
  if (g.dims >= 2) {
    if (g.patch_stride[last] != g.patch_stride[last - 1]) {
      return Illegal("model.patch_stride: ", List(g.patch_stride),
                     "; the last two must be equal, since the decoder predicts square patches.");
    }
    if (g.q_stride[last] != g.q_stride[last - 1]) {
      return Illegal("model.q_stride: ", List(g.q_stride),
                     "; the last two must be equal, since the decoder predicts square patches.");
    }
  }
  if (g.dims == 3 && g.q_stride[0] != 1) {
    return Illegal("model.q_stride: ", List(g.q_stride), "; a video MAE needs 1 on the time axis.");
  }
  return absl::OkStatus();
}

absl::Status CheckMask(const Geometry& g) {
  const int64_t n = g.num_mask_units;
  const double ratio = g.spec.mask_ratio();
  if (n < 2) {
    return Illegal("model.input_size: ", List(g.input_size), " is a single mask unit, so nothing can be both kept and "
                   "removed; an MAE needs two or more mask units of ", List(g.mask_unit_size), " tokens.");
  }
  if (!(ratio > 0 && ratio < 1)) return Illegal("model.mask_ratio: ", ratio, " must lie between 0 and 1.");
  if (g.num_kept >= 1 && g.num_kept < n) return absl::OkStatus();
  // Rounding decides at the bound (10 * (1 - .9) is below 1), so the nearest legal ratio is searched for.
  double nearest = ratio;
  for (int step = 1; step < 1000 && KeptMaskUnits(n, nearest) < 1; ++step) nearest = std::floor(ratio * 1000 - step) / 1000;
  return Illegal("model.mask_ratio: ", ratio, " keeps ", g.num_kept, " of ", n, " mask units; at least one must be kept and "
                 "one removed", g.num_kept < 1 ? absl::StrCat(", so use at most ", nearest) : "", ".");
}

absl::Status CheckWidth(const char* what, int64_t dim, int64_t heads, double mlp_ratio, const char* key) {
  if (dim % heads != 0) {
    const int64_t below = dim / heads * heads;
    return Illegal("model.", key, ": ", what, " has ", dim, " channels and ", heads,
                   " heads; channels must be a multiple of heads (nearest: ", below > 0 ? absl::StrCat(below, " and ") : "",
                   below + heads, " channels).");
  }
  if (!(mlp_ratio > 0) || int64_t(double(dim) * mlp_ratio) < 1) {
    return Illegal("model.mlp_ratio: ", mlp_ratio, " leaves no hidden channel for the MLP of ", what, " (", dim, " channels).");
  }
  return absl::OkStatus();
}

// FAIR's loop over the blocks, with its lag of one block in mask_unit_attn.
absl::Status MakeBlocks(Geometry* g) {
  const v1::ModelSpec& spec = g->spec;
  int depth = 0;
  for (int blocks : spec.stages()) g->stage_ends.push_back((depth += blocks) - 1);
  int64_t dim = spec.embed_dim(), heads = spec.num_heads();
  int64_t window = g->mask_unit_tokens, tokens = g->num_tokens;
  int stage = 0;
  for (int i = 0; i < depth; ++i) {
    BlockShape block{i, stage, dim, dim, heads, 1, spec.mask_unit_attn(stage), window, tokens,
                     DropPathRate(spec.drop_path_rate(), i, depth)};
    if (i == g->stage_ends[stage] + 1) {
      block.stage = ++stage;
      block.dim_out = 2 * dim;
      block.heads = 2 * heads;
      if (stage <= spec.q_pool()) block.q_stride = g->flat_q_stride;
    }
    RETURN_IF_ERROR(CheckWidth(absl::StrCat("stage ", stage).c_str(), block.dim_out, block.heads, spec.mlp_ratio(), "num_heads"));
    dim = block.dim_out;
    heads = block.heads;
    window /= block.q_stride;
    tokens /= block.q_stride;
    g->blocks.push_back(block);
  }
  g->encoder_dim_out = dim;
  return absl::OkStatus();
}

absl::Status MakeDecoder(Geometry* g) {
  const v1::ModelSpec& spec = g->spec;
  const int last = g->dims - 1;
  // Kernels take each stage's mask unit to the final one.
  std::vector<int64_t> unit = g->mask_unit_size;
  for (int s = 0; s < spec.q_pool(); ++s) {
    g->fusion_stages.push_back(s);
    std::vector<int64_t> kernel;
    for (int d = 0; d < g->dims; ++d) {
      kernel.push_back(unit[d] / g->mask_unit_final[d]);
      unit[d] /= g->q_stride[d];
    }
    g->fusion_kernels.push_back(kernel);
  }
  g->fusion_stages.push_back(spec.stages_size() - 1);
  g->decoder_dim = spec.decoder_embed_dim();
  g->decoder_depth = spec.decoder_depth();
  g->decoder_heads = spec.decoder_num_heads();
  RETURN_IF_ERROR(CheckWidth("the decoder", g->decoder_dim, g->decoder_heads, spec.mlp_ratio(), "decoder_num_heads"));
  g->pred_stride = g->patch_stride[last] * Power(g->q_stride[last], spec.q_pool());
  g->pred_dim = Power(g->pred_stride, std::min(2, g->dims)) * spec.in_chans();
  if (spec.norm_target() && g->pred_dim < 2) {
    return Illegal("model.norm_target: true needs targets of two or more elements, this model's have ", g->pred_dim,
                   " (patch of ", g->pred_stride, " x in_chans ", spec.in_chans(), "); set norm_target: false.");
  }
  return CheckMask(*g);
}

}  // namespace

int64_t KeptMaskUnits(int64_t num_mask_units, double mask_ratio) {
  return int64_t(double(num_mask_units) * (1.0 - mask_ratio));
}

absl::StatusOr<Geometry> Geometry::From(const v1::ModelSpec& given) {
  Geometry g{};
  g.spec = given;
  RETURN_IF_ERROR(Resolve(&g.spec));
  RETURN_IF_ERROR(CheckPositive(g.spec));
  RETURN_IF_ERROR(CheckLengths(g.spec));
  g.spec.mutable_mask_unit_attn()->Truncate(g.spec.stages_size());
  g.dims = g.spec.input_size_size();
  g.input_size = ToVector(g.spec.input_size());
  g.patch_kernel = ToVector(g.spec.patch_kernel());
  g.patch_stride = ToVector(g.spec.patch_stride());
  g.patch_padding = ToVector(g.spec.patch_padding());
  g.q_stride = ToVector(g.spec.q_stride());
  g.mask_unit_size = ToVector(g.spec.mask_unit_size());
  RETURN_IF_ERROR(CheckSpace(g));
  for (int d = 0; d < g.dims; ++d) {
    const int64_t pooled = Power(g.q_stride[d], g.spec.q_pool());
    g.tokens.push_back(g.input_size[d] / g.patch_stride[d]);
    g.mask_units.push_back(g.tokens[d] / g.mask_unit_size[d]);
    g.mask_unit_final.push_back(g.mask_unit_size[d] / pooled);
    g.tokens_final.push_back(g.tokens[d] / pooled);
  }
  g.num_tokens = Product(g.tokens);
  g.num_mask_units = Product(g.mask_units);
  g.mask_unit_tokens = Product(g.mask_unit_size);
  g.mask_unit_final_tokens = Product(g.mask_unit_final);
  g.num_tokens_final = Product(g.tokens_final);
  g.flat_q_stride = Product(g.q_stride);
  g.separate_pos_embed = g.spec.sep_pos_embed();
  const bool mae = g.spec.task() == "mae";
  g.num_kept = mae ? KeptMaskUnits(g.num_mask_units, g.spec.mask_ratio()) : g.num_mask_units;
  RETURN_IF_ERROR(MakeBlocks(&g));
  if (mae) RETURN_IF_ERROR(MakeDecoder(&g));
  return g;
}

std::vector<int64_t> Geometry::UnrollOrder() const {
  // Unrolled index n = (s_1, ..., s_L, window), each s_i a row-major offset within q_stride; on every axis the
  // coordinate is s_1 + q (s_2 + q (... + q * window)).
  const int levels = spec.stages_size() - 1;
  std::vector<int64_t> order(num_tokens);
  std::vector<int64_t> coordinate(dims), scale(dims);
  for (int64_t n = 0; n < num_tokens; ++n) {
    int64_t rest = n % num_mask_units, offset = n / num_mask_units;
    for (int d = dims - 1; d >= 0; --d) {
      coordinate[d] = rest % mask_units[d] * mask_unit_size[d];
      rest /= mask_units[d];
      scale[d] = mask_unit_size[d];
    }
    for (int level = levels; level >= 1; --level) {  // s_L, the coarsest, is the fastest index
      int64_t s = offset % flat_q_stride;
      offset /= flat_q_stride;
      for (int d = dims - 1; d >= 0; --d) {
        scale[d] /= q_stride[d];
        coordinate[d] += s % q_stride[d] * scale[d];
        s /= q_stride[d];
      }
    }
    int64_t position = 0;
    for (int d = 0; d < dims; ++d) position = position * tokens[d] + coordinate[d];
    order[n] = position;
  }
  return order;
}

}  // namespace hierad
