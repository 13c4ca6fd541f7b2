// JPEG by libjpeg-turbo's own interface: only what is used is decoded, at a part of the size where that is enough. Where the
// output's size is known the planes stay as they are stored, mostly colour at half the size: the resize takes them from there, and
// neither interpolates nor converts colour that it averages away.
#include <csetjmp>
#include <cstdio>

#include <jerror.h>
#include <jpeglib.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "worker/data/image_pixels.h"

namespace hierad {
namespace {

constexpr int kMargin = 16;         // stored pixels around a region, so that its chroma is interpolated as in the whole image
constexpr int64_t kScanLimit = 256; // of a progressive file: each costs a pass over all
// What is left of a region decoded at a part of its size, in outputs. At half the size photographs of grass keep 43 dB with 2, 40 with
// 1.75, 32 with 1; at a quarter outputs of some 30 pixels have come out at 39.95 dB with 2, and at no less than 46 from 2.3 on.
constexpr int ScaledReserve(int denominator) { return denominator == 2 ? 2 : 3; }
constexpr int kPlanes = 3, kMostLines = 4 * 16;   // lines of a plane in a row of blocks: by its sampling factor, and scaled up

struct Errors {
  jpeg_error_mgr base;
  std::jmp_buf leave;
  char text[JMSG_LENGTH_MAX] = "";
  bool cut = false;
};

void Leave(j_common_ptr info) {
  auto* errors = reinterpret_cast<Errors*>(info->err);
  info->err->format_message(info, errors->text);
  std::longjmp(errors->leave, 1);
}

void Note(j_common_ptr info, int level) {
  auto* errors = reinterpret_cast<Errors*>(info->err);
  if (level >= 0) return;
  ++info->err->num_warnings;
  if (info->err->msg_code == JWRN_JPEG_EOF || info->err->msg_code == JWRN_HIT_MARKER) errors->cut = true;
}

void CheckScans(j_common_ptr info) {
  auto* decoder = reinterpret_cast<j_decompress_ptr>(info);
  if (info->is_decompressor && decoder->input_scan_number > kScanLimit) ERREXIT(decoder, JERR_BAD_PROGRESSION);
}

// EXIF's orientation from an APP1 marker; 1 where it says none.
int Orientation(const jpeg_saved_marker_ptr markers) {
  for (jpeg_saved_marker_ptr marker = markers; marker; marker = marker->next) {
    const std::string_view data(reinterpret_cast<const char*>(marker->data), marker->data_length);
    if (marker->marker != JPEG_APP0 + 1 || data.size() < 14 || data.substr(0, 6) != std::string_view("Exif\0\0", 6)) continue;
    const std::string_view tiff = data.substr(6);
    const bool big = tiff[0] == 'M';
    const auto number = [&](size_t at, int bytes) -> uint32_t {
      uint32_t value = 0;
      if (at > tiff.size() || bytes > static_cast<int>(tiff.size() - at)) return 0;
      for (int i = 0; i < bytes; ++i) value |= uint32_t{static_cast<uint8_t>(tiff[at + i])} << 8 * (big ? bytes - 1 - i : i);
      return value;
    };
    const size_t directory = number(4, 4);
    const uint32_t entries = number(directory, 2);
    for (uint32_t e = 0; e < entries; ++e) {
      const size_t entry = directory + 2 + size_t{12} * e;
      if (entry >= tiff.size()) break;
      if (number(entry, 2) == 0x0112 && number(entry + 2, 2) == 3) {
        const uint32_t value = number(entry + 8, 2);
        return value >= 1 && value <= 8 ? static_cast<int>(value) : 1;
      }
    }
  }
  return 1;
}

// An end-of-image marker after the last scan's start. Inside a scan 0xFF is always stuffed, so both are real markers.
bool Ends(std::string_view file) {
  const size_t scan = file.rfind("\xFF\xDA"), end = file.rfind("\xFF\xD9");
  return end != std::string_view::npos && scan != std::string_view::npos && end > scan;
}

class Decoder {
 public:
  Decoder() {
    info_.err = jpeg_std_error(&errors_.base);
    errors_.base.error_exit = Leave;
    errors_.base.emit_message = Note;
    progress_.progress_monitor = CheckScans;
  }
  ~Decoder() { jpeg_destroy_decompress(&info_); }

