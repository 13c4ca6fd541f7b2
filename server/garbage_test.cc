#include "server/garbage.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>

#include "base/fs.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace hierad {
namespace {

class RunFolders : public testing::Test {
 protected:
  void SetUp() override {
    root_ = testing::TempDir() + "/garbage_XXXXXX";
    ASSERT_NE(mkdtemp(root_.data()), nullptr);
    root_ = std::filesystem::canonical(root_).string();
    for (const char* run : {"mine", "yours"}) {
      ASSERT_TRUE(MakeFolders(Path(run) + "/checkpoints/step-1").ok());
      ASSERT_TRUE(WriteFileAtomic(Path(run) + "/checkpoints/step-1/state", std::string(1000, 'x')).ok());
    }
    job_.set_id(7);
    job_.set_run_folder(Path("mine"));
  }
  void TearDown() override { EXPECT_TRUE(RemoveTree(root_).ok()); }
  std::string Path(const std::string& name) const { return JoinPath(root_, name); }

  std::string root_;
  v1::Job job_;
};

TEST_F(RunFolders, AreMeasuredAndRemoved) {
  job_.mutable_spec()->mutable_output()->set_folder(Path("mine"));
  v1::Garbage garbage;
  ASSERT_TRUE(GarbageOf(job_, /*whole_run=*/true, std::nullopt, &garbage));   // given by the user: the checkpoints alone
  EXPECT_EQ(garbage.path(), Path("mine/checkpoints"));
  EXPECT_EQ(garbage.bytes(), 1000);
  RemoveGarbage(std::nullopt, &garbage);
  EXPECT_TRUE(garbage.removed()) << garbage.problem();
  EXPECT_FALSE(Exists(Path("mine/checkpoints")));
  EXPECT_TRUE(Exists(Path("mine")));
  EXPECT_FALSE(GarbageOf(job_, true, std::nullopt, &garbage));
  job_.mutable_spec()->mutable_output()->clear_folder();
  ASSERT_TRUE(GarbageOf(job_, true, std::nullopt, &garbage));
  EXPECT_EQ(garbage.path(), Path("mine"));
  RemoveGarbage(std::nullopt, &garbage);
  EXPECT_FALSE(Exists(Path("mine")));
}

// The folder's owner may put a link in its place at any time: before it is looked at, or between that and its removal.
TEST_F(RunFolders, AreNotThoseOfOthersByALink) {
  v1::Garbage looked;
  ASSERT_TRUE(GarbageOf(job_, /*whole_run=*/false, std::nullopt, &looked));
  ASSERT_EQ(rename(Path("mine").c_str(), Path("away").c_str()), 0);
  ASSERT_EQ(symlink("yours", Path("mine").c_str()), 0);
  RemoveGarbage(std::nullopt, &looked);
  EXPECT_FALSE(looked.removed());
  EXPECT_THAT(looked.problem(), testing::HasSubstr("leads over a link"));
  v1::Garbage later;
  ASSERT_TRUE(GarbageOf(job_, false, std::nullopt, &later));
  EXPECT_EQ(later.bytes(), 0);
  EXPECT_THAT(later.problem(), testing::HasSubstr("leads over a link"));
  ASSERT_TRUE(GarbageOf(job_, true, std::nullopt, &later));   // the run itself: a link too
  RemoveGarbage(std::nullopt, &later);
  EXPECT_TRUE(Exists(Path("yours/checkpoints/step-1/state")));
}

// Nested as deep as its owner likes, for whoever walks it.
TEST_F(RunFolders, AsDeepAsOneLikesEndNothing) {
  UniqueFd at(open(Path("mine/checkpoints").c_str(), O_PATH | O_DIRECTORY));
  for (int i = 0; i < 3000; ++i) {
    ASSERT_EQ(mkdirat(at.get(), "d", 0755), 0);
    at = UniqueFd(openat(at.get(), "d", O_PATH | O_DIRECTORY));
  }
  v1::Garbage garbage;
  ASSERT_TRUE(GarbageOf(job_, false, std::nullopt, &garbage));
  RemoveGarbage(std::nullopt, &garbage);
  EXPECT_FALSE(garbage.removed());
  EXPECT_THAT(garbage.problem(), testing::HasSubstr("nested more than 128 deep"));
  EXPECT_EQ(std::system(("rm -rf '" + Path("mine") + "'").c_str()), 0);
}

// output.folder may name another user's: hierad of root removes there no more than the job's account could.
TEST_F(RunFolders, ThatAreGivenAreOnesOwn) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root";
  job_.mutable_spec()->mutable_output()->set_folder(Path("mine"));
  const Account nobody{.uid = 65534, .gid = 65534, .name = "nobody", .home = "/"};
  ASSERT_EQ(chmod(root_.c_str(), 0755), 0);
  v1::Garbage garbage;
  ASSERT_TRUE(GarbageOf(job_, false, nobody, &garbage));
  RemoveGarbage(nobody, &garbage);
  EXPECT_FALSE(garbage.removed());
  EXPECT_THAT(garbage.problem(), testing::HasSubstr("Permission denied"));
  EXPECT_TRUE(Exists(Path("mine/checkpoints/step-1/state")));
  for (const char* own : {"mine", "mine/checkpoints", "mine/checkpoints/step-1", "mine/checkpoints/step-1/state"}) {
    ASSERT_EQ(chown(Path(own).c_str(), nobody.uid, nobody.gid), 0);
  }
  RemoveGarbage(nobody, &garbage);
  EXPECT_TRUE(garbage.removed()) << garbage.problem();
  EXPECT_FALSE(Exists(Path("mine/checkpoints")));
}

}  // namespace
}  // namespace hierad
