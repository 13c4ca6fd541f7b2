#include "server/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "server/state_folder.h"

namespace hierad {
namespace {

using testing::HasSubstr;

class ConfigTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string path = testing::TempDir() + "/hierad_config_XXXXXX";
    folder_ = mkdtemp(path.data());
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  absl::StatusOr<ServerConfig> Read(const std::string& text) {
    std::ofstream(folder_ + "/hierad.yaml") << text;
    ServerConfig config;
    absl::Status status = ReadConfig(folder_ + "/hierad.yaml", &config);
    if (status.ok()) status = CompleteConfig(&config);
    if (!status.ok()) return status;
    return config;
  }
  std::string Problem(const std::string& text) {
    auto config = Read(text);
    EXPECT_FALSE(config.ok()) << text;
    return std::string(config.status().message());
  }
  std::string folder_;
};

// The shipped file says what the defaults are: reading it changes nothing.
TEST_F(ConfigTest, TheShippedFileHoldsTheDefaults) {
  ServerConfig shipped, built_in;
  ASSERT_TRUE(ReadConfig(std::string(std::getenv("HIERAD_SOURCE_DIR")) + "/configs/hierad.yaml", &shipped).ok());
  EXPECT_EQ(shipped.state_folder, built_in.state_folder);
  EXPECT_EQ(shipped.listen, built_in.listen);
  EXPECT_EQ(shipped.access, built_in.access);
  EXPECT_EQ(shipped.access_group, built_in.access_group);
  EXPECT_EQ(shipped.tcp, built_in.tcp);
  EXPECT_EQ(shipped.certificates, built_in.certificates);
  EXPECT_EQ(shipped.metrics, built_in.metrics);
  EXPECT_EQ(shipped.agent, built_in.agent);
  EXPECT_EQ(shipped.agent_lifetime, built_in.agent_lifetime);
  EXPECT_EQ(shipped.worker_user, built_in.worker_user);
  EXPECT_EQ(shipped.root_ranks, built_in.root_ranks);
  EXPECT_EQ(shipped.cpu_slots, built_in.cpu_slots);
  EXPECT_EQ(shipped.runs_folder, built_in.runs_folder);
  EXPECT_EQ(shipped.allowed_roots, built_in.allowed_roots);
  EXPECT_EQ(shipped.stop_grace_s, built_in.stop_grace_s);
  EXPECT_EQ(shipped.node_lost_after_s, built_in.node_lost_after_s);
  EXPECT_EQ(shipped.hang_after_s, built_in.hang_after_s);
  EXPECT_EQ(shipped.pause_grace_s, built_in.pause_grace_s);
  EXPECT_EQ(shipped.disk_reserve_gib, built_in.disk_reserve_gib);
  EXPECT_EQ(shipped.log_level, built_in.log_level);
}

TEST_F(ConfigTest, DependentSettingsAreFilledIn) {
  auto config = Read("state_folder: /s/../t/\ncpu_slots: 3\nmetrics: off\n");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->state_folder, "/t");
  EXPECT_EQ(config->runs_folder, "/t/runs");
  EXPECT_EQ(config->listen, "unix:/t/hierad.sock");
  EXPECT_EQ(config->cpu_slots, 3);
}

TEST_F(ConfigTest, MistakesAreNamedWithTheirLine) {
  EXPECT_THAT(Problem("\nstate_foldr: /x\n"), testing::AllOf(HasSubstr("hierad.yaml:2"), HasSubstr("state_foldr"), HasSubstr("state_folder")));
  EXPECT_THAT(Problem("tcp: ''\ntcp: ''\n"), HasSubstr("twice"));
  EXPECT_THAT(Problem("cpu_slots: many\n"), HasSubstr("cpu_slots"));
  EXPECT_THAT(Problem("cpu_slots: [1]\n"), HasSubstr("cpu_slots"));
  EXPECT_THAT(Problem("- a\n"), HasSubstr("expected settings"));
  EXPECT_THAT(Problem("a: [\n"), HasSubstr("hierad.yaml:"));
  EXPECT_THAT(Problem("agent: maybe\n"), HasSubstr("auto, none"));
  EXPECT_THAT(Problem("agent_lifetime: x\n"), HasSubstr("service, session"));
  EXPECT_THAT(Problem("node_lost_after_s: 1\n"), HasSubstr("3 to 3600"));
  EXPECT_THAT(Problem("stop_grace_s: nan\n"), HasSubstr("stop_grace_s"));
  EXPECT_THAT(Problem("listen: 127.0.0.1:1\n"), HasSubstr("unix:/path"));
  EXPECT_THAT(Problem(absl::StrCat("listen: unix:/", std::string(200, 'x'), "\n")), HasSubstr("107"));
}

TEST_F(ConfigTest, TcpNeedsCertificates) {
  for (const char* address : {"127.0.0.1:7000", "'[::]:7000'", "0.0.0.0:7000", "example.org:7000"}) {
    EXPECT_TRUE(Read(absl::StrCat("tcp: ", address, "\ncertificates: /etc/hierad/server\n")).ok()) << address;
    EXPECT_THAT(Problem(absl::StrCat("tcp: ", address, "\n")), HasSubstr("mutual TLS only")) << address;
  }
  EXPECT_THAT(Problem("tcp: 127.0.0.1\n"), HasSubstr("host:port"));
}

