#include "server/scheduler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>

namespace hierad {
namespace {

using testing::HasSubstr;
using Verdict = Scheduler::Verdict;

NodeSlots MakeNode(const std::string& name, v1::Slot::Kind kind, int slots, int busy = 0, bool connected = true) {
  NodeSlots node;
  node.name = name;
  node.connected = connected;
  for (int i = 0; i < slots; ++i) {
    v1::Slot slot;
    slot.set_id(name + "-" + std::to_string(i));
    slot.set_kind(kind);
    node.slots.push_back({slot, i < busy});
  }
  return node;
}
NodeSlots WithMemory(NodeSlots node, int64_t gib) {
  for (NodeSlots::Use& use : node.slots) use.slot.set_memory_bytes(gib << 30);
  return node;
}
NodeSlots Gpus(const std::string& name, int slots, int busy = 0, bool connected = true) { return MakeNode(name, v1::Slot::CUDA, slots, busy, connected); }
NodeSlots Cpus(const std::string& name, int slots, int busy = 0, bool connected = true) { return MakeNode(name, v1::Slot::CPU, slots, busy, connected); }
QueuedJob Ask(int ranks, const std::string& device = "auto", double gib = 0) {
  return {1, ranks, device, 0, static_cast<int64_t>(gib * (int64_t{1} << 30))};
}

TEST(Scheduler, AutoTakesGpusWhereThereAre) {
  EXPECT_EQ(Scheduler({Cpus("a", 4)}).KindFor("auto"), v1::Slot::CPU);
  EXPECT_EQ(Scheduler({Cpus("a", 4), Gpus("b", 1)}).KindFor("auto"), v1::Slot::CUDA);
  EXPECT_EQ(Scheduler({Cpus("a", 4), Gpus("b", 1, 0, false)}).KindFor("auto"), v1::Slot::CPU);
  EXPECT_EQ(Scheduler({Gpus("b", 1)}).KindFor("cpu"), v1::Slot::CPU);
}

TEST(Scheduler, PrefersOneNodeAndTheOneWithLeastLeftOver) {
  Scheduler scheduler({Gpus("big", 8), Gpus("small", 4), Gpus("tiny", 2)});
  const auto decision = scheduler.Consider(Ask(4));
  ASSERT_EQ(decision.verdict, Verdict::kPlaced);
  for (int r = 0; r < 4; ++r) {
    EXPECT_EQ(decision.places[r].node, "small");
    EXPECT_EQ(decision.places[r].local_rank, r);
    EXPECT_EQ(decision.places[r].local_world_size, 4);
  }
}

TEST(Scheduler, SpansNodesOnlyIfNeeded) {
  const auto decision = Scheduler({Gpus("a", 2), Gpus("b", 4)}).Consider(Ask(5));
  ASSERT_EQ(decision.verdict, Verdict::kPlaced);
  EXPECT_EQ(decision.places[3].node, "b");
  EXPECT_EQ(decision.places[4].node, "a");
  EXPECT_EQ(decision.places[4].local_rank, 0);
  EXPECT_EQ(decision.places[4].local_world_size, 1);
  EXPECT_EQ(decision.places[0].local_world_size, 4);

  const auto cpu = Scheduler({Cpus("a", 2), Cpus("b", 4)}).Consider(Ask(5));
  ASSERT_EQ(cpu.verdict, Verdict::kPlaced);   // CPU ranks reach each other by TCP
  EXPECT_EQ(cpu.places[4].node, "a");
  EXPECT_EQ(cpu.places[4].local_world_size, 1);
}

TEST(Scheduler, SaysWhyItWaits) {
  EXPECT_THAT(Scheduler({}).Consider(Ask(1)).why, HasSubstr("none has connected"));
  const auto busy = Scheduler({Gpus("a", 4, 3)}).Consider(Ask(2));
  EXPECT_EQ(busy.verdict, Verdict::kWaits);
  EXPECT_THAT(busy.why, testing::AllOf(HasSubstr("wants 2 GPU slots"), HasSubstr("free are 1 of 4")));
  const auto large = Scheduler({Gpus("a", 4)}).Consider(Ask(16));
  EXPECT_EQ(large.verdict, Verdict::kStepsAside);
  EXPECT_THAT(large.why, testing::AllOf(HasSubstr("wants 16 GPU slots"), HasSubstr("together have 4")));
  QueuedJob retry = Ask(1);
  retry.retry_in_ms = 1500;
  const auto later = Scheduler({Gpus("a", 4)}).Consider(retry);
  EXPECT_EQ(later.verdict, Verdict::kWaits);   // it keeps its place: nothing behind it may start
  EXPECT_THAT(later.why, HasSubstr("2 s"));
}

TEST(Scheduler, ARankGoesOnlyWhereItsPlanFits) {
  const std::vector<NodeSlots> nodes = {WithMemory(Gpus("small", 4), 8), WithMemory(Gpus("large", 1), 80)};
  const auto one = Scheduler(nodes).Consider(Ask(1, "auto", 9.1));
  ASSERT_EQ(one.verdict, Verdict::kPlaced);
  EXPECT_EQ(one.places[0].node, "large");
  EXPECT_EQ(Scheduler(nodes).Consider(Ask(1, "auto", 7)).places[0].node, "large");   // the least left over, as ever
  const auto two = Scheduler(nodes).Consider(Ask(2, "auto", 9.1));
  EXPECT_EQ(two.verdict, Verdict::kStepsAside);
  EXPECT_THAT(two.why, HasSubstr("needs 9.1 GiB of device memory a rank by its plan; the largest card has 80.0 GiB, and 1 card has room for one"));
  const auto never = Scheduler({WithMemory(Gpus("small", 4), 8)}).Consider(Ask(1, "auto", 9.1));
  EXPECT_EQ(never.verdict, Verdict::kStepsAside);
  EXPECT_THAT(never.why, testing::AllOf(HasSubstr("needs 9.1 GiB of device memory by its plan; the largest card has 8.0 GiB."), HasSubstr("batch_per_rank")));
  // A card that does not say what it has is tried.
  EXPECT_EQ(Scheduler({Gpus("mute", 1)}).Consider(Ask(1, "auto", 9.1)).verdict, Verdict::kPlaced);
}

TEST(Scheduler, AMixedNodeGivesOnlyTheCardsThatFit) {
  NodeSlots node = WithMemory(Gpus("n", 4), 8);
  node.slots[2].slot.set_memory_bytes(int64_t{80} << 30);
  Scheduler scheduler({node});
  const auto placed = scheduler.Consider(Ask(1, "cuda", 20));
  ASSERT_EQ(placed.verdict, Verdict::kPlaced);
  EXPECT_EQ(placed.places[0].slot.id(), "n-2");
  const auto waits = scheduler.Consider(Ask(1, "cuda", 20));   // the card is taken, yet it will be free again
  EXPECT_EQ(waits.verdict, Verdict::kWaits);
  EXPECT_THAT(waits.why, testing::AllOf(HasSubstr("free are 3 of 4"), HasSubstr("needs 20.0 GiB")));
  EXPECT_EQ(scheduler.Consider(Ask(3, "cuda", 8)).verdict, Verdict::kPlaced);
}

TEST(Scheduler, AFaultyCardIsAsIfItWereNotThere) {
  NodeSlots node = WithMemory(Gpus("n", 2), 8);
  node.slots[0].faulty = true;
  node.slots[0].slot.set_memory_bytes(int64_t{80} << 30);
  Scheduler scheduler({node});
  EXPECT_EQ(scheduler.KindFor("auto"), v1::Slot::CUDA) << "a job that would have it does not go to the CPU";
  const auto both = scheduler.Consider({.id = 1, .ranks = 2, .device = "cuda"});
  EXPECT_EQ(both.verdict, Verdict::kStepsAside);
  EXPECT_THAT(both.why, HasSubstr("together have 1; 1 more is out of use for a fault of its card (hierctl nodes). It waits"));
  const auto large = scheduler.Consider({.id = 2, .ranks = 1, .device = "cuda", .rank_bytes = int64_t{10} << 30});
  EXPECT_EQ(large.verdict, Verdict::kStepsAside);
  EXPECT_THAT(large.why, testing::AllOf(HasSubstr("the largest card has 8.0 GiB"), HasSubstr("out of use")));
  const auto one = scheduler.Consider({.id = 3, .ranks = 1, .device = "cuda"});
  ASSERT_EQ(one.verdict, Verdict::kPlaced);
  EXPECT_EQ(one.places[0].slot.id(), node.slots[1].slot.id());
  node.slots[1].faulty = true;
  EXPECT_EQ(Scheduler({node}).KindFor("auto"), v1::Slot::CUDA);
}

TEST(Scheduler, CpuRanksShareTheirNodesMemory) {
  // 4 slots of 2 GiB each: one rank may take all of it.
  const std::vector<NodeSlots> nodes = {WithMemory(Cpus("n", 4), 2)};
  EXPECT_EQ(Scheduler(nodes).Consider(Ask(1, "cpu", 7)).verdict, Verdict::kPlaced);
  const auto never = Scheduler(nodes).Consider(Ask(2, "cpu", 5));
  EXPECT_EQ(never.verdict, Verdict::kStepsAside);
  EXPECT_THAT(never.why, HasSubstr("needs 10.0 GiB of memory by its plan (2 ranks of 5.0 GiB); the largest node has 8.0 GiB"));
  // Over two nodes: as many on each as its memory holds, however many slots it has.
  const auto two = Scheduler({WithMemory(Cpus("a", 4), 2), WithMemory(Cpus("b", 4), 2)}).Consider(Ask(2, "cpu", 5));
  ASSERT_EQ(two.verdict, Verdict::kPlaced);
  EXPECT_NE(two.places[0].node, two.places[1].node);
  Scheduler scheduler(nodes);
  ASSERT_EQ(scheduler.Consider(Ask(1, "cpu", 5)).verdict, Verdict::kPlaced);
  const auto waits = scheduler.Consider(Ask(1, "cpu", 5));
  EXPECT_EQ(waits.verdict, Verdict::kWaits);
  EXPECT_THAT(waits.why, testing::AllOf(HasSubstr("free are 3 of 4"), HasSubstr("needs 5.0 GiB of memory")));
  EXPECT_EQ(scheduler.Consider(Ask(2, "cpu", 1.5)).verdict, Verdict::kPlaced);
}

TEST(Scheduler, NothingIsPlacedOnADisconnectedNode) {
  EXPECT_EQ(Scheduler({Gpus("a", 4, 0, false)}).Consider({1, 1, "cuda", 0, 0}).verdict, Verdict::kWaits);
}

// Random clusters and queues, against the promises themselves.
TEST(Scheduler, Properties) {
  std::mt19937 random(20261130);
  const auto pick = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  for (int round = 0; round < 3000; ++round) {
    std::vector<NodeSlots> nodes;
    std::map<std::string, bool> usable;   // slot id -> free and connected
    std::map<std::string, std::string> node_of;
    const int n = pick(0, 5);
    for (int i = 0; i < n; ++i) {
      const int slots = pick(0, 8);
      nodes.push_back(MakeNode("n" + std::to_string(i), pick(0, 1) ? v1::Slot::CUDA : v1::Slot::CPU, slots, pick(0, slots), pick(0, 4) > 0));
      for (const auto& use : nodes.back().slots) {
        usable[use.slot.id()] = !use.busy && nodes.back().connected;
        node_of[use.slot.id()] = nodes.back().name;
      }
    }
    Scheduler scheduler(nodes);
    std::set<std::string> taken;
    bool blocked = false;
    for (int j = 0; j < 12 && !blocked; ++j) {
      QueuedJob job{static_cast<uint64_t>(j), pick(1, 10), std::vector<std::string>{"auto", "cpu", "cuda"}[pick(0, 2)], 0, 0};
      const v1::Slot::Kind kind = scheduler.KindFor(job.device);
      std::map<std::string, int> free_by_node;
      int free = 0, most = 0;
      for (const auto& node : nodes) {
        for (const auto& use : node.slots) {
          if (use.slot.kind() != kind || !usable[use.slot.id()] || taken.count(use.slot.id())) continue;
          ++free;
          most = std::max(most, ++free_by_node[node.name]);
        }
      }
      const bool fits = free >= job.ranks;
      const auto decision = scheduler.Consider(job);
      ASSERT_EQ(decision.verdict == Verdict::kPlaced, fits) << decision.why;
      blocked = decision.verdict == Verdict::kWaits;
      if (!fits) {
        EXPECT_FALSE(decision.why.empty());
        EXPECT_TRUE(decision.places.empty());
        continue;
      }
      ASSERT_EQ(decision.places.size(), static_cast<size_t>(job.ranks));   // all or nothing
      std::map<std::string, std::set<int>> local;
      for (const Place& place : decision.places) {
        ASSERT_TRUE(usable.at(place.slot.id()));
        ASSERT_EQ(place.slot.kind(), kind);
        ASSERT_EQ(node_of.at(place.slot.id()), place.node);
        ASSERT_TRUE(taken.insert(place.slot.id()).second) << "given twice";
        ASSERT_TRUE(local[place.node].insert(place.local_rank).second);
      }
      if (most >= job.ranks) {
        EXPECT_EQ(local.size(), 1u);
      }
      for (const Place& place : decision.places) EXPECT_EQ(place.local_world_size, static_cast<int>(local[place.node].size()));
    }
  }
}

}  // namespace
}  // namespace hierad
