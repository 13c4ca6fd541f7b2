// Running statistics of one channel's values.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "nlohmann/json.hpp"

namespace hierad {

class ChannelSummary {
 public:
  void Add(const float* x, int64_t size) {
    for (int64_t i = 0; i < size; ++i) {
      const double v = x[i];
      if (!std::isfinite(v)) {
        ++not_finite_;
        continue;
      }
      // Welford: exact enough for any offset.
      const double delta = v - mean_;
      mean_ += delta / double(++count_);
      squares_ += delta * (v - mean_);
      if (v < least_) least_ = v, at_least_ = 0;
      if (v > most_) most_ = v, at_most_ = 0;
      at_least_ += v == least_;
      at_most_ += v == most_;
    }
  }
  double mean() const { return mean_; }
  double std() const { return count_ ? std::sqrt(squares_ / double(count_)) : 0; }
  bool flat() const { return count_ > 0 && least_ == most_; }
  // Fraction of the values that stand at either end: a rail that the signal was cut at.
  double clipped() const { return count_ == 0 || flat() ? 0 : double(at_least_ + at_most_) / double(count_); }
  int64_t not_finite() const { return not_finite_; }
  void Write(nlohmann::ordered_json* row) const {
    (*row)["mean"] = mean();
    (*row)["std"] = std();
    (*row)["min"] = count_ ? least_ : 0;
    (*row)["max"] = count_ ? most_ : 0;
    (*row)["nan_or_inf"] = not_finite_;
    (*row)["at_ends"] = clipped();
  }

 private:
  int64_t count_ = 0, not_finite_ = 0, at_least_ = 0, at_most_ = 0;
  double mean_ = 0, squares_ = 0, least_ = std::numeric_limits<double>::infinity(), most_ = -least_;
};

inline constexpr double kClippedFraction = 0.001;   // above it a channel is called clipped: an extreme is met once by itself

}  // namespace hierad
