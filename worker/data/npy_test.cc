#include <sys/resource.h>

#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/data/npy_file.h"
#include "worker/data/signal_source.h"
#include "worker/data/test_files.h"

namespace hierad {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

template <typename T>
std::string Bytes(std::vector<T> values) {
  return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

const std::string kSmall = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }";
const std::string kSix = Bytes<float>({1, 2, 3, 4, 5, 6});

std::vector<float> Row(const NpyFile& file, int64_t index) {
  std::vector<float> row(file.header().elements / file.header().shape[0]);
  const absl::Status status = file.ReadRow(index, row.data());
  EXPECT_TRUE(status.ok()) << status;
  return row;
}

TEST(Npy, ReadsEveryHeaderVersionAndPadding) {
  TestFolder folder;
  const std::string long_gap(2000, ' ');
  for (const std::string& bytes : {NpyBytes(kSmall, kSix, 1, 16), NpyBytes(kSmall, kSix, 1, 64), NpyBytes(kSmall, kSix, 1, 1),
                                   NpyBytes(kSmall + long_gap, kSix, 2), NpyBytes(kSmall + long_gap, kSix, 3),
                                   NpyBytes("{'shape':(2,3),\"fortran_order\":False,'descr':'<f4'}", kSix),
                                   NpyBytes("{'shape': (2L, 3L), 'descr': '<f4', 'fortran_order': False}", kSix)}) {
    const auto file = NpyFile::Open(folder.Write("a.npy", bytes));
    ASSERT_TRUE(file.ok()) << file.status();
    EXPECT_THAT(Row(*file, 0), ElementsAre(1, 2, 3));
    EXPECT_THAT(Row(*file, 1), ElementsAre(4, 5, 6));
  }
}

std::string Refusal(const TestFolder& folder, const std::string& bytes) {
  const auto file = NpyFile::Open(folder.Write("b.npy", bytes));
  EXPECT_FALSE(file.ok());
  if (file.ok()) return "";
  EXPECT_EQ(ReasonOf(file.status()), v1::REASON_DATA_ERROR);
  EXPECT_THAT(std::string(file.status().message()), HasSubstr("b.npy"));
  return std::string(file.status().message());
}

TEST(Npy, RefusesOtherTypesNamingTheTypeAndTheAcceptedOnes) {
  TestFolder folder;
  for (const std::string descr : {"|O", "<c8", "<U3", "|S4", "<M8[ns]", "|V8", "<u2", "<i3", "|f4"}) {
    const std::string message = Refusal(folder, NpyBytes("{'descr': '" + descr + "', 'fortran_order': False, 'shape': (1,)}", "0123456789abcdef"));
    EXPECT_THAT(message, HasSubstr("'" + descr + "'"));
    EXPECT_THAT(message, HasSubstr("accepted: |b1"));
  }
  EXPECT_THAT(Refusal(folder, NpyBytes("{'descr': [('shape', '<f4'), ('y', '<i2')], 'fortran_order': False, 'shape': (1,)}", "01234567")),
              testing::AllOf(HasSubstr("structured type [('shape', '<f4')"), HasSubstr("accepted: |b1")));
}

TEST(Npy, RefusesDamage) {
  TestFolder folder;
  const std::string good = NpyBytes(kSmall, kSix);
  for (size_t size = 0; size < good.size(); ++size) {
    EXPECT_NE(Refusal(folder, good.substr(0, size)), "") << size;
  }
  EXPECT_THAT(Refusal(folder, good.substr(0, good.size() - 1)), HasSubstr("needs a file of 152 bytes, it has 151"));
  const auto with_shape = [&](const std::string& shape) {
    return NpyBytes("{'descr': '<f4', 'fortran_order': False, 'shape': " + shape + "}", kSix);
  };
  EXPECT_THAT(Refusal(folder, with_shape("(1099511627776, 1099511627776)")), HasSubstr("more than 2^63 bytes"));
  EXPECT_THAT(Refusal(folder, with_shape("(2305843009213693952,)")), HasSubstr("more than 2^63 bytes"));
  EXPECT_THAT(Refusal(folder, with_shape("(99999999999999999999,)")), HasSubstr("beyond 64 bits"));
  EXPECT_THAT(Refusal(folder, with_shape("(-1,)")), HasSubstr("0 or more"));
  EXPECT_THAT(Refusal(folder, with_shape("__import__('os')")), HasSubstr("'(' expected"));
  EXPECT_THAT(Refusal(folder, NpyBytes("{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (1,)}", kSix)), HasSubstr("doubled"));
  EXPECT_THAT(Refusal(folder, NpyBytes("{'descr': '<f4', 'shape': (1,)}", kSix)), HasSubstr("no 'fortran_order'"));
  EXPECT_THAT(Refusal(folder, "PK\x03\x04 a zip file, really"), HasSubstr("not an npy file"));
}

// Every supported type, byte order and memory order as NumPy itself writes them, against NumPy's own conversion.
TEST(Npy, EqualsNumpyBitForBit) {
  TestFolder folder;
  RunPython(folder, R"(
import sys
import numpy as np
out = sys.argv[1]
rng = np.random.default_rng(0)
for descr in ['|b1', '|u1', '|i1', '<i2', '>i2', '<i4', '>i4', '<f2', '>f2', '<f4', '>f4', '<f8', '>f8']:
    for order in 'CF':
        dtype = np.dtype(descr)
        bits = rng.integers(0, 256, (3, 4, 2, 5, dtype.itemsize), dtype=np.uint8)
        if descr == '|b1':
            bits %= 2
        a = bits.view(dtype)[..., 0]
        if dtype.kind == 'f':
            a = np.where(np.isnan(a), dtype.type(1.5), a)
            a[0, 0, 0] = np.array([0, -0.0, 6e-8, np.inf, -6.1e-5])
        a = np.array(a, dtype=descr, order=order)
        name = f'{out}/{descr[1:]}{"b" if descr[0] == ">" else "l"}{order}'
        np.save(name + '.npy', a)
        with np.errstate(all='ignore'):
            np.ascontiguousarray(a.astype(np.float32)).tofile(name + '.expected')
)");
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder.Path(""))) {
    if (entry.path().extension() != ".npy") continue;
    ++files;
    const auto file = NpyFile::Open(entry.path());
    ASSERT_TRUE(file.ok()) << file.status();
    ASSERT_THAT(file->header().shape, ElementsAre(3, 4, 2, 5));
    std::vector<float> got;
    for (int64_t i = 0; i < 3; ++i)
      for (float value : Row(*file, i)) got.push_back(value);
    const auto expected = ReadFile(std::filesystem::path(entry.path()).replace_extension(".expected"), 1 << 20);
    ASSERT_TRUE(expected.ok());
    EXPECT_TRUE(*expected == Bytes(got)) << entry.path();
  }
  EXPECT_EQ(files, 26);
}

