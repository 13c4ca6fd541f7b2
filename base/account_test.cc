#include "base/account.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>

#include "base/fs.h"

namespace hierad {
namespace {

using testing::HasSubstr;

TEST(Account, IsFoundByNameOrNumber) {
  const auto root = FindAccount("root");
  ASSERT_TRUE(root.ok()) << root.status();
  EXPECT_EQ(root->uid, 0u);
  EXPECT_EQ(FindAccount("uid 0")->name, "root");
  const auto number = FindAccount("uid 4000000");   // without a name here
  ASSERT_TRUE(number.ok()) << number.status();
  EXPECT_EQ(number->uid, 4000000u);
  EXPECT_THAT(std::string(FindAccount("no such user").status().message()), HasSubstr("no user \"no such user\""));
  for (const char* bad : {"uid ", "uid x", "uid 1x", "uid -1", "uid 99999999999"}) EXPECT_FALSE(FindAccount(bad).ok()) << bad;
}

TEST(Account, IsNeverRoots) {
  const auto refused = [](const RankRights& rights, const std::string& submitter) { return std::string(AccountFor(rights, submitter).status().message()); };
  for (const bool allowed : {false, true}) EXPECT_THAT(refused({"root", allowed}, "alice"), HasSubstr("do not run as root")) << allowed;
  for (const char* root : {"root", "uid 0"}) EXPECT_THAT(refused({"submitter", false}, root), HasSubstr("submitted by root"));
  if (geteuid() == 0) {
    for (const char* root : {"root", "uid 0"}) EXPECT_THAT(refused({}, root), HasSubstr("root_ranks: allow"));
    for (const char* user : {"", "submitter"}) {
      const auto allowed = AccountFor({user, true}, "root");
      ASSERT_TRUE(allowed.ok()) << allowed.status();
      EXPECT_FALSE(allowed->has_value()) << "root stays root";
      EXPECT_EQ((*AccountFor({user, true}, "uid 65534"))->uid, 65534u) << "but for others' jobs";
      EXPECT_EQ((*AccountFor({user, false}, "uid 65534"))->uid, 65534u);
    }
    EXPECT_EQ((*AccountFor({"nobody", false}, "root"))->name, "nobody");
  } else {
    EXPECT_FALSE(AccountFor({}, "root")->has_value()) << "the own account, whoever submits";
    EXPECT_THAT(refused({"uid 4000000", false}, ""), HasSubstr("only an agent of root"));
  }
}

// What a child has left, as "uid gid CapEff CapBnd NoNewPrivs" of /proc/self/status.
std::string LeftAfter(const std::optional<Account>& account) {
  int ends[2];
  if (pipe(ends) != 0) return "pipe";
  const pid_t pid = fork();
  if (pid == 0) {
    std::string text = std::to_string(DropPrivileges(account));
    text += " " + std::to_string(getuid()) + " " + std::to_string(getgid());
    std::ifstream status("/proc/self/status");
    for (std::string line; std::getline(status, line);) {
      if (line.rfind("CapEff:", 0) == 0 || line.rfind("CapBnd:", 0) == 0 || line.rfind("NoNewPrivs:", 0) == 0) text += " " + line;
    }
    _exit(WriteAll(ends[1], text, "pipe").ok() ? 0 : 1);
  }
  close(ends[1]);
  std::string text;
  char buffer[512];
  for (ssize_t n; (n = read(ends[0], buffer, sizeof buffer)) > 0;) text.append(buffer, size_t(n));
  close(ends[0]);
  waitpid(pid, nullptr, 0);
  return text;
}

TEST(DropPrivileges, LeavesNoCapabilityAndNoWayToGetOne) {
  const std::string own = LeftAfter(std::nullopt);
  EXPECT_THAT(own, HasSubstr("0 " + std::to_string(getuid())));
  EXPECT_THAT(own, HasSubstr("NoNewPrivs:\t1"));
  if (geteuid() != 0) {
    EXPECT_THAT(own, HasSubstr("CapEff:\t0000000000000000"));
    std::fprintf(stderr, "not run here, for want of root: another account\n");
    return;
  }
  const std::string other = LeftAfter(*FindAccount("nobody"));
  EXPECT_THAT(other, HasSubstr("0 65534 65534"));
  EXPECT_THAT(other, HasSubstr("CapEff:\t0000000000000000"));
  EXPECT_THAT(other, HasSubstr("CapBnd:\t0000000000000000"));
  EXPECT_THAT(other, HasSubstr("NoNewPrivs:\t1"));
}

TEST(FilesAs, HasTheAccountsRightsToFilesOnly) {
  if (geteuid() != 0) {
    std::fprintf(stderr, "not run here, for want of root: another account's files\n");
    return;
  }
  std::string folder = testing::TempDir() + "/account_XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  ASSERT_TRUE(WriteFileAtomic(JoinPath(folder, "secret"), "x", 0600).ok());
  ASSERT_EQ(chmod(folder.c_str(), 0777), 0);
  {
    const FilesAs rights(*FindAccount("nobody"));
    EXPECT_FALSE(ReadFile(JoinPath(folder, "secret"), 10).ok());
    EXPECT_TRUE(MakeFolders(JoinPath(folder, "own")).ok());
    EXPECT_EQ(geteuid(), 0u);
  }
  struct stat info {};
  ASSERT_EQ(stat(JoinPath(folder, "own").c_str(), &info), 0);
  EXPECT_EQ(info.st_uid, 65534u);
  EXPECT_TRUE(ReadFile(JoinPath(folder, "secret"), 10).ok());
  EXPECT_TRUE(RemoveTree(folder).ok());
}

}  // namespace
}  // namespace hierad
