#include "worker/data/signal_filter.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "base/limits.h"
#include "base/status.h"
#include "worker/data/wide.h"

namespace hierad {
namespace {

constexpr double kPi = std::numbers::pi;
constexpr int kZeros = 24;
constexpr double kBeta = 8, kRoll = 0.95;
constexpr int64_t kTableFloats = 4 << 20;

double Sinc(double x) { return x == 0 ? 1 : std::sin(kPi * x) / (kPi * x); }

int64_t OddLength(double transition_hz, double rate_hz) {
  const int64_t length = static_cast<int64_t>(std::ceil(3.3 / transition_hz * rate_hz));
  return length | 1;
}

// Low-pass of `length` taps with its half-amplitude point at cutoff_hz, sum 1.
std::vector<double> LowPass(double cutoff_hz, double rate_hz, int64_t length) {
  std::vector<double> taps(length);
  const double centre = double(length - 1) / 2, f = 2 * cutoff_hz / rate_hz;
  double sum = 0;
  for (int64_t i = 0; i < length; ++i) {
    const double hamming = length == 1 ? 1 : 0.54 - 0.46 * std::cos(2 * kPi * double(i) / double(length - 1));
    sum += taps[i] = f * Sinc(f * (double(i) - centre)) * hamming;
  }
  for (double& tap : taps) tap /= sum;
  return taps;
}

// 1 - filter.
void Invert(std::vector<double>* taps) {
  for (double& tap : *taps) tap = -tap;
  (*taps)[taps->size() / 2] += 1;
}

std::vector<double> Convolve(const std::vector<double>& a, const std::vector<double>& b) {
  std::vector<double> out(a.size() + b.size() - 1, 0);
  for (size_t i = 0; i < a.size(); ++i)
    for (size_t k = 0; k < b.size(); ++k) out[i + k] += a[i] * b[k];
  return out;
}

absl::Status BadFrequency(const std::string& what, double rate_hz) {
  return ErrorOf(v1::REASON_USER_ERROR, absl::StrCat(what, " does not fit a rate of ", rate_hz, " Hz, which holds frequencies below ", rate_hz / 2));
}

absl::StatusOr<std::vector<double>> PassBand(double low, double high, double rate) {
  const double nyquist = rate / 2;
  std::vector<double> taps = {1};
  if (low > 0) {
    if (low >= nyquist) return BadFrequency(absl::StrCat("data.band_pass: lower edge ", low), rate);
    const double width = std::min(std::max(low * 0.25, 2.0), low);
    taps = LowPass(low - width / 2, rate, OddLength(width, rate));
    Invert(&taps);
  }
  if (high > 0) {
    if (high >= nyquist) return BadFrequency(absl::StrCat("data.band_pass: upper edge ", high), rate);
    const double width = std::min(std::max(high * 0.25, 2.0), nyquist - high);
    const int64_t length = OddLength(width, rate);
    if (length > limits::kFilterTaps) return BadFrequency(absl::StrCat("data.band_pass: upper edge ", high, " so close to half of the rate"), rate);
    taps = Convolve(taps, LowPass(high + width / 2, rate, length));
  }
  return taps;
}

double Bessel0(double x) {
  double sum = 1, term = 1;
  for (int k = 1; k < 60 && term > 1e-12 * sum; ++k) {
    term *= (x / (2 * k)) * (x / (2 * k));
    sum += term;
  }
  return sum;
}

}  // namespace

absl::StatusOr<std::vector<float>> DesignFilter(const FilterSpec& spec, double rate_hz) {
  const double length_of_low = spec.low_hz > 0 ? 3.3 / std::min(std::max(spec.low_hz * 0.25, 2.0), spec.low_hz) * rate_hz : 0;
  if (length_of_low > limits::kFilterTaps)
    return ErrorOf(v1::REASON_USER_ERROR, absl::StrCat("data.band_pass: lower edge ", spec.low_hz, " at ", rate_hz, " Hz needs a filter of more than ", limits::kFilterTaps, " points"));
  ASSIGN_OR_RETURN(std::vector<double> taps, PassBand(spec.low_hz, spec.high_hz, rate_hz));
  for (const double notch : spec.notches_hz) {
    const double half = notch / 400 + 0.5;
    if (notch + half + 0.5 >= rate_hz / 2 || notch - half - 0.5 <= 0) return BadFrequency(absl::StrCat("data.notch: ", notch), rate_hz);
    // A header may claim any rate.
    if (3.3 * rate_hz > limits::kFilterTaps)
      return ErrorOf(v1::REASON_USER_ERROR, absl::StrCat("data.notch: ", notch, " at ", rate_hz, " Hz needs a filter of more than ", limits::kFilterTaps, " points"));
    const int64_t length = OddLength(1, rate_hz);
    std::vector<double> stop = LowPass(notch + half, rate_hz, length);
    const std::vector<double> below = LowPass(notch - half, rate_hz, length);
    for (int64_t i = 0; i < length; ++i) stop[i] -= below[i];
    Invert(&stop);
    taps = Convolve(taps, stop);
  }
  return std::vector<float>(taps.begin(), taps.end());
}

HIERAD_WIDE
void ApplyFilter(const std::vector<float>& taps, const float* x, int64_t count, float* out) {
  const int64_t size = static_cast<int64_t>(taps.size());
  std::fill_n(out, count, 0.0f);
  constexpr int64_t kBlock = 1024;   // of outputs: stays in the first cache
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t n = std::min(kBlock, count - begin);
    float* o = out + begin;
    for (int64_t k = 0; k < size; ++k) {
      const float tap = taps[k];
      const float* in = x + begin + k;
      for (int64_t i = 0; i < n; ++i) o[i] += tap * in[i];
    }
  }
}