TEST(NpySource, ShapesAndLabels) {
  TestFolder folder;
  const auto array = [&](const std::string& name, const std::string& shape) {
    return folder.Write(name, NpyBytes("{'descr': '|u1', 'fortran_order': False, 'shape': " + shape + "}", std::string(64, '\1')));
  };
  const auto bare = OpenNpy(array("a.npy", "(4, 16)"), 1, 1);
  ASSERT_TRUE(bare.ok()) << bare.status();
  EXPECT_EQ((*bare)->channels(), 1);
  EXPECT_THAT((*bare)->axes(), ElementsAre(16));
  EXPECT_EQ((*bare)->num_classes(), 0);
  EXPECT_EQ((*bare)->label(0), -1);
  folder.Write("a_labels.npy", NpyBytes("{'descr': '>i8', 'fortran_order': False, 'shape': (4,)}", std::string("\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\2\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\0\0\0\0\0\0\0\1", 32)));
  const auto labelled = OpenNpy(array("a.npy", "(4, 2, 8)"), 1, 2);
  ASSERT_TRUE(labelled.ok()) << labelled.status();
  EXPECT_EQ((*labelled)->channels(), 2);
  EXPECT_EQ((*labelled)->num_classes(), 3);
  EXPECT_EQ((*labelled)->label(1), 2);
  EXPECT_EQ((*labelled)->label(2), -1);
  EXPECT_EQ((*labelled)->label(3), 1);

  const auto refusal = [&](const std::string& shape, int dims, int chans) {
    const auto source = OpenNpy(array("c.npy", shape), dims, chans);
    EXPECT_FALSE(source.ok()) << shape;
    return source.ok() ? "" : std::string(source.status().message());
  };
  EXPECT_THAT(refusal("()", 1, 1), HasSubstr("shape ()"));
  EXPECT_THAT(refusal("(64,)", 1, 1), HasSubstr("or without channels"));
  EXPECT_THAT(refusal("(4, 16)", 1, 8), HasSubstr("shape (4, 16)"));
  EXPECT_THAT(refusal("(0, 8, 224)", 1, 8), HasSubstr("0 samples"));
  EXPECT_THAT(refusal("(8, 0, 224)", 1, 8), HasSubstr("samples of 0 values"));
  folder.Write("c_labels.npy", NpyBytes("{'descr': '|u1', 'fortran_order': False, 'shape': (5,)}", "12345"));
  EXPECT_THAT(refusal("(4, 2, 8)", 1, 2), HasSubstr("labels of shape (5)"));
  folder.Write("c_labels.npy", NpyBytes("{'descr': '<f4', 'fortran_order': False, 'shape': (4,)}", std::string(16, '\0')));
  EXPECT_THAT(refusal("(4, 2, 8)", 1, 2), HasSubstr("whole numbers"));
}

