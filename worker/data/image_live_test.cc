// Images written by Pillow and tifffile; crops and orientations against torchvision and Pillow, live.
#include <cmath>
#include <cstring>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/data/image_pixels.h"
#include "worker/data/test_files.h"

namespace hierad {
namespace {

using testing::HasSubstr;

// Each line of "list": file, channels, height, width of the model's view of it, top, left, height, width of the crop, output
// height and width, and the file with the expected [H, W, C] bytes of the crop.
constexpr char kMake[] = R"(
import sys
from pathlib import Path
import numpy as np, torch, tifffile
from PIL import Image, ImageOps
import torchvision.transforms as T
import torchvision.transforms.functional as F
from torchvision.transforms import InterpolationMode
X = Image.Transpose
out = sys.argv[1] + '/'
seed = int.from_bytes(np.random.bytes(4), 'little')
print(seed)
rng = np.random.default_rng(seed)
torch.manual_seed(seed)

def picture(h, w, c):   # smooth, with some noise: what a camera gives
    y, x = np.mgrid[0:h, 0:w]
    waves = [120 + 70 * np.sin(x / rng.uniform(6, 30) + k) + 50 * np.cos(y / rng.uniform(6, 30)) for k in range(c)]
    return np.clip(np.stack(waves, -1) + rng.normal(0, 6, (h, w, c)), 0, 255).astype(np.uint8)

listing = open(out + 'list', 'w')
def expect(name, image, channels, least=24):
    w, h = image.size
    for k in range(4):
        top, left, height, width = T.RandomResizedCrop.get_params(image, (0.1, 1.0), (0.75, 1.3333)) if k else (0, 0, h, w)
        oh, ow = int(rng.integers(least, 70)), int(rng.integers(least, 70))
        crop = F.resized_crop(image, top, left, height, width, (oh, ow), InterpolationMode.BICUBIC)
        np.asarray(crop).tofile(f'{out}{name}.{k}')
        print(name, channels, h, w, top, left, height, width, oh, ow, f'{name}.{k}', file=listing)

rgb, gray = Image.fromarray(picture(143, 201, 3)), Image.fromarray(picture(97, 150, 1)[..., 0])
for name, image, channels in (('rgb', rgb, 3), ('gray', gray, 1)):
    image.save(out + name + '.png'); expect(name + '.png', image, channels)
    image.save(out + name + '.jpg', quality=90); expect(name + '.jpg', Image.open(out + name + '.jpg'), channels)
    image.save(out + name + 'p.jpg', quality=70, progressive=True, subsampling=0 if channels == 3 else -1); expect(name + 'p.jpg', Image.open(out + name + 'p.jpg'), channels)
    for compression in ('raw', 'tiff_lzw', 'tiff_adobe_deflate', 'packbits'):
        image.save(f'{out}{name}{compression}.tif', compression=compression); expect(f'{name}{compression}.tif', image, channels)
rgb.save(out + 'lossless.webp', lossless=True); expect('lossless.webp', rgb, 3)
rgb.save(out + 'lossy.webp', quality=80); expect('lossy.webp', Image.open(out + 'lossy.webp').convert('RGB'), 3)
rgb.quantize(64).save(out + 'palette.png'); expect('palette.png', Image.open(out + 'palette.png').convert('RGB'), 3)
rgb.convert('CMYK').save(out + 'cmyk.jpg', quality=92); expect('cmyk.jpg', Image.open(out + 'cmyk.jpg').convert('RGB'), 3)
alpha = rgb.copy(); alpha.putalpha(gray.resize(rgb.size)); alpha.save(out + 'alpha.png'); expect('alpha.png', rgb, 3)
for turn in range(1, 9):
    exif = Image.Exif(); exif[0x0112] = turn
    rgb.save(f'{out}turn{turn}.jpg', quality=95, exif=exif, subsampling=0)
    expect(f'turn{turn}.jpg', ImageOps.exif_transpose(Image.open(f'{out}turn{turn}.jpg')), 3)
    tifffile.imwrite(f'{out}turn{turn}.tif', np.asarray(rgb), photometric='rgb', extratags=[(274, 'H', 1, turn, True)])
    upright = {1: rgb, 2: rgb.transpose(X.FLIP_LEFT_RIGHT), 3: rgb.transpose(X.ROTATE_180), 4: rgb.transpose(X.FLIP_TOP_BOTTOM), 5: rgb.transpose(X.TRANSPOSE),
               6: rgb.transpose(X.ROTATE_270), 7: rgb.transpose(X.TRANSVERSE), 8: rgb.transpose(X.ROTATE_90)}[turn]
    expect(f'turn{turn}.tif', upright, 3)

# Any number of channels, 8 and 16 bits, strips and tiles, together and apart: exact after rounding to 8 bits.
for name, channels, dtype, more in (('five', 5, 'u1', {}), ('apart', 6, 'u1', dict(planarconfig='separate')), ('tiles', 8, 'u2', dict(tile=(32, 48))),
                                    ('big', 3, '>u2', {}), ('strips', 2, 'u2', dict(rowsperstrip=7, compression='zlib')), ('apart16', 4, 'u2', dict(planarconfig='separate', tile=(16, 16)))):
    a = rng.integers(0, 256 if dtype == 'u1' else 65536, (61, 83, channels)).astype(dtype)
    stored = np.moveaxis(a, -1, 0) if 'planarconfig' in more else a
    tifffile.imwrite(f'{out}{name}.tif', stored, photometric='minisblack' if channels != 3 else 'rgb', byteorder='>' if dtype[0] == '>' else '<', **dict(dict(planarconfig='contig'), **more))
    eight = a.astype(np.uint8) if dtype == 'u1' else ((a.astype(np.int64) * 255 + 32767) // 65535).astype(np.uint8)
    eight.tofile(f'{out}{name}.whole')
    print(f'{name}.tif', channels, 61, 83, 0, 0, 61, 83, 61, 83, f'{name}.whole', file=listing)
# 16 bits that stay 16 bits, against torch's resize in single precision: [C, H, W] after rounding.
deep = open(out + 'deep', 'w')
for name, channels, more in (('deep.png', 1, None), ('deep1.tif', 1, dict(photometric='minisblack')), ('deep3.tif', 3, dict(photometric='rgb')), ('deep5.tif', 5, dict(photometric='minisblack', planarconfig='separate'))):
    a = (picture(87, 131, channels).astype(np.uint16) * 257 + rng.integers(0, 200, (87, 131, channels))).clip(0, 65535).astype(np.uint16)
    if more is None: Image.fromarray(a[..., 0]).save(out + name)
    else: tifffile.imwrite(out + name, np.moveaxis(a, -1, 0) if 'planarconfig' in more else a if channels > 1 else a[..., 0], **more)
    for k in range(3):
        h, w = int(rng.integers(20, 88)), int(rng.integers(20, 132))
        top, left = int(rng.integers(0, 88 - h)), int(rng.integers(0, 132 - w))
        oh, ow = int(rng.integers(10, 100)), int(rng.integers(10, 100))
        x = torch.tensor(a[top:top + h, left:left + w].astype(np.float32)).movedim(-1, 0)[None]
        y = torch.nn.functional.interpolate(x, (oh, ow), mode='bicubic', antialias=True).clamp(0, 65535).round()
        y[0].numpy().astype(np.uint16).tofile(f'{out}{name}.{k}')
        print(name, channels, top, left, h, w, oh, ow, f'{name}.{k}', file=deep)
deep.close()
tifffile.imwrite(out + 'float.tif', np.zeros((4, 4), 'f4'))
tifffile.imwrite(out + 'bits32.tif', np.zeros((4, 4), 'u4'))

# Planes, and decoding at a part of the size, against torchvision on the whole image: photographs, and waves with noise.
photos = sorted((Path(sys.prefix).parent / 'data/photos').glob('*/*.png'))
assert len(photos) > 10, 'no photographs: tools/setup fetches them'
fast = open(out + 'fast', 'w')
for k, image in enumerate([Image.open(path).convert('RGB') for path in photos] + [Image.fromarray(picture(1000, 1400, 3))]):
    exif = Image.Exif(); exif[0x0112] = int(rng.integers(1, 9))
    image.save(f'{out}fast{k}.jpg', quality=int(rng.integers(60, 96)), subsampling=int(rng.integers(0, 3)), progressive=k % 4 == 0, exif=exif)
    upright = ImageOps.exif_transpose(Image.open(f'{out}fast{k}.jpg'))
    for turn in range(4):
        top, left, height, width = T.RandomResizedCrop.get_params(upright, (0.2, 1.0), (0.75, 1.3333)) if turn else (0, 0, upright.height, upright.width)
        oh, ow = (int(x / rng.uniform(0.7, 9)) for x in (height, width))
        np.asarray(F.resized_crop(upright, top, left, height, width, (oh, ow), InterpolationMode.BICUBIC)).tofile(f'{out}fast{k}.{turn}')
        print(f'fast{k}.jpg', top, left, height, width, oh, ow, f'fast{k}.{turn}', file=fast)
fast.close()
listing.close()
)";

class ImageLive : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = new TestFolder;
    seed_ = RunPython(*folder_, kMake);
  }
  static void TearDownTestSuite() {
    delete folder_;
    folder_ = nullptr;
  }
  static std::string Read(const std::string& name) {
    const auto file = ReadFile(folder_->Path(name), 1 << 26);
    EXPECT_TRUE(file.ok()) << file.status();
    return file.ok() ? *file : "";
  }
  static TestFolder* folder_;
  static std::string seed_;
};
TestFolder* ImageLive::folder_ = nullptr;
std::string ImageLive::seed_;

