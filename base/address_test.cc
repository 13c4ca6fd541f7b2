#include "base/address.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace hierad {
namespace {

TEST(AddressToward, IsTheOneOnTheWay) {
  EXPECT_EQ(AddressToward("unix:/run/hierad.sock").value_or(""), "127.0.0.1");
  EXPECT_EQ(AddressToward("127.0.0.1:7000").value_or(""), "127.0.0.1");
  EXPECT_THAT(std::string(AddressToward("no.such.host.invalid:7000").status().message()),
              testing::HasSubstr("no.such.host.invalid:7000"));
  EXPECT_FALSE(AddressToward("localhost").ok());
}

}  // namespace
}  // namespace hierad
