// Against a tree made of plain files, so it holds wherever it runs. What the real kernel does with them is not shown here.
#include "server/agent/cgroup.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "base/fs.h"

namespace hierad {
namespace {

using testing::HasSubstr;

class CgroupTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string path = testing::TempDir() + "/hierad_cgroup_XXXXXX";
    folder_ = mkdtemp(path.data());
    std::filesystem::create_directories(folder_ + "/proc/self");
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  void Put(const std::string& path, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(folder_ + "/" + path).parent_path());
    std::ofstream(folder_ + "/" + path) << text;
  }
  std::string Read(const std::string& path) { return ReadFile(folder_ + "/" + path, 1 << 20).value_or("?"); }
  // The agent's group, as the kernel shows it.
  void Group(const std::string& own) {
    Put("proc/self/cgroup", "12:memory:/old\n0::" + own + "\n");
    Put("sys/cgroup.controllers", "cpu memory pids\n");
    for (const char* file : {"cgroup.procs", "cgroup.subtree_control"}) Put("sys" + own + "/" + file, "");
  }
  absl::StatusOr<std::string> Home() { return FindCgroupHome(folder_ + "/proc", folder_ + "/sys"); }
  // mkdir in cgroupfs makes these.
  void Born(const std::string& path) {
    for (const char* file : {"cgroup.procs", "cgroup.kill", "memory.max", "memory.oom.group"}) Put(path + "/" + file, "");
    Put(path + "/cgroup.events", "populated 1\nfrozen 0\n");
    Put(path + "/memory.events", "low 0\nhigh 0\nmax 4\noom 2\noom_kill 2\n");
  }
  std::string folder_;
};

TEST_F(CgroupTest, HomeIsWhatWasDelegated) {
  EXPECT_THAT(std::string(Home().status().message()), HasSubstr("no cgroup version 2"));
  Put("sys/cgroup.controllers", "memory\n");
  Put("proc/self/cgroup", "4:memory:/docker\n");
  EXPECT_THAT(std::string(Home().status().message()), HasSubstr("no control group of its own"));
  Put("proc/self/cgroup", "0::/\n");
  EXPECT_FALSE(Home().ok());
  Put("proc/self/cgroup", "0::/system.slice/foreign\n");
  EXPECT_THAT(std::string(Home().status().message()), HasSubstr("is not delegated"));
  Group("/system.slice/hierad-agent.service");
  EXPECT_EQ(Home().value_or(""), folder_ + "/sys/system.slice/hierad-agent.service");
  EXPECT_EQ(Read("sys/system.slice/hierad-agent.service/cgroup.subtree_control"), "");   // the agent itself is in there
}

TEST_F(CgroupTest, WithASubgroupOfItsOwnTheAgentHandsTheMemoryControllerDown) {
  Group("/system.slice/hierad-agent.service/agent");
  for (const char* file : {"cgroup.procs", "cgroup.subtree_control"}) Put(std::string("sys/system.slice/hierad-agent.service/") + file, "");
  Put("sys/system.slice/hierad-agent.service/cgroup.controllers", "cpu memory\n");
  EXPECT_EQ(Home().value_or(""), folder_ + "/sys/system.slice/hierad-agent.service");
  EXPECT_EQ(Read("sys/system.slice/hierad-agent.service/cgroup.subtree_control"), "+memory");
}

TEST_F(CgroupTest, ARankIsEnteredLimitedKilledAndCounted) {
  Group("/a");
  EXPECT_FALSE(RankCgroup::Open(folder_ + "/sys/a", "1.2.0").has_value());
  Born("sys/a/rank-1.2.0");
  const auto group = RankCgroup::Make(folder_ + "/sys/a", "1.2.0", int64_t{3} << 30);
  ASSERT_TRUE(group.ok()) << group.status();
  EXPECT_EQ(Read("sys/a/rank-1.2.0/memory.max"), "3221225472");
  EXPECT_EQ(Read("sys/a/rank-1.2.0/memory.oom.group"), "1");
  const std::string tried = "sys/a/rank-try." + std::to_string(getpid());
  Born(tried);
  EXPECT_TRUE(TryCgroup(folder_ + "/sys/a", 1 << 20).ok());
  EXPECT_EQ(Read(tried + "/memory.max"), "1048576");
  EXPECT_EQ(Read(tried + "/cgroup.procs"), "0");
  EXPECT_EQ(group->Enter(4242), 0);
  EXPECT_EQ(Read("sys/a/rank-1.2.0/cgroup.procs"), "4242");
  EXPECT_EQ(group->OomKills(), 2);
  EXPECT_TRUE(group->Populated());
  EXPECT_TRUE(group->Kill());
  EXPECT_EQ(Read("sys/a/rank-1.2.0/cgroup.kill"), "1");
  Put("sys/a/rank-1.2.0/cgroup.events", "populated 0\nfrozen 0\n");
  EXPECT_FALSE(group->Populated());
  EXPECT_TRUE(RankCgroup::Open(folder_ + "/sys/a", "1.2.0").has_value());
}

TEST_F(CgroupTest, WhatTheKernelDoesNotHaveIsSaid) {
  Group("/a");
  // An old kernel: no cgroup.kill. No memory controller: no limit, and asking for one is refused.
  const auto group = RankCgroup::Make(folder_ + "/sys/a", "1.1.0", 0);
  ASSERT_TRUE(group.ok()) << group.status();
  EXPECT_FALSE(group->Kill());
  EXPECT_FALSE(group->OomKills().has_value());
  EXPECT_FALSE(group->Populated());
  EXPECT_NE(group->Enter(1), 0);
  EXPECT_THAT(std::string(RankCgroup::Make(folder_ + "/sys/a", "1.1.1", 1 << 20).status().message()), HasSubstr("memory controller"));
  EXPECT_THAT(std::string(TryCgroup(folder_ + "/sys/a", 0).message()), HasSubstr("cannot be moved into"));
  EXPECT_FALSE(TryCgroup(folder_ + "/none", 0).ok());
  group->Remove();
  EXPECT_FALSE(std::filesystem::exists(group->path()));
}

}  // namespace
}  // namespace hierad
