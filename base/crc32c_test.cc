#include "base/crc32c.h"

#include <gtest/gtest.h>

#include <string>

namespace hierad {
namespace {

// RFC 3720, B.4.
TEST(Crc32c, KnowsTheStandardsExamples) {
  EXPECT_EQ(Crc32c(std::string(32, '\0')), 0x8A9136AAu);
  EXPECT_EQ(Crc32c(std::string(32, '\xFF')), 0x62A8AB43u);
  std::string rising;
  for (int i = 0; i < 32; ++i) rising += char(i);
  EXPECT_EQ(Crc32c(rising), 0x46DD794Eu);
  EXPECT_EQ(Crc32c("123456789"), 0xE3069283u);
  EXPECT_EQ(Crc32c("56789", Crc32c("1234")), Crc32c("123456789"));
  EXPECT_EQ(Crc32c(""), 0u);
}

}  // namespace
}  // namespace hierad
