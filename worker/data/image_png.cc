#include <png.h>

#include <bit>
#include <csetjmp>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "worker/data/image_pixels.h"

namespace hierad {
namespace {

struct Input {
  std::string_view file;
  size_t at = 0;
  char error[128] = "";
};

void Read(png_structp png, png_bytep out, png_size_t size) {
  auto* input = static_cast<Input*>(png_get_io_ptr(png));
  if (size > input->file.size() - input->at) png_error(png, "cut short");
  std::memcpy(out, input->file.data() + input->at, size);
  input->at += size;
}

void Leave(png_structp png, png_const_charp message) {
  auto* input = static_cast<Input*>(png_get_error_ptr(png));
  std::strncpy(input->error, message, sizeof input->error - 1);
  png_longjmp(png, 1);
}

// libpng leaves by longjmp: no object with a destructor lives in these two frames.
bool ReadHeader(png_structp png, png_infop info, int channels, bool deep, Pixels* image) {
  if (setjmp(png_jmpbuf(png))) return false;
  png_read_info(png, info);
  png_set_expand(png);
  if (!deep) png_set_scale_16(png);
  else if (std::endian::native == std::endian::little) png_set_swap(png);
  const bool color = png_get_color_type(png, info) & (PNG_COLOR_MASK_COLOR | PNG_COLOR_MASK_PALETTE);
  if (channels != (color ? 4 : 2)) png_set_strip_alpha(png);
  png_set_interlace_handling(png);
  png_read_update_info(png, info);
  image->height = static_cast<int>(png_get_image_height(png, info));
  image->width = static_cast<int>(png_get_image_width(png, info));
  image->channels = png_get_channels(png, info);
  return true;
}

bool ReadRows(png_structp png, png_bytep* rows) {
  if (setjmp(png_jmpbuf(png))) return false;
  png_read_image(png, rows);
  png_read_end(png, nullptr);
  return true;
}

}  // namespace

absl::StatusOr<Pixels> DecodePng(std::string_view file, const DecodeOptions& options) {
  Input input{file};
  struct Reader {
    png_structp png = nullptr;
    png_infop info = nullptr;
    ~Reader() { png_destroy_read_struct(&png, &info, nullptr); }
  } reader;
  reader.png = png_create_read_struct(PNG_LIBPNG_VER_STRING, &input, Leave, [](png_structp, png_const_charp) {});
  if (reader.png) reader.info = png_create_info_struct(reader.png);
  if (!reader.info) return ErrorOf(v1::REASON_HOST_OOM, "no memory for a PNG decoder");
  png_set_read_fn(reader.png, &input, Read);
  Pixels image;
  if (!ReadHeader(reader.png, reader.info, options.channels, options.deep, &image)) return DamagedImage(absl::StrCat("damaged PNG: ", input.error));
  RETURN_IF_ERROR(CheckImageSize("PNG", image.height, image.width, image.channels, options));
  const bool deep = png_get_bit_depth(reader.png, reader.info) == 16;
  const int64_t row = int64_t{image.width} * image.channels, row_bytes = row * (deep ? 2 : 1);
  if (static_cast<int64_t>(png_get_rowbytes(reader.png, reader.info)) != row_bytes)
    return DamagedImage(absl::StrCat("PNG of ", image.channels, " channels in rows of ", png_get_rowbytes(reader.png, reader.info), " bytes"));
  if (deep) image.deep_HWC.resize(image.height * row);
  else image.values_HWC.resize(image.height * row);
  png_bytep values = deep ? reinterpret_cast<png_bytep>(image.deep_HWC.data()) : image.values_HWC.data();
  std::vector<png_bytep> rows(image.height);
  for (int y = 0; y < image.height; ++y) rows[y] = values + y * row_bytes;
  if (!ReadRows(reader.png, rows.data())) return DamagedImage(absl::StrCat("damaged PNG: ", input.error));
  return image;
}

}  // namespace hierad
