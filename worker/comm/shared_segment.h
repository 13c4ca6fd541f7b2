// The memory that CPU ranks share: a block per rank (arrivals, signs of life) and two sets of one chunk per rank.
// One object per process and segment; `Sync` is called by one thread. Sleeping ranks wait on a futex after a short spin,
// because ranks may outnumber cores.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/fs.h"
#include "worker/comm/communicator.h"

namespace hierad {

class SharedSegment {
 public:
  // Makes the segment and returns the blob that names it; the descriptor stays open for rank 0's Join.
  static absl::StatusOr<std::string> Make(const CommunicatorOptions& options, const std::string& unique_name,
                                          int64_t max_bytes);
  static absl::StatusOr<std::unique_ptr<SharedSegment>> Join(const CommunicatorOptions& options,
                                                             const std::string& rendezvous);
  ~SharedSegment();

  int64_t chunk_bytes() const { return chunk_bytes_; }
  char* Slot(int set, int rank) const;
  // Returns when every rank has made as many calls of it as this one. `what`: the collective, for the message.
  absl::Status Sync(const std::function<std::string()>& what);

  // What each rank is about to do; two calls in turn, so that a rank one collective ahead does not overwrite it.
  void Publish(uint64_t collective, uint64_t tag);
  uint64_t Published(uint64_t collective, int rank) const;
  void SetActivity(const std::string& activity);

 private:
  struct Header;
  struct RankBlock;

  SharedSegment(const CommunicatorOptions& options, UniqueFd fd, void* memory, size_t bytes);
  RankBlock& Block(int rank) const;
  bool AllArrived(uint64_t target) const;
  absl::Status SleepUntilArrived(uint64_t target, const std::function<std::string()>& what);
  // Who of the missing is dead, has left or has been silent too long; OK: keep waiting.
  absl::Status CheckMissing(uint64_t target, std::chrono::nanoseconds waited, const std::function<std::string()>& what);
  std::string DescribeRank(int rank) const;
  bool Alive(int rank) const;
  void Beat();

  const CommunicatorOptions options_;
  UniqueFd fd_;
  void* const memory_;
  const size_t bytes_;
  Header* const header_;
  int64_t chunk_bytes_ = 0;
  uint64_t arrivals_ = 0;

  struct Sign {                    // when a peer's beat was last seen to change
    uint64_t beat = 0;
    std::chrono::nanoseconds at{0};
  };
  std::unique_ptr<Sign[]> signs_;

  std::mutex mutex_;
  std::condition_variable stop_changed_;
  bool stop_ = false;
  std::thread beat_;
};

}  // namespace hierad
