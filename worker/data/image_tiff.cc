// TIFF: the first image of a file; 8 or 16 bits a channel, any number of channels, strips or tiles, together or apart.
#include <tiffio.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/limits.h"
#include "base/status.h"
#include "worker/data/image_pixels.h"

namespace hierad {
namespace {

struct Memory {
  std::string_view file;
  int64_t at = 0;
  std::string error;
};

tmsize_t Read(thandle_t handle, void* out, tmsize_t size) {
  auto* memory = static_cast<Memory*>(handle);
  const int64_t left = static_cast<int64_t>(memory->file.size()) - memory->at;
  const int64_t count = std::clamp<int64_t>(left, 0, size);
  if (count > 0) std::memcpy(out, memory->file.data() + memory->at, count);
  memory->at += count;
  return count;
}
tmsize_t Write(thandle_t, void*, tmsize_t) { return -1; }
toff_t Seek(thandle_t handle, toff_t offset, int whence) {
  auto* memory = static_cast<Memory*>(handle);
  const int64_t base = whence == SEEK_SET ? 0 : whence == SEEK_CUR ? memory->at : static_cast<int64_t>(memory->file.size());
  int64_t at = 0;
  if (__builtin_add_overflow(base, static_cast<int64_t>(offset), &at) || at < 0) return static_cast<toff_t>(-1);
  memory->at = at;
  return static_cast<toff_t>(at);
}
int Close(thandle_t) { return 0; }
toff_t Size(thandle_t handle) { return static_cast<Memory*>(handle)->file.size(); }

int Note(TIFF*, void* user, const char*, const char* format, va_list arguments) {
  auto* memory = static_cast<Memory*>(user);
  char text[256];
  std::vsnprintf(text, sizeof text, format, arguments);
  if (memory->error.empty()) memory->error = text;
  return 1;
}
int Ignore(TIFF*, void*, const char*, const char*, va_list) { return 1; }

struct Layout {
  uint32_t width = 0, height = 0;
  uint16_t bits = 1, channels = 1, format = SAMPLEFORMAT_UINT, planar = PLANARCONFIG_CONTIG, photometric = PHOTOMETRIC_MINISBLACK, extra = 0;
  int stored_channels() const { return planar == PLANARCONFIG_SEPARATE ? 1 : channels; }   // in one strip or tile
  int planes() const { return planar == PLANARCONFIG_SEPARATE ? channels : 1; }
};

class TiffReader {
 public:
  explicit TiffReader(std::string_view file) : memory_{file, 0, {}} {
    TIFFOpenOptions* options = TIFFOpenOptionsAlloc();
    TIFFOpenOptionsSetErrorHandlerExtR(options, Note, &memory_);
    TIFFOpenOptionsSetWarningHandlerExtR(options, Ignore, nullptr);
    TIFFOpenOptionsSetMaxSingleMemAlloc(options, limits::kImageFileBytes);
    tiff_.reset(TIFFClientOpenExt("tiff", "rm", &memory_, Read, Write, Seek, Close, Size, nullptr, nullptr, options));
    TIFFOpenOptionsFree(options);
  }

  int bits() const {
    uint16_t bits = 0;
    if (tiff_) TIFFGetFieldDefaulted(tiff_.get(), TIFFTAG_BITSPERSAMPLE, &bits);
    return bits;
  }

  absl::StatusOr<Pixels> Decode(const DecodeOptions& options, int* orientation) {
    if (!tiff_) return Problem();
    RETURN_IF_ERROR(ReadLayout(options));
    uint16_t turned = 1;
    TIFFGetFieldDefaulted(tiff_.get(), TIFFTAG_ORIENTATION, &turned);
    *orientation = turned;
    Pixels image{static_cast<int>(layout_.height), static_cast<int>(layout_.width), layout_.channels, {}};
    const int64_t values = int64_t{image.height} * image.width * image.channels;
    if (options.deep && layout_.bits == 16) image.deep_HWC.resize(values);
    else image.values_HWC.resize(values);
    RETURN_IF_ERROR(TIFFIsTiled(tiff_.get()) ? ReadTiles(options, &image) : ReadStrips(&image));
    if (layout_.photometric == PHOTOMETRIC_MINISWHITE) {
      for (uint8_t& value : image.values_HWC) value = static_cast<uint8_t>(255 - value);
      for (uint16_t& value : image.deep_HWC) value = static_cast<uint16_t>(65535 - value);
    }
    if (layout_.photometric == PHOTOMETRIC_PALETTE) return Coloured(image);
    if (options.channels != image.channels && layout_.extra > 0 && layout_.extra < layout_.channels) DropChannels(layout_.channels - layout_.extra, &image);
    return image;
  }

