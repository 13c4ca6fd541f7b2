#include "worker/model/initialize.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/random.h"

namespace hierad {
namespace {

// Element i from Uniform(i), four of each block.
void FillUniform(const RandomStream& stream, double bound, float* out, int64_t size) {
  for (int64_t i = 0; i < size; i += 4) {
    const Random4 block = stream.At(uint32_t(i >> 2));
    for (int64_t j = 0; j < 4 && i + j < size; ++j) {
      out[i + j] = float((2.0 * (float(block.v[j] >> 8) * (1.0f / 16777216.0f)) - 1.0) * bound);
    }
  }
}

// Box-Muller, two values of each four words; std 0.02 lies a hundred times inside torch's cut at +-2.
void FillNormal02(const RandomStream& stream, float* out, int64_t size) {
  for (int64_t i = 0; i < size; i += 2) {
    const Random4 block = stream.At(uint32_t(i >> 2));
    const double u = (double(block.v[i & 2]) + 1.0) / 4294967296.0;   // (0, 1]
    const double angle = 2 * std::numbers::pi * double(block.v[(i & 2) + 1]) / 4294967296.0;
    const double radius = 0.02 * std::sqrt(-2 * std::log(u));
    out[i] = float(radius * std::cos(angle));
    if (i + 1 < size) out[i + 1] = float(radius * std::sin(angle));
  }
}

}  // namespace

void InitializeParameters(const ParameterTable& table, uint64_t seed, float* flat) {
  std::fill(flat, flat + table.flat_size, 0.0f);
  for (size_t index = 0; index < table.parameters.size(); ++index) {
    const Parameter& p = table.parameters[index];
    const RandomStream stream{seed, Draw::kInit, 0, index};
    float* out = flat + p.offset;
    switch (p.init) {
      case Init::kZero:
        break;
      case Init::kOne:
        std::fill(out, out + p.size, 1.0f);
        break;
      case Init::kConstant02:
        std::fill(out, out + p.size, 0.02f);
        break;
      case Init::kXavierUniform:
        FillUniform(stream, std::sqrt(6.0 / double(p.shape[0] + p.size / p.shape[0])), out, p.size);
        break;
      case Init::kTorchUniform:
        FillUniform(stream, 1.0 / std::sqrt(double(p.fan_in)), out, p.size);
        break;
      case Init::kTruncatedNormal02:
        FillNormal02(stream, out, p.size);
        break;
    }
    if (p.init_scale != 1) {
      for (int64_t i = 0; i < p.size; ++i) out[i] = float(out[i] * p.init_scale);
    }
  }
}

}  // namespace hierad
