#include "base/sha256.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "base/fs.h"

namespace hierad {

class Sha256Test : public testing::Test {
 protected:
  static std::array<uint32_t, 8> Plain(const std::array<uint8_t, 64>& block) {
    Sha256 hash;
    hash.PlainBlock(block.data());
    return hash.state_;
  }
  static std::array<uint32_t, 8> Dispatched(const std::array<uint8_t, 64>& block) {
    Sha256 hash;
    hash.Block(block.data());
    return hash.state_;
  }
};

// On a processor with SHA instructions these are two implementations; on others the same one twice.
TEST_F(Sha256Test, BothImplementationsAgree) {
  std::array<uint8_t, 64> block{};
  for (int i = 0; i < 200; ++i) {
    for (size_t k = 0; k < block.size(); ++k) block[k] = uint8_t(block[k] * 5 + k + i);
    ASSERT_EQ(Plain(block), Dispatched(block));
  }
  block = {'a', 'b', 'c', 0x80};
  block[63] = 24;
  EXPECT_EQ(Plain(block)[0], 0xba7816bfu) << "\"abc\", by FIPS 180-4";
}

namespace {

TEST(Sha256, PublishedVectors) {
  EXPECT_EQ(Sha256Hex(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(Sha256Hex("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(Sha256Hex("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(Sha256Hex(std::string(1'000'000, 'a')),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, HowTheDataIsCutDoesNotMatter) {
  std::string text;
  for (int i = 0; i < 300; ++i) text += char(i * 7);
  for (size_t size = 0; size <= text.size(); ++size) {
    const std::string whole = Sha256Hex(text.substr(0, size));
    for (const size_t cut : {size_t{1}, size_t{55}, size_t{63}, size_t{64}, size_t{65}}) {
      Sha256 hash;
      for (size_t at = 0; at < size; at += cut) hash.Update(text.substr(at, std::min(cut, size - at)));
      ASSERT_EQ(hash.HexDigest(), whole) << size << " bytes, cut at " << cut;
    }
  }
}

TEST(Sha256, OfAFile) {
  const std::string path = testing::TempDir() + "/sha256_test.bin";
  const std::string data(3 << 20, 'x');
  ASSERT_TRUE(WriteFileAtomic(path, data).ok());
  EXPECT_EQ(*Sha256OfFile(path), Sha256Hex(data));
  EXPECT_EQ(Sha256OfFile(path + ".none").status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace hierad