 private:
  absl::Status Problem() const { return DamagedImage(absl::StrCat("damaged TIFF: ", memory_.error.empty() ? "it cannot be read" : memory_.error)); }

  absl::Status ReadLayout(const DecodeOptions& options) {
    TIFF* tiff = tiff_.get();
    uint16_t compression = 0;
    uint16_t* kinds = nullptr;
    if (!TIFFGetField(tiff, TIFFTAG_IMAGEWIDTH, &layout_.width) || !TIFFGetField(tiff, TIFFTAG_IMAGELENGTH, &layout_.height)) return DamagedImage("damaged TIFF: it has no size");
    TIFFGetFieldDefaulted(tiff, TIFFTAG_SAMPLESPERPIXEL, &layout_.channels);
    TIFFGetFieldDefaulted(tiff, TIFFTAG_BITSPERSAMPLE, &layout_.bits);
    TIFFGetFieldDefaulted(tiff, TIFFTAG_SAMPLEFORMAT, &layout_.format);
    TIFFGetFieldDefaulted(tiff, TIFFTAG_PLANARCONFIG, &layout_.planar);
    TIFFGetFieldDefaulted(tiff, TIFFTAG_EXTRASAMPLES, &layout_.extra, &kinds);
    TIFFGetFieldDefaulted(tiff, TIFFTAG_COMPRESSION, &compression);
    TIFFGetField(tiff, TIFFTAG_PHOTOMETRIC, &layout_.photometric);
    RETURN_IF_ERROR(CheckImageSize("TIFF", layout_.height, layout_.width, layout_.channels, options));
    if ((layout_.bits != 8 && layout_.bits != 16) || (layout_.format != SAMPLEFORMAT_UINT && layout_.format != SAMPLEFORMAT_VOID))
      return DamagedImage(absl::StrCat("TIFF of ", layout_.bits, " bits in sample format ", layout_.format, "; unsigned whole numbers (1) of 8 or 16 bits are read"));
    if (layout_.photometric == PHOTOMETRIC_YCBCR && compression == COMPRESSION_JPEG) TIFFSetField(tiff, TIFFTAG_JPEGCOLORMODE, JPEGCOLORMODE_RGB);
    else if (layout_.photometric != PHOTOMETRIC_MINISBLACK && layout_.photometric != PHOTOMETRIC_MINISWHITE && layout_.photometric != PHOTOMETRIC_RGB && layout_.photometric != PHOTOMETRIC_PALETTE)
      return DamagedImage(absl::StrCat("TIFF of colour space ", layout_.photometric, "; gray (0, 1), RGB (2) and palettes (3) are read"));
    if (layout_.photometric == PHOTOMETRIC_PALETTE && (layout_.channels != 1 || layout_.bits != 8)) return DamagedImage("TIFF with a palette of more than 8 bits or one channel");
    return absl::OkStatus();
  }

  // `count` stored values at `in` to every `step`-th of `out`; 16 bits are rounded to 8 where 8 are kept.
  template <typename V>
  void Store(const uint8_t* in, int64_t count, int step, V* out) const {
    for (int64_t i = 0; i < count; ++i) {
      if (layout_.bits == 8) {
        out[i * step] = in[i];
      } else {
        uint16_t value;
        std::memcpy(&value, in + 2 * i, 2);
        out[i * step] = static_cast<V>(sizeof(V) == 2 ? value : (value * 255 + 32767) / 65535);
      }
    }
  }

  // A rectangle of one plane, rows of `row_bytes`, to its place.
  void Place(const uint8_t* in, int64_t row_bytes, int plane, int64_t top, int64_t left, int64_t height, int64_t width, Pixels* image) const {
    const int channels = image->channels, stored = layout_.stored_channels();
    for (int64_t y = 0; y < height; ++y) {
      const int64_t at = ((top + y) * image->width + left) * channels + plane;
      const int step = stored == channels ? 1 : channels;
      if (image->deep_HWC.empty()) Store(in + y * row_bytes, width * stored, step, image->values_HWC.data() + at);
      else Store(in + y * row_bytes, width * stored, step, image->deep_HWC.data() + at);
    }
  }

