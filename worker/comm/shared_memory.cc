// Collectives over a SharedSegment. A chunk of an all-reduce: every rank copies its part in, each rank sums one slice over
// all ranks in rank order, every rank copies the whole out. Chunks alternate between two sets of slots: a rank that writes
// a set again has seen every rank arrive in the chunk between, that is, done with this one.
#include <algorithm>
#include <cstring>
#include <utility>

#include "base/status.h"
#include "worker/comm/collective.h"
#include "worker/comm/communicator.h"
#include "worker/comm/shared_segment.h"

namespace hierad {
namespace {

constexpr int64_t kSliceAlign = 16;      // floats: slices end on cache lines
constexpr int64_t kBlock = 4096;         // floats summed at a time: stays in the first-level cache

class SharedMemoryCommunicator : public Communicator {
 public:
  SharedMemoryCommunicator(const CommunicatorOptions& options, std::unique_ptr<SharedSegment> segment)
      : options_(options), segment_(std::move(segment)) {}

  int rank() const override { return options_.rank; }
  int size() const override { return options_.size; }

  absl::Status AllReduceSum(float* data, int64_t count, void*) override {
    const Entered entered(this, Collective::kAllReduce, count, 0);
    const int64_t step = segment_->chunk_bytes() / int64_t(sizeof(float));
    int64_t at = 0;
    do {
      RETURN_IF_ERROR(ReduceChunk(data + at, std::min(step, count - at), at == 0));
      at += step;
    } while (at < count);
    return absl::OkStatus();
  }

  absl::Status ReduceScatterSum(float* data, int64_t count, void*) override {
    const Entered entered(this, Collective::kReduceScatter, count * size(), 0);
    const int64_t step = segment_->chunk_bytes() / int64_t(sizeof(float)), whole = count * size();
    int64_t at = 0;
    do {
      RETURN_IF_ERROR(ScatterChunk(data, at, std::min(step, whole - at), count));
      at += step;
    } while (at < whole);
    return absl::OkStatus();
  }

  absl::Status AllGather(void* data, int64_t bytes, void*) override {
    const Entered entered(this, Collective::kAllGather, bytes, 0);
    const int64_t step = segment_->chunk_bytes();
    int64_t at = 0;
    do {
      const size_t n = size_t(std::min(step, bytes - at));
      const int set = NextSet();
      auto part = [&](int r) { return static_cast<char*>(data) + r * bytes + at; };
      if (n > 0) std::memcpy(segment_->Slot(set, rank()), part(rank()), n);
      RETURN_IF_ERROR(Sync(at == 0));
      for (int r = 0; r < size(); ++r) {
        if (r != rank() && n > 0) std::memcpy(part(r), segment_->Slot(set, r), n);
      }
      at += step;
    } while (at < bytes);
    return absl::OkStatus();
  }

  absl::Status Broadcast(void* data, int64_t bytes, int root, void*) override {
    const Entered entered(this, Collective::kBroadcast, bytes, root);
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
    const Entered entered(this, Collective::kBarrier, 0, 0);
    return Sync(true);
  }

  std::string WaitingIn() const override { return activity_.WaitingIn(); }

  void SetActivity(const std::string& activity) override {
    segment_->SetActivity(activity);
    activity_.SetActivity(activity);
  }

 private:
  // Marks the collective as the one that the rank is in, and tells the others.
  struct Entered {
    Entered(SharedMemoryCommunicator* owner, Collective kind, int64_t count, int root) : owner(owner) {
      owner->tag_ = CollectiveTag(kind, count, root);
      owner->segment_->Publish(++owner->collective_, owner->tag_);
      owner->activity_.Enter(kind, count);
    }
    ~Entered() { owner->activity_.Enter(Collective::kNone, 0); }
    SharedMemoryCommunicator* owner;
  };

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
      return absl::InternalError(MismatchText(rank(), WaitingIn(), r, theirs));
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

  // Elements [at, at + n) of all parts: every rank copies them in, and sums what of them lies in its own part of `count`.
  absl::Status ScatterChunk(float* data, int64_t at, int64_t n, int64_t count) {
    const int set = NextSet();
    if (n > 0) std::memcpy(segment_->Slot(set, rank()), data + at, size_t(n) * sizeof(float));
    RETURN_IF_ERROR(Sync(at == 0));
    const int64_t begin = std::max(at, count * rank()), end = std::min(at + n, count * (rank() + 1));
    for (int64_t first = begin; first < end; first += kBlock) {
      const int64_t some = std::min(kBlock, end - first);
      for (int r = 0; r < size(); ++r) {
        const float* theirs = reinterpret_cast<const float*>(segment_->Slot(set, r)) + (first - at);
        for (int64_t i = 0; i < some; ++i) data[first + i] = r == 0 ? theirs[i] : data[first + i] + theirs[i];
      }
    }
    return absl::OkStatus();
  }

  const CommunicatorOptions options_;
  const std::unique_ptr<SharedSegment> segment_;
  uint64_t collective_ = 0, chunk_ = 0, tag_ = 0;
  absl::Status failed_;
  CollectiveActivity activity_;
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
