#include "base/fs_beneath.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <filesystem>
#include <fstream>
#include <random>
#include <thread>

#include "absl/strings/str_cat.h"

namespace hierad {
namespace {

// A root with files, links that stay and links that leave, and something outside to be found.
class BeneathTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string path = testing::TempDir() + "/beneath_XXXXXX";
    top_ = std::filesystem::canonical(mkdtemp(path.data()));
    root_ = top_ + "/root";
    for (const char* folder : {"/root/a/b/c", "/root/a/d", "/outside/x", "/root-not"}) std::filesystem::create_directories(top_ + folder);
    for (const char* file : {"/root/a/b/c/f", "/root/a/f", "/outside/f", "/outside/x/f", "/root-not/f"}) std::ofstream(top_ + file) << "x";
    for (const auto& [name, target] : std::initializer_list<std::pair<const char*, std::string>>{
             {"/root/in", "a/b"}, {"/root/a/up", "../a/d"}, {"/root/out", "../outside"}, {"/root/abs", top_ + "/outside"},
             {"/root/a/out", "../../outside/x"}, {"/root/self", root_}, {"/root/loop", "loop"}, {"/root/slash", "/"},
             {"/root/magic", "/proc/self/root"}, {"/root/cwd", "/proc/self/cwd"}, {"/root/a/chain", "../in/../../out"},
             {"/root/a/b/out", "../../abs/f"}, {"/root/nowhere", "../outside/new"}, {"/root/a/fd", "/dev/fd"}}) {
      std::filesystem::create_symlink(target, top_ + name);
    }
  }
  void TearDown() override { std::filesystem::remove_all(top_); }
  // Where an opened descriptor really is.
  static std::string Place(int fd) {
    char path[PATH_MAX] = "";
    return readlink(absl::StrCat("/proc/self/fd/", fd).c_str(), path, sizeof path - 1) > 0 ? path : "?";
  }
  bool IsBeneath(const std::string& place) const { return place == root_ || place.rfind(root_ + "/", 0) == 0; }
  std::string top_, root_;
};

