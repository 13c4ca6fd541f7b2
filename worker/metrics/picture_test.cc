#include "worker/metrics/picture.h"

#include <gtest/gtest.h>
#include <png.h>

#include <cmath>

namespace hierad {
namespace {

Reconstruction Made(std::vector<int64_t> size, int64_t channels) {
  Reconstruction r;
  r.samples = 2;
  r.channels = channels;
  r.size = std::move(size);
  int64_t elements = r.samples * channels;
  for (const int64_t extent : r.size) elements *= extent;
  for (int64_t i = 0; i < elements; ++i) {
    r.input.push_back(float(i % 7) / 7.0f);
    r.masked.push_back(i % 2 == 0);
    r.predicted.push_back(r.masked.back() != 0 ? 0.5f : r.input.back());
  }
  return r;
}

TEST(Pictures, OfImagesShowOriginalMaskedAndReconstruction) {
  Reconstruction r = Made({96, 96}, 3);
  r.input[0] = 1;   // red of the first pixel, which is masked
  r.predicted[0] = 0;
  const Picture p = DrawImages(r, {0, 0, 0}, {1, 1, 1});
  EXPECT_EQ(p.width, 3 * 96 + 4 * 4);
  EXPECT_EQ(p.height, 2 * 100 + 4);
  const auto red = [&](int x, int y) { return int(p.rgb[size_t(y * p.width + x) * 3]); };
  EXPECT_EQ(red(4, 4), 255);          // as it is
  EXPECT_EQ(red(4 + 100, 4), 128);    // not shown to the model
  EXPECT_EQ(red(4 + 200, 4), 0);      // what it made of it
  // Preparation is undone.
  const Picture undone = DrawImages(r, {0.5, 0.5, 0.5}, {0.5, 0.5, 0.5});
  EXPECT_EQ(int(undone.rgb[size_t(4 * p.width + 4 + 200) * 3]), 128);
}

TEST(Pictures, ArePngWhateverTheNumbers) {
  for (Reconstruction r : {Made({64}, 6), Made({16, 24}, 1)}) {
    r.predicted[3] = NAN;
    r.input[5] = INFINITY;
    const Picture p = r.size.size() == 1 ? DrawSignals(r) : DrawImages(r, {}, {});
    ASSERT_EQ(p.rgb.size(), size_t(p.width) * size_t(p.height) * 3);
    const auto png = EncodePng(p);
    ASSERT_TRUE(png.ok()) << png.status();
    png_image image{};
    image.version = PNG_IMAGE_VERSION;
    ASSERT_NE(png_image_begin_read_from_memory(&image, png->data(), png->size()), 0);
    EXPECT_EQ(int(image.width), p.width);
    image.format = PNG_FORMAT_RGB;
    std::vector<uint8_t> read(PNG_IMAGE_SIZE(image));
    ASSERT_NE(png_image_finish_read(&image, nullptr, read.data(), 0, nullptr), 0);
    EXPECT_EQ(read, p.rgb);
  }
}

}  // namespace
}  // namespace hierad
