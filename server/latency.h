// How long something took, as counts below fixed bounds: a Prometheus histogram of a few words. One thread.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>

namespace hierad {

struct Latency {
  static constexpr std::array<double, 10> kBounds = {0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3};   // seconds

  void Add(std::chrono::nanoseconds took) {
    const double seconds = std::chrono::duration<double>(took).count();
    size_t at = 0;
    while (at < kBounds.size() && seconds > kBounds[at]) ++at;
    ++counts[at];
    sum_s += seconds;
  }

  std::array<uint64_t, kBounds.size() + 1> counts{};   // the last: above all bounds
  double sum_s = 0;
};

}  // namespace hierad
