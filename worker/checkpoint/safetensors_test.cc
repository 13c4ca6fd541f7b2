#include "worker/checkpoint/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>

#include "base/fs.h"
#include "base/sha256.h"
#include "base/status.h"

namespace hierad {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class Safetensors : public ::testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/safetensors-test-XXXXXX";
    folder_ = mkdtemp(name);
  }
  void TearDown() override { EXPECT_TRUE(RemoveTree(folder_).ok()); }

  std::string Path(const std::string& name) const { return JoinPath(folder_, name); }

  void Put(const std::string& name, const std::string& data) { std::ofstream(Path(name), std::ios::binary) << data; }

  // A file of this header and these bytes of data.
  std::string Made(const std::string& header, const std::string& data) {
    uint64_t length = header.size();
    std::string file(reinterpret_cast<const char*>(&length), 8);
    file += header + data;
    Put("made", file);
    return Path("made");
  }
  std::string Refusal(const std::string& header, const std::string& data) {
    const auto file = ReadSafetensors(Made(header, data));
    EXPECT_TRUE(absl::IsDataLoss(file.status())) << file.status();
    EXPECT_THAT(std::string(file.status().message()), HasSubstr("made"));
    return std::string(file.status().message());
  }

  std::string folder_;
};

TEST_F(Safetensors, ReadsBackWhatItWrites) {
  const std::vector<float> a = {1.5f, -0.0f, std::numeric_limits<float>::denorm_min(), 3e38f, std::nanf(""), 0.1f};
  const float scalar = 7;
  const auto hash = WriteSafetensors(Path("x"), {{"a \"b\"\n", {2, 3}, a.data()}, {"scalar", {}, &scalar}, {"empty", {0, 4}, nullptr}},
                                     {{"format", "pt"}});
  ASSERT_TRUE(hash.ok()) << hash.status();
  EXPECT_EQ(*hash, *Sha256OfFile(Path("x")));
  const auto file = ReadSafetensors(Path("x"));
  ASSERT_TRUE(file.ok()) << file.status();
  ASSERT_EQ(file->tensors.size(), 3u);
  const Tensor& read = file->tensors.at("a \"b\"\n");
  EXPECT_THAT(read.shape, ElementsAre(2, 3));
  EXPECT_EQ(std::memcmp(read.data.data(), a.data(), sizeof(float) * a.size()), 0);
  EXPECT_THAT(file->tensors.at("scalar").data, ElementsAre(7));
  EXPECT_TRUE(file->tensors.at("empty").data.empty());
  EXPECT_EQ(file->metadata.at("format"), "pt");
}

TEST_F(Safetensors, AcceptsLegalRarities) {
  EXPECT_TRUE(ReadSafetensors(Made("{}", "")).ok());
  EXPECT_TRUE(ReadSafetensors(Made("{\"__metadata__\":{}}", "")).ok());
  EXPECT_TRUE(ReadSafetensors(Made("{\"a\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]}}     ", "")).ok());
  // Keys in any order, data in another order than the header, an empty tensor between two.
  const auto file = ReadSafetensors(Made(
      "{\"b\":{\"data_offsets\":[4,8],\"shape\":[1],\"dtype\":\"F32\"},\"e\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[4,4]},"
      "\"a\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]}}",
      std::string("\x00\x00\x80\x3f\x00\x00\x00\x40", 8)));
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_THAT(file->tensors.at("a").data, ElementsAre(1));
  EXPECT_THAT(file->tensors.at("b").data, ElementsAre(2));
}

TEST_F(Safetensors, ConvertsOtherFloats) {
  const auto half = ReadSafetensors(Made("{\"a\":{\"dtype\":\"F16\",\"shape\":[5],\"data_offsets\":[0,10]}}",
                                         std::string("\x00\x3c\x01\x00\xff\x7b\x00\xfc\x00\x80", 10)));
  ASSERT_TRUE(half.ok()) << half.status();
  EXPECT_THAT(half->tensors.at("a").data,
              ElementsAre(1.0f, std::ldexp(1.0f, -24), 65504.0f, -std::numeric_limits<float>::infinity(), -0.0f));
  const auto brain = ReadSafetensors(Made("{\"a\":{\"dtype\":\"BF16\",\"shape\":[1],\"data_offsets\":[0,2]}}", std::string("\x49\x40", 2)));
  ASSERT_TRUE(brain.ok());
  EXPECT_THAT(brain->tensors.at("a").data, ElementsAre(3.140625f));
}

