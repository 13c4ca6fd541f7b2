#include "worker/export/python_model.h"

#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "base/job_keys.h"

namespace hierad {
namespace {

template <typename Values, typename Text>
std::string Tuple(const Values& values, const Text& text) {
  std::vector<std::string> parts;
  for (const auto& value : values) parts.push_back(text(value));
  return absl::StrCat("(", absl::StrJoin(parts, ", "), parts.size() == 1 ? ",)" : ")");
}

struct Argument {
  std::string name, value;
};

// The arguments that decide shapes and arithmetic, in FAIR's order.
std::vector<Argument> Arguments(const v1::ModelSpec& spec) {
  const auto number = [](int value) { return absl::StrCat(value); };
  const auto flag = [](bool value) { return absl::StrCat(value ? "True" : "False"); };
  return {{"input_size", Tuple(spec.input_size(), number)},
          {"in_chans", number(spec.in_chans())},
          {"embed_dim", number(spec.embed_dim())},
          {"num_heads", number(spec.num_heads())},
          {"num_classes", number(spec.num_classes())},
          {"stages", Tuple(spec.stages(), number)},
          {"q_pool", number(spec.q_pool())},
          {"q_stride", Tuple(spec.q_stride(), number)},
          {"mask_unit_size", Tuple(spec.mask_unit_size(), number)},
          {"mask_unit_attn", Tuple(spec.mask_unit_attn(), flag)},
          {"patch_kernel", Tuple(spec.patch_kernel(), number)},
          {"patch_stride", Tuple(spec.patch_stride(), number)},
          {"patch_padding", Tuple(spec.patch_padding(), number)},
          {"mlp_ratio", DoubleText(spec.mlp_ratio())},
          {"sep_pos_embed", flag(spec.sep_pos_embed())},
          {"decoder_embed_dim", number(spec.decoder_embed_dim())},
          {"decoder_depth", number(spec.decoder_depth())},
          {"decoder_num_heads", number(spec.decoder_num_heads())}};
}

// What both libraries' constructors take for an image classifier of this variant.
std::vector<Argument> Defaults(const std::string& variant) {
  v1::ModelSpec spec;
  spec.set_task("classify");
  spec.set_variant(variant);
  const auto geometry = Geometry::From(spec);   // legal: nothing is given
  return geometry.ok() ? Arguments(geometry->spec) : std::vector<Argument>();
}

}  // namespace

std::string FairModel(const Geometry& geometry) {
  const bool mae = geometry.spec.task() == "mae";
  const std::vector<Argument> own = Arguments(geometry.spec), defaults = Defaults("base");
  std::string call;
  for (size_t i = 0; i < own.size(); ++i) {
    const bool other_task = mae ? own[i].name == "num_classes" : absl::StartsWith(own[i].name, "decoder_");
    if (other_task || own[i].value == defaults[i].value) continue;
    absl::StrAppend(&call, call.empty() ? "" : ", ", own[i].name, "=", own[i].value);
  }
  return absl::StrCat("hiera.", mae ? "MaskedAutoencoderHiera" : "Hiera", "(", call, ")");
}

std::string TimmModel(const Geometry& geometry) {
  const bool mae = geometry.spec.task() == "mae";
  std::vector<Argument> own = Arguments(geometry.spec), defaults = Defaults(geometry.spec.variant());
  std::string call = absl::StrCat("timm.create_model(\"hiera_", geometry.spec.variant(), "_224\"");
  for (size_t i = 0; i < own.size(); ++i) {
    if (absl::StartsWith(own[i].name, "decoder_")) continue;
    if (own[i].name == "num_classes" && mae) own[i].value = absl::StrCat(0);   // no head
    if (own[i].value == defaults[i].value) continue;
    absl::StrAppend(&call, ", ", own[i].name == "input_size" ? "img_size" : own[i].name, "=", own[i].value);
  }
  return absl::StrCat(call, ")");
}

std::optional<std::string> TimmName(const std::string& name) {
  for (const char* absent : {"mask_token", "decoder_", "multi_scale_fusion_heads."}) {
    if (absl::StartsWith(name, absent)) return std::nullopt;
  }
  absl::string_view rest = name;
  if (absl::ConsumePrefix(&rest, "encoder_norm.") || absl::ConsumePrefix(&rest, "norm.")) return absl::StrCat("head.norm.", rest);
  if (absl::ConsumePrefix(&rest, "head.projection.")) return absl::StrCat("head.fc.", rest);
  return name;
}

}  // namespace hierad