  // libjpeg leaves by longjmp: no object with a destructor lives in these two frames.
  bool ReadHeader(const uint8_t* bytes, size_t size) {
    if (setjmp(errors_.leave)) return false;
    jpeg_create_decompress(&info_);
    info_.progress = &progress_;
    jpeg_mem_src(&info_, bytes, size);
    jpeg_save_markers(&info_, JPEG_APP0 + 1, 0xFFFF);
    jpeg_read_header(&info_, TRUE);
    return true;
  }

  // Decodes `region` of the scaled image, whose columns grow to what the format can part; rows of *row_bytes.
  bool Start(int denominator, J_COLOR_SPACE space) {
    if (setjmp(errors_.leave)) return false;
    info_.scale_num = 1;
    info_.scale_denom = denominator;
    info_.out_color_space = space;
    info_.dct_method = JDCT_ISLOW;
    jpeg_start_decompress(&info_);
    return true;
  }
  bool Crop(int* left, int* width, int top) {
    if (setjmp(errors_.leave)) return false;
    if (*width < static_cast<int>(info_.output_width)) {
      JDIMENSION begin = *left, count = *width;
      jpeg_crop_scanline(&info_, &begin, &count);
      *left = static_cast<int>(begin);
      *width = static_cast<int>(count);
    }
    if (top > 0 && jpeg_skip_scanlines(&info_, top) != static_cast<JDIMENSION>(top)) errors_.cut = true;
    return true;
  }
  bool ReadRows(uint8_t* rows, int height, size_t row_bytes) {
    if (setjmp(errors_.leave)) return false;
    for (int y = 0; y < height; ++y) {
      JSAMPROW row = rows + y * row_bytes;
      if (jpeg_read_scanlines(&info_, &row, 1) != 1) return errors_.cut = true;
    }
    if (info_.output_scanline == info_.output_height) jpeg_finish_decompress(&info_);
    else jpeg_abort_decompress(&info_);
    return true;
  }

  // The planes of the scaled image as they are stored.
  bool StartPlanes(int denominator) {
    info_.raw_data_out = TRUE;
    return Start(denominator, JCS_YCbCr);
  }
  // Block rows up to `last`; those from `first` on are kept, in lines of row_bytes.
  bool ReadPlanes(int first, int last, uint8_t* const* planes, const int* row_bytes) {
    if (setjmp(errors_.leave)) return false;
    JSAMPROW rows[kPlanes][kMostLines];
    JSAMPARRAY lines[kPlanes] = {rows[0], rows[1], rows[2]};
    for (int i = 0; i < last; ++i) {
      for (int c = 0; c < kPlanes; ++c) {
        const int count = Lines(c);
        for (int k = 0; k < count; ++k) rows[c][k] = planes[c] + (int64_t{std::max(i - first, 0)} * count + k) * row_bytes[c];
      }
      if (jpeg_read_raw_data(&info_, lines, info_.max_v_samp_factor * info_.min_DCT_scaled_size) == 0) return errors_.cut = true;
    }
    jpeg_abort_decompress(&info_);
    return true;
  }
  int Lines(int c) const { return info_.comp_info[c].v_samp_factor * info_.comp_info[c].DCT_scaled_size; }

  jpeg_decompress_struct& info() { return info_; }
  const Errors& errors() const { return errors_; }
  absl::Status Problem() const { return DamagedImage(absl::StrCat("damaged JPEG: ", errors_.text)); }

