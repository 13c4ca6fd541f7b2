// What the agent sends of its ranks' logs to a hierad that does not share its storage: each piece that hierad's orders ask for, once,
// and again in every report until they ask no more. Files are read on a thread of its own: a disk that hangs holds nothing up.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

#include "base/account.h"
#include "hierad/v1/agent.pb.h"

namespace hierad {

// The piece that `wanted` names (base/attempt_log.h), read with the rights of the rank's account.
v1::LogPiece ReadLogPiece(const v1::LogWanted& wanted, const RankRights& rights);

class LogReader {
 public:
  // `ready`: a piece is there; called on the reader's thread.
  LogReader(RankRights rights, std::function<void()> ready);
  ~LogReader();

  void Want(const v1::AgentOrders& orders);       // all that is asked for now
  void AddPieces(v1::AgentReport* report);        // those that are there

 private:
  void Run();

  const RankRights rights_;
  const std::function<void()> ready_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<uint64_t, v1::LogWanted> wanted_;      // by id; guarded by mutex_, as all below
  std::map<uint64_t, v1::LogPiece> pieces_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace hierad
