#include "base/plan/parameters.h"

#include <cmath>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace hierad {
namespace {

// Adds parameters in FAIR's order (a module's own parameters before its children's).
class TableBuilder {
 public:
  explicit TableBuilder(bool mae)
      : linear_weight_(mae ? Init::kXavierUniform : Init::kTruncatedNormal02),
        bias_(mae ? Init::kZero : Init::kConstant02) {}

  // timm's rule: one-dimensional tensors, biases and what no_weight_decay() names do not decay.
  void Add(std::string name, std::vector<int64_t> shape, Init init, int64_t fan_in = 0, bool may_decay = true) {
    Parameter p;
    p.matrix = in_block_ && shape.size() == 2;
    p.layer = layer_;
    p.size = 1;
    for (int64_t extent : shape) p.size *= extent;
    p.decay = may_decay && shape.size() > 1;
    p.name = std::move(name);
    p.shape = std::move(shape);
    p.init = init;
    p.init_scale = 1;
    p.fan_in = fan_in;
    p.offset = table_.flat_size;
    table_.flat_size += (p.size + kParameterAlign - 1) / kParameterAlign * kParameterAlign;
    table_.num_elements += p.size;
    table_.parameters.push_back(std::move(p));
  }

  void Linear(const std::string& name, int64_t in, int64_t out) {
    Add(name + ".weight", {out, in}, linear_weight_);
    Add(name + ".bias", {out}, bias_);
  }

  void Norm(const std::string& name, int64_t dim) {
    Add(name + ".weight", {dim}, Init::kOne);
    Add(name + ".bias", {dim}, bias_);
  }

  void Convolution(const std::string& name, int64_t in, int64_t out, const std::vector<int64_t>& kernel, Init weight) {
    std::vector<int64_t> shape{out, in};
    int64_t fan_in = in;
    for (int64_t k : kernel) {
      shape.push_back(k);
      fan_in *= k;
    }
    Add(name + ".weight", std::move(shape), weight, fan_in);
    Add(name + ".bias", {out}, Init::kTorchUniform, fan_in);
  }

  void Block(const std::string& name, int64_t dim, int64_t dim_out, double mlp_ratio) {
    const int64_t hidden = int64_t(double(dim_out) * mlp_ratio);
    in_block_ = true;
    Norm(name + ".norm1", dim);
    Linear(name + ".attn.qkv", dim, 3 * dim_out);
    Linear(name + ".attn.proj", dim_out, dim_out);
    Norm(name + ".norm2", dim_out);
    Linear(name + ".mlp.fc1", dim_out, hidden);
    Linear(name + ".mlp.fc2", hidden, dim_out);
    if (dim != dim_out) Linear(name + ".proj", dim, dim_out);
    in_block_ = false;
  }

  // What is added from here on belongs to this layer.
  void SetLayer(int layer) { layer_ = layer; }

  void Scale(double factor) {  // of the last module: weight and bias
    const size_t n = table_.parameters.size();
    table_.parameters[n - 2].init_scale = table_.parameters[n - 1].init_scale = factor;
  }

  ParameterTable Take() {
    table_.num_layers = layer_ + 1;
    return std::move(table_);
  }

 private:
  const Init linear_weight_, bias_;
  ParameterTable table_{{}, 0, 0, 0};
  bool in_block_ = false;
  int layer_ = 0;
};

}  // namespace

ParameterTable ParameterTable::For(const Geometry& g) {
  const bool mae = g.spec.task() == "mae";
  const int64_t dim = g.spec.embed_dim();
  TableBuilder table(mae);
  if (g.separate_pos_embed) {
    table.Add("pos_embed_spatial", {1, g.tokens[1] * g.tokens[2], dim}, Init::kTruncatedNormal02, 0, false);
    table.Add("pos_embed_temporal", {1, g.tokens[0], dim}, Init::kTruncatedNormal02, 0, false);
  } else {
    table.Add("pos_embed", {1, g.num_tokens, dim}, Init::kTruncatedNormal02, 0, false);
  }
  if (mae) {
    table.SetLayer(int(g.blocks.size()) + 1);
    table.Add("mask_token", {1, 1, g.decoder_dim}, Init::kTruncatedNormal02);
    table.Add("decoder_pos_embed", {1, g.num_tokens_final, g.decoder_dim}, Init::kTruncatedNormal02);
    table.SetLayer(0);
  }
  table.Convolution("patch_embed.proj", g.spec.in_chans(), dim, g.patch_kernel,
                    mae ? Init::kXavierUniform : Init::kTruncatedNormal02);
  for (const BlockShape& block : g.blocks) {
    table.SetLayer(block.index + 1);
    table.Block(absl::StrCat("blocks.", block.index), block.dim_in, block.dim_out, g.spec.mlp_ratio());
  }
  table.SetLayer(int(g.blocks.size()) + 1);
  if (!mae) {
    table.Norm("norm", g.encoder_dim_out);
    table.Linear("head.projection", g.encoder_dim_out, g.spec.num_classes());
    table.Scale(0.001);
    return table.Take();
  }
  table.Norm("encoder_norm", g.encoder_dim_out);
  for (size_t i = 0; i < g.fusion_kernels.size(); ++i) {
    const int64_t stage_dim = g.blocks[g.stage_ends[g.fusion_stages[i]]].dim_out;
    table.Convolution(absl::StrCat("multi_scale_fusion_heads.", i), stage_dim, g.encoder_dim_out, g.fusion_kernels[i],
                      Init::kTorchUniform);
  }
  table.Linear("decoder_embed", g.encoder_dim_out, g.decoder_dim);
  for (int64_t i = 0; i < g.decoder_depth; ++i) {
    table.Block(absl::StrCat("decoder_blocks.", i), g.decoder_dim, g.decoder_dim, g.spec.mlp_ratio());
  }
  table.Norm("decoder_norm", g.decoder_dim);
  table.Linear("decoder_pred", g.decoder_dim, g.pred_dim);
  return table.Take();
}

double RateFactor(int layer, int num_layers, const v1::OptimizerSpec& optimizer) {
  return optimizer.has_layer_decay() ? std::pow(optimizer.layer_decay(), num_layers - 1 - layer) : 1.0;
}

const Parameter* ParameterTable::Find(const std::string& name) const {
  for (const Parameter& parameter : parameters) {
    if (parameter.name == name) return &parameter;
  }
  return nullptr;
}

}  // namespace hierad
