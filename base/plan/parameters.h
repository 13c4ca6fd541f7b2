// The parameter table: one list of every parameter by FAIR's name, in FAIR's order, with shape, initialisation, decay
// group and offset in the flat buffers. All step modes, the optimizer, checkpoints and export read this one.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/plan/geometry.h"

namespace hierad {

enum class Init {
  kZero,
  kOne,
  kXavierUniform,       // on the weight flattened to [out, rest]
  kTorchUniform,        // U(-1/sqrt(fan_in), 1/sqrt(fan_in)): torch's default for convolution weights and biases
  kTruncatedNormal02,   // std 0.02, cut at +-2 absolute (torch's trunc_normal_ default)
  kConstant02,          // 0.02
};

struct Parameter {
  std::string name;             // FAIR's, e.g. "blocks.3.attn.qkv.weight"
  std::vector<int64_t> shape;
  Init init;
  double init_scale;            // factor after initialisation (FAIR's head: 0.001), else 1
  int64_t fan_in;               // of kTorchUniform
  bool decay;                   // weight decay applies
  bool matrix;                  // weight of a linear layer inside a block: Muon's, where that is the optimizer
  // For layer decay, as timm counts: 0 what stands before the blocks, block i of the encoder i + 1, and behind them all the rest.
  int layer;
  int64_t size;                 // elements
  int64_t offset;               // elements, in the flat fp32 buffers; multiples of kParameterAlign
};

inline constexpr int64_t kParameterAlign = 64;   // elements: 256 bytes in fp32, 128 in bf16

struct ParameterTable {
  std::vector<Parameter> parameters;
  int64_t flat_size;            // elements, padding included
  int64_t num_elements;         // without padding
  int num_layers;               // of Parameter::layer

  static ParameterTable For(const Geometry& geometry);
  const Parameter* Find(const std::string& name) const;   // nullptr: unknown
};

// Factor of the rate of a parameter: layer_decay to the number of layers behind its own.
double RateFactor(int layer, int num_layers, const v1::OptimizerSpec& optimizer);

}  // namespace hierad