// 5 GiB, more than 2^31 elements: the last sample is exact and no memory grows with the file.
TEST(NpySource, LargeSparseFileWithLittleMemory) {
  if (kSanitized) GTEST_SKIP() << "under a sanitizer";
  TestFolder folder;
  const int64_t rows = 5 * 1024, row_bytes = 1 << 20;
  const std::string path = folder.Write("big.npy", NpyBytes(absl::StrCat("{'descr': '|i1', 'fortran_order': False, 'shape': (", rows, ", 4, ", row_bytes / 4, ")}"), ""));
  std::string last(row_bytes, '\0');
  for (int64_t i = 0; i < row_bytes; ++i) last[i] = static_cast<char>(i * 7 % 251 - 120);
  {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<int64_t>(std::filesystem::file_size(path)) + (rows - 1) * row_bytes);
    file << last;
  }
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_AS, &before), 0);
  const rlimit low{1 << 30, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_AS, &low), 0);
  const auto source = OpenNpy(path, 1, 4);
  std::vector<float> row(row_bytes);
  const absl::Status read = source.ok() ? (*source)->Read(rows - 1, row.data()) : source.status();
  ASSERT_EQ(setrlimit(RLIMIT_AS, &before), 0);
  ASSERT_TRUE(read.ok()) << read;
  for (int64_t i = 0; i < row_bytes; ++i) ASSERT_EQ(row[i], static_cast<float>(static_cast<int8_t>(last[i]))) << i;
}

TEST(NpySource, AFileCutWhileInUseIsAnError) {
  TestFolder folder;
  const std::string path = folder.Write("a.npy", NpyBytes("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 1, 3)}", kSix));
  const auto source = OpenNpy(path, 1, 1);
  ASSERT_TRUE(source.ok()) << source.status();
  std::filesystem::resize_file(path, std::filesystem::file_size(path) - 4);
  float row[3];
  EXPECT_TRUE((*source)->Read(0, row).ok());
  const absl::Status status = (*source)->Read(1, row);
  EXPECT_EQ(ReasonOf(status), v1::REASON_DATA_ERROR);
  EXPECT_THAT(std::string(status.message()), HasSubstr("cut while in use"));
}

// Fortran order is mapped: without a look at the size, a row past the end would be a SIGBUS.
TEST(NpySource, AMappedFileCutWhileInUseIsAnError) {
  TestFolder folder;
  const std::string path = folder.Write("a.npy", NpyBytes("{'descr': '<f4', 'fortran_order': True, 'shape': (4, 2, 4096)}", std::string(4 * 2 * 4096 * 4, 'x')));
  const auto source = OpenNpy(path, 1, 2);
  ASSERT_TRUE(source.ok()) << source.status();
  std::vector<float> row(2 * 4096);
  EXPECT_TRUE((*source)->Read(3, row.data()).ok());
  std::filesystem::resize_file(path, 4096);
  const absl::Status status = (*source)->Read(3, row.data());
  EXPECT_EQ(ReasonOf(status), v1::REASON_DATA_ERROR);
  EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("a.npy"), HasSubstr("cut while in use")));
}

TEST(NpySource, PathsAreBytes) {
  TestFolder folder;
  for (const std::string name : {"Çelik/été 1.npy", "line\nbreak.npy", "byte\xFF.npy"}) {
    const std::string path = folder.Write(name, NpyBytes("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 1, 3)}", kSix));
    const auto source = OpenNpy(path, 1, 1);
    ASSERT_TRUE(source.ok()) << source.status();
    for (unsigned char c : (*source)->SampleName(1)) EXPECT_TRUE(c >= 0x20 && c != 0xFF) << (*source)->SampleName(1);
  }
}

