#include <png.h>
#include <turbojpeg.h>

#include <csetjmp>
#include <cstring>
#include <memory>

#include "absl/strings/str_cat.h"
#include "base/fs.h"
#include "base/limits.h"
#include "base/status.h"
#include "worker/data/image_pixels.h"

namespace hierad {
namespace {

absl::Status Damaged(const std::string& problem) { return ErrorOf(v1::REASON_DATA_ERROR, problem); }

absl::Status CheckSize(const char* kind, int64_t height, int64_t width) {
  if (height < 1 || width < 1 || height > limits::kImagePixels / width)
    return Damaged(absl::StrCat(kind, " of ", width, " x ", height, " pixels; at most ", limits::kImagePixels, " in all are read"));
  return absl::OkStatus();
}

// An end-of-image marker after the last scan's start. Inside a scan 0xFF is always stuffed, so both are real markers.
bool JpegEnds(std::string_view file) {
  const size_t scan = file.rfind("\xFF\xDA"), end = file.rfind("\xFF\xD9");
  return end != std::string_view::npos && scan != std::string_view::npos && end > scan;
}

absl::StatusOr<Pixels> DecodeJpeg(std::string_view file) {
  const std::unique_ptr<void, int (*)(void*)> decoder(tjInitDecompress(), tjDestroy);
  if (!decoder) return ErrorOf(v1::REASON_HOST_OOM, "no memory for a JPEG decoder");
  const auto* bytes = reinterpret_cast<const unsigned char*>(file.data());
  int width = 0, height = 0, subsampling = 0, colorspace = 0;
  if (tjDecompressHeader3(decoder.get(), bytes, file.size(), &width, &height, &subsampling, &colorspace) != 0 &&
      tjGetErrorCode(decoder.get()) != TJERR_WARNING)
    return Damaged(absl::StrCat("damaged JPEG: ", tjGetErrorStr2(decoder.get())));
  RETURN_IF_ERROR(CheckSize("JPEG", height, width));
  if (!JpegEnds(file)) return Damaged("JPEG cut short: no end-of-image marker");
  const bool gray = colorspace == TJCS_GRAY, cmyk = colorspace == TJCS_CMYK || colorspace == TJCS_YCCK;
  Pixels image{height, width, gray ? 1 : 3, {}};
  const int read_channels = gray ? 1 : cmyk ? 4 : 3;
  std::vector<uint8_t> values(int64_t{height} * width * read_channels);
  const int format = gray ? TJPF_GRAY : cmyk ? TJPF_CMYK : TJPF_RGB;
  if (tjDecompress2(decoder.get(), bytes, file.size(), values.data(), width, 0, height, format, TJFLAG_ACCURATEDCT) != 0) {
    const std::string error = tjGetErrorStr2(decoder.get());
    if (tjGetErrorCode(decoder.get()) != TJERR_WARNING || error.find("remature end") != std::string::npos)
      return Damaged(absl::StrCat("damaged JPEG: ", error));
  }
  if (cmyk) {   // Adobe's files hold it inverted
    image.values_HWC.resize(int64_t{height} * width * 3);
    for (int64_t i = 0; i < int64_t{height} * width; ++i)
      for (int c = 0; c < 3; ++c) image.values_HWC[i * 3 + c] = values[i * 4 + c] * values[i * 4 + 3] / 255;
  } else {
    image.values_HWC = std::move(values);
  }
  return image;
}

struct PngInput {
  std::string_view file;
  size_t at = 0;
  char error[128] = "";
};

void ReadPng(png_structp png, png_bytep out, png_size_t size) {
  auto* input = static_cast<PngInput*>(png_get_io_ptr(png));
  if (size > input->file.size() - input->at) png_error(png, "cut short");
  std::memcpy(out, input->file.data() + input->at, size);
  input->at += size;
}

void PngError(png_structp png, png_const_charp message) {
  auto* input = static_cast<PngInput*>(png_get_error_ptr(png));
  std::strncpy(input->error, message, sizeof input->error - 1);
  png_longjmp(png, 1);
}

// libpng leaves by longjmp: no object with a destructor lives in these two frames.
bool ReadPngHeader(png_structp png, png_infop info, Pixels* image) {
  if (setjmp(png_jmpbuf(png))) return false;
  png_read_info(png, info);
  png_set_expand(png);
  png_set_scale_16(png);
  png_set_strip_alpha(png);
  png_set_interlace_handling(png);
  png_read_update_info(png, info);
  image->height = static_cast<int>(png_get_image_height(png, info));
  image->width = static_cast<int>(png_get_image_width(png, info));
  image->channels = png_get_channels(png, info);
  return true;
}

bool ReadPngRows(png_structp png, png_bytep* rows) {
  if (setjmp(png_jmpbuf(png))) return false;
  png_read_image(png, rows);
  png_read_end(png, nullptr);
  return true;
}

absl::StatusOr<Pixels> DecodePng(std::string_view file) {
  PngInput input{file};
  struct Reader {
    png_structp png = nullptr;
    png_infop info = nullptr;
    ~Reader() { png_destroy_read_struct(&png, &info, nullptr); }
  } reader;
  reader.png = png_create_read_struct(PNG_LIBPNG_VER_STRING, &input, PngError, [](png_structp, png_const_charp) {});
  if (reader.png) reader.info = png_create_info_struct(reader.png);
  if (!reader.info) return ErrorOf(v1::REASON_HOST_OOM, "no memory for a PNG decoder");
  png_set_read_fn(reader.png, &input, ReadPng);
  Pixels image;
  if (!ReadPngHeader(reader.png, reader.info, &image)) return Damaged(absl::StrCat("damaged PNG: ", input.error));
  RETURN_IF_ERROR(CheckSize("PNG", image.height, image.width));
  const int64_t row_bytes = int64_t{image.width} * image.channels;
  if ((image.channels != 1 && image.channels != 3) || static_cast<int64_t>(png_get_rowbytes(reader.png, reader.info)) != row_bytes)
    return Damaged(absl::StrCat("PNG of ", image.channels, " channels; gray and RGB are read"));
  image.values_HWC.resize(image.height * row_bytes);
  std::vector<png_bytep> rows(image.height);
  for (int y = 0; y < image.height; ++y) rows[y] = image.values_HWC.data() + y * row_bytes;
  if (!ReadPngRows(reader.png, rows.data())) return Damaged(absl::StrCat("damaged PNG: ", input.error));
  return image;
}

}  // namespace

absl::StatusOr<Pixels> DecodeImage(std::string_view file) {
  if (file.empty()) return Damaged("empty file");
  if (file.substr(0, 3) == "\xFF\xD8\xFF") return DecodeJpeg(file);
  if (file.substr(0, 8) == "\x89PNG\r\n\x1A\n") return DecodePng(file);
  return Damaged(absl::StrCat("neither JPEG nor PNG (it begins with '", Printable(file.substr(0, 8)), "')"));
}

}  // namespace hierad