// The bound: no value differs by more than 1, and at most one in 10,000 does. (The two agree exactly but where a sum in double
// precision stands on the edge of rounding a weight of 22 bits.) Lossy files are decoded by the same libjpeg or libwebp, but of
// other versions in Pillow's wheel: 3, and 0.3 in the mean.
TEST_F(ImageLive, CropsEqualTorchvision) {
  SCOPED_TRACE("seed " + seed_);
  std::istringstream list(Read("list"));
  std::string name, expected_name;
  int channels, h, w, oh, ow, cases = 0;
  Region region;
  while (list >> name >> channels >> h >> w >> region.top >> region.left >> region.height >> region.width >> oh >> ow >> expected_name) {
    SCOPED_TRACE(expected_name);
    ++cases;
    const std::string file = Read(name), expected = Read(expected_name);
    for (const bool part : {false, true}) {   // the whole image decoded, or what the crop needs
      DecodeOptions options;
      options.channels = channels;
      if (part) {
        options.region = [&](int height, int width) {
          EXPECT_EQ(height, h);
          EXPECT_EQ(width, w);
          return region;
        };
      }
      const auto image = DecodeImage(file, options);
      ASSERT_TRUE(image.ok()) << image.status();
      ASSERT_EQ(image->pixels.channels, channels);
      const Box box = part ? image->box : Box{double(region.top), double(region.left), double(region.height), double(region.width)};
      std::vector<uint8_t> out(oh * ow * channels);
      ASSERT_EQ(out.size(), expected.size());
      ResizeBox(image->pixels, box, oh, ow, out.data());
      int most = 0;
      int64_t differ = 0, sum = 0;
      for (size_t i = 0; i < out.size(); ++i) {
        const int difference = std::abs(int(out[i]) - int(uint8_t(expected[i])));
        most = std::max(most, difference);
        differ += difference != 0;
        sum += difference;
      }
      const bool lossy = name.find(".jpg") != std::string::npos || name == "lossy.webp";
      EXPECT_LE(most, lossy ? 3 : 1) << part;
      EXPECT_LE(lossy ? sum * 3 / 10 : differ * 10000, int64_t(out.size())) << part;
    }
  }
  EXPECT_GE(cases, 120);
}

