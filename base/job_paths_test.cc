#include "base/job_paths.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <thread>

#include "absl/strings/str_cat.h"

namespace hierad {
namespace {

using testing::HasSubstr;

// One test: what is confined stays so for the process.
TEST(JobPaths, StayBeneathTheRootsAtTheMomentOfOpening) {
  std::string folder = testing::TempDir() + "/job_paths_XXXXXX";
  const std::string top = std::filesystem::canonical(mkdtemp(folder.data()));
  for (const char* name : {"/data/set", "/more", "/outside/set"}) std::filesystem::create_directories(top + name);
  for (const char* name : {"/data/set/x", "/more/x"}) std::ofstream(top + name) << "inside";
  for (const char* name : {"/outside/x", "/outside/set/x"}) std::ofstream(top + name) << "outside";
  const auto read = [](const std::string& path) { return ReadJobFile(path, 100).value_or("refused"); };
  struct stat info;

  ASSERT_TRUE(ConfineJobPaths({}).ok());
  EXPECT_EQ(read(top + "/outside/x"), "outside") << "no roots: anywhere";
  EXPECT_EQ(std::string(ReadJobFile(top + "/missing", 100).status().message()), "cannot open \"" + top + "/missing\": No such file or directory");
  EXPECT_FALSE(ConfineJobPaths({top + "/none", top + "/neither"}).ok());
  ASSERT_TRUE(ConfineJobPaths({top + "/none", top + "/data", top + "/more"}).ok());

  EXPECT_EQ(read(top + "/data/set/x"), "inside");
  EXPECT_EQ(read(top + "/more/x"), "inside");
  EXPECT_THAT(*ListJobFolder(top + "/data"), testing::ElementsAre("set"));
  EXPECT_TRUE(StatJobPath(top + "/data/set", &info).ok() && S_ISDIR(info.st_mode));
  EXPECT_TRUE(absl::IsNotFound(StatJobPath(top + "/data/missing", &info)));
  for (const char* path : {"/outside/x", "/data/../outside/x", "/data-not", "/"}) {
    const auto refused = OpenJobPath(top + path, O_RDONLY);
    EXPECT_TRUE(absl::IsPermissionDenied(refused.status())) << path;
    EXPECT_THAT(std::string(refused.status().message()), HasSubstr("allowed_roots"));
  }

  // Links, folders and the root itself, exchanged after somebody has looked.
  std::filesystem::rename(top + "/data/set", top + "/data/old");
  std::filesystem::create_symlink("../outside/set", top + "/data/set");
  EXPECT_EQ(read(top + "/data/set/x"), "refused");
  EXPECT_FALSE(JobPathExists(top + "/data/set/x"));
  EXPECT_FALSE(ListJobFolder(top + "/data/set").ok());
  std::filesystem::create_symlink("old/x", top + "/data/stays");
  EXPECT_EQ(read(top + "/data/stays"), "inside");
  std::filesystem::rename(top + "/more", top + "/moved");
  std::filesystem::create_symlink(top + "/outside", top + "/more");
  EXPECT_EQ(read(top + "/more/x"), "inside") << "the root that was there at the start";

  std::atomic<bool> done{false};
  std::thread other([&] {
    for (int i = 0; !done; ++i) {
      std::filesystem::create_symlink(i % 2 == 0 ? "../outside/x" : "old/x", absl::StrCat(top, "/data/new"));
      std::filesystem::rename(top + "/data/new", top + "/data/swapped");
    }
  });
  int inside = 0;
  for (int i = 0; i < 20000; ++i) {
    const std::string text = read(top + "/data/swapped");
    ASSERT_NE(text, "outside");
    inside += text == "inside";
  }
  done = true;
  other.join();
  EXPECT_GT(inside, 0);
  std::filesystem::remove_all(top);
}

}  // namespace
}  // namespace hierad
