#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <string>
#include <unistd.h>
#include <vector>

#include "base/clock.h"
#include "base/fs.h"
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
using ::testing::Not;

// Values whose sum depends on the order of the additions.
float Value(int rank, int64_t i, int round) {
  const RandomStream stream{7, Draw::kSynthetic, uint32_t(round), uint64_t(rank)};
  const float u = stream.Uniform(uint64_t(i)) - 0.5f;
  return i % 3 == rank % 3 ? u * 1e6f : u;
}

std::string Bits(const std::vector<float>& v) {
  return Sha256Hex({reinterpret_cast<const char*>(v.data()), v.size() * sizeof(float)});
}

class Sums : public ::testing::TestWithParam<int> {};

TEST_P(Sums, AreThoseOfRankOrderOnEveryRank) {
  const int ranks = GetParam();
  // One chunk is 16384 floats here: counts below, at, across and far beyond it, and none.
  const std::vector<int64_t> counts = {1, 15, 16383, 16384, 16385, 100'003, 0, 540'123};
  std::string expected;
  for (int round = 0; round < 3; ++round) {
    for (int64_t count : counts) {
      std::vector<float> sum(static_cast<size_t>(count));
      for (int64_t i = 0; i < count; ++i) {
        float s = Value(0, i, round);
        for (int r = 1; r < ranks; ++r) s += Value(r, i, round);
        sum[size_t(i)] = s;
      }
      expected += Bits(sum) + "\n";
    }
  }
  ForkedRanks processes(ranks, {}, 1, [&](Communicator* comm) {
    std::string got;
    for (int round = 0; round < 3; ++round) {
      for (int64_t count : counts) {
        std::vector<float> data(static_cast<size_t>(count));
        for (int64_t i = 0; i < count; ++i) data[size_t(i)] = Value(comm->rank(), i, round);
        if (auto status = comm->AllReduceSum(data.data(), count, nullptr); !status.ok()) return std::string(status.message());
        got += Bits(data) + "\n";
      }
    }
    return got;
  });
  for (int r = 0; r < ranks; ++r) {
    const auto outcome = processes.Wait(r);
    EXPECT_TRUE(outcome.exited);
    EXPECT_EQ(outcome.output, expected) << "rank " << r;
  }
}