Resampler::Resampler(int64_t step_num, int64_t step_den) {
  const int64_t divisor = std::gcd(step_num, step_den);
  num_ = step_num / divisor;
  den_ = step_den / divisor;
  const double widening = std::max(1.0, double(num_) / double(den_));
  cutoff_ = kRoll / widening;
  half_ = static_cast<int64_t>(std::ceil(kZeros * widening));
  if (den_ > kTableFloats / (2 * half_)) return;
  table_.resize(den_ * 2 * half_);
  for (int64_t phase = 0; phase < den_; ++phase) Weights(phase, table_.data() + phase * 2 * half_);
}

void Resampler::Weights(int64_t phase, float* weights) const {
  const double fraction = double(phase) / double(den_);
  double sum = 0;
  std::vector<double> values(2 * half_);
  for (int64_t k = 0; k < 2 * half_; ++k) {
    const double distance = double(k - half_ + 1) - fraction, place = distance / double(half_);
    sum += values[k] = std::abs(place) >= 1 ? 0 : Sinc(cutoff_ * distance) * Bessel0(kBeta * std::sqrt(1 - place * place));
  }
  for (int64_t k = 0; k < 2 * half_; ++k) weights[k] = static_cast<float>(values[k] / sum);
}

int64_t Resampler::OutputsOf(int64_t inputs) const { return static_cast<int64_t>(static_cast<__int128>(inputs) * den_ / num_); }

Resampler::Range Resampler::InputsFor(int64_t begin, int64_t n) const {
  const int64_t first = static_cast<int64_t>(static_cast<__int128>(begin) * num_ / den_) - half_ + 1;
  const int64_t last = static_cast<int64_t>(static_cast<__int128>(begin + n - 1) * num_ / den_) + half_;
  return {first, last - first + 1};
}

void Resampler::Apply(const float* x, int64_t begin, int64_t n, float* out) const {
  const int64_t origin = InputsFor(begin, n).first;
  std::vector<float> computed(table_.empty() ? 2 * half_ : 0);
  for (int64_t i = 0; i < n; ++i) {
    const __int128 position = static_cast<__int128>(begin + i) * num_;
    const int64_t whole = static_cast<int64_t>(position / den_), phase = static_cast<int64_t>(position % den_);
    if (table_.empty()) Weights(phase, computed.data());
    const float* weights = table_.empty() ? computed.data() : table_.data() + phase * 2 * half_;
    const float* in = x + (whole - half_ + 1 - origin);
    float sum[4] = {};
    for (int64_t k = 0; k + 1 < 2 * half_; k += 2) {
      sum[0] += weights[k] * in[k];
      sum[1] += weights[k + 1] * in[k + 1];
    }
    out[i] = sum[0] + sum[1];
  }
}

SampleRange ReflectedRange(int64_t n, int64_t begin, int64_t end) {
  SampleRange range{std::clamp<int64_t>(begin, 0, n - 1), std::clamp<int64_t>(end, 1, n)};
  if (begin < 0) range = {0, std::max(range.end, std::min(n, -begin + 1))};
  if (end > n) range = {std::min(range.begin, std::max<int64_t>(0, 2 * (n - 1) - (end - 1))), n};
  return range;
}

float Reflected(const float* x, int64_t first, int64_t n, int64_t index) {
  if (index < 0) return 2 * x[-first] - x[std::min(-index, n - 1) - first];
  if (index >= n) return 2 * x[n - 1 - first] - x[std::max<int64_t>(2 * (n - 1) - index, 0) - first];
  return x[index - first];
}

}  // namespace hierad
