#include "base/fs.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>

#include "base/fs_descriptor.h"
#include "base/limits.h"

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

// As deep as a job's user likes: refused, before descriptors or the stack run out.
TEST_F(FsTest, FoldersAreNotFollowedWithoutEnd) {
  const auto make = [&](const std::string& top, int depth) {
    UniqueFd at(::open(folder_.c_str(), O_PATH | O_DIRECTORY));
    for (int i = 0; i < depth; ++i) {
      const char* name = i == 0 ? top.c_str() : "d";
      ASSERT_EQ(::mkdirat(at.get(), name, 0755), 0);
      at = UniqueFd(::openat(at.get(), name, O_PATH | O_DIRECTORY));
    }
  };
  make("fits", limits::kFolderDepth);
  EXPECT_TRUE(RemoveTree(Path("fits")).ok());
  make("deep", 3000);
  const absl::Status removed = RemoveTree(Path("deep"));
  EXPECT_EQ(removed.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(removed.message()), testing::AllOf(testing::HasSubstr("nested more than 128 deep"), testing::SizeIs(testing::Lt(1000u))));
  // By hand, from below.
  EXPECT_EQ(std::system(("rm -rf '" + Path("deep") + "'").c_str()), 0);
}

TEST_F(FsTest, OnlyFilesAreOpenedWhereOthersPutThings) {
  const auto open_as = [&](const char* name, int flags) { return OpenRegularIn(AT_FDCWD, Path(name), flags, 0644, Path(name)); };
  ASSERT_TRUE(open_as("new", O_RDWR | O_CREAT).ok());
  EXPECT_TRUE(open_as("new", O_RDONLY).ok());
  EXPECT_TRUE(absl::IsNotFound(open_as("none", O_RDONLY).status()));
  ASSERT_EQ(::mkfifo(Path("pipe").c_str(), 0600), 0);
  ASSERT_TRUE(MakeFolders(Path("folder")).ok());
  ASSERT_EQ(::symlink("new", Path("link").c_str()), 0);
  for (const char* name : {"pipe", "folder", "link"}) {
    for (const int flags : {O_RDONLY, O_WRONLY | O_CREAT, O_RDWR | O_CREAT | O_APPEND}) {   // and it does not hang
      const auto opened = open_as(name, flags);
      EXPECT_EQ(opened.status().code(), absl::StatusCode::kFailedPrecondition) << name << " " << flags;
      EXPECT_THAT(std::string(opened.status().message()), testing::AllOf(testing::HasSubstr(name), testing::HasSubstr("remove it"))) << flags;
    }
  }
}

TEST_F(FsTest, WritesIntoAFolderThatIsOpenWhateverTakesItsName) {
  ASSERT_TRUE(MakeFolders(Path("run")).ok());
  const UniqueFd run(::open(Path("run").c_str(), O_PATH | O_DIRECTORY));
  ASSERT_EQ(::rename(Path("run").c_str(), Path("away").c_str()), 0);
  ASSERT_TRUE(MakeFolders(Path("run")).ok());
  ASSERT_TRUE(WriteFileAtomicIn(run.get(), "x", "data", 0644, Path("run/x")).ok());
  EXPECT_EQ(*ListFolder(Path("run")), std::vector<std::string>());
  EXPECT_EQ(*ListFolder(Path("away")), std::vector<std::string>{"x"});
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