TEST_F(ConfigTest, AllowedRootsAreAbsoluteFolders) {
  auto config = Read("allowed_roots: /data:/home/lab\n");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_THAT(AllowedRoots(*config), testing::ElementsAre("/data", "/home/lab"));
  EXPECT_THAT(Problem("allowed_roots: data\n"), HasSubstr("absolute"));
  EXPECT_THAT(Problem("allowed_roots: '/data:'\n"), HasSubstr("absolute"));
}

TEST_F(ConfigTest, RanksOfAnotherAccountNeedASocketAndAFolderThatTheyCanReach) {
  EXPECT_THAT(Problem("worker_user: no-such-user\n"), testing::AllOf(HasSubstr("worker_user"), HasSubstr("no user \"no-such-user\"")));
  EXPECT_THAT(Problem("worker_user: root\n"), HasSubstr("do not run as root"));
  EXPECT_THAT(Problem("worker_user: root\nroot_ranks: allow\n"), HasSubstr("do not run as root"));
  if (geteuid() == 0) {   // the submitters' ranks, without a word of worker_user
    EXPECT_THAT(Problem("access: everyone\n"), HasSubstr("runs_folder"));
    EXPECT_TRUE(Read("access: everyone\nroot_ranks: allow\n").ok());
  }
  EXPECT_THAT(Problem("root_ranks: yes\n"), HasSubstr("refuse, allow"));
  if (geteuid() != 0) {
    EXPECT_THAT(Problem("worker_user: submitter\n"), HasSubstr("as root"));
    return;
  }
  EXPECT_THAT(Problem("worker_user: nobody\n"), HasSubstr("access: group or everyone"));
  EXPECT_THAT(Problem("worker_user: submitter\naccess: everyone\n"), HasSubstr("runs_folder"));
  EXPECT_THAT(Problem("worker_user: nobody\naccess: everyone\nstate_folder: /s\nruns_folder: /s/r\n"), HasSubstr("in the state folder"));
  EXPECT_TRUE(Read("worker_user: nobody\naccess: everyone\nstate_folder: /s\nruns_folder: /srv\n").ok());
}

TEST_F(ConfigTest, AccessOfAGroupNamesIt) {
  EXPECT_TRUE(Read("access: group\naccess_group: lab\nruns_folder: /srv\n").ok());
  EXPECT_TRUE(Read("access: everyone\nruns_folder: /srv\n").ok());
  EXPECT_THAT(Problem("access: group\n"), HasSubstr("access_group"));
  EXPECT_THAT(Problem("access_group: lab\n"), HasSubstr("not owner"));
  EXPECT_THAT(Problem("access: all\n"), HasSubstr("owner, group, everyone"));
}

TEST_F(ConfigTest, StateFolderOnAFileOrANetworkIsRefused) {
  std::ofstream(folder_ + "/file") << "x";
  EXPECT_THAT(std::string(PrepareStateFolder(folder_ + "/file").message()), HasSubstr("is not a folder"));
  EXPECT_FALSE(PrepareStateFolder(folder_ + "/file/below").ok());
  EXPECT_TRUE(PrepareStateFolder(folder_ + "/a/b").ok());
  EXPECT_EQ(std::filesystem::status(folder_ + "/a/b").permissions() & std::filesystem::perms(077), std::filesystem::perms::none);
  EXPECT_STREQ(RefusedFileSystem(0x6969), "NFS");
  EXPECT_STREQ(RefusedFileSystem(0x65735546), "FUSE");
  EXPECT_STREQ(RefusedFileSystem(0x01021997), "9p");
  EXPECT_STREQ(RefusedFileSystem(static_cast<int>(0xFF534D42)), "SMB");   // as 32-bit kernels give it: negative
  EXPECT_EQ(RefusedFileSystem(0xEF53), nullptr);       // ext4
  EXPECT_EQ(RefusedFileSystem(0x794C7630), nullptr);   // overlay: a container's own disk
}

TEST_F(ConfigTest, ALockHasOneOwnerWhoIsNamed) {
  const std::string path = folder_ + "/hierad.lock";
  EXPECT_FALSE(IsLocked(path));
  {
    auto lock = LockFile(path, "another hierad");
    ASSERT_TRUE(lock.ok()) << lock.status();
    EXPECT_TRUE(IsLocked(path));
    EXPECT_EQ(LockOwner(path), getpid());
    const auto second = LockFile(path, "another hierad");
    EXPECT_THAT(std::string(second.status().message()), testing::AllOf(HasSubstr("another hierad"), HasSubstr(absl::StrCat(getpid()))));
  }
  EXPECT_FALSE(IsLocked(path));
  EXPECT_TRUE(LockFile(path, "another hierad").ok());
}

}  // namespace
}  // namespace hierad
