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
  EXPECT_EQ(*CachedAlgorithms("card.cublasLt-1"), "a 00\n");
  EXPECT_EQ(*CachedAlgorithms("card.cublasLt-2"), "") << "another version of the library";
  ::setenv("XDG_CACHE_HOME", (folder_ + "/xdg").c_str(), 1);
  EXPECT_EQ(*CachedAlgorithms("card.cublasLt-1"), "");
  ::setenv("HIERAD_CACHE", (folder_ + "/ours").c_str(), 1);
  ASSERT_TRUE(CacheAlgorithms("card.cublasLt-1", "b 01\n").ok());
  EXPECT_EQ(*ReadFile(folder_ + "/ours/card.cublasLt-1.txt", 100), "b 01\n");
}

TEST_F(AlgorithmTableTest, SaysWhereItCouldBeKept) {
  EXPECT_EQ(*CachedAlgorithms("card.cublasLt-1"), "");
  const absl::Status status = CacheAlgorithms("card.cublasLt-1", "a 00\n");
  EXPECT_EQ(ReasonOf(status), v1::REASON_USER_ERROR);
  EXPECT_NE(status.message().find("HIERAD_CACHE"), absl::string_view::npos) << status;
}

TEST_F(AlgorithmTableTest, ATableThatCannotBeReadIsSaid) {
  ::setenv("HIERAD_CACHE", folder_.c_str(), 1);
  ASSERT_TRUE(MakeFolders(folder_ + "/card.cublasLt-1.txt").ok());   // no file; root may read any
  EXPECT_FALSE(CachedAlgorithms("card.cublasLt-1").ok());
}

// What is committed stays out of the cache, where it would go before a newer committed row.
TEST_F(AlgorithmTableTest, WritesWhatWasMeasuredHereAlone) {
  AlgorithmTable table;
  ASSERT_TRUE(table.Read("a 0001\nb 0002\n", 2, /*measured_here=*/false).ok());
  ASSERT_TRUE(table.Read("b 0003\nc 0004\n", 2, /*measured_here=*/true).ok());
  EXPECT_EQ(*table.Find("b"), std::string("\0\3", 2)) << "the machine's own goes first";
  table.KeepMeasured("d", std::string("\0\5", 2));
  table.Forget("c");
  EXPECT_EQ(table.Find("c"), nullptr);
  EXPECT_EQ(table.Measured(), "b 0003\nd 0005\n");
  EXPECT_EQ(table.size(), 3u);
  EXPECT_EQ(ReasonOf(table.Read("e 00\n", 2, true)), v1::REASON_USER_ERROR);
}

TEST_F(AlgorithmTableTest, HashesWhatAJobsShapesAreMadeBy) {
  AlgorithmTable one, other;
  ASSERT_TRUE(one.Read("a 0001\nb 0002\n", 2, false).ok());
  ASSERT_TRUE(other.Read("a 0001\nb 0003\n", 2, false).ok());
  EXPECT_EQ(one.HashOf({"a", "z"}), other.HashOf({"z", "a", "a"}));
  EXPECT_NE(one.HashOf({"a", "b"}), other.HashOf({"a", "b"}));
  other.Forget("b");
  EXPECT_NE(one.HashOf({"b"}), other.HashOf({"b"}));
}

}  // namespace
}  // namespace hierad::kernels