std::string Array(const std::string& shape, const std::string& bytes, const std::string& descr = "|u1") {
  return NpyBytes("{'descr': '" + descr + "', 'fortran_order': False, 'shape': " + shape + "}", bytes);
}

TEST(NpyFolder, ShardsAreOneSetInTheOrderOfTheirNames) {
  TestFolder folder;
  folder.Write("b.npy", Array("(1, 1, 2)", "\x05\x06"));
  folder.Write("b_labels.npy", Array("(1,)", "\x02"));
  folder.Write("a.npy", Array("(2, 1, 2)", "\x01\x02\x03\x04", "|i1"));
  folder.Write("a_labels.npy", Array("(2,)", std::string("\0\1", 2)));
  folder.Write("empty.npy", Array("(0, 1, 2)", ""));
  folder.Write("notes.txt", "x");
  folder.Write("classes.txt", "rest\nleft\n\xC3\xA9t\xC3\xA9\nunseen\n");
  const auto source = OpenNpy(folder.Path(""), 1, 1);
  ASSERT_TRUE(source.ok()) << source.status();
  ASSERT_EQ((*source)->count(), 3);
  EXPECT_EQ((*source)->num_classes(), 4);
  EXPECT_EQ((*source)->class_name(2), "\xC3\xA9t\xC3\xA9");
  for (int i = 0; i < 3; ++i) {
    float row[2];
    ASSERT_TRUE((*source)->Read(i, row).ok());
    EXPECT_THAT(row, ElementsAre(2 * i + 1, 2 * i + 2));
    EXPECT_EQ((*source)->label(i), i);
  }
  EXPECT_THAT((*source)->SampleName(2), testing::AllOf(HasSubstr("b.npy, sample 0"), HasSubstr("(2 of all)")));
}

TEST(NpyFolder, RefusesMixedShapesAndLabelsOfSome) {
  TestFolder folder;
  folder.Write("a.npy", Array("(2, 1, 2)", "\x01\x02\x03\x04"));
  folder.Write("b.npy", Array("(1, 1, 3)", "\x05\x06\x07"));
  EXPECT_THAT(std::string(OpenNpy(folder.Path(""), 1, 1).status().message()), testing::AllOf(HasSubstr("b.npy: array of shape (1, 1, 3)"), HasSubstr("a.npy is of shape (2, 1, 2)")));
  folder.Write("b.npy", Array("(1, 1, 2)", "\x05\x06"));
  folder.Write("b_labels.npy", Array("(1,)", "\x02"));
  EXPECT_THAT(std::string(OpenNpy(folder.Path(""), 1, 1).status().message()), testing::AllOf(HasSubstr("b.npy has labels"), HasSubstr("a.npy has none")));
  TestFolder none;
  none.Write("x.txt", "");
  EXPECT_THAT(std::string(OpenNpy(none.Path(""), 1, 1).status().message()), HasSubstr("0 arrays (.npy, .npz)"));
}

// More files than descriptors may be open.
TEST(NpyFolder, ManyShards) {
  TestFolder folder;
  for (int i = 0; i < 1100; ++i) folder.Write(absl::StrCat("s", 10000 + i, ".npy"), Array("(1, 1, 2)", std::string({char(i % 100), char(i / 100)})));
  const auto source = OpenNpy(folder.Path(""), 1, 1);
  ASSERT_TRUE(source.ok()) << source.status();
  for (int i : {0, 777, 1099}) {
    float row[2];
    ASSERT_TRUE((*source)->Read(i, row).ok());
    EXPECT_THAT(row, ElementsAre(i % 100, i / 100));
  }
}

