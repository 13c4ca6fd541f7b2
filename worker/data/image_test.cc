#include <cstdio>

#include <jpeglib.h>
#include <png.h>

#include <chrono>
#include <cmath>
#include <random>
#include <unistd.h>

#include "base/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/data/dataset.h"
#include "worker/data/image_dataset.h"
#include "worker/data/image_pixels.h"
#include "worker/data/image_taps.h"
#include "worker/data/test_files.h"

namespace hierad {
namespace {

using testing::HasSubstr;

Pixels Ramp(int height, int width, int channels) {
  Pixels image{height, width, channels, {}};
  for (int y = 0; y < height; ++y)
    for (int x = 0; x < width; ++x)
      for (int c = 0; c < channels; ++c) image.values_HWC.push_back(static_cast<uint8_t>((x * 5 + y * 3 + c * 40) % 256));
  return image;
}

std::string Png(const Pixels& pixels, uint32_t format = 0) {
  png_image image{};
  image.version = PNG_IMAGE_VERSION;
  image.width = pixels.width;
  image.height = pixels.height;
  image.format = format ? format : pixels.channels == 1 ? PNG_FORMAT_GRAY : PNG_FORMAT_RGB;
  png_alloc_size_t size = 0;
  EXPECT_TRUE(png_image_write_to_memory(&image, nullptr, &size, 0, pixels.values_HWC.data(), 0, nullptr));
  std::string out(size, '\0');
  EXPECT_TRUE(png_image_write_to_memory(&image, out.data(), &size, 0, pixels.values_HWC.data(), 0, nullptr));
  out.resize(size);
  return out;
}

std::string Jpeg(const Pixels& pixels) {
  jpeg_compress_struct info{};
  jpeg_error_mgr errors;
  info.err = jpeg_std_error(&errors);
  jpeg_create_compress(&info);
  unsigned char* bytes = nullptr;
  unsigned long size = 0;
  jpeg_mem_dest(&info, &bytes, &size);
  info.image_width = pixels.width;
  info.image_height = pixels.height;
  info.input_components = pixels.channels;
  info.in_color_space = pixels.channels == 1 ? JCS_GRAYSCALE : JCS_RGB;
  jpeg_set_defaults(&info);
  jpeg_set_quality(&info, 95, TRUE);
  for (int c = 0; c < info.num_components; ++c) info.comp_info[c].h_samp_factor = info.comp_info[c].v_samp_factor = 1;
  jpeg_start_compress(&info, TRUE);
  for (int y = 0; y < pixels.height; ++y) {
    auto* row = const_cast<JSAMPROW>(pixels.values_HWC.data() + size_t(y) * pixels.width * pixels.channels);
    jpeg_write_scanlines(&info, &row, 1);
  }
  jpeg_finish_compress(&info);
  const std::string out(reinterpret_cast<char*>(bytes), size);
  jpeg_destroy_compress(&info);
  free(bytes);
  return out;
}

TEST(DecodeImage, PngIsExactAndJpegClose) {
  for (int channels : {1, 3}) {
    const Pixels image = Ramp(19, 23, channels);
    const auto png = DecodeImage(Png(image));
    ASSERT_TRUE(png.ok()) << png.status();
    EXPECT_EQ(png->pixels.channels, channels);
    EXPECT_EQ(png->pixels.values_HWC, image.values_HWC);
    const auto jpeg = DecodeImage(Jpeg(image));
    ASSERT_TRUE(jpeg.ok()) << jpeg.status();
    EXPECT_EQ(jpeg->pixels.height, 19);
    EXPECT_EQ(jpeg->pixels.width, 23);
    ASSERT_EQ(jpeg->pixels.values_HWC.size(), image.values_HWC.size());
    for (size_t i = 0; i < image.values_HWC.size(); ++i) EXPECT_NEAR(jpeg->pixels.values_HWC[i], image.values_HWC[i], 16);
  }
}

TEST(DecodeImage, AlphaIsDroppedOrKeptForFourChannels) {
  Pixels rgba{2, 2, 4, {10, 20, 30, 0, 40, 50, 60, 128, 70, 80, 90, 255, 1, 2, 3, 7}};
  const auto image = DecodeImage(Png(rgba, PNG_FORMAT_RGBA));
  ASSERT_TRUE(image.ok()) << image.status();
  EXPECT_EQ(image->pixels.channels, 3);
  EXPECT_THAT(image->pixels.values_HWC, testing::ElementsAre(10, 20, 30, 40, 50, 60, 70, 80, 90, 1, 2, 3));
  DecodeOptions four;
  four.channels = 4;
  EXPECT_EQ(DecodeImage(Png(rgba, PNG_FORMAT_RGBA), four)->pixels.values_HWC, rgba.values_HWC);
}

TEST(DecodeImage, EveryCutIsRefused) {
  for (const std::string& file : {Png(Ramp(19, 23, 3)), Jpeg(Ramp(19, 23, 3)), Jpeg(Ramp(19, 23, 1))}) {
    ASSERT_TRUE(DecodeImage(file).ok());
    for (size_t size = 0; size < file.size(); ++size) {
      const auto image = DecodeImage(file.substr(0, size));
      ASSERT_FALSE(image.ok()) << size << " of " << file.size();
      EXPECT_EQ(ReasonOf(image.status()), v1::REASON_DATA_ERROR);
    }
  }
  EXPECT_THAT(std::string(DecodeImage("").status().message()), HasSubstr("empty file"));
  EXPECT_THAT(std::string(DecodeImage("hello, world").status().message()), HasSubstr("neither JPEG, PNG, WebP nor TIFF (it begins with 'hello, w')"));
}

TEST(DecodeImage, RefusesAHugeCanvasBeforeAllocating) {
  std::string file = Png(Ramp(4, 4, 1));
  file.replace(16, 8, std::string("\0\0\xFF\xFF\0\0\xFF\xFF", 8));   // 65535 x 65535; the checksum of IHDR is wrong, too
  EXPECT_FALSE(DecodeImage(file).ok());
}

// The widest instructions that the machine has against plain sums of the same weights: the same bytes.
TEST(ResizePlanes, EqualsPlainSums) {
  const auto seed = static_cast<uint32_t>(std::chrono::steady_clock::now().time_since_epoch().count());
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  const auto draw = [&](int least, int most) { return std::uniform_int_distribution<int>(least, most)(random); };
  for (int turn = 0; turn < 40; ++turn) {
    Pixels image{draw(1, 90), draw(1, 90), 3, {}};
    for (int i = 0; i < image.height * image.width; ++i) image.values_HWC.push_back(static_cast<uint8_t>(draw(0, 3) ? draw(0, 255) : draw(0, 1) * 255));
    Box box{draw(0, image.height - 1) * 0.5, draw(0, image.width - 1) * 0.5, 0, 0};
    box.height = image.height - box.top - 0.25 * draw(0, 1), box.width = image.width - box.left;
    for (int c = 0; c < 2; ++c) image.chroma.push_back({1, 1, {128}, {0, 0, 1, 1}});   // no colour
    const int oh = draw(1, 80), ow = draw(1, 80);
    std::vector<uint8_t> out(3 * oh * ow), shorter, expected;
    ResizePlanes(image, box, oh, ow, out.data());
    const auto byte = [](int32_t sum) { return static_cast<uint8_t>(std::clamp((sum + (1 << 13)) >> 14, 0, 255)); };
    const Taps down = TapsFor(image.height, box.top, box.height, oh, 14), across = TapsFor(image.width, box.left, box.width, ow, 14);
    for (int y = 0; y < oh; ++y)
      for (int x = 0; x < image.width; ++x) {
        int32_t sum = 0;
        for (int k = 0; k < down.count[y]; ++k) sum += down.weights_of(y)[k] * image.values_HWC[(down.first[y] + k) * image.width + x];
        shorter.push_back(byte(sum));
      }
    for (int y = 0; y < oh; ++y)
      for (int x = 0; x < ow; ++x) {
        int32_t sum = 0;
        for (int k = 0; k < across.count[x]; ++k) sum += across.weights_of(x)[k] * shorter[y * image.width + across.first[x] + k];
        expected.push_back(byte(sum));
      }
    for (int c = 0; c < 3; ++c) EXPECT_EQ(std::vector<uint8_t>(out.begin() + c * oh * ow, out.begin() + (c + 1) * oh * ow), expected) << turn;
  }
}

TEST(ResizePlanes, ColoursAreJfifs) {
  for (int y = 0; y < 256; y += 15)
    for (int cb = 0; cb < 256; cb += 15)
      for (int cr = 0; cr < 256; cr += 15) {
        Pixels image{1, 1, 3, {static_cast<uint8_t>(y)}};
        for (const int value : {cb, cr}) image.chroma.push_back({1, 1, {static_cast<uint8_t>(value)}, {0, 0, 1, 1}});
        uint8_t rgb[3];
        ResizePlanes(image, {0, 0, 1, 1}, 1, 1, rgb);
        const double expected[] = {y + 1.402 * (cr - 128), y - 0.344136 * (cb - 128) - 0.714136 * (cr - 128), y + 1.772 * (cb - 128)};
        for (int c = 0; c < 3; ++c) ASSERT_NEAR(rgb[c], std::clamp(expected[c], 0.0, 255.0), 0.51) << y << " " << cb << " " << cr;
      }
}

TEST(RandomRegion, CoversTheAskedScalesAndRatiosAndDependsOnTheVisitAlone) {
  v1::DataSpec data;
  data.add_crop_scale(0.2), data.add_crop_scale(1);
  data.add_crop_ratio(0.75), data.add_crop_ratio(4.0 / 3);
  double least = 1, most = 0, mean = 0;
  for (uint64_t id = 0; id < 2000; ++id) {
    const Visit visit{0, id, 7, 3, true};
    const Region region = RandomRegion(data, visit, 200, 300);
    ASSERT_TRUE(region.top >= 0 && region.left >= 0 && region.top + region.height <= 200 && region.left + region.width <= 300);
    const double area = region.height * region.width / 60000.0, ratio = double(region.width) / region.height;
    ASSERT_TRUE(area > 0.19 && area < 1.01) << area;
    ASSERT_TRUE(ratio > 0.73 && ratio < 1.53) << ratio;
    least = std::min(least, area), most = std::max(most, area), mean += area / 2000;
    const Region again = RandomRegion(data, visit, 200, 300);
    EXPECT_TRUE(again.top == region.top && again.left == region.left && again.width == region.width);
  }
  EXPECT_LT(least, 0.21);
  EXPECT_GT(most, 0.8);
  EXPECT_NEAR(mean, 0.5, 0.08);
  const Region tall = RandomRegion(data, Visit{0, 0, 7, 3, true}, 300, 3);   // no try fits: the largest centred one
  EXPECT_TRUE(tall.width == 3 && tall.height == 4 && tall.top == 148);
}

TEST(CentreRegion, SevenEighths) {
  const Region region = CentreRegion(256, 512, 224, 224);
  EXPECT_TRUE(region.height == 224 && region.width == 224 && region.top == 16 && region.left == 144);
  const Region tiny = CentreRegion(1, 1, 64, 64);
  EXPECT_TRUE(tiny.height == 1 && tiny.width == 1 && tiny.top == 0);
}

v1::DataSpec Images() {
  v1::DataSpec data;
  data.set_source("images");
  data.set_flip(0);
  return data;
}

TEST(ImageFolder, ClassesAreSubFoldersInOrder) {
  TestFolder folder;
  folder.Write("b/2.png", Png(Ramp(8, 8, 3)));
  folder.Write("a/deep/1.JPG", Jpeg(Ramp(8, 8, 1)));
  folder.Write("a/notes.txt", "x");
  folder.Write("a/.hidden.png", "x");
  folder.Write("c/empty.txt", "x");
  const auto dataset = OpenDataset(Images(), folder.Path(""), InputGeometry(3, {8, 8}), nullptr);
  ASSERT_TRUE(dataset.ok()) << dataset.status();
  EXPECT_EQ((*dataset)->count(), 2);
  EXPECT_EQ((*dataset)->num_classes(), 3);
  EXPECT_EQ((*dataset)->class_name(1), "b");
  EXPECT_EQ((*dataset)->label(0), 0);
  EXPECT_EQ((*dataset)->label(1), 1);
  EXPECT_THAT((*dataset)->SampleName(0), HasSubstr("a/deep/1.JPG (sample 0)"));
  EXPECT_THAT((*dataset)->Describe(), HasSubstr("2 other files"));
}

// Whether a folder's rows have 16 bits must not hang on which of its files could be read just now.
TEST(ImageFolder, AFileThatCannotBeReadIsNoFileOfEightBits) {
  TestFolder folder;
  folder.Write("1.png", Png(Ramp(8, 8, 3)));
  ASSERT_EQ(symlink("nowhere.png", folder.Path("0.png").c_str()), 0);
  v1::DataSpec data = Images();
  data.set_on_error("fail");
  const auto refused = OpenDataset(data, folder.Path(""), InputGeometry(3, {8, 8}), nullptr);
  EXPECT_EQ(ReasonOf(refused.status()), v1::REASON_DATA_ERROR);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("0.png (sample 0)"));
  data.set_on_error("skip");
  EXPECT_TRUE(OpenDataset(data, folder.Path(""), InputGeometry(3, {8, 8}), nullptr).ok());
}

TEST(ImageFolder, RefusesMixturesEmptinessAndOtherShapes) {
  TestFolder folder;
  const auto refusal = [&](const std::string& path, int chans, std::vector<int64_t> size, v1::DataSpec data = Images()) {
    const auto dataset = OpenDataset(data, path, InputGeometry(chans, std::move(size)), nullptr);
    EXPECT_FALSE(dataset.ok());
    return dataset.ok() ? "" : std::string(dataset.status().message());
  };
  EXPECT_THAT(refusal(folder.Path("none"), 3, {8, 8}), HasSubstr("No such file"));
  folder.Write("a/notes.txt", "x");
  EXPECT_THAT(refusal(folder.Path(""), 3, {8, 8}), HasSubstr("0 images"));
  folder.Write("a/1.png", Png(Ramp(8, 8, 3)));
  EXPECT_THAT(refusal(folder.Path(""), 3, {64}), HasSubstr("input_size [H, W]"));
  v1::DataSpec data = Images();
  data.add_mean(0.5);
  EXPECT_THAT(refusal(folder.Path(""), 3, {8, 8}, data), HasSubstr("data.mean has 1 values"));
  folder.Write("2.png", Png(Ramp(8, 8, 3)));
  EXPECT_THAT(refusal(folder.Path(""), 3, {8, 8}), HasSubstr("both images (2.png) and folders (a)"));
}

TEST(ImageFolder, GrayToThreeRgbToOneAndNormalisation) {
  TestFolder folder;
  folder.Write("1.png", Png(Pixels{1, 1, 1, {51}}));
  folder.Write("2.png", Png(Pixels{1, 1, 3, {100, 150, 200}}));
  const auto three = OpenDataset(Images(), folder.Path(""), InputGeometry(3, {1, 1}), nullptr);
  ASSERT_TRUE(three.ok()) << three.status();
  float rgb[3];
  ASSERT_TRUE((*three)->Read({0, 0, 0, 0, false}, rgb).ok());
  EXPECT_NEAR(rgb[0], (0.2 - 0.485) / 0.229, 1e-5);
  EXPECT_NEAR(rgb[1], (0.2 - 0.456) / 0.224, 1e-5);
  EXPECT_NEAR(rgb[2], (0.2 - 0.406) / 0.225, 1e-5);
  const auto one = OpenDataset(Images(), folder.Path(""), InputGeometry(1, {1, 1}), nullptr);
  ASSERT_TRUE(one.ok());
  float gray;
  ASSERT_TRUE((*one)->Read({1, 1, 0, 0, false}, &gray).ok());
  float other[8];
  const auto eight = OpenDataset(Images(), folder.Path(""), InputGeometry(8, {1, 1}), nullptr);
  ASSERT_TRUE(eight.ok());
  EXPECT_THAT(std::string((*eight)->Read({1, 1, 0, 0, false}, other).message()), HasSubstr("2.png (sample 1): 3 channels, model.in_chans is 8"));
  EXPECT_NEAR(gray, (141 / 255.0 - 0.5) / 0.5, 1e-5);   // of 140.75, as Pillow's convert("L")
}

TEST(ImageFolder, FlipMirrorsHalfOfTheVisits) {
  TestFolder folder;
  folder.Write("1.png", Png(Ramp(4, 4, 1)));
  v1::DataSpec data = Images();
  data.add_crop_scale(1), data.add_crop_scale(1);
  data.add_crop_ratio(1), data.add_crop_ratio(1);
  data.set_flip(0.5);
  const auto dataset = OpenDataset(data, folder.Path(""), InputGeometry(1, {4, 4}), nullptr);
  ASSERT_TRUE(dataset.ok());
  int flipped = 0;
  for (uint64_t id = 0; id < 400; ++id) {
    float x[16];
    ASSERT_TRUE((*dataset)->Read({0, id, 1, 0, true}, x).ok());
    flipped += x[0] > x[3];   // the ramp rises to the right
  }
  EXPECT_NEAR(flipped, 200, 40);
}

TEST(ImageFolder, UnreadableFilesAreNamed) {
  TestFolder folder;
  const std::string jpeg = Jpeg(Ramp(64, 64, 3));
  folder.Write("700.jpg", "");
  folder.Write("701.jpg", jpeg.substr(0, jpeg.size() - 54));
  folder.Write("702.jpg", "text");
  const auto dataset = OpenDataset(Images(), folder.Path(""), InputGeometry(3, {8, 8}), nullptr);
  ASSERT_TRUE(dataset.ok());
  float x[3 * 64];
  const char* expected[] = {"empty file", "cut short", "neither JPEG, PNG"};
  for (uint64_t i = 0; i < 3; ++i) {
    const absl::Status status = (*dataset)->Read({i, i, 0, 0, true}, x);
    EXPECT_EQ(ReasonOf(status), v1::REASON_DATA_ERROR);
    EXPECT_THAT(std::string(status.message()), testing::AllOf(HasSubstr("70" + std::to_string(i) + ".jpg (sample " + std::to_string(i) + ")"), HasSubstr(expected[i])));
  }
}

}  // namespace
}  // namespace hierad