// A chunk is 16384 floats: parts at, across and beyond it, and none.
TEST_P(Sums, InPartsHaveTheBitsOfAnAllReduceAndAreGathered) {
  ForkedRanks processes(GetParam(), {}, 1, [&](Communicator* comm) -> std::string {
    for (const int64_t part : {1, 63, 16384, 50'001, 0}) {
      const int64_t count = part * comm->size();
      std::vector<float> whole(static_cast<size_t>(count));
      for (int64_t i = 0; i < count; ++i) whole[size_t(i)] = Value(comm->rank(), i, 1);
      std::vector<float> parts = whole;
      if (!comm->AllReduceSum(whole.data(), count, nullptr).ok() || !comm->ReduceScatterSum(parts.data(), part, nullptr).ok()) return "failed";
      const int64_t own = comm->rank() * part;
      if (!std::equal(parts.begin() + own, parts.begin() + own + part, whole.begin() + own)) return "wrong sums";
      for (int64_t i = 0; i < count; ++i) {
        if (i < own || i >= own + part) parts[size_t(i)] = -1;
      }
      std::vector<float> gathered(comm->rank() == 1 ? size_t(count) : 0);
      if (!comm->Gather(parts.data() + own, gathered.empty() ? nullptr : gathered.data(), part * 4, 1, nullptr).ok()) return "failed";
      if (!comm->AllGather(parts.data(), part * 4, nullptr).ok()) return "failed";
      if (parts != whole || (comm->rank() == 1 && gathered != whole)) return "wrong parts";
    }
    return "right";
  });
  for (int r = 0; r < GetParam(); ++r) EXPECT_EQ(processes.Wait(r).output, "right") << "rank " << r;
}

INSTANTIATE_TEST_SUITE_P(Ranks, Sums, ::testing::Values(2, 3, 4));

TEST(SharedMemory, BroadcastsFromAnyRootBetweenOtherCollectives) {
  const auto outcome_of = [](Communicator* comm) {
    std::string all;
    for (int root = 0; root < comm->size(); ++root) {
      std::string data(size_t(200'001), char('a' + comm->rank()));
      if (!comm->Broadcast(data.data(), int64_t(data.size()), root, nullptr).ok()) return std::string("failed");
      if (data != std::string(data.size(), char('a' + root))) return std::string("wrong bytes");
      if (!comm->Barrier().ok()) return std::string("failed");
      float one = 1;
      if (!comm->AllReduceSum(&one, 1, nullptr).ok() || one != float(comm->size())) return std::string("wrong sum");
      all += data[0];
    }
    return all;
  };
  ForkedRanks processes(3, {}, 1, outcome_of);
  for (int r = 0; r < 3; ++r) EXPECT_EQ(processes.Wait(r).output, "abc");
}

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

TEST(SharedMemory, NamesAKilledPeerAtOnce) {
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  ForkedRanks processes(3, {}, 1 << 20, [&](Communicator* comm) {
    comm->SetActivity("step 17");
    if (!comm->Barrier().ok()) return std::string("barrier failed");
    if (comm->rank() == 1) {
      const char byte = 1;
      if (write(ready[1], &byte, 1) != 1) return std::string("pipe");
      while (true) pause();
    }
    std::vector<float> data(540'123, 1.0f);
    const auto status = comm->AllReduceSum(data.data(), int64_t(data.size()), nullptr);
    if (ReasonOf(status) != v1::REASON_PEER_LOST) return std::string("not PEER_LOST");
    // A failed communicator stays failed.
    if (comm->Barrier() != status) return std::string("worked again");
    return std::string(status.message());
  });
  char byte;
  ASSERT_EQ(read(ready[0], &byte, 1), 1);
  const auto begin = Clock::System().Monotonic();
  // Not reaped: a zombie is as dead as one that is gone.
  kill(processes.pid(1), SIGKILL);
  for (int r : {0, 2}) {
    EXPECT_THAT(processes.Wait(r).output,
                AllOf(HasSubstr("all_reduce of 540,123 floats, step 17"),
                      HasSubstr("rank 1 (pid " + std::to_string(processes.pid(1)) + ", at step 17) has exited"),
                      Not(HasSubstr("; rank"))));
  }
  EXPECT_LT(Clock::System().Monotonic() - begin, std::chrono::seconds(5));
  close(ready[0]);
  close(ready[1]);
}

TEST(SharedMemory, NamesAFrozenPeerAndAPeerThatNeverCame) {
  CommunicatorOptions options;
  options.timeout = std::chrono::milliseconds(700);
  options.join_timeout = std::chrono::milliseconds(700);
  ForkedRanks processes(2, options, 1, [](Communicator* comm) {
    if (!comm->Barrier().ok()) return std::string("barrier failed");
    if (comm->rank() == 1) kill(getpid(), SIGSTOP);
    return std::string(comm->Barrier().message());
  });
  EXPECT_THAT(processes.Wait(0).output, HasSubstr("has shown no sign of life for"));
  // Nothing is said where it came before it was killed: then once more.
  std::string said;
  for (int i = 0; i < 20 && said.empty(); ++i) {
    ForkedRanks absent(2, options, 1, [](Communicator*) { return std::string(); });
    kill(absent.pid(1), SIGKILL);
    said = absent.Wait(0).output;
  }
  EXPECT_THAT(said, ::testing::AnyOf(HasSubstr("rank 1 has not joined within 0.7 s"), HasSubstr("has exited")));
}

TEST(SharedMemory, ToleratesABusyPeerUpToItsOwnLimit) {
  CommunicatorOptions options;
  options.timeout = std::chrono::milliseconds(600);
  options.busy_timeout = std::chrono::milliseconds(2000);
  int gate[2];
  ASSERT_EQ(pipe(gate), 0);
  ForkedRanks processes(2, options, 1, [&](Communicator* comm) {
    if (!comm->Barrier().ok()) return std::string("barrier failed");
    if (comm->rank() == 1) {
      char byte;   // busy: its signs of life go on
      if (read(gate[0], &byte, 1) != 1) return std::string("pipe");
    }
    return std::string(comm->Barrier().message());
  });
  EXPECT_THAT(processes.Wait(0).output, HasSubstr("is alive but has not come for 2 s"));
}

TEST(SharedMemory, NamesAPeerThatLeft) {
  ForkedRanks processes(2, {}, 1, [](Communicator* comm) {
    return comm->rank() == 1 ? std::string() : std::string(comm->Barrier().message());
  });
  EXPECT_THAT(processes.Wait(0).output, ::testing::AnyOf(HasSubstr("has left"), HasSubstr("has exited")));
}

TEST(SharedMemory, AbandonsWhenAsked) {
  std::atomic<bool> abandon{true};
  CommunicatorOptions options;
  options.size = 2;
  options.abandon = &abandon;
  const auto blob = MakeSharedMemoryRendezvous(options, "test", 1);
  ASSERT_TRUE(blob.ok());
  const auto joined = JoinSharedMemory(options, *blob);
  EXPECT_EQ(ReasonOf(joined.status()), v1::REASON_CANCELLED);
}

TEST(SharedMemory, RefusesMismatchedCollectives) {
  ForkedRanks processes(2, {}, 1, [](Communicator* comm) {
    float data[4] = {};
    const auto status = comm->rank() == 0 ? comm->AllReduceSum(data, 4, nullptr) : comm->Barrier();
    return std::string(status.message());
  });
  EXPECT_THAT(processes.Wait(0).output,
              AllOf(HasSubstr("rank 0 is in all_reduce of 4 floats but rank 1 in barrier"), HasSubstr("same collectives")));
}

TEST(SharedMemory, RefusesAForeignRendezvous) {
  CommunicatorOptions options;
  options.size = 2;
  options.rank = 1;
  EXPECT_FALSE(JoinSharedMemory(options, "hierad-shm-2:1:2:3").ok());
  EXPECT_EQ(ReasonOf(JoinSharedMemory(options, "hierad-shm-1:999999999:3:5").status()), v1::REASON_PEER_LOST);
}

TEST(Agreements, GiveEveryRankTheSameAnswer) {
  ForkedRanks processes(3, {}, 1, [](Communicator* comm) {
    const auto sum = SumOverRanks(comm, {0.1 * (comm->rank() + 1), 1});
    if (!sum.ok() || sum->first != 0.1 + 0.2 + 0.1 * 3 || sum->second != 3) return std::string("wrong sum");
    if (!*AnyRank(comm, comm->rank() == 2) || *AnyRank(comm, false)) return std::string("wrong any");
    if (!Agree(comm, absl::OkStatus()).ok()) return std::string("disagreed");
    const auto status = Agree(comm, comm->rank() == 0 ? absl::OkStatus() : ErrorOf(v1::REASON_DATA_ERROR, "bad file"));
    return v1::Reason_Name(ReasonOf(status)) + " " + std::string(status.message());
  });
  EXPECT_EQ(processes.Wait(0).output, "REASON_DATA_ERROR rank 1: bad file");
  EXPECT_EQ(processes.Wait(1).output, "REASON_DATA_ERROR bad file");
  EXPECT_EQ(processes.Wait(2).output, "REASON_DATA_ERROR rank 1: bad file");
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
