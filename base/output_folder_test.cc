#include "base/output_folder.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "base/fs.h"
#include "base/fs_descriptor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace hierad {
namespace {

using testing::HasSubstr;

class MakesOutputFolder : public testing::Test {
 protected:
  void SetUp() override {
    root_ = testing::TempDir() + "/output_XXXXXX";
    ASSERT_NE(mkdtemp(root_.data()), nullptr);
    ASSERT_EQ(chmod(root_.c_str(), 0755), 0);
    for (const char* name : {"runs", "private", "elsewhere"}) ASSERT_TRUE(MakeFolders(Path(name)).ok());
    ASSERT_EQ(chmod(Path("runs").c_str(), 01777), 0);
  }
  void TearDown() override { EXPECT_TRUE(RemoveTree(root_).ok()); }
  std::string Path(const std::string& name) const { return JoinPath(root_, name); }
  uid_t OwnerOf(const std::string& path) const {
    struct stat info {};
    EXPECT_EQ(lstat(path.c_str(), &info), 0);
    return info.st_uid;
  }

  std::string root_;
};

TEST_F(MakesOutputFolder, ForAnyAttempt) {
  for (int attempt = 0; attempt < 2; ++attempt) {
    EXPECT_TRUE(MakeOutputFolder({Path("runs/1-a"), false, {}}, std::nullopt).ok());
    EXPECT_TRUE(MakeOutputFolder({Path("elsewhere/deep/run"), true, {Path("elsewhere")}}, std::nullopt).ok());
  }
  EXPECT_EQ(OwnerOf(Path("runs/1-a")), geteuid());
  EXPECT_TRUE(Exists(Path("elsewhere/deep/run")));
}

TEST_F(MakesOutputFolder, NotWhereALinkHasCome) {
  ASSERT_EQ(symlink(Path("elsewhere").c_str(), Path("runs/2-b").c_str()), 0);
  const absl::Status made = MakeOutputFolder({Path("runs/2-b"), false, {}}, std::nullopt).status();
  EXPECT_TRUE(absl::IsPermissionDenied(made)) << made;
  // In a folder where nobody else makes any it is the administrator's.
  ASSERT_EQ(symlink(Path("elsewhere").c_str(), Path("private/2-b").c_str()), 0);
  EXPECT_TRUE(MakeOutputFolder({Path("private/2-b"), false, {}}, std::nullopt).ok());
  // A given one: out of the roots, as it has become since the submission.
  ASSERT_EQ(symlink(Path("private").c_str(), Path("runs/out").c_str()), 0);
  const absl::Status out = MakeOutputFolder({Path("runs/out/run"), true, {Path("runs")}}, std::nullopt).status();
  EXPECT_TRUE(absl::IsPermissionDenied(out)) << out;
  EXPECT_THAT(std::string(out.message()), HasSubstr("allowed_roots"));
  EXPECT_FALSE(Exists(Path("private/run")));
}

// Of each kind: what is written goes to the folder that was looked at, though another, or a link, has its name by then.
TEST_F(MakesOutputFolder, AndHoldsIt) {
  for (const OutputFolder& folder : {OutputFolder{Path("runs/5-e"), false, {}}, {Path("private/5-e"), false, {}}, {Path("elsewhere/run"), true, {}},
                                     {Path("runs/given"), true, {Path("runs")}}}) {
    const auto held = MakeOutputFolder(folder, std::nullopt);
    ASSERT_TRUE(held.ok()) << held.status();
    ASSERT_EQ(rename(folder.path.c_str(), (folder.path + ".away").c_str()), 0);
    ASSERT_EQ(symlink(Path("private").c_str(), folder.path.c_str()), 0);
    ASSERT_TRUE(WriteFileAtomicIn(held->get(), "mark", "x", 0644, "mark").ok());
    EXPECT_TRUE(Exists(folder.path + ".away/mark"));
  }
  EXPECT_FALSE(Exists(Path("private/mark")));
}

TEST_F(MakesOutputFolder, WithTheAccountsRightsAndNotWhereAnotherWasFirst) {
  if (geteuid() != 0) {
    std::fprintf(stderr, "not run here, for want of root: another account's folders\n");
    return;
  }
  const Account nobody = *FindAccount("nobody");
  ASSERT_TRUE(MakeOutputFolder({Path("runs/3-c"), false, {}}, nobody).ok());
  EXPECT_EQ(OwnerOf(Path("runs/3-c")), nobody.uid);
  EXPECT_FALSE(MakeOutputFolder({Path("private/3-c"), false, {}}, nobody).ok());
  // Ranks of root, and of anybody else, do not write where nobody waits for them.
  const absl::Status made = MakeOutputFolder({Path("runs/3-c"), false, {}}, std::nullopt).status();
  EXPECT_TRUE(absl::IsPermissionDenied(made)) << made;
  EXPECT_THAT(std::string(made.message()), HasSubstr("made beforehand by uid 65534"));
  ASSERT_TRUE(MakeOutputFolder({Path("runs/4-d"), false, {}}, std::nullopt).ok());
  EXPECT_TRUE(absl::IsPermissionDenied(MakeOutputFolder({Path("runs/4-d"), false, {}}, nobody).status()));
}

}  // namespace
}  // namespace hierad