  absl::Status ReadStrips(Pixels* image) {
    uint32_t rows = 0;
    TIFFGetFieldDefaulted(tiff_.get(), TIFFTAG_ROWSPERSTRIP, &rows);
    rows = std::clamp<uint32_t>(rows, 1, layout_.height);
    const int64_t row_bytes = TIFFScanlineSize64(tiff_.get());
    if (row_bytes != int64_t{layout_.width} * layout_.stored_channels() * layout_.bits / 8) return DamagedImage(absl::StrCat("TIFF with rows of ", row_bytes, " bytes"));
    std::vector<uint8_t> strip(row_bytes * rows);
    for (int plane = 0; plane < layout_.planes(); ++plane)
      for (uint32_t top = 0; top < layout_.height; top += rows) {
        const int64_t here = std::min(rows, layout_.height - top);
        if (TIFFReadEncodedStrip(tiff_.get(), TIFFComputeStrip(tiff_.get(), top, plane), strip.data(), here * row_bytes) != here * row_bytes) return Problem();
        Place(strip.data(), row_bytes, plane, top, 0, here, layout_.width, image);
      }
    return absl::OkStatus();
  }

  absl::Status ReadTiles(const DecodeOptions& options, Pixels* image) {
    uint32_t tile_width = 0, tile_height = 0;
    TIFFGetField(tiff_.get(), TIFFTAG_TILEWIDTH, &tile_width);
    TIFFGetField(tiff_.get(), TIFFTAG_TILELENGTH, &tile_height);
    RETURN_IF_ERROR(CheckImageSize("TIFF tile", tile_height, tile_width, layout_.stored_channels(), options));
    const int64_t row_bytes = int64_t{tile_width} * layout_.stored_channels() * layout_.bits / 8;
    if (static_cast<int64_t>(TIFFTileSize64(tiff_.get())) != row_bytes * tile_height) return DamagedImage(absl::StrCat("TIFF with tiles of ", TIFFTileSize64(tiff_.get()), " bytes"));
    std::vector<uint8_t> tile(row_bytes * tile_height);
    for (int plane = 0; plane < layout_.planes(); ++plane)
      for (uint32_t top = 0; top < layout_.height; top += tile_height)
        for (uint32_t left = 0; left < layout_.width; left += tile_width) {
          if (TIFFReadTile(tiff_.get(), tile.data(), left, top, 0, plane) != static_cast<tmsize_t>(tile.size())) return Problem();
          Place(tile.data(), row_bytes, plane, top, left, std::min(tile_height, layout_.height - top), std::min(tile_width, layout_.width - left), image);
        }
    return absl::OkStatus();
  }

  absl::StatusOr<Pixels> Coloured(const Pixels& indices) const {
    uint16_t* map[3] = {};
    if (!TIFFGetField(tiff_.get(), TIFFTAG_COLORMAP, &map[0], &map[1], &map[2])) return DamagedImage("damaged TIFF: it has no palette");
    Pixels image{indices.height, indices.width, 3, {}};
    image.values_HWC.reserve(indices.values_HWC.size() * 3);
    for (const uint8_t index : indices.values_HWC)
      for (const uint16_t* colors : map) image.values_HWC.push_back(static_cast<uint8_t>(colors[index] >> 8));
    return image;
  }

  static void DropChannels(int kept, Pixels* image) {
    const auto drop = [&](auto* values_HWC) {
      const size_t pixels = values_HWC->size() / image->channels;
      for (size_t i = 0; i < pixels; ++i)
        for (int c = 0; c < kept; ++c) (*values_HWC)[i * kept + c] = (*values_HWC)[i * image->channels + c];
      values_HWC->resize(pixels * kept);
    };
    drop(&image->values_HWC);
    drop(&image->deep_HWC);
    image->channels = kept;
  }

  Memory memory_;
  Layout layout_;
  std::unique_ptr<TIFF, void (*)(TIFF*)> tiff_{nullptr, TIFFClose};
};

}  // namespace

int TiffBits(std::string_view file) { return TiffReader(file).bits(); }

absl::StatusOr<Pixels> DecodeTiff(std::string_view file, const DecodeOptions& options, int* orientation) {
  return TiffReader(file).Decode(options, orientation);
}

}  // namespace hierad
