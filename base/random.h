// Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11).
// Every draw is a pure function of (seed, purpose, epoch, sample, index): no state to save, the same at any world size,
// on CPU and GPU, after any resume. Header-only and usable in device code.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define HIERAD_HOST_DEVICE __host__ __device__
#else
#define HIERAD_HOST_DEVICE
#endif

namespace hierad {

// What a draw is for; part of the key, so that two uses never share numbers. Values are stable: they are in every run.
enum class Draw : uint32_t {
  kInit = 1,        // sample = index of the parameter in the parameter table
  kOrder = 2,       // shuffling; sample = position
  kMask = 3,
  kCrop = 4,
  kFlip = 5,
  kDropPath = 6,
  kDropout = 7,
  kSynthetic = 8,
  kEvalMask = 9,
  kSignalCrop = 10,
  kShift = 11,
  kChannelDrop = 12,   // one word a channel
  kAmplitude = 13,
};

struct Random4 {
  uint32_t v[4];
};

// Ten rounds of Philox4x32 on counter c with key k.
HIERAD_HOST_DEVICE inline Random4 Philox4x32(Random4 c, uint32_t k0, uint32_t k1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c.v[0];
    const uint64_t p1 = uint64_t{0xCD9E8D57u} * c.v[2];
    c = Random4{{uint32_t(p1 >> 32) ^ c.v[1] ^ k0, uint32_t(p1), uint32_t(p0 >> 32) ^ c.v[3] ^ k1, uint32_t(p0)}};
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c;
}

// The stream of one (seed, purpose, epoch, sample); At(i) is its i-th block of four words, i < 2^32.
// Key: the seed (64 bits). Counter: block index, sample (low 32, high 16 bits with purpose in the top 16), epoch.
struct RandomStream {
  uint64_t seed;
  Draw purpose;
  uint32_t epoch;
  uint64_t sample;   // < 2^48

  HIERAD_HOST_DEVICE Random4 At(uint32_t block) const {
    return Philox4x32({{block, uint32_t(sample), (uint32_t(sample >> 32) & 0xFFFFu) | (uint32_t(purpose) << 16), epoch}},
                      uint32_t(seed), uint32_t(seed >> 32));
  }
  HIERAD_HOST_DEVICE uint32_t Word(uint64_t i) const { return At(uint32_t(i >> 2)).v[i & 3]; }
  // Uniform in [0, 1), 24 bits: exact in float.
  HIERAD_HOST_DEVICE float Uniform(uint64_t i) const { return float(Word(i) >> 8) * (1.0f / 16777216.0f); }
};

}  // namespace hierad
