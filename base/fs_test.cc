#include "base/fs.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>

namespace hierad {
namespace {

class FsTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = testing::TempDir() + "/fs_test-XXXXXX";
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { EXPECT_TRUE(RemoveTree(folder_).ok()); }
  std::string Path(const std::string& name) const { return JoinPath(folder_, name); }

  std::string folder_;
};

TEST_F(FsTest, WritesAndReadsWhole) {
  const std::string data("a\0b\n", 4);
  ASSERT_TRUE(WriteFileAtomic(Path("x"), data, 0640).ok());
  EXPECT_EQ(*ReadFile(Path("x"), 4), data);
  struct stat info;
  ASSERT_EQ(::stat(Path("x").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0640u);
  ASSERT_TRUE(WriteFileAtomic(Path("x"), "new").ok());
  EXPECT_EQ(*ReadFile(Path("x"), 100), "new");
  EXPECT_EQ(ListFolder(folder_)->size(), 1u) << "a temporary file was left";
}

TEST_F(FsTest, ReadRefusesMoreThanItsLimit) {
  ASSERT_TRUE(WriteFileAtomic(Path("x"), "12345").ok());
  EXPECT_TRUE(ReadFile(Path("x"), 5).ok());
  const auto result = ReadFile(Path("x"), 4);
  EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(std::string(result.status().message()).find("4 bytes"), std::string::npos);
}

TEST_F(FsTest, AFailedWriteLeavesTheOldFileAndNoTemporaryOne) {
  ASSERT_TRUE(MakeFolders(Path("x")).ok());   // a folder cannot be replaced by a file
  EXPECT_FALSE(WriteFileAtomic(Path("x"), "data").ok());
  EXPECT_EQ(*ListFolder(folder_), std::vector<std::string>{"x"});
  EXPECT_EQ(WriteFileAtomic(Path("none/x"), "data").code(), absl::StatusCode::kNotFound);
}

TEST_F(FsTest, MakesAndRemovesTrees) {
  ASSERT_TRUE(MakeFolders(Path("a/b/c")).ok());
  ASSERT_TRUE(MakeFolders(Path("a/b/c/")).ok());
  ASSERT_TRUE(WriteFileAtomic(Path("a/b/file"), "x").ok());
  ASSERT_TRUE(WriteFileAtomic(Path("kept"), "x").ok());
  ASSERT_EQ(::symlink(Path("kept").c_str(), Path("a/link").c_str()), 0);
  ASSERT_EQ(::symlink(folder_.c_str(), Path("a/b/folder_link").c_str()), 0);
  EXPECT_FALSE(MakeFolders(Path("kept/x")).ok());
  EXPECT_TRUE(RemoveTree(Path("a")).ok());
  EXPECT_FALSE(Exists(Path("a")));
  EXPECT_TRUE(Exists(Path("kept"))) << "a link was followed";
  EXPECT_TRUE(RemoveTree(Path("a")).ok()) << "missing is fine";
}

TEST_F(FsTest, ListsSorted) {
  for (const char* name : {"b", "a", "..x", "\xff"}) ASSERT_TRUE(WriteFileAtomic(Path(name), "").ok());
  EXPECT_EQ(*ListFolder(folder_), (std::vector<std::string>{"..x", "a", "b", "\xff"}));
  EXPECT_EQ(ListFolder(Path("none")).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(FsTest, FreeBytesIsPositive) {
  EXPECT_GT(*FreeBytes(folder_), 0);
  EXPECT_FALSE(FreeBytes(Path("none")).ok());
}

TEST(Fs, ErrnoBecomesACodeAndASentence) {
  EXPECT_EQ(ErrnoStatus(ENOSPC, "cannot write", "/d/x").code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ErrnoStatus(EDQUOT, "cannot write", "/d/x").code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ErrnoStatus(EACCES, "cannot write", "/d/x").code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(ErrnoStatus(EIO, "cannot write", "/d/x").code(), absl::StatusCode::kInternal);
  EXPECT_EQ(std::string(ErrnoStatus(ENOENT, "cannot open", "/d/\n").message()),
            "cannot open \"/d/\\x0a\": No such file or directory");
}

TEST(Fs, Paths) {
  EXPECT_EQ(JoinPath("/a", "b"), "/a/b");
  EXPECT_EQ(JoinPath("/a/", "b"), "/a/b");
  EXPECT_EQ(JoinPath("/a", "/b"), "/b");
  EXPECT_EQ(JoinPath("", "b"), "b");
  EXPECT_EQ(FolderOf("/a/b"), "/a");
  EXPECT_EQ(FolderOf("/a"), "/");
  EXPECT_EQ(FolderOf("a"), ".");
}

TEST(Fs, UniqueFdClosesOnce) {
  int raw;
  {
    UniqueFd fd(::open("/dev/null", O_RDONLY));
    raw = fd.get();
    UniqueFd moved = std::move(fd);
    EXPECT_FALSE(fd);
    EXPECT_TRUE(moved);
  }
  EXPECT_EQ(::fcntl(raw, F_GETFD), -1);
}

}  // namespace
}  // namespace hierad
