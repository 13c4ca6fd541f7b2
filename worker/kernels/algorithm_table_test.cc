#include "worker/kernels/algorithm_table.h"

#include <unistd.h>

#include <cstdlib>
#include <string>

#include "base/fs.h"
#include "base/status.h"
#include "gtest/gtest.h"

namespace hierad::kernels {
namespace {

class AlgorithmTableTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "/algorithm_table_test-XXXXXX";
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
    for (const char* name : {"HIERAD_CACHE", "XDG_CACHE_HOME", "HOME"}) ::unsetenv(name);
  }
  void TearDown() override { EXPECT_TRUE(RemoveTree(folder_).ok()); }
  std::string folder_;
};

TEST_F(AlgorithmTableTest, KeepsWhatWasFoundInTheNearestPlace) {
  ::setenv("HOME", (folder_ + "/home").c_str(), 1);
  ASSERT_TRUE(CacheAlgorithms("card.cublasLt-1", "a 00\n").ok());
  EXPECT_EQ(*ReadFile(folder_ + "/home/.cache/hierad/card.cublasLt-1.txt", 100), "a 00\n");
  EXPECT_EQ(CachedAlgorithms("card.cublasLt-1"), "a 00\n");
  EXPECT_EQ(CachedAlgorithms("card.cublasLt-2"), "") << "another version of the library";
  ::setenv("XDG_CACHE_HOME", (folder_ + "/xdg").c_str(), 1);
  EXPECT_EQ(CachedAlgorithms("card.cublasLt-1"), "");
  ::setenv("HIERAD_CACHE", (folder_ + "/ours").c_str(), 1);
  ASSERT_TRUE(CacheAlgorithms("card.cublasLt-1", "b 01\n").ok());
  EXPECT_EQ(*ReadFile(folder_ + "/ours/card.cublasLt-1.txt", 100), "b 01\n");
}

TEST_F(AlgorithmTableTest, SaysWhereItCouldBeKept) {
  EXPECT_EQ(CachedAlgorithms("card.cublasLt-1"), "");
  const absl::Status status = CacheAlgorithms("card.cublasLt-1", "a 00\n");
  EXPECT_EQ(ReasonOf(status), v1::REASON_USER_ERROR);
  EXPECT_NE(status.message().find("HIERAD_CACHE"), absl::string_view::npos) << status;
}

}  // namespace
}  // namespace hierad::kernels