TEST_F(ImageLive, SixteenBitsStaySixteen) {
  SCOPED_TRACE("seed " + seed_);
  std::istringstream list(Read("deep"));
  std::string name, expected_name;
  Region region;
  int channels, oh, ow, cases = 0;
  while (list >> name >> channels >> region.top >> region.left >> region.height >> region.width >> oh >> ow >> expected_name) {
    SCOPED_TRACE(expected_name);
    ++cases;
    const std::string file = Read(name), bytes = Read(expected_name);
    EXPECT_TRUE(IsDeep(file));
    DecodeOptions options;
    options.channels = channels;
    options.region = [&](int, int) { return region; };
    const auto eight = DecodeImage(file, options);
    options.deep = true;
    const auto image = DecodeImage(file, options);
    ASSERT_TRUE(image.ok() && eight.ok()) << image.status() << eight.status();
    EXPECT_TRUE(image->pixels.values_HWC.empty());
    ASSERT_EQ(image->pixels.channels, channels);
    std::vector<uint16_t> out(channels * oh * ow), narrow(out.size()), expected(out.size());
    ASSERT_EQ(bytes.size(), 2 * expected.size());
    std::memcpy(expected.data(), bytes.data(), bytes.size());
    ResizePlanes(image->pixels, image->box, oh, ow, out.data());
    ResizePlanes(eight->pixels, eight->box, oh, ow, narrow.data());
    for (size_t i = 0; i < out.size(); ++i) {
      ASSERT_NEAR(out[i], expected[i], 1) << i;
      ASSERT_NEAR(narrow[i], expected[i], 3 * 257) << i;   // the same picture in 8 bits
    }
  }
  EXPECT_EQ(cases, 12);
  EXPECT_FALSE(IsDeep(Read("rgb.png")));
  EXPECT_FALSE(IsDeep(Read("five.tif")));
  EXPECT_FALSE(IsDeep(Read("rgb.jpg")));
  EXPECT_FALSE(IsDeep(Read("deep3.tif").substr(0, 6)));
}

