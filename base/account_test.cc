#include "base/account.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/capability.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <functional>
#include <string>

#include "base/fs.h"

namespace hierad {
namespace {

using testing::HasSubstr;

TEST(Account, IsFoundByNameOrNumber) {
  const auto root = FindAccount("root");
  ASSERT_TRUE(root.ok()) << root.status();
  EXPECT_EQ(root->uid, 0u);
  EXPECT_EQ(FindAccount("uid 0")->name, "root");
  // Without a name here nobody knows its groups, and 42, say, is where shadow belongs.
  const auto number = FindAccount("uid 4000000");
  EXPECT_TRUE(absl::IsNotFound(number.status())) << number.status();
  EXPECT_THAT(std::string(number.status().message()), HasSubstr("no user of uid 4000000"));
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
    EXPECT_THAT(refused({"nobody", false}, ""), HasSubstr("only an agent of root"));
  }
}

// What `text` says in a child.
std::string InChild(const std::function<std::string()>& text) {
  int ends[2];
  if (pipe(ends) != 0) return "pipe";
  const pid_t pid = fork();
  if (pid == 0) _exit(WriteAll(ends[1], text(), "pipe").ok() ? 0 : 1);
  close(ends[1]);
  std::string all;
  char buffer[512];
  for (ssize_t n; (n = read(ends[0], buffer, sizeof buffer)) > 0;) all.append(buffer, size_t(n));
  close(ends[0]);
  waitpid(pid, nullptr, 0);
  return all;
}

// A container's root may lack what it takes: then what is another account's is refused, not done as root.
TEST(Account, IsNotTakenByARootWithoutTheCapabilities) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root";
  EXPECT_TRUE(CanTakeAccounts().ok());
  for (const int missing : {CAP_SETUID, CAP_SETGID}) {
    const std::string said = InChild([missing] {
      const Account nobody = *FindAccount("nobody");
      __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
      __user_cap_data_struct data[2] = {};
      syscall(SYS_capget, &header, data);
      data[0].effective = data[0].permitted &= ~(1u << missing);
      if (syscall(SYS_capset, &header, data) != 0) return std::string("capset");
      std::string text(AccountFor({}, "nobody").status().message());
      text += "|" + std::string(AccountFor({"nobody", false}, "").status().message());
      text += AccountFor({"", true}, "root").ok() ? "|root's own|" : "|refused|";
      const FilesAs rights(nobody);
      return text + std::string(rights.status().message());
    });
    EXPECT_THAT(said, testing::MatchesRegex("no rank is started as \"nobody\": .*without CAP_SETUID and CAP_SETGID.*--cap-add.*\\|no rank is .*"
                                            "\\|root's own\\|cannot look at files with the rights of \"nobody\".*")) << missing;
  }
}

// What a child has left, as "uid gid CapEff CapBnd NoNewPrivs" of /proc/self/status.
std::string LeftAfter(const std::optional<Account>& account) {
  return InChild([&] {
    std::string text = std::to_string(DropPrivileges(account));
    text += " " + std::to_string(getuid()) + " " + std::to_string(getgid());
    std::ifstream status("/proc/self/status");
    for (std::string line; std::getline(status, line);) {
      if (line.rfind("CapEff:", 0) == 0 || line.rfind("CapBnd:", 0) == 0 || line.rfind("NoNewPrivs:", 0) == 0) text += " " + line;
    }
    return text;
  });
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
    EXPECT_TRUE(rights.status().ok()) << rights.status();
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
