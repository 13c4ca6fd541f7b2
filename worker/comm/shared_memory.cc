// Collectives over a SharedSegment. A chunk of an all-reduce: every rank copies its part in, each rank sums one slice over
// all ranks in rank order, every rank copies the whole out. Chunks alternate between two sets of slots: a rank that writes
// a set again has seen every rank arrive in the chunk between, that is, done with this one.
#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "worker/comm/communicator.h"
#include "worker/comm/shared_segment.h"

namespace hierad {
namespace {

constexpr int64_t kSliceAlign = 16;      // floats: slices end on cache lines
constexpr int64_t kBlock = 4096;         // floats summed at a time: stays in the first-level cache

enum class Kind : uint64_t { kNone, kAllReduce, kBroadcast, kBarrier };

std::string Grouped(int64_t n) {
  const std::string digits = absl::StrCat(n);
  std::string grouped;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) grouped += ',';
    grouped += digits[i];
  }
  return grouped;
}

std::string Describe(Kind kind, int64_t count) {
  switch (kind) {
    case Kind::kNone: return "";
    case Kind::kAllReduce: return absl::StrCat("all_reduce of ", Grouped(count), " floats");
    case Kind::kBroadcast: return absl::StrCat("broadcast of ", Grouped(count), " bytes");
    case Kind::kBarrier: return "barrier";
  }
  return "";
}

uint64_t Tag(Kind kind, int64_t count, int root) { return uint64_t(kind) << 60 | uint64_t(root) << 48 | uint64_t(count); }

class SharedMemoryCommunicator : public Communicator {
 public:
  SharedMemoryCommunicator(const CommunicatorOptions& options, std::unique_ptr<SharedSegment> segment)
      : options_(options), segment_(std::move(segment)) {}

  int rank() const override { return options_.rank; }
  int size() const override { return options_.size; }

  absl::Status AllReduceSum(float* data, int64_t count, void*) override {
    const Entered entered(this, Kind::kAllReduce, count, 0);
    const int64_t step = segment_->chunk_bytes() / int64_t(sizeof(float));
    int64_t at = 0;
    do {
      RETURN_IF_ERROR(ReduceChunk(data + at, std::min(step, count - at), at == 0));
      at += step;
    } while (at < count);
    return absl::OkStatus();
  }

  absl::Status Broadcast(void* data, int64_t bytes, int root, void*) override {
    const Entered entered(this, Kind::kBroadcast, bytes, root);
    const int64_t step = segment_->chunk_bytes();
    int64_t at = 0;
    do {
      const size_t n = size_t(std::min(step, bytes - at));
      char* slot = segment_->Slot(NextSet(), root);
      if (rank() == root && n > 0) std::memcpy(slot, static_cast<char*>(data) + at, n);
      RETURN_IF_ERROR(Sync(at == 0));
      if (rank() != root && n > 0) std::memcpy(static_cast<char*>(data) + at, slot, n);
      at += step;
    } while (at < bytes);
    return absl::OkStatus();
  }

  absl::Status BroadcastHost(void* data, int64_t bytes, int root) override { return Broadcast(data, bytes, root, nullptr); }

  absl::Status Barrier() override {
    const Entered entered(this, Kind::kBarrier, 0, 0);
    return Sync(true);
  }

  std::string WaitingIn() const override {
    std::lock_guard lock(mutex_);
    if (kind_ == Kind::kNone) return "";
    return absl::StrCat(Describe(kind_, count_), activity_.empty() ? "" : ", ", activity_);
  }

  void SetActivity(const std::string& activity) override {
    segment_->SetActivity(activity);
    std::lock_guard lock(mutex_);
    activity_ = activity;
  }

 private:
  // Marks the collective as the one that the rank is in, and tells the others.
  struct Entered {
    Entered(SharedMemoryCommunicator* owner, Kind kind, int64_t count, int root) : owner(owner) {
      owner->tag_ = Tag(kind, count, root);
      owner->segment_->Publish(++owner->collective_, owner->tag_);
      owner->Set(kind, count);
    }
    ~Entered() { owner->Set(Kind::kNone, 0); }
    SharedMemoryCommunicator* owner;
  };

  void Set(Kind kind, int64_t count) {
    std::lock_guard lock(mutex_);
    kind_ = kind;
    count_ = count;
  }

  int NextSet() { return int(chunk_++ & 1); }

  // A failed communicator stays failed: its ranks no longer count alike.
  absl::Status Sync(bool first_of_collective) {
    if (!failed_.ok()) return failed_;
    failed_ = segment_->Sync([this] { return WaitingIn(); });
    if (failed_.ok() && first_of_collective) failed_ = CheckSameCollective();
    return failed_;
  }

  absl::Status CheckSameCollective() const {
    for (int r = 0; r < size(); ++r) {
      const uint64_t theirs = segment_->Published(collective_, r);
      if (theirs == tag_) continue;
      return absl::InternalError(absl::StrCat(
          "rank ", rank(), " is in ", WaitingIn(), " but rank ", r, " in ",
          Describe(Kind(theirs >> 60), int64_t(theirs & ((uint64_t{1} << 48) - 1))), "; all ranks must call the same collectives"));
    }
    return absl::OkStatus();
  }

  absl::Status ReduceChunk(float* data, int64_t count, bool first) {
    const int set = NextSet();
    const size_t bytes = size_t(count) * sizeof(float);
    if (bytes > 0) std::memcpy(segment_->Slot(set, rank()), data, bytes);
    RETURN_IF_ERROR(Sync(first));
    const int64_t slice = ((count + size() - 1) / size() + kSliceAlign - 1) / kSliceAlign * kSliceAlign;
    const int64_t end = std::min(count, slice * (rank() + 1));
    float* sum = reinterpret_cast<float*>(segment_->Slot(set, 0));
    for (int64_t at = std::min(count, slice * rank()); at < end; at += kBlock) {
      const int64_t n = std::min(kBlock, end - at);
      for (int r = 1; r < size(); ++r) {
        const float* theirs = reinterpret_cast<const float*>(segment_->Slot(set, r)) + at;
        for (int64_t i = 0; i < n; ++i) sum[at + i] += theirs[i];
      }
    }
    RETURN_IF_ERROR(Sync(false));
    if (bytes > 0) std::memcpy(data, sum, bytes);
    return absl::OkStatus();
  }

  const CommunicatorOptions options_;
  const std::unique_ptr<SharedSegment> segment_;
  uint64_t collective_ = 0, chunk_ = 0, tag_ = 0;
  absl::Status failed_;

  mutable std::mutex mutex_;   // of the rest
  Kind kind_ = Kind::kNone;
  int64_t count_ = 0;
  std::string activity_;
};

}  // namespace

absl::StatusOr<std::string> MakeSharedMemoryRendezvous(const CommunicatorOptions& options, const std::string& unique_name,
                                                       int64_t max_bytes) {
  return SharedSegment::Make(options, unique_name, max_bytes);
}

absl::StatusOr<std::unique_ptr<Communicator>> JoinSharedMemory(const CommunicatorOptions& options,
                                                               const std::string& rendezvous) {
  ASSIGN_OR_RETURN(auto segment, SharedSegment::Join(options, rendezvous));
  return std::unique_ptr<Communicator>(std::make_unique<SharedMemoryCommunicator>(options, std::move(segment)));
}

}  // namespace hierad