TEST_F(ImageLive, FastDecodingKeepsForty) {
  SCOPED_TRACE("seed " + seed_);
  std::istringstream list(Read("fast"));
  std::string name, expected_name;
  Region region;
  int oh, ow, cases = 0, planes = 0, scaled = 0;
  while (list >> name >> region.top >> region.left >> region.height >> region.width >> oh >> ow >> expected_name) {
    SCOPED_TRACE(absl::StrCat(expected_name, ": ", region.height, " x ", region.width, " to ", oh, " x ", ow));
    ++cases;
    DecodeOptions options;
    options.region = [&](int, int) { return region; };
    options.out_height = oh;
    options.out_width = ow;
    const auto image = DecodeImage(Read(name), options);
    ASSERT_TRUE(image.ok()) << image.status();
    planes += !image->pixels.chroma.empty();
    scaled += image->box.height < region.height - 1;
    EXPECT_TRUE(image->box.height > region.height - 1 || image->box.height >= 2 * oh);
    std::vector<uint8_t> out(oh * ow * 3);
    ResizeBox(image->pixels, image->box, oh, ow, out.data());
    const std::string expected = Read(expected_name);
    ASSERT_EQ(expected.size(), out.size());
    double squares = 0;
    for (size_t i = 0; i < out.size(); ++i) squares += std::pow(double(out[i]) - uint8_t(expected[i]), 2);
    EXPECT_GE(10 * std::log10(255.0 * 255.0 / (squares / double(out.size()))), 40);
  }
  EXPECT_GT(cases, 40);
  EXPECT_EQ(planes, cases);
  EXPECT_GT(scaled, 5);
}

TEST_F(ImageLive, EveryCutAndDamageIsRefusedOrRead) {
  for (const char* name : {"lossless.webp", "lossy.webp", "tiles.tif", "rgbtiff_lzw.tif", "cmyk.jpg", "rgbp.jpg"}) {
    const std::string file = Read(name);
    ASSERT_GT(file.size(), 100u);
    for (size_t size = 0; size < file.size(); size += 1 + file.size() / 400) {
      const auto image = DecodeImage(std::string_view(file).substr(0, size));
      EXPECT_FALSE(image.ok() && size + 54 < file.size()) << name << " cut to " << size << " of " << file.size();
    }
    for (size_t at = 0; at < file.size(); at += 1 + file.size() / 400) {
      std::string damaged = file;
      damaged[at] = static_cast<char>(damaged[at] ^ 0x5A);
      (void)DecodeImage(damaged);
    }
  }
  EXPECT_THAT(std::string(DecodeImage(Read("float.tif")).status().message()), HasSubstr("TIFF of 32 bits in sample format 3"));
  EXPECT_THAT(std::string(DecodeImage(Read("bits32.tif")).status().message()), HasSubstr("TIFF of 32 bits"));
}

}  // namespace
}  // namespace hierad
