// What a masked auto-encoder made of a few samples, as plain numbers.
#pragma once

#include <cstdint>
#include <vector>

namespace hierad {

// Samples [samples, channels, size...] with what was predicted for the masked elements, and which those are; elsewhere
// `predicted` equals `input`.
struct Reconstruction {
  int64_t samples = 0, channels = 0;
  std::vector<int64_t> size;   // per axis: one or two; a video is so many images
  std::vector<float> input, predicted;
  std::vector<uint8_t> masked;
};

}  // namespace hierad
