// Rows in the type of their file, and what the step makes of them, against NumPy and torchvision, live.
#include <cmath>
#include <cstring>
#include <fstream>
#include <map>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "base/fs.h"
#include "base/status.h"
#include "worker/data/dataset.h"
#include "worker/data/test_files.h"

namespace hierad {
namespace {

using testing::HasSubstr;

constexpr uint64_t kSeed = 11;
constexpr uint32_t kEpoch = 3;
constexpr int kSamples = 6, kChannels = 3;

std::string Whole(const TestFolder& folder, const std::string& name) {
  const auto file = ReadFile(folder.Path(name), 1 << 24);
  EXPECT_TRUE(file.ok()) << file.status();
  return file.ok() ? *file : "";
}

// What the numbers are made of: the draws of each visit, one line a sample: shift, factor, then 1 for each dropped channel.
void WriteDraws(const TestFolder& folder, const RowRules& rules) {
  std::ofstream out(folder.Path("draws"));
  out.precision(9);
  for (uint64_t id = 0; id < kSamples; ++id) {
    const RowDraws draws = DrawRow(rules, kSeed, kEpoch, id);
    out << draws.shift << " " << draws.factor;
    for (int c = 0; c < kChannels; ++c) out << " " << DropsChannel(rules, kSeed, kEpoch, id, c);
    out << "\n";
  }
}

// Arrays of every type; the model's input in double precision for plain, cropped and padded lengths, with and without draws.
constexpr char kArrays[] = R"(
import sys
import numpy as np
out = sys.argv[1]
seed = int.from_bytes(np.random.bytes(4), 'little')
print(seed)
rng = np.random.default_rng(seed)
draws = [line.split() for line in open(out + '/draws')]

def finish(x, kept, length, pad, drawn):
    x = x[..., :kept]
    if length > kept:
        x = np.concatenate([x, np.repeat(x[..., -1:], length - kept, -1) if pad == 'edge' else np.zeros(x.shape[:-1] + (length - kept,))], -1)
    y = np.zeros_like(x)
    for i, (shift, factor, *drop) in enumerate(draws):
        s = int(shift) if drawn else 0
        y[i, :, max(0, s):length + min(0, s)] = x[i, :, max(0, -s):length - max(0, s)]
        if drawn:
            y[i] *= float(factor)
            y[i, np.array(drop) == '1'] = 0
    return y

for descr in ['|b1', '|u1', '|i1', '<i2', '>i2', '<i4', '<f2', '>f2', '<f4', '>f4', '<f8']:
    for order in 'CF':
        kind = np.dtype(descr).kind
        a = rng.normal(3, 40, (6, 3, 20)) if kind == 'f' else rng.integers(0, 2 if kind == 'b' else 200 if kind == 'u' else 120, (6, 3, 20)) - (60 if kind == 'i' else 0)
        a = np.array(a, dtype=descr, order=order)
        name = out + '/' + descr[1:] + ('b' if descr[0] == '>' else 'l') + order
        np.save(name + '.npy', a)
        np.ascontiguousarray(a).astype(np.dtype(descr).newbyteorder('<')).tofile(name + '.stored')
        cut = np.clip(a.astype(np.float64), -50, 50)
        mean, std = cut.mean((0, 2), keepdims=True), cut.std((0, 2), keepdims=True)
        for kept, length, pad in ((20, 20, 'none'), (15, 15, 'none'), (20, 27, 'zero'), (20, 27, 'edge')):
            for drawn in (0, 1):
                finish((cut - mean) / std, kept, length, pad, drawn).tofile(f'{name}.{length}{pad}{drawn}')
                finish(a.astype(np.float64) / 7, kept, length, pad, drawn).tofile(f'{name}.scaled{length}{pad}{drawn}')
)";

v1::DataSpec Arrays(int length, const char* pad, bool scaled) {
  v1::DataSpec data;
  data.set_source("npy");
  data.set_pad(pad);
  data.set_crop(length < 20 ? "start" : "none");
  data.set_normalize(scaled ? "none" : "channel");
  if (scaled) data.set_scale(7);
  else data.set_clip(50);
  data.set_shift(4);
  data.set_channel_drop(0.3);
  data.add_amplitude(0.5), data.add_amplitude(2);
  return data;
}

TEST(Rows, ArraysEqualNumpyInEveryType) {
  TestFolder folder;
  RowRules rules;
  rules.shift = 4, rules.channel_drop = 0.3, rules.amplitude_least = 0.5, rules.amplitude_most = 2;
  WriteDraws(folder, rules);
  SCOPED_TRACE("seed " + RunPython(folder, kArrays));
  const std::map<std::string, DType> types = {{"b1", DType::kU8}, {"u1", DType::kU8}, {"i1", DType::kI16}, {"i2", DType::kI16}, {"i4", DType::kF32},
                                              {"f2", DType::kF16}, {"f4", DType::kF32}, {"f8", DType::kF32}};
  int cases = 0;
  for (const std::string descr : {"b1l", "u1l", "i1l", "i2l", "i2b", "i4l", "f2l", "f2b", "f4l", "f4b", "f8l"}) {
    for (const char* order : {"C", "F"}) {
      const std::string path = folder.Path(descr + order);
      for (const bool scaled : {false, true}) {
        for (const auto& [length, pad] : std::vector<std::pair<int, const char*>>{{20, "none"}, {15, "none"}, {27, "zero"}, {27, "edge"}}) {
          SCOPED_TRACE(absl::StrCat(path, " to ", length, " pad ", pad, scaled ? " scaled" : " normalised"));
          ChannelStatistics statistics;
          const auto dataset = OpenDataset(Arrays(length, pad, scaled), path + ".npy", InputGeometry(kChannels, {length}), &statistics);
          ASSERT_TRUE(dataset.ok()) << dataset.status();
          const RowFormat& format = (*dataset)->row_format();
          ASSERT_EQ(format.type, types.at(descr.substr(0, 2)));
          for (const bool drawn : {false, true}) {
            const std::string expected = Whole(folder, absl::StrCat(descr, order, ".", scaled ? "scaled" : "", length, pad, drawn ? 1 : 0));
            ASSERT_EQ(expected.size(), sizeof(double) * kSamples * kChannels * length);
            const auto* want = reinterpret_cast<const double*>(expected.data());
            std::vector<float> x(kChannels * length);
            for (uint64_t i = 0; i < kSamples; ++i) {
              ASSERT_TRUE((*dataset)->Read({i, i, kSeed, kEpoch, drawn}, x.data()).ok());
              for (int k = 0; k < kChannels * length; ++k, ++want) {
                const int c = k / length;
                // Rounding of the offset and of three products in fp32; of 64-bit numbers to fp32 before them.
                const double bound = 3e-7 * (std::abs(*want) + 2 * std::abs(double(format.offset[c]) * format.scale[c]) + 1e-3);
                ASSERT_NEAR(x[k], *want, bound) << "sample " << i << " channel " << c << " point " << k % length;
              }
            }
            ++cases;
          }
        }
      }
    }
  }
  EXPECT_EQ(cases, 11 * 2 * 2 * 4 * 2);
}

// What the step is given of 8, 16 and 32 bits are the file's own bits.
TEST(Rows, HoldTheFilesBits) {
  TestFolder folder;
  WriteDraws(folder, {});
  RunPython(folder, kArrays);
  for (const std::string descr : {"u1l", "i2l", "i2b", "f2l", "f2b", "f4l", "f4b"}) {
    for (const char* order : {"C", "F"}) {
      ChannelStatistics none;
      const auto dataset = OpenDataset(Arrays(20, "none", true), folder.Path(descr + order + ".npy"), InputGeometry(kChannels, {20}), &none);
      ASSERT_TRUE(dataset.ok()) << dataset.status();
      const int64_t bytes = (*dataset)->row_format().row_bytes();
      ASSERT_EQ(bytes, kChannels * 20 * (descr[1] - '0'));
      std::string rows(kSamples * bytes, '\0');
      for (uint64_t i = 0; i < kSamples; ++i) ASSERT_TRUE((*dataset)->ReadRow({i, i, kSeed, kEpoch, true}, rows.data() + i * bytes).ok());
      EXPECT_TRUE(rows == Whole(folder, descr + order + ".stored")) << descr << order;
    }
  }
}

// Files of two types in one set: the one that holds both.
TEST(Rows, MixedShardsShareAType) {
  TestFolder folder;
  const auto array = [&](const char* name, const char* descr, std::string_view bytes) {
    folder.Write(name, NpyBytes(absl::StrCat("{'descr': '", descr, "', 'fortran_order': False, 'shape': (1, 1, 2)}"), bytes));
  };
  const auto open = [&] {
    ChannelStatistics none;
    v1::DataSpec data;
    data.set_source("npy");
    auto dataset = OpenDataset(data, folder.Path(""), InputGeometry(1, {2}), &none);
    EXPECT_TRUE(dataset.ok()) << dataset.status();
    return *std::move(dataset);
  };
  array("a.npy", "|u1", "\x01\xFF");
  array("b.npy", "<i2", std::string_view("\xFE\xFF\x00\x01", 4));
  const auto whole = open();
  EXPECT_EQ(whole->row_format().type, DType::kI16);
  float x[2];
  ASSERT_TRUE(whole->Read({0, 0, 0, 0, false}, x).ok());
  EXPECT_THAT(x, testing::ElementsAre(1, 255));
  ASSERT_TRUE(whole->Read({1, 1, 0, 0, false}, x).ok());
  EXPECT_THAT(x, testing::ElementsAre(-2, 256));
  array("c.npy", "<f2", std::string_view("\x00\x3C\x00\xBC", 4));
  const auto mixed = open();
  EXPECT_EQ(mixed->row_format().type, DType::kF32);
  ASSERT_TRUE(mixed->Read({2, 2, 0, 0, false}, x).ok());
  EXPECT_THAT(x, testing::ElementsAre(1, -1));
}

// What only the host can do: rows become fp32.
TEST(Rows, ThatTheHostPreparesAreFp32) {
  TestFolder folder;
  folder.Write("a.npy", NpyBytes("{'descr': '<i2', 'fortran_order': False, 'shape': (1, 1, 4)}", std::string_view("\1\0\3\0\5\0\7\0", 8)));
  const auto rows = [&](v1::DataSpec data, int64_t length) {
    ChannelStatistics none;
    data.set_source("npy");
    const auto dataset = OpenDataset(data, folder.Path("a.npy"), InputGeometry(1, {length}), &none);
    EXPECT_TRUE(dataset.ok()) << dataset.status();
    return (*dataset)->row_format().type;
  };
  v1::DataSpec data;
  EXPECT_EQ(rows(data, 4), DType::kI16);
  data.set_missing("hold");   // whole numbers miss none
  EXPECT_EQ(rows(data, 4), DType::kI16);
  data.set_normalize("window");
  EXPECT_EQ(rows(data, 4), DType::kF32);
  data.clear_normalize();
  data.set_mean_pool(2);
  EXPECT_EQ(rows(data, 2), DType::kF32);
}

// A value that is not finite: found by the step (here: by Read) and named with its place; found before it where it is to be
// left out, wherever the crop lies.
TEST(Rows, NotFiniteInHalfPrecisionIsNamed) {
  TestFolder folder;
  const uint16_t values[] = {0x3C00, 0x3C00, 0x3C00, 0x3C00, 0x3C00, 0x3C00, 0xFC00, 0x3C00};   // ones, and -inf
  folder.Write("a.npy", NpyBytes("{'descr': '<f2', 'fortran_order': False, 'shape': (2, 1, 4)}", {reinterpret_cast<const char*>(values), sizeof values}));
  v1::DataSpec data;
  data.set_source("npy");
  data.set_crop("start");
  data.set_clip(5);   // does not hide it
  ChannelStatistics none;
  auto dataset = OpenDataset(data, folder.Path("a.npy"), InputGeometry(1, {3}), &none);
  ASSERT_TRUE(dataset.ok()) << dataset.status();
  float x[3];
  EXPECT_TRUE((*dataset)->Read({0, 0, 0, 0, true}, x).ok());
  EXPECT_TRUE((*dataset)->ReadRow({1, 1, 0, 0, true}, x).ok());
  const absl::Status status = (*dataset)->Read({1, 1, 0, 0, true}, x);
  EXPECT_EQ(ReasonOf(status), v1::REASON_DATA_ERROR);
  EXPECT_THAT(std::string(status.message()), HasSubstr("a.npy, sample 1: value -inf at channel 0, point 2"));
  data.set_on_error("skip");
  dataset = OpenDataset(data, folder.Path("a.npy"), InputGeometry(1, {2}), &none);
  ASSERT_TRUE(dataset.ok()) << dataset.status();
  EXPECT_TRUE((*dataset)->ReadRow({0, 0, 0, 0, true}, x).ok());
  EXPECT_EQ(ReasonOf((*dataset)->ReadRow({1, 1, 0, 0, true}, x)), v1::REASON_DATA_ERROR);
}

TEST(Rows, PreparedOnesAreTheSameNumbers) {
  TestFolder folder;
  WriteDraws(folder, {});
  RunPython(folder, kArrays);
  ChannelStatistics statistics;
  auto opened = OpenDataset(Arrays(27, "zero", false), folder.Path("i2lC.npy"), InputGeometry(kChannels, {27}), &statistics);
  ASSERT_TRUE(opened.ok()) << opened.status();
  const std::shared_ptr<const Dataset> stored = *std::move(opened);
  const auto prepared = PreparedRows(stored);
  EXPECT_EQ(prepared->row_format().type, DType::kF32);
  std::vector<float> a(kChannels * 27), b(kChannels * 27);
  for (uint64_t i = 0; i < kSamples; ++i) {
    for (const bool augment : {false, true}) {
      ASSERT_TRUE(stored->Read({i, i, kSeed, kEpoch, augment}, a.data()).ok());
      ASSERT_TRUE(prepared->Read({i, i, kSeed, kEpoch, augment}, b.data()).ok());
      EXPECT_EQ(a, b);
    }
  }
}

TEST(Rows, ImagesEqualTorchvision) {
  TestFolder folder;
  const std::string seed = RunPython(folder, R"(
import sys
import numpy as np
import torchvision.transforms.functional as F
from PIL import Image
out = sys.argv[1]
seed = int.from_bytes(np.random.bytes(4), 'little')
print(seed)
rng = np.random.default_rng(seed)
for i in range(12):
    image = Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8))
    image.save(f'{out}/{i:02}.png')
    for flip in (0, 1):
        F.normalize(F.to_tensor(F.hflip(image) if flip else image), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)).numpy().tofile(f'{out}/{i}.{flip}')
)");
  SCOPED_TRACE("seed " + seed);
  v1::DataSpec data;
  data.set_source("images");
  data.add_crop_scale(1), data.add_crop_scale(1);
  data.add_crop_ratio(1), data.add_crop_ratio(1);
  data.set_flip(0.5);
  const auto dataset = OpenDataset(data, folder.Path(""), InputGeometry(3, {16, 16}), nullptr);
  ASSERT_TRUE(dataset.ok()) << dataset.status();
  const RowFormat& format = (*dataset)->row_format();
  EXPECT_EQ(format.type, DType::kU8);
  int flipped = 0;
  for (uint64_t i = 0; i < 12; ++i) {
    for (uint64_t id = i; id < 48; id += 12) {
      const bool flip = DrawRow(format.rules, kSeed, kEpoch, id).flip;
      flipped += flip;
      const std::string expected = Whole(folder, absl::StrCat(i, ".", flip ? 1 : 0));
      float x[3 * 256], want[3 * 256];
      ASSERT_EQ(expected.size(), sizeof want);
      std::memcpy(want, expected.data(), sizeof want);
      ASSERT_TRUE((*dataset)->Read({i, id, kSeed, kEpoch, true}, x).ok());
      for (int k = 0; k < 3 * 256; ++k) ASSERT_NEAR(x[k], want[k], 1e-6) << "image " << i << " value " << k;
    }
  }
  EXPECT_TRUE(flipped > 4 && flipped < 44) << flipped;
}

