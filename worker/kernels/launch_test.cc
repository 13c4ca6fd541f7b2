// What launch.cuh asks of every kernel, read off the sources: a kernel that forgot it would be right until launches overlap.
#include <cstdlib>
#include <filesystem>
#include <string>

#include "base/fs.h"
#include "gtest/gtest.h"

namespace hierad::kernels {
namespace {

TEST(LaunchTest, EveryKernelBeginsByWaitingForThoseBeforeIt) {
  const char* const source = std::getenv("HIERAD_SOURCE_DIR");
  if (source == nullptr) GTEST_SKIP() << "HIERAD_SOURCE_DIR names no source";
  int kernels = 0;
  for (const auto& entry : std::filesystem::directory_iterator(std::string(source) + "/worker/kernels")) {
    const std::string name = entry.path().filename();
    if ((!name.ends_with(".cu") && !name.ends_with(".cuh")) || name.starts_with("gemm_gelu")) continue;   // CUTLASS's own
    const auto text = ReadFile(entry.path(), 1 << 20);
    ASSERT_TRUE(text.ok()) << text.status();
    EXPECT_EQ(text->find("<<<"), std::string::npos) << name << ": a kernel started by other means than Launch";
    for (size_t at = text->find("__global__"); at != std::string::npos; at = text->find("__global__", at + 1)) {
      const size_t body = text->find("{\n", at);
      ASSERT_NE(body, std::string::npos) << name;
      EXPECT_EQ(text->substr(body + 2, 17), "  BeginKernel();\n") << name << ": " << text->substr(at, body - at);
      ++kernels;
    }
  }
  EXPECT_GT(kernels, 40);
}

}  // namespace
}  // namespace hierad::kernels
