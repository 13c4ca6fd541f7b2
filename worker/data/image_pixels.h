// Images in memory: decoding of JPEG, PNG, WebP and TIFF, and the resize of a region.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/limits.h"

namespace hierad {

struct Region {
  int top, left, height, width;
};

// In units of pixels of an image, which may lie between them where a JPEG was decoded at a part of its size.
struct Box {
  double top = 0, left = 0, height = 0, width = 0;
  bool operator==(const Box&) const = default;
};

// One of a JPEG's colour planes, which may be smaller than its brightness, with the box that was asked for in its own pixels.
struct Plane {
  int height = 0, width = 0;
  std::vector<uint8_t> values_HW;
  Box box;
};

struct Pixels {
  int height = 0, width = 0, channels = 0;   // 1 gray, 3 RGB; more as the file has them
  std::vector<uint8_t> values_HWC;
  std::vector<uint16_t> deep_HWC = {};   // instead of values_HWC: an image of 16 bits, where DecodeOptions::deep asks for them
  std::vector<Plane> chroma = {};   // Cb and Cr, not yet RGB: then values_HWC is the brightness alone, [H, W]
};

struct DecodeOptions {
  int channels = 3;   // of the model: 2 and 4 keep a PNG's or WebP's alpha, and any count that a TIFF has is kept; else it is dropped
  // The region that will be used, of the upright image's height and width; empty: all of it is decoded.
  std::function<Region(int height, int width)> region;
  // What the region will be resized to. A JPEG is decoded at 1/2 where the region stays twice, at 1/4 or 1/8 where it stays three times as large, and stays in
  // planes (Pixels::chroma) where it has them: the result is within 40 dB. 0: its size, RGB.
  int out_height = 0, out_width = 0;
  bool deep = false;   // 16 bits stay 16 bits
  int64_t most_pixels = limits::kImagePixels;
};

struct DecodedImage {
  Pixels pixels;
  Box box;   // the region, in pixels
};

// By content, not by name. Upright (EXIF's and TIFF's orientation applied); 16 bits become 8 (unless `deep`), palettes and CMYK become RGB. Empty,
// foreign, cut, damaged or larger than limits::kImagePixels: DATA_ERROR that says which, without the file's name. Warnings of
// libjpeg about harmless oddities are let pass; missing data never is.
absl::StatusOr<DecodedImage> DecodeImage(std::string_view file, const DecodeOptions& options = {});

bool IsJpeg(std::string_view file);   // by its first bytes
bool IsDeep(std::string_view file);   // a PNG or TIFF of 16 bits, by its header

// Resamples `box` of the image to out_height x out_width. Bicubic (a = -0.5), the filter widened by the scale when shrinking
// (antialiased), in fixed point with 8 bits between the passes and nothing read outside the box: Pillow's arithmetic, and its
// values for whole boxes.
void ResizeBox(const Pixels& image, const Box& box, int out_height, int out_width, uint8_t* out_HWC);
// The same values, a plane a channel.
void ResizePlanes(const Pixels& image, const Box& box, int out_height, int out_width, uint8_t* out_CHW);
// In 16 bits: of a deep image in single precision, rounded once; of others the values above, times 257.
void ResizePlanes(const Pixels& image, const Box& box, int out_height, int out_width, uint16_t* out_CHW);

// Parts of DecodeImage, one a format.
absl::StatusOr<DecodedImage> DecodeJpeg(std::string_view file, const DecodeOptions& options);
absl::StatusOr<Pixels> DecodePng(std::string_view file, const DecodeOptions& options);
absl::StatusOr<Pixels> DecodeWebp(std::string_view file, const DecodeOptions& options);
absl::StatusOr<Pixels> DecodeTiff(std::string_view file, const DecodeOptions& options, int* orientation);
int TiffBits(std::string_view file);   // of a sample; 0: it cannot be read
absl::Status CheckImageSize(const char* kind, int64_t height, int64_t width, int64_t channels, const DecodeOptions& options);
absl::Status DamagedImage(const std::string& problem);
// Turns stored pixels upright: `orientation` 1 to 8 as EXIF numbers them.
Pixels Upright(Pixels stored, int orientation);
// The region of the stored image that becomes `upright`, for a stored image of height x width.
Region StoredRegion(const Region& upright, int orientation, int height, int width);

}  // namespace hierad
