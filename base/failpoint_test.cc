#include "base/failpoint.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <string>

#include "base/fs.h"

namespace hierad {
namespace {

// The folder is read from the environment once: one test has them all.
TEST(Failpoint, ActsOnceAsItIsArmed) {
  std::string folder = testing::TempDir() + "/failpoints_XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  setenv("HIERAD_FAILPOINTS", folder.c_str(), 1);
  const auto arm = [&](const std::string& name, const std::string& text) { std::ofstream(folder + "/" + name) << text; };

  EXPECT_TRUE(Failpoint("a").ok());
  arm("a", "error 2");
  EXPECT_TRUE(Failpoint("a").ok());
  EXPECT_TRUE(Failpoint("b").ok());
  EXPECT_TRUE(Failpoint("a").ok());
  EXPECT_EQ(Failpoint("a").code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(Failpoint("a").ok());
  EXPECT_TRUE(Exists(folder + "/a.fired"));

  arm("b", "enospc");
  EXPECT_EQ(Failpoint("b").code(), absl::StatusCode::kResourceExhausted);

  arm("c", "kill");
  const pid_t child = fork();
  if (child == 0) {
    (void)Failpoint("c");
    _exit(0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);

  arm("d", "value 0 12345");
  EXPECT_TRUE(Failpoint("d").ok());
  EXPECT_EQ(FailpointValue("d"), 12345);
  EXPECT_EQ(FailpointValue("d"), 12345);
  EXPECT_EQ(FailpointValue("e"), std::nullopt);
  EXPECT_TRUE(RemoveTree(folder).ok());
}

}  // namespace
}  // namespace hierad
