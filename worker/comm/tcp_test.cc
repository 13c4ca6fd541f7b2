// The collective over TCP: the same promises as the shared-memory one, and the same bits.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

#include "base/random.h"
#include "base/sha256.h"
#include "base/status.h"
#include "worker/comm/agree.h"
#include "worker/comm/communicator.h"
#include "worker/comm/forked_ranks.h"

namespace hierad {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Values whose sum depends on the order of the additions.
float Value(int rank, int64_t i, int round) {
  const RandomStream stream{7, Draw::kSynthetic, uint32_t(round), uint64_t(rank)};
  const float u = stream.Uniform(uint64_t(i)) - 0.5f;
  return i % 3 == rank % 3 ? u * 1e6f : u;
}

// The hashes of some sums: a chunk is 65,536 floats; counts below, at, across and beyond it, and none.
std::string SumsOf(Communicator* comm) {
  std::string got;
  for (int round = 0; round < 2; ++round) {
    for (const int64_t count : {1, 15, 65'535, 65'536, 65'537, 0, 1'540'123}) {
      std::vector<float> data(static_cast<size_t>(count));
      for (int64_t i = 0; i < count; ++i) data[size_t(i)] = Value(comm->rank(), i, round);
      if (auto status = comm->AllReduceSum(data.data(), count, nullptr); !status.ok()) return std::string(status.message());
      got += Sha256Hex({reinterpret_cast<const char*>(data.data()), data.size() * sizeof(float)}) + "\n";
    }
  }
  return got;
}

class Sums : public ::testing::TestWithParam<int> {};

TEST_P(Sums, HaveTheBitsOfSharedMemoryOnEveryRank) {
  ForkedRanks shared(GetParam(), {}, 1 << 20, SumsOf);
  const std::string expected = shared.Wait(0).output;
  ASSERT_EQ(expected.size(), 2u * 7 * 65);
  ForkedRanks processes(GetParam(), {}, ForkedRanks::kTcp, SumsOf);
  for (int r = 0; r < GetParam(); ++r) EXPECT_EQ(processes.Wait(r).output, expected) << "rank " << r;
}

INSTANTIATE_TEST_SUITE_P(Ranks, Sums, ::testing::Values(2, 3, 5));

TEST(Tcp, BroadcastsFromAnyRootBetweenOtherCollectives) {
  ForkedRanks processes(4, {}, ForkedRanks::kTcp, [](Communicator* comm) {
    std::string all;
    for (int root = 0; root < comm->size(); ++root) {
      std::string data(size_t(3'000'001), char('a' + comm->rank()));
      if (!comm->Broadcast(data.data(), int64_t(data.size()), root, nullptr).ok()) return std::string("failed");
      if (data != std::string(data.size(), char('a' + root))) return std::string("wrong bytes");
      if (!comm->Barrier().ok()) return std::string("failed");
      float one = 1;
      if (!comm->AllReduceSum(&one, 1, nullptr).ok() || one != float(comm->size())) return std::string("wrong sum");
      all += data[0];
    }
    return all;
  });
  for (int r = 0; r < 4; ++r) EXPECT_EQ(processes.Wait(r).output, "abcd");
}

// Each other rank is told which one is lost, in which collective, at which step; the lost one itself, or rank 0.
TEST(Tcp, NamesAKilledPeerToEveryRank) {
  for (const int victim : {2, 0}) {
    ForkedRanks processes(3, {}, ForkedRanks::kTcp, [&](Communicator* comm) {
      comm->SetActivity("step 17");
      std::vector<float> data(540'123, 1.0f);
      // Some rounds, so that the activity has been told.
      const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(1);
      for (float going = 1; going > 0;) {
        going = std::chrono::steady_clock::now() < until ? 1.0f : 0.0f;
        if (!comm->BroadcastHost(&going, sizeof going, 0).ok()) return std::string("failed early");
      }
      if (comm->rank() == victim) kill(getpid(), SIGKILL);
      return std::string(comm->AllReduceSum(data.data(), int64_t(data.size()), nullptr).message());
    });
    for (int r = 0; r < 3; ++r) {
      if (r == victim) continue;
      EXPECT_THAT(processes.Wait(r).output,
                  AllOf(HasSubstr("all_reduce of 540,123 floats, step 17"),
                        HasSubstr("rank " + std::to_string(victim) + " (pid " + std::to_string(processes.pid(victim))),
                        HasSubstr("at step 17) has exited")))
          << "rank " << r;
    }
  }
}

TEST(Tcp, NamesAFrozenPeerAndAPeerThatNeverCame) {
  CommunicatorOptions options;
  options.timeout = std::chrono::milliseconds(1500);
  options.join_timeout = std::chrono::milliseconds(1500);
  ForkedRanks processes(3, options, ForkedRanks::kTcp, [](Communicator* comm) {
    if (!comm->Barrier().ok()) return std::string("barrier failed");
    if (comm->rank() == 1) kill(getpid(), SIGSTOP);
    return std::string(comm->Barrier().message());
  });
  for (const int r : {0, 2}) {
    EXPECT_THAT(processes.Wait(r).output, AllOf(HasSubstr("rank 1 (pid "), HasSubstr("has shown no sign of life for"))) << "rank " << r;
  }
  ForkedRanks absent(3, options, ForkedRanks::kTcp, [](Communicator*) { return std::string(); });
  kill(absent.pid(1), SIGSTOP);   // before it has joined, or never mind
  const std::string alone = absent.Wait(0).output;
  if (!alone.empty()) {
    EXPECT_THAT(alone, HasSubstr("rank 1 has not joined within 1.5 s"));
    EXPECT_THAT(absent.Wait(2).output, HasSubstr("rank 1"));
  }
}

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

TEST(Tcp, ToleratesABusyPeerUpToItsOwnLimit) {
  CommunicatorOptions options;
  options.timeout = std::chrono::milliseconds(1000);
  options.busy_timeout = std::chrono::milliseconds(2500);
  int gate[2];
  ASSERT_EQ(pipe(gate), 0);
  ForkedRanks processes(2, options, ForkedRanks::kTcp, [&](Communicator* comm) {
    if (!comm->Barrier().ok()) return std::string("barrier failed");
    if (comm->rank() == 1) {
      char byte;   // busy: its signs of life go on
      if (read(gate[0], &byte, 1) != 1) return std::string("pipe");
    }
    return std::string(comm->Barrier().message());
  });
  EXPECT_THAT(processes.Wait(0).output, HasSubstr("is alive but has not come for 2 s"));
}

TEST(Tcp, RefusesMismatchedCollectives) {
  ForkedRanks processes(2, {}, ForkedRanks::kTcp, [](Communicator* comm) {
    float data[4] = {};
    const auto status = comm->rank() == 0 ? comm->AllReduceSum(data, 4, nullptr) : comm->Barrier();
    return std::string(status.message());
  });
  for (int r = 0; r < 2; ++r) {
    EXPECT_THAT(processes.Wait(r).output,
                AllOf(HasSubstr("rank 0 is in all_reduce of 4 floats but rank 1 in barrier"), HasSubstr("same collectives")));
  }
}

TEST(Tcp, AbandonsWhenAsked) {
  std::atomic<bool> abandon{true};
  CommunicatorOptions options;
  options.size = 2;
  options.abandon = &abandon;
  const auto blob = MakeTcpRendezvous("127.0.0.1");
  ASSERT_TRUE(blob.ok());
  EXPECT_EQ(ReasonOf(JoinCpu(options, *blob).status()), v1::REASON_CANCELLED);
  options.rank = 1;   // rank 0 has gone: the listener with it
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

TEST(Agreements, GiveEveryRankTheSameAnswerOverTcp) {
  ForkedRanks processes(3, {}, ForkedRanks::kTcp, [](Communicator* comm) {
    const auto sum = SumOverRanks(comm, {0.1 * (comm->rank() + 1), 1});
    if (!sum.ok() || sum->first != 0.1 + 0.2 + 0.1 * 3 || sum->second != 3) return std::string("wrong sum");
    const auto status = Agree(comm, comm->rank() == 0 ? absl::OkStatus() : ErrorOf(v1::REASON_DATA_ERROR, "bad file"));
    return v1::Reason_Name(ReasonOf(status)) + " " + std::string(status.message());
  });
  EXPECT_EQ(processes.Wait(0).output, "REASON_DATA_ERROR rank 1: bad file");
  EXPECT_EQ(processes.Wait(1).output, "REASON_DATA_ERROR bad file");
  EXPECT_EQ(processes.Wait(2).output, "REASON_DATA_ERROR rank 1: bad file");
}

}  // namespace
}  // namespace hierad
