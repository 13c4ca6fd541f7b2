// What holds of the collective in shared memory alone; collective_test.cc has what it shares with TCP.
#include <gtest/gtest.h>

#include <csignal>
#include <string>
#include <unistd.h>

#include "base/fs.h"
#include "base/status.h"
#include "worker/comm/communicator.h"
#include "worker/comm/forked_ranks.h"

namespace hierad {
namespace {

TEST(SharedMemory, MovesNothingIntoAFileSystem) {
  const auto before = ListFolder("/dev/shm");
  ASSERT_TRUE(before.ok());
  ForkedRanks processes(2, {}, 1 << 20, [](Communicator* comm) {
    const auto during = ListFolder("/dev/shm");
    if (!comm->Barrier().ok() || !during.ok()) return std::string("failed");
    for (const std::string& name : *during) {
      if (name.find("test") != std::string::npos) return name;
    }
    kill(getpid(), SIGKILL);
    return std::string();
  });
  EXPECT_FALSE(processes.Wait(0).exited);
  EXPECT_FALSE(processes.Wait(1).exited);
}

TEST(SharedMemory, RefusesAForeignRendezvous) {
  CommunicatorOptions options;
  options.size = 2;
  options.rank = 1;
  EXPECT_FALSE(JoinSharedMemory(options, "hierad-shm-2:1:2:3").ok());
  EXPECT_EQ(ReasonOf(JoinSharedMemory(options, "hierad-shm-1:999999999:3:5").status()), v1::REASON_PEER_LOST);
}

TEST(SelfCommunicator, IsTheIdentity) {
  const auto comm = MakeSelfCommunicator();
  float x = 3;
  EXPECT_TRUE(comm->AllReduceSum(&x, 1, nullptr).ok());
  EXPECT_TRUE(comm->Barrier().ok());
  EXPECT_EQ(x, 3);
  EXPECT_EQ(comm->size(), 1);
}

}  // namespace
}  // namespace hierad
