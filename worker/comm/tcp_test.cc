// What holds of the collective over TCP alone: who comes to the port, and who does not; collective_test.cc has what it shares with
// shared memory.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

#include "base/status.h"
#include "worker/comm/communicator.h"

namespace hierad {
namespace {

using ::testing::HasSubstr;

TEST(Tcp, NamesTheMissingAtTheJoin) {
  CommunicatorOptions options;
  options.size = 3;
  options.join_timeout = std::chrono::milliseconds(300);
  const auto blob = MakeTcpRendezvous("127.0.0.1");
  ASSERT_TRUE(blob.ok()) << blob.status();
  const auto joined = JoinCpu(options, *blob);
  EXPECT_EQ(ReasonOf(joined.status()), v1::REASON_PEER_LOST);
  EXPECT_THAT(std::string(joined.status().message()), HasSubstr("rank 1, rank 2 has not joined within 0.3 s"));
}

TEST(Tcp, NamesARankZeroThatHasGone) {
  std::atomic<bool> abandon{true};
  CommunicatorOptions options;
  options.size = 2;
  options.abandon = &abandon;
  const auto blob = MakeTcpRendezvous("127.0.0.1");
  ASSERT_TRUE(blob.ok());
  ASSERT_FALSE(JoinCpu(options, *blob).ok());   // abandoned, the listener with it
  options.rank = 1;
  abandon = false;
  const auto refused = JoinCpu(options, *blob);
  EXPECT_EQ(ReasonOf(refused.status()), v1::REASON_PEER_LOST);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("cannot reach rank 0 at 127.0.0.1:"));
}

int Connect(int port) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(uint16_t(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  return fd;
}

// Strangers: silent ones, noise, and one that knows everything but the token.
TEST(Tcp, StrangersDoNotDisturbAGang) {
  const auto blob = MakeTcpRendezvous("127.0.0.1");
  ASSERT_TRUE(blob.ok());
  char token[64];
  int port = 0;
  ASSERT_EQ(std::sscanf(blob->c_str(), "hierad-tcp-1 %*d %*d %63s %d", token, &port), 2) << *blob;
  std::vector<int> strangers;
  for (int i = 0; i < 200; ++i) strangers.push_back(Connect(port));
  for (size_t i = 0; i < strangers.size(); i += 3) {
    std::string hello = "hieraT01" + std::string(32, i % 2 == 0 ? 'x' : token[0]) + std::string("\1\0\0\0\2\0\0\0\0\0\0\0\7\0\0\0", 16);
    ASSERT_EQ(send(strangers[i], hello.data(), hello.size(), MSG_NOSIGNAL), ssize_t(hello.size()));
  }
  CommunicatorOptions options;
  options.size = 2;
  std::string other = "nothing";
  std::thread peer([&] {
    CommunicatorOptions second = options;
    second.rank = 1;
    auto joined = JoinCpu(second, *blob);
    if (!joined.ok()) {
      other = std::string(joined.status().message());
      return;
    }
    float value = 2;
    other = (*joined)->AllReduceSum(&value, 1, nullptr).ok() && value == 3 ? "" : "wrong sum";
  });
  auto joined = JoinCpu(options, *blob);
  EXPECT_TRUE(joined.ok()) << joined.status();
  float value = 1;
  if (joined.ok()) {
    EXPECT_TRUE((*joined)->AllReduceSum(&value, 1, nullptr).ok());
    EXPECT_EQ(value, 3);
  }
  peer.join();
  EXPECT_EQ(other, "");
  for (const int fd : strangers) close(fd);
}

TEST(Tcp, RefusesAForeignRendezvous) {
  CommunicatorOptions options;
  options.size = 2;
  options.rank = 1;
  for (const char* blob : {"hierad-tcp-2 1 2 3 4 5", "hierad-tcp-1 1 2 short 4 127.0.0.1", "hierad-tcp-1"}) {
    EXPECT_THAT(std::string(JoinCpu(options, blob).status().message()), HasSubstr("same hiera-worker")) << blob;
  }
}

}  // namespace
}  // namespace hierad