 private:
  jpeg_decompress_struct info_{};
  Errors errors_{};
  jpeg_progress_mgr progress_{};
};

// As Pillow turns CMYK into RGB; Adobe's files hold it inverted.
std::vector<uint8_t> RgbOfCmyk(const std::vector<uint8_t>& cmyk, bool inverted) {
  std::vector<uint8_t> rgb(cmyk.size() / 4 * 3);
  for (size_t i = 0; i < cmyk.size() / 4; ++i) {
    const int paper = inverted ? cmyk[i * 4 + 3] : 255 - cmyk[i * 4 + 3];
    for (int c = 0; c < 3; ++c) {
      const int ink = inverted ? 255 - cmyk[i * 4 + c] : cmyk[i * 4 + c], product = ink * paper + 128;
      rgb[i * 3 + c] = static_cast<uint8_t>(std::clamp(paper - ((product + (product >> 8)) >> 8), 0, 255));
    }
  }
  return rgb;
}

// Largest of 8, 4, 2 by which the region may shrink and stay ScaledReserve times as large as the output; else 1.
int Denominator(const Region& region, const DecodeOptions& options) {
  if (options.out_height < 1 || options.out_width < 1) return 1;
  const auto fits = [](int have, int out, int d) { return have >= int64_t{ScaledReserve(d)} * out * d; };
  for (const int d : {8, 4, 2})
    if (fits(region.height, options.out_height, d) && fits(region.width, options.out_width, d)) return d;
  return 1;
}

bool FromRight(int orientation) { return orientation == 2 || orientation == 3 || orientation == 7 || orientation == 8; }
bool FromBottom(int orientation) { return orientation == 3 || orientation == 4 || orientation == 6 || orientation == 7; }

// Stored pixels and the box within them, upright.
DecodedImage Turned(Pixels stored, Box box, int orientation) {
  if (FromRight(orientation)) box.left = stored.width - box.left - box.width;
  if (FromBottom(orientation)) box.top = stored.height - box.top - box.height;
  if (orientation >= 5) box = {box.left, box.top, box.width, box.height};
  DecodedImage image{Upright(std::move(stored), orientation), box};
  image.box.top = std::max(0.0, image.box.top);
  image.box.left = std::max(0.0, image.box.left);
  image.box.height = std::min(image.box.height, image.pixels.height - image.box.top);
  image.box.width = std::min(image.box.width, image.pixels.width - image.box.left);
  return image;
}

absl::StatusOr<DecodedImage> DecodePlanes(Decoder* decoder, const Region& region, int orientation, int denominator) {
  if (!decoder->StartPlanes(denominator)) return decoder->Problem();
  const jpeg_decompress_struct& info = decoder->info();
  Box boxes[kPlanes];   // the region in each plane's own pixels, which lie as the image's do: centred on the same area
  int first = INT_MAX, last = 0, row_bytes[kPlanes], lines[kPlanes];   // kept: the decoder forgets its planes once they are read
  for (int c = 0; c < kPlanes; ++c) {
    const jpeg_component_info& plane = info.comp_info[c];
    lines[c] = decoder->Lines(c);
    const double down = double(lines[c]) / (info.max_v_samp_factor * DCTSIZE);
    const double across = double(plane.h_samp_factor * plane.DCT_scaled_size) / (info.max_h_samp_factor * DCTSIZE);
    boxes[c] = {region.top * down, region.left * across, region.height * down, region.width * across};
    row_bytes[c] = static_cast<int>(plane.width_in_blocks) * plane.DCT_scaled_size;
    first = std::min(first, static_cast<int>(boxes[c].top / lines[c]));
    last = std::max(last, static_cast<int>(std::ceil((boxes[c].top + boxes[c].height) / lines[c])));
  }
  last = std::min(last, static_cast<int>(info.total_iMCU_rows));
  std::vector<uint8_t> values[kPlanes];
  uint8_t* planes[kPlanes];
  for (int c = 0; c < kPlanes; ++c) {
    values[c].resize(int64_t{last - first} * lines[c] * row_bytes[c]);
    planes[c] = values[c].data();
  }
  if (!decoder->ReadPlanes(first, last, planes, row_bytes)) return decoder->Problem();
  DecodedImage image;
  for (int c = 0; c < kPlanes; ++c) {
    boxes[c].top -= first * lines[c];
    DecodedImage plane = Turned(Pixels{(last - first) * lines[c], row_bytes[c], 1, std::move(values[c])}, boxes[c], orientation);
    if (c == 0) image = std::move(plane);
    else image.pixels.chroma.push_back({plane.pixels.height, plane.pixels.width, std::move(plane.pixels.values_HWC), plane.box});
  }
  image.pixels.channels = kPlanes;
  return image;
}

absl::StatusOr<DecodedImage> DecodeRows(Decoder* decoder, const Region& region, int orientation, int denominator) {
  jpeg_decompress_struct& info = decoder->info();
  const bool gray = info.jpeg_color_space == JCS_GRAYSCALE, cmyk = info.jpeg_color_space == JCS_CMYK || info.jpeg_color_space == JCS_YCCK;
  if (!decoder->Start(denominator, gray ? JCS_GRAYSCALE : cmyk ? JCS_CMYK : JCS_RGB)) return decoder->Problem();
  // What to decode, in pixels of the scaled image: the region and a margin.
  const int scaled_height = static_cast<int>(info.output_height), scaled_width = static_cast<int>(info.output_width);
  const int top = std::max(0, region.top / denominator - kMargin), bottom = std::min(scaled_height, (region.top + region.height) / denominator + 1 + kMargin);
  int left = std::max(0, region.left / denominator - kMargin), columns = std::min(scaled_width, (region.left + region.width) / denominator + 1 + kMargin) - left;
  if (!decoder->Crop(&left, &columns, top)) return decoder->Problem();
  const int channels = info.output_components;
  std::vector<uint8_t> values(int64_t{bottom - top} * columns * channels);
  if (!decoder->ReadRows(values.data(), bottom - top, size_t(columns) * channels)) return decoder->Problem();
  Pixels stored{bottom - top, columns, cmyk ? 3 : channels, cmyk ? RgbOfCmyk(values, info.saw_Adobe_marker) : std::move(values)};
  const double scale = 1.0 / denominator;
  return Turned(std::move(stored), {region.top * scale - top, region.left * scale - left, region.height * scale, region.width * scale}, orientation);
}

}  // namespace

absl::StatusOr<DecodedImage> DecodeJpeg(std::string_view file, const DecodeOptions& options) {
  Decoder decoder;
  if (!decoder.ReadHeader(reinterpret_cast<const uint8_t*>(file.data()), file.size())) return decoder.Problem();
  const jpeg_decompress_struct& info = decoder.info();
  const int stored_height = static_cast<int>(info.image_height), stored_width = static_cast<int>(info.image_width);
  RETURN_IF_ERROR(CheckImageSize("JPEG", info.image_height, info.image_width, 4, options));
  if (!Ends(file)) return DamagedImage("JPEG cut short: no end-of-image marker");
  const int orientation = Orientation(info.marker_list);
  const bool swaps = orientation >= 5;
  const int height = swaps ? stored_width : stored_height, width = swaps ? stored_height : stored_width;
  const Region upright = options.region ? options.region(height, width) : Region{0, 0, height, width};
  const Region region = StoredRegion(upright, orientation, stored_height, stored_width);
  const bool planes = options.out_height > 0 && info.jpeg_color_space == JCS_YCbCr && info.num_components == kPlanes;
  absl::StatusOr<DecodedImage> image = (planes ? DecodePlanes : DecodeRows)(&decoder, region, orientation, Denominator(upright, options));
  if (image.ok() && decoder.errors().cut) return DamagedImage("damaged JPEG: premature end of its data");
  return image;
}

}  // namespace hierad