TEST_F(Safetensors, RefusesEachBrokenRule) {
  const auto one = [](const std::string& shape, int begin, int end) {
    return "{\"dtype\":\"F32\",\"shape\":" + shape + ",\"data_offsets\":[" + std::to_string(begin) + "," + std::to_string(end) + "]}";
  };
  const std::string four(4, 0), eight(8, 0);
  EXPECT_THAT(Refusal("{\"a\":" + one("[1]", 0, 4) + "}", eight), HasSubstr("take 4 bytes, the file holds 8"));
  EXPECT_THAT(Refusal("{\"a\":" + one("[2]", 0, 8) + "}", four), HasSubstr("cut short"));
  EXPECT_THAT(Refusal("{\"a\":" + one("[1]", 0, 4) + ",\"a\":" + one("[1]", 4, 8) + "}", eight), HasSubstr("\"a\" stands twice"));
  EXPECT_THAT(Refusal("{\"a\":" + one("[1000, 1000]", 0, 4) + "}", four), AllOf(HasSubstr("\"a\""), HasSubstr("needs 4000000 bytes")));
  EXPECT_THAT(Refusal("{\"a\":" + one("[1]", 0, 4) + ",\"b\":" + one("[1]", 0, 4) + "}", four), HasSubstr("overlap"));
  EXPECT_THAT(Refusal("{\"a\":" + one("[1]", 4, 8) + "}", eight), HasSubstr("hole"));
  EXPECT_THAT(Refusal("{\"a\":" + one("[1]", 8, 4) + "}", eight), HasSubstr("after its end"));
  EXPECT_THAT(Refusal("{\"a\":" + one("[4294967296, 4294967296]", 0, 4) + "}", four), HasSubstr("64 bits"));
  EXPECT_THAT(Refusal("{\"a\":" + one("[-1]", 0, 4) + "}", four), HasSubstr("no size"));
  EXPECT_THAT(Refusal("{\"a\":" + one("[1.5]", 0, 4) + "}", four), HasSubstr("no size"));
  EXPECT_THAT(Refusal("{\"a\":{\"dtype\":\"I64\",\"shape\":[1],\"data_offsets\":[0,8]}}", eight), HasSubstr("F32, F16, BF16 and F64"));
  EXPECT_THAT(Refusal("{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", four), HasSubstr("data_offsets\" is missing"));
  EXPECT_THAT(Refusal("{\"a\":3}", ""), HasSubstr("not an object"));
  EXPECT_THAT(Refusal("{\"__metadata__\":{\"x\":1}}", ""), HasSubstr("not a string"));
  EXPECT_THAT(Refusal("{\"a\":", ""), HasSubstr("not JSON"));
  EXPECT_THAT(Refusal(" {}", ""), HasSubstr("begin with '{'"));
  EXPECT_THAT(Refusal("", ""), HasSubstr("begin with '{'"));
  EXPECT_THAT(Refusal("[]", ""), HasSubstr("begin with '{'"));
}

TEST_F(Safetensors, RefusesImpossibleHeaders) {
  for (const uint64_t length : {uint64_t{1} << 63, uint64_t{100'000'000'000}, uint64_t{9}, ~uint64_t{0}}) {
    std::string file(reinterpret_cast<const char*>(&length), 8);
    ASSERT_TRUE(WriteFileAtomic(Path("h"), file + "{}").ok());
    EXPECT_TRUE(absl::IsDataLoss(ReadSafetensors(Path("h")).status())) << length;
  }
  ASSERT_TRUE(WriteFileAtomic(Path("h"), "1234567").ok());
  EXPECT_TRUE(absl::IsDataLoss(ReadSafetensors(Path("h")).status()));
  EXPECT_TRUE(absl::IsNotFound(ReadSafetensors(Path("absent")).status()));
  EXPECT_FALSE(ReadSafetensors(folder_).ok());
}

TEST_F(Safetensors, RefusesEveryTruncation) {
  const std::vector<float> a(10, 1.0f);
  ASSERT_TRUE(WriteSafetensors(Path("x"), {{"a", {10}, a.data()}, {"b", {5, 2}, a.data()}}, {}).ok());
  const auto whole = ReadFile(Path("x"), 1 << 20);
  ASSERT_TRUE(whole.ok());
  for (size_t n = 0; n < whole->size(); ++n) {
    Put("cut", whole->substr(0, n));
    EXPECT_TRUE(absl::IsDataLoss(ReadSafetensors(Path("cut")).status())) << n;
  }
}

// The reference library reads what we write, and we read what it writes.
TEST_F(Safetensors, AgreesWithTheReferenceLibrary) {
  const char* python = std::getenv("HIERAD_PYTHON");
  ASSERT_NE(python, nullptr) << "run by ctest, or set HIERAD_PYTHON";
  const std::vector<float> a = {1, 2, 3, 4, 5, 6};
  const float scalar = 7;
  ASSERT_TRUE(WriteSafetensors(Path("ours"), {{"a", {2, 3}, a.data()}, {"s", {}, &scalar}, {"e", {0, 4}, nullptr}}, {{"format", "pt"}}).ok());
  const std::string script = R"(
import sys, numpy as np
from safetensors.numpy import load_file, save_file
from safetensors import safe_open
x = load_file(sys.argv[1])
assert sorted(x) == ['a', 'e', 's'] and x['a'].tolist() == [[1, 2, 3], [4, 5, 6]] and x['s'].shape == () and x['s'] == 7, x
assert x['e'].shape == (0, 4)
assert safe_open(sys.argv[1], 'np').metadata() == {'format': 'pt'}
save_file({'z': np.arange(5, dtype=np.float64), 'h': np.array([[0.5, -2]], np.float16), 'f': np.float32(3).reshape(())}, sys.argv[2], {'k': 'v'})
)";
  ASSERT_TRUE(WriteFileAtomic(Path("check.py"), script).ok());
  ASSERT_EQ(std::system((std::string(python) + " " + Path("check.py") + " " + Path("ours") + " " + Path("theirs")).c_str()), 0);
  const auto file = ReadSafetensors(Path("theirs"));
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_THAT(file->tensors.at("z").data, ElementsAre(0, 1, 2, 3, 4));
  EXPECT_THAT(file->tensors.at("h").data, ElementsAre(0.5f, -2.0f));
  EXPECT_THAT(file->tensors.at("h").shape, ElementsAre(1, 2));
  EXPECT_THAT(file->tensors.at("f").data, ElementsAre(3));
  EXPECT_EQ(file->metadata.at("k"), "v");
}

}  // namespace
}  // namespace hierad
