// What every collective of CPU ranks promises, over shared memory and over TCP: the same bits, and the same words where a peer is lost.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <string>
#include <tuple>
#include <unistd.h>
#include <vector>

#include "base/clock.h"
#include "base/random.h"
#include "base/sha256.h"
#include "base/status.h"
#include "worker/comm/agree.h"
#include "worker/comm/communicator.h"
#include "worker/comm/forked_ranks.h"

namespace hierad {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::Not;

enum Transport { kSharedMemory, kLoopback };
int64_t BytesOf(Transport transport) { return transport == kLoopback ? ForkedRanks::kTcp : 1; }
std::string NameOf(Transport transport) { return transport == kLoopback ? "Tcp" : "SharedMemory"; }

// Values whose sum depends on the order of the additions.
float Value(int rank, int64_t i, int round) {
  const RandomStream stream{7, Draw::kSynthetic, uint32_t(round), uint64_t(rank)};
  const float u = stream.Uniform(uint64_t(i)) - 0.5f;
  return i % 3 == rank % 3 ? u * 1e6f : u;
}

std::string Bits(const std::vector<float>& v) {
  return Sha256Hex({reinterpret_cast<const char*>(v.data()), v.size() * sizeof(float)});
}

class Sums : public ::testing::TestWithParam<std::tuple<Transport, int>> {
 protected:
  const int64_t bytes_ = BytesOf(std::get<0>(GetParam()));
  const int ranks_ = std::get<1>(GetParam());
};

// A chunk is 16384 floats in shared memory, 65,536 over TCP: counts below, at, across and far beyond both, and none.
TEST_P(Sums, AreThoseOfRankOrderOnEveryRank) {
  const std::vector<int64_t> counts = {1, 15, 16383, 16384, 16385, 65'535, 65'536, 65'537, 0, 1'540'123};
  std::string expected;
  for (int round = 0; round < 2; ++round) {
    for (int64_t count : counts) {
      std::vector<float> sum(static_cast<size_t>(count));
      for (int64_t i = 0; i < count; ++i) {
        float s = Value(0, i, round);
        for (int r = 1; r < ranks_; ++r) s += Value(r, i, round);
        sum[size_t(i)] = s;
      }
      expected += Bits(sum) + "\n";
    }
  }
  ForkedRanks processes(ranks_, {}, bytes_, [&](Communicator* comm) {
    std::string got;
    for (int round = 0; round < 2; ++round) {
      for (int64_t count : counts) {
        std::vector<float> data(static_cast<size_t>(count));
        for (int64_t i = 0; i < count; ++i) data[size_t(i)] = Value(comm->rank(), i, round);
        if (auto status = comm->AllReduceSum(data.data(), count, nullptr); !status.ok()) return std::string(status.message());
        got += Bits(data) + "\n";
      }
    }
    return got;
  });
  for (int r = 0; r < ranks_; ++r) {
    const auto outcome = processes.Wait(r);
    EXPECT_TRUE(outcome.exited);
    EXPECT_EQ(outcome.output, expected) << "rank " << r;
  }
}

TEST_P(Sums, InPartsHaveTheBitsOfAnAllReduceAndAreGathered) {
  ForkedRanks processes(ranks_, {}, bytes_, [&](Communicator* comm) -> std::string {
    for (const int64_t part : {1, 63, 16384, 70'001, 0}) {
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
  for (int r = 0; r < ranks_; ++r) EXPECT_EQ(processes.Wait(r).output, "right") << "rank " << r;
}

INSTANTIATE_TEST_SUITE_P(Ranks, Sums, ::testing::Combine(::testing::Values(kSharedMemory, kLoopback), ::testing::Values(2, 3, 4, 5)),
                         [](const auto& info) { return NameOf(std::get<0>(info.param)) + std::to_string(std::get<1>(info.param)); });

class Collectives : public ::testing::TestWithParam<Transport> {
 protected:
  const int64_t bytes_ = BytesOf(GetParam());
};

INSTANTIATE_TEST_SUITE_P(Over, Collectives, ::testing::Values(kSharedMemory, kLoopback), [](const auto& info) { return NameOf(info.param); });

TEST_P(Collectives, BroadcastFromAnyRootBetweenOthers) {
  ForkedRanks processes(4, {}, bytes_, [](Communicator* comm) {
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
  for (int r = 0; r < 4; ++r) EXPECT_EQ(processes.Wait(r).output, "abcd") << "rank " << r;
}

// Each other rank is told which one is lost, in which collective, at which step; any one, rank 0 too. Not reaped: a zombie is as dead as
// one that is gone.
TEST_P(Collectives, NameAKilledPeerToEveryRankAtOnce) {
  for (const int victim : {2, 0}) {
    ForkedRanks processes(3, {}, bytes_, [&](Communicator* comm) {
      comm->SetActivity("step 17");
      // Some rounds, so that the activity has been told.
      const auto until = Clock::System().Monotonic() + std::chrono::seconds(1);
      for (float going = 1; going > 0;) {
        going = Clock::System().Monotonic() < until ? 1.0f : 0.0f;
        if (!comm->BroadcastHost(&going, sizeof going, 0).ok()) return std::string("failed early");
      }
      if (comm->rank() == victim) kill(getpid(), SIGKILL);
      std::vector<float> data(540'123, 1.0f);
      const auto status = comm->AllReduceSum(data.data(), int64_t(data.size()), nullptr);
      if (ReasonOf(status) != v1::REASON_PEER_LOST) return std::string("not PEER_LOST");
      // A failed communicator stays failed.
      if (comm->Barrier() != status) return std::string("worked again");
      return std::string(status.message());
    });
    const auto begin = Clock::System().Monotonic();
    for (int r = 0; r < 3; ++r) {
      if (r == victim) continue;
      EXPECT_THAT(processes.Wait(r).output,
                  AllOf(HasSubstr("all_reduce of 540,123 floats, step 17"),
                        HasSubstr("rank " + std::to_string(victim) + " (pid " + std::to_string(processes.pid(victim))),
                        HasSubstr(", at step 17) has exited"), Not(HasSubstr("; rank"))))
          << "rank " << r;
    }
    EXPECT_LT(Clock::System().Monotonic() - begin, std::chrono::seconds(6));
  }
}

TEST_P(Collectives, NameAFrozenPeerAndAPeerThatNeverCame) {
  CommunicatorOptions options;
  options.timeout = std::chrono::milliseconds(1500);
  options.join_timeout = std::chrono::milliseconds(1500);
  ForkedRanks processes(3, options, bytes_, [](Communicator* comm) {
    if (!comm->Barrier().ok()) return std::string("barrier failed");
    if (comm->rank() == 1) kill(getpid(), SIGSTOP);
    return std::string(comm->Barrier().message());
  });
  for (const int r : {0, 2}) {
    EXPECT_THAT(processes.Wait(r).output, AllOf(HasSubstr("rank 1 (pid "), HasSubstr("has shown no sign of life for"))) << "rank " << r;
  }
  // Nothing is said where it had joined before it was stopped: then once more.
  std::string said;
  for (int i = 0; i < 20 && said.empty(); ++i) {
    ForkedRanks absent(2, options, bytes_, [](Communicator*) { return std::string(); });
    kill(absent.pid(1), SIGSTOP);
    said = absent.Wait(0).output;
  }
  EXPECT_THAT(said, HasSubstr("rank 1 has not joined within 1.5 s"));
}

TEST_P(Collectives, TolerateABusyPeerUpToItsOwnLimit) {
  CommunicatorOptions options;
  options.timeout = std::chrono::milliseconds(1000);
  options.busy_timeout = std::chrono::milliseconds(2500);
  int gate[2];
  ASSERT_EQ(pipe(gate), 0);
  ForkedRanks processes(2, options, bytes_, [&](Communicator* comm) {
    if (!comm->Barrier().ok()) return std::string("barrier failed");
    if (comm->rank() == 1) {
      char byte;   // busy: its signs of life go on
      if (read(gate[0], &byte, 1) != 1) return std::string("pipe");
    }
    return std::string(comm->Barrier().message());
  });
  EXPECT_THAT(processes.Wait(0).output, HasSubstr("is alive but has not come for 2 s"));
}

TEST_P(Collectives, NameAPeerThatLeft) {
  ForkedRanks processes(2, {}, bytes_, [](Communicator* comm) {
    return comm->rank() == 1 ? std::string() : std::string(comm->Barrier().message());
  });
  EXPECT_THAT(processes.Wait(0).output, AnyOf(HasSubstr("has left"), HasSubstr("has exited")));
}

TEST_P(Collectives, RefuseWhatDoesNotFitTogether) {
  ForkedRanks processes(2, {}, bytes_, [](Communicator* comm) {
    float data[4] = {};
    const auto status = comm->rank() == 0 ? comm->AllReduceSum(data, 4, nullptr) : comm->Barrier();
    return std::string(status.message());
  });
  EXPECT_THAT(processes.Wait(0).output,
              AllOf(HasSubstr("rank 0 is in all_reduce of 4 floats but rank 1 in barrier"), HasSubstr("same collectives")));
}

TEST_P(Collectives, AbandonWhenAsked) {
  std::atomic<bool> abandon{true};
  CommunicatorOptions options;
  options.size = 2;
  options.abandon = &abandon;
  const auto blob = GetParam() == kLoopback ? MakeTcpRendezvous("127.0.0.1") : MakeSharedMemoryRendezvous(options, "test", 1);
  ASSERT_TRUE(blob.ok()) << blob.status();
  EXPECT_EQ(ReasonOf(JoinCpu(options, *blob).status()), v1::REASON_CANCELLED);
}

TEST_P(Collectives, AgreementsGiveEveryRankTheSameAnswer) {
  ForkedRanks processes(3, {}, bytes_, [](Communicator* comm) {
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

}  // namespace
}  // namespace hierad
