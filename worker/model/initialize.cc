#include "worker/model/initialize.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <numbers>
#include <thread>
#include <vector>

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

// Values of parameter number `index`.
void Fill(const Parameter& p, uint64_t seed, size_t index, float* out) {
  const RandomStream stream{seed, Draw::kInit, 0, index};
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

// Elements from which on more than one thread fills them: a run of 80 M parameters would wait for one.
constexpr int64_t kManyElements = 4 << 20;
constexpr unsigned kMostThreads = 8;

}  // namespace

void InitializeParameters(const ParameterTable& table, uint64_t seed, float* flat) {
  std::atomic<size_t> next{0};
  auto work = [&] {
    for (size_t index; (index = next++) < table.parameters.size();) {
      const Parameter& p = table.parameters[index];
      // To the next parameter: padding too.
      const int64_t end = index + 1 < table.parameters.size() ? table.parameters[index + 1].offset : table.flat_size;
      std::fill(flat + p.offset, flat + end, 0.0f);
      Fill(p, seed, index, flat + p.offset);
    }
  };
  std::vector<std::thread> others;
  const unsigned threads = table.flat_size < kManyElements ? 1 : std::clamp(std::thread::hardware_concurrency(), 1u, kMostThreads);
  for (unsigned t = 1; t < threads; ++t) others.emplace_back(work);
  work();
  for (std::thread& other : others) other.join();
}

}  // namespace hierad
