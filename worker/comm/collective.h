// What CPU ranks say of a collective: its kind and size, as a tag that they compare and as words for messages.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>

namespace hierad {

enum class Collective : uint64_t { kNone, kAllReduce, kBroadcast, kBarrier, kReduceScatter, kAllGather };

// "all_reduce of 540,123 floats"; `count`: floats of all ranks' parts in reductions, bytes of a broadcast or of a part.
std::string DescribeCollective(Collective kind, int64_t count);
// Of a collective as another rank has announced it.
std::string DescribeTag(uint64_t tag);
uint64_t CollectiveTag(Collective kind, int64_t count, int root);

// "rank 0 is in all_reduce of 4 floats but rank 1 in barrier; ...", where `own` is WaitingIn's text.
std::string MismatchText(int rank, const std::string& own, int other, uint64_t other_tag);

// What a rank is at; asked by any thread.
class CollectiveActivity {
 public:
  void Enter(Collective kind, int64_t count);
  void SetActivity(const std::string& activity);
  // "all_reduce of 540,123 floats, step 17"; empty: in none.
  std::string WaitingIn() const;

 private:
  mutable std::mutex mutex_;
  Collective kind_ = Collective::kNone;
  int64_t count_ = 0;
  std::string activity_;
};

}  // namespace hierad