// Archives as numpy.savez and numpy.savez_compressed write them.
TEST(Npz, EqualsNumpyAndDamageIsNeverACrash) {
  TestFolder folder;
  RunPython(folder, R"(
import sys
import numpy as np
out = sys.argv[1]
x = np.random.default_rng(1).integers(-9, 9, (5, 2, 7)).astype('<i2')
x.astype(np.float32).tofile(out + '/expected')
y = np.array([0, 1, 2, -1, 1])
np.savez(out + '/stored.npz', x=x, y=y)
np.savez_compressed(out + '/packed.npz', x=x, y=y)
np.savez_compressed(out + '/fortran.npz', np.asfortranarray(x))
np.savez(out + '/fortran_stored.npz', labels=y, anything=np.asfortranarray(x))
np.savez(out + '/two.npz', a=x, b=x)
)");
  const auto expected = ReadFile(folder.Path("expected"), 1 << 20);
  ASSERT_TRUE(expected.ok());
  for (const std::string name : {"stored", "packed", "fortran", "fortran_stored"}) {
    const auto source = OpenNpy(folder.Path(name + ".npz"), 1, 2);
    ASSERT_TRUE(source.ok()) << name << ": " << source.status();
    ASSERT_EQ((*source)->count(), 5);
    std::vector<float> got(70);
    for (int i = 0; i < 5; ++i) ASSERT_TRUE((*source)->Read(i, got.data() + 14 * i).ok());
    EXPECT_TRUE(Bytes(got) == *expected) << name;
    EXPECT_EQ((*source)->label(2), name == "fortran" ? -1 : 2);
  }
  EXPECT_THAT(std::string(OpenNpy(folder.Path("two.npz"), 1, 2).status().message()), HasSubstr("2 arrays (a, b)"));
  for (const std::string name : {"stored", "packed"}) {
    const std::string whole = *ReadFile(folder.Path(name + ".npz"), 1 << 20);
    for (size_t size = 0; size < whole.size(); size += 1 + size % 5) {
      const auto cut = OpenNpy(folder.Write("cut.npz", whole.substr(0, size)), 1, 2);
      ASSERT_FALSE(cut.ok()) << name << " cut to " << size;
      EXPECT_THAT(std::string(cut.status().message()), HasSubstr("cut.npz"));
    }
    for (size_t at = 0; at < whole.size(); at += 3) {   // damage to the samples of a stored array cannot be seen
      std::string damaged = whole;
      damaged[at] = static_cast<char>(damaged[at] ^ 0x55);
      const auto source = OpenNpy(folder.Write("damaged.npz", damaged), 1, 2);
      std::vector<float> row(source.ok() ? (*source)->channels() * (*source)->axes()[0] : 0);
      if (source.ok()) (void)(*source)->Read(0, row.data());
    }
  }
}

// A member that claims to be larger than deflate can make it, or than is held in memory, is refused before it is unpacked.
TEST(Npz, RefusesBombs) {
  TestFolder folder;
  RunPython(folder, R"(
import sys
import numpy as np
np.savez_compressed(sys.argv[1] + '/a.npz', x=np.zeros((40, 1, 1000), 'f4'))
data = bytearray(open(sys.argv[1] + '/a.npz', 'rb').read())
at = data.rindex(b'PK\x01\x02')
for name, size in (('large', 0xF0000000), ('lying', 1 << 30)):
    data[at + 24:at + 28] = size.to_bytes(4, 'little')
    open(sys.argv[1] + f'/{name}.npz', 'wb').write(data)
)");
  EXPECT_TRUE(OpenNpy(folder.Path("a.npz"), 1, 1).ok());
  EXPECT_THAT(std::string(OpenNpy(folder.Path("large.npz"), 1, 1).status().message()), HasSubstr("unpacks to 4026531840 bytes; at most"));
  EXPECT_THAT(std::string(OpenNpy(folder.Path("lying.npz"), 1, 1).status().message()), HasSubstr("which deflate cannot"));
}

// Four entries, one piece of deflated bytes: each passes for itself, together they are more than the file.
TEST(Npz, RefusesMembersThatOverlap) {
  TestFolder folder;
  RunPython(folder, R"(
import sys
import numpy as np
np.savez_compressed(sys.argv[1] + '/a.npz', x=np.random.default_rng(0).integers(0, 256, (40, 1, 1000), 'u1'))
data = open(sys.argv[1] + '/a.npz', 'rb').read()
at, end = data.rindex(b'PK\x01\x02'), data.rindex(b'PK\x05\x06')
entry, tail = data[at:end], bytearray(data[end:])
tail[8:12] = (4).to_bytes(2, 'little') * 2
tail[12:16] = (4 * len(entry)).to_bytes(4, 'little')
names = [entry.replace(b'x.npy', name) for name in (b'x.npy', b'a.npy', b'b.npy', b'c.npy')]
open(sys.argv[1] + '/shared.npz', 'wb').write(data[:at] + b''.join(names) + tail)
)");
  EXPECT_TRUE(OpenNpy(folder.Path("a.npz"), 1, 1).ok());
  const auto source = OpenNpy(folder.Path("shared.npz"), 1, 1);
  EXPECT_THAT(std::string(source.status().message()), AllOf(HasSubstr("shared.npz"), HasSubstr("they overlap")));
}

}  // namespace
}  // namespace hierad