TEST_F(BeneathTest, WhatStaysIsOpened) {
  for (const char* path : {"a/b/c/f", "./a//b/c/f", "in/c/f", "a/up", "a/../a/f", "."}) {
    const auto fd = OpenBeneath(root_, path, O_RDONLY);
    ASSERT_TRUE(fd.ok()) << path << ": " << fd.status();
    EXPECT_TRUE(IsBeneath(Place(fd->get()))) << path;
  }
  EXPECT_TRUE(OpenBeneath(root_, root_ + "/a/f", O_RDONLY).ok());
  EXPECT_TRUE(OpenBeneath(root_ + "/", root_ + "//a/f", O_RDONLY).ok());
  const auto made = OpenBeneath(root_, "a/new", O_WRONLY | O_CREAT | O_EXCL, 0600);
  ASSERT_TRUE(made.ok()) << made.status();
  struct stat info {};
  ASSERT_EQ(fstat(made->get(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  EXPECT_TRUE(absl::IsNotFound(OpenBeneath(root_, "a/none", O_RDONLY).status()));
  EXPECT_TRUE(CheckBeneath({"/none", root_}, root_ + "/a/still/to/make").ok());
  EXPECT_TRUE(CheckBeneath({root_}, root_ + "/in/new").ok());
}

TEST_F(BeneathTest, WhatLeavesIsRefused) {
  for (const char* path : {"..", "../outside/f", "a/../../outside/f", "out/f", "abs/f", "a/out/f", "self/a/f", "loop", "slash/etc/passwd",
                           "magic/etc/passwd", "cwd", "a/chain/f", "a/b/out", "nowhere", "a/fd/0", "/etc/passwd"}) {
    const auto fd = OpenBeneath(root_, path, O_RDONLY);
    EXPECT_TRUE(absl::IsPermissionDenied(fd.status())) << path << ": " << fd.status();
    if (path[0] != '/') {
      EXPECT_FALSE(CheckBeneath({root_}, root_ + "/" + path).ok()) << path;
    }
  }
  EXPECT_FALSE(OpenBeneath(root_, top_ + "/root-not/f", O_RDONLY).ok());
  EXPECT_FALSE(CheckBeneath({root_}, top_ + "/root-not/f").ok());
  EXPECT_FALSE(OpenBeneath(root_, std::string("a/f\0/../../..", 14), O_RDONLY).ok());
  EXPECT_FALSE(OpenBeneath(root_, "nowhere", O_WRONLY | O_CREAT, 0600).ok());
  EXPECT_FALSE(std::filesystem::exists(top_ + "/outside/new"));
  EXPECT_FALSE(CheckBeneath({root_}, root_ + "/out/new").ok());
  EXPECT_FALSE(CheckBeneath({}, root_).ok());
}

TEST_F(BeneathTest, MakesFoldersThatStay) {
  for (const char* path : {"/a/new", "/made/of/many//parts/", "/in/new/deep", "/a/b", ""}) {
    const auto made = MakeFoldersBeneath({"/none", root_}, root_ + path);
    ASSERT_TRUE(made.ok()) << path << ": " << made.status();
    EXPECT_TRUE(IsBeneath(Place(made->get()))) << path;
    EXPECT_TRUE(std::filesystem::equivalent(Place(made->get()), root_ + path)) << path;
  }
  for (const char* path : {"/out/new", "/abs/new", "/a/out/new", "/a/../../outside/new", "/nowhere", "/nowhere/new", "/slash/tmp/new", "/loop/new"}) {
    const auto made = MakeFoldersBeneath({root_}, root_ + path);
    EXPECT_TRUE(absl::IsPermissionDenied(made.status())) << path << ": " << made.status();
  }
  EXPECT_FALSE(MakeFoldersBeneath({root_}, root_ + "/a/f/new").ok());
  EXPECT_FALSE(MakeFoldersBeneath({root_}, top_ + "/root-not/new").ok());
  for (const char* outside : {"/outside", "/root-not"}) {
    for (const auto& each : std::filesystem::recursive_directory_iterator(top_ + outside)) EXPECT_NE(each.path().filename(), "new") << each.path();
  }
}

// The owner of a folder on the way exchanges it for a link that leaves, again and again.
TEST_F(BeneathTest, MakesNothingOutsideWhileTheWayIsExchanged) {
  std::filesystem::create_directories(root_ + "/swap");
  std::filesystem::create_symlink("../outside", root_ + "/swap.link");
  std::atomic<bool> stop{false};
  std::thread swapper([&] {
    while (!stop) syscall(SYS_renameat2, AT_FDCWD, (root_ + "/swap").c_str(), AT_FDCWD, (root_ + "/swap.link").c_str(), 2u /* RENAME_EXCHANGE */);
  });
  int made = 0, refused = 0;
  for (int i = 0; i < 2000; ++i) {
    const auto folder = MakeFoldersBeneath({root_}, absl::StrCat(root_, "/swap/run-", i, "/deep"));
    ++(folder.ok() ? made : refused);
  }
  stop = true;
  swapper.join();
  std::fprintf(stderr, "%d made, %d refused\n", made, refused);
  EXPECT_GT(made, 0);
  EXPECT_GT(refused, 0);
  for (const auto& each : std::filesystem::directory_iterator(top_ + "/outside")) EXPECT_EQ(each.path().filename().string().rfind("run-", 0), std::string::npos) << each.path();
}

// A link comes where a folder is about to be made.
TEST_F(BeneathTest, OpensNoLinkThatCameInTheMeantime) {
  const std::string flip = root_ + "/flip";
  std::atomic<bool> stop{false};
  std::thread flipper([&] {
    while (!stop) {
      if (symlink("../outside", flip.c_str()) != 0) rmdir(flip.c_str());
      unlink(flip.c_str());
    }
  });
  for (int i = 0; i < 40000; ++i) {
    const auto folder = MakeFoldersBeneath({root_}, flip);
    EXPECT_TRUE(!folder.ok() || IsBeneath(Place(folder->get())));
  }
  stop = true;
  flipper.join();
}

// Paths of everything that a path can be made of, while a folder on the way is exchanged for a link that leaves, again and
// again.
TEST_F(BeneathTest, AThousandHostilePathsLeadNowhere) {
  std::random_device device;
  const unsigned seed = device();
  std::fprintf(stderr, "seed %u\n", seed);
  std::mt19937 random(seed);
  const std::vector<std::string> pieces = {"..", ".", "", "a", "b", "c", "d", "f", "in", "up", "out", "abs", "self", "loop", "slash", "magic", "cwd",
                                           "chain", "fd", "nowhere", "swap", "swap", "outside", "root", "etc", "passwd", "proc", "self", "root",
                                           "..\\", "%2e%2e", "a\n", "\xff\xfe", "...", "~", std::string(300, 'x'), std::string("a\0b", 3)};
  std::filesystem::create_directories(root_ + "/swap");
  std::ofstream(root_ + "/swap/f") << "x";
  std::filesystem::create_symlink("../outside", root_ + "/swap.link");
  std::atomic<bool> stop{false};
  std::thread swapper([&] {
    while (!stop) syscall(SYS_renameat2, AT_FDCWD, (root_ + "/swap").c_str(), AT_FDCWD, (root_ + "/swap.link").c_str(), 2u /* RENAME_EXCHANGE */);
  });
  int opened = 0, refused = 0, escaped = 0;
  for (int i = 0; i < 1000; ++i) {
    std::string path = random() % 4 == 0 ? root_ + "/" : random() % 8 == 0 ? "/" : "";
    for (int n = 1 + int(random() % 8); n > 0; --n) path += pieces[random() % (random() % 2 == 0 ? 12 : pieces.size())] + (n > 1 ? "/" : "");
    const auto fd = OpenBeneath(root_, path, random() % 2 == 0 ? O_RDONLY | O_NONBLOCK : O_PATH);
    if (!fd.ok()) {
      ++refused;
      continue;
    }
    ++opened;
    const std::string place = Place(fd->get());
    if (!IsBeneath(place)) {
      ++escaped;
      ADD_FAILURE() << path << " led to " << place;
    }
  }
  stop = true;
  swapper.join();
  std::fprintf(stderr, "%d opened beneath, %d refused, %d escaped\n", opened, refused, escaped);
  EXPECT_EQ(escaped, 0);
  EXPECT_GT(opened, 20);
  EXPECT_GT(refused, 300);
}

}  // namespace
}  // namespace hierad
