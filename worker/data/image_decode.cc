#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/limits.h"
#include "base/status.h"
#include "base/text.h"
#include "worker/data/image_pixels.h"

namespace hierad {

absl::Status DamagedImage(const std::string& problem) { return ErrorOf(v1::REASON_DATA_ERROR, problem); }

absl::Status CheckImageSize(const char* kind, int64_t height, int64_t width, int64_t channels, const DecodeOptions& options) {
  if (height < 1 || width < 1 || height > options.most_pixels / width)
    return DamagedImage(absl::StrCat(kind, " of ", width, " x ", height, " pixels; at most ", options.most_pixels, " in all are read"));
  if (channels < 1 || channels > limits::kImageFileBytes / (height * width))
    return DamagedImage(absl::StrCat(kind, " of ", width, " x ", height, " pixels with ", channels, " channels; at most ", limits::kImageFileBytes, " values in all are read"));
  return absl::OkStatus();
}

// EXIF: 2 mirrored, 3 by 180 degrees, 4 upside down mirrored, 5 transposed, 6 to be turned clockwise, 7 transposed the other
// way, 8 to be turned counter-clockwise.
namespace {

template <typename V>
std::vector<V> Turned(const std::vector<V>& stored_HWC, const Pixels& stored, const Pixels& out, bool swaps, bool from_right, bool from_bottom) {
  const int channels = stored.channels;
  std::vector<V> values(stored_HWC.size());
  V* to = values.data();
  for (int y = 0; y < out.height; ++y)
    for (int x = 0; x < out.width; ++x, to += channels) {
      const int row = swaps ? x : y, column = swaps ? y : x;
      const int stored_row = from_bottom ? stored.height - 1 - row : row, stored_column = from_right ? stored.width - 1 - column : column;
      std::memcpy(to, stored_HWC.data() + (size_t(stored_row) * stored.width + stored_column) * channels, channels * sizeof(V));
    }
  return values;
}

bool IsPng(std::string_view file) { return file.substr(0, 8) == "\x89PNG\r\n\x1A\n"; }
bool IsTiff(std::string_view file) {
  const std::string_view begin = file.substr(0, 4);
  return begin == std::string_view("II*\0", 4) || begin == std::string_view("MM\0*", 4) || begin == std::string_view("II+\0", 4) || begin == std::string_view("MM\0+", 4);
}

}  // namespace

Pixels Upright(Pixels stored, int orientation) {
  if (orientation < 2 || orientation > 8) return stored;
  const bool swaps = orientation >= 5, from_right = orientation == 2 || orientation == 3 || orientation == 7 || orientation == 8,
             from_bottom = orientation == 3 || orientation == 4 || orientation == 6 || orientation == 7;
  Pixels out{swaps ? stored.width : stored.height, swaps ? stored.height : stored.width, stored.channels, {}};
  if (stored.deep_HWC.empty()) out.values_HWC = Turned(stored.values_HWC, stored, out, swaps, from_right, from_bottom);
  else out.deep_HWC = Turned(stored.deep_HWC, stored, out, swaps, from_right, from_bottom);
  return out;
}

Region StoredRegion(const Region& upright, int orientation, int height, int width) {
  if (orientation < 2 || orientation > 8) return upright;
  Region stored = orientation >= 5 ? Region{upright.left, upright.top, upright.width, upright.height} : upright;
  const bool from_right = orientation == 2 || orientation == 3 || orientation == 7 || orientation == 8,
             from_bottom = orientation == 3 || orientation == 4 || orientation == 6 || orientation == 7;
  if (from_right) stored.left = width - stored.left - stored.width;
  if (from_bottom) stored.top = height - stored.top - stored.height;
  return stored;
}

bool IsDeep(std::string_view file) {
  constexpr size_t kDepthAt = 24;   // in a PNG's first chunk
  if (IsPng(file)) return file.size() > kDepthAt && file[kDepthAt] == 16;
  return IsTiff(file) && TiffBits(file) == 16;
}

bool IsJpeg(std::string_view file) { return file.substr(0, 3) == "\xFF\xD8\xFF"; }

absl::StatusOr<DecodedImage> DecodeImage(std::string_view file, const DecodeOptions& options) {
  if (file.empty()) return DamagedImage("empty file");
  if (IsJpeg(file)) return DecodeJpeg(file, options);
  DecodedImage image;
  int orientation = 1;
  if (IsPng(file)) {
    ASSIGN_OR_RETURN(image.pixels, DecodePng(file, options));
  } else if (file.size() >= 12 && file.substr(0, 4) == "RIFF" && file.substr(8, 4) == "WEBP") {
    ASSIGN_OR_RETURN(image.pixels, DecodeWebp(file, options));
  } else if (IsTiff(file)) {
    ASSIGN_OR_RETURN(image.pixels, DecodeTiff(file, options, &orientation));
  } else {
    return DamagedImage(absl::StrCat("neither JPEG, PNG, WebP nor TIFF (it begins with '", Printable(file.substr(0, 8)), "')"));
  }
  image.pixels = Upright(std::move(image.pixels), orientation);
  const Region region = options.region ? options.region(image.pixels.height, image.pixels.width) : Region{0, 0, image.pixels.height, image.pixels.width};
  image.box = {double(region.top), double(region.left), double(region.height), double(region.width)};
  return image;
}

}  // namespace hierad
