// Pictures of what a masked auto-encoder does: inputs, what it was shown, what it made of the rest. Plain pixels, no font.
// Functions are pure.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/metrics/reconstruction.h"

namespace hierad {

struct Picture {
  int width = 0, height = 0;
  std::vector<uint8_t> rgb;   // rows from the top
};

// A row a sample: original, masked (grey), reconstruction. `mean` and `spread` per channel undo the preparation: the value
// shown is input * spread + mean, from 0 (black) to 1. One channel is grey, of three and more the first three are red, green, blue.
Picture DrawImages(const Reconstruction& r, const std::vector<double>& mean, const std::vector<double>& spread);
// A strip a sample and channel (the first four): the trace in blue, masked parts shaded, predictions there in red.
Picture DrawSignals(const Reconstruction& r);

absl::StatusOr<std::string> EncodePng(const Picture& picture);

}  // namespace hierad
