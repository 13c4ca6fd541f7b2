// Images in memory: decoding of JPEG and PNG, and the resize of a region.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace hierad {

struct Pixels {
  int height = 0, width = 0, channels = 0;   // 1 gray, 3 RGB
  std::vector<uint8_t> values_HWC;
};

// By content, not by name. Alpha is dropped, 16 bits become 8, palettes and CMYK become RGB; EXIF's orientation is not
// applied. Empty, foreign, cut or damaged: DATA_ERROR that says which, without the file's name. Warnings of libjpeg
// about harmless oddities are let pass; missing data never is.
absl::StatusOr<Pixels> DecodeImage(std::string_view file);

struct Region {
  int top, left, height, width;
};

// Resamples `region` of the image to out_height x out_width, values in [0, 255], as planes [channels, H, W]. Bicubic
// (a = -0.5), the filter widened by the scale when shrinking (antialiased), computed in fp32 without rounding in
// between, nothing read outside the region; overshoot is cut.
void ResizeRegion(const Pixels& image, const Region& region, int out_height, int out_width, float* out_CHW);

}  // namespace hierad