// 16 bits stay 16 bits; what has 8 in the same folder is widened.
TEST(Rows, ImagesOf16BitsKeepThem) {
  TestFolder folder;
  const std::string seed = RunPython(folder, R"(
import sys
import numpy as np
import tifffile
from PIL import Image
out = sys.argv[1]
seed = int.from_bytes(np.random.bytes(4), 'little')
print(seed)
rng = np.random.default_rng(seed)
mean, std = np.array([0.485, 0.456, 0.406])[:, None, None], np.array([0.229, 0.224, 0.225])[:, None, None]
def expect(i, x):
    x = (np.broadcast_to(x, (3, 16, 16)) - mean) / std
    for flip in (0, 1):
        (x[..., ::-1] if flip else x).astype(np.float64).tofile(f'{out}/{i}.{flip}')
deep = rng.integers(0, 65536, (16, 16, 3), dtype=np.uint16)
tifffile.imwrite(out + '/0.tif', deep, photometric='rgb')
expect(0, deep.transpose(2, 0, 1) / 65535)
gray = rng.integers(0, 65536, (16, 16), dtype=np.uint16)
Image.fromarray(gray).save(out + '/1.png')
expect(1, gray / 65535)
flat = rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
Image.fromarray(flat).save(out + '/2.png')
expect(2, flat.transpose(2, 0, 1) / 255)
)");
  SCOPED_TRACE("seed " + seed);
  v1::DataSpec data;
  data.set_source("images");
  data.add_crop_scale(1), data.add_crop_scale(1);
  data.add_crop_ratio(1), data.add_crop_ratio(1);
  data.set_flip(0.5);
  const auto dataset = OpenDataset(data, folder.Path(""), InputGeometry(3, {16, 16}), nullptr);
  ASSERT_TRUE(dataset.ok()) << dataset.status();
  const RowFormat& format = (*dataset)->row_format();
  EXPECT_EQ(format.type, DType::kI16);
  for (uint64_t i = 0; i < 3; ++i) {
    for (uint64_t id = i; id < 12; id += 3) {
      const std::string expected = Whole(folder, absl::StrCat(i, ".", DrawRow(format.rules, kSeed, kEpoch, id).flip ? 1 : 0));
      float x[3 * 256];
      ASSERT_EQ(expected.size(), 3 * 256 * sizeof(double));
      const auto* want = reinterpret_cast<const double*>(expected.data());
      ASSERT_TRUE((*dataset)->Read({i, id, kSeed, kEpoch, true}, x).ok());
      for (int k = 0; k < 3 * 256; ++k) ASSERT_NEAR(x[k], want[k], 1e-6) << "image " << i << " value " << k;   // a step of 16 bits is 6e-5
    }
  }
}

}  // namespace
}  // namespace hierad
