// Zero-phase FIR filters and resampling of signals. Every output depends on a stretch of input of known length around it,
// so a window comes out the same whether it is computed alone or with its whole recording.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace hierad {

struct FilterSpec {
  double low_hz = 0;               // pass band; 0: no lower edge
  double high_hz = 0;              // 0: no upper edge
  std::vector<double> notches_hz;
};

// The symmetric taps (an odd number) of the whole filter at `rate_hz`; {1}: nothing to do. Windowed sinc (Hamming); as MNE's
// default, an edge at f falls off over min(max(f / 4, 2), room) Hz beyond it, and the length is 3.3 over the narrowest of
// these. A notch takes f -+ (f / 400 + 0.5) Hz out, with edges of 1 Hz. Frequencies that the rate cannot hold are USER_ERROR.
absl::StatusOr<std::vector<float>> DesignFilter(const FilterSpec& spec, double rate_hz);

// out[i] = sum over k of taps[k] * x[i + k], i < count; x has count + taps - 1 values.
void ApplyFilter(const std::vector<float>& taps, const float* x, int64_t count, float* out);

// From a rate to another, both exact fractions: sinc of 24 zero crossings each side in a Kaiser window (beta 8), cut off at
// 0.95 of the lower Nyquist frequency, every phase with a sum of 1.
class Resampler {
 public:
  // Output sample k lies at input position k * step_num / step_den.
  Resampler(int64_t step_num, int64_t step_den);
  int64_t OutputsOf(int64_t inputs) const;
  // Input samples [first, first + count) that outputs [begin, begin + n) need; may reach beyond the signal on both sides.
  struct Range { int64_t first, count; };
  Range InputsFor(int64_t begin, int64_t n) const;
  // `x` holds exactly InputsFor(begin, n).
  void Apply(const float* x, int64_t begin, int64_t n, float* out) const;

 private:
  void Weights(int64_t phase, float* weights) const;   // of an output at phase / step_den of an input sample

  int64_t num_, den_, half_;
  double cutoff_;
  std::vector<float> table_;   // [den, 2 * half]; empty: too many phases, computed each time
};

// Value at `index` of a signal of n samples continued beyond its ends by odd reflection (2 * x[0] - x[-index]), at most once
// its length; x[0] is the signal's sample `first`.
float Reflected(const float* x, int64_t first, int64_t n, int64_t index);
// The samples that Reflected may ask for, of those in [begin, end).
struct SampleRange { int64_t begin, end; };
SampleRange ReflectedRange(int64_t n, int64_t begin, int64_t end);

}  // namespace hierad
