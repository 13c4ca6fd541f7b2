#include <webp/decode.h>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "worker/data/image_pixels.h"

namespace hierad {

absl::StatusOr<Pixels> DecodeWebp(std::string_view file, const DecodeOptions& options) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(file.data());
  WebPBitstreamFeatures features;
  if (WebPGetFeatures(bytes, file.size(), &features) != VP8_STATUS_OK) return DamagedImage("damaged WebP: its header cannot be read, or it is cut short");
  if (features.has_animation) return DamagedImage("animated WebP; still images are read");
  const int channels = features.has_alpha && options.channels == 4 ? 4 : 3;
  RETURN_IF_ERROR(CheckImageSize("WebP", features.height, features.width, channels, options));
  Pixels image{features.height, features.width, channels, {}};
  image.values_HWC.resize(int64_t{image.height} * image.width * channels);
  const int row = image.width * channels;
  const uint8_t* decoded = channels == 4 ? WebPDecodeRGBAInto(bytes, file.size(), image.values_HWC.data(), image.values_HWC.size(), row)
                                         : WebPDecodeRGBInto(bytes, file.size(), image.values_HWC.data(), image.values_HWC.size(), row);
  if (!decoded) return DamagedImage("damaged WebP, or cut short");
  return image;
}

}  // namespace hierad
