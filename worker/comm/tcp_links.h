// The connections of one gang over TCP: a star with rank 0 in the middle, two connections per other rank. `data` carries
// the collectives; the control connection carries signs of life, so that a rank that computes for long is told from one
// that is gone, and rank 0's verdict on a lost rank. Nothing is encrypted: like NCCL's, this traffic belongs on a network
// of one's own. Whoever joins must know the token of the rendezvous, which comes by hierad's session.
//
// One object per process; its own thread keeps the control connections, all else is called by the communicator's thread.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/fs.h"
#include "worker/comm/communicator.h"

namespace hierad {

class TcpLinks {
 public:
  // Rank 0: listens at `address` on a port of the system's choice; the blob names both. Join in the same process.
  static absl::StatusOr<std::string> Listen(const std::string& address);
  static absl::StatusOr<std::unique_ptr<TcpLinks>> Join(const CommunicatorOptions& options, const std::string& rendezvous);
  ~TcpLinks();

  // The data connection to `rank` (of rank 0; the others have one to rank 0 only). Never blocks.
  int data(int rank) const { return links_[size_t(rank)].data.get(); }
  void SetActivity(const std::string& activity);

  // Why `rank`, waited for so long, is to be given up; empty: it is not.
  std::string Loss(int rank, std::chrono::nanoseconds waited) const;
  // The words of one whose connection has closed.
  std::string Gone(int rank) const;
  // Rank 0: tells the others why the gang has failed.
  void SendVerdict(const std::string& message);
  // What rank 0 has said so; empty: nothing, for as long as `wait`.
  std::string AwaitVerdict(std::chrono::nanoseconds wait) const;

 private:
  struct Message;
  struct Link {
    UniqueFd data, control;
    int pid = 0;
    std::string where;               // address of the other end
    // Below: under mutex_.
    std::string activity;
    std::chrono::nanoseconds seen{0};
    bool closed = false;
    std::string in, out;             // parts of control messages
  };

  explicit TcpLinks(const CommunicatorOptions& options);
  absl::Status Accept(UniqueFd listener, const std::string& token);
  absl::Status Connect(const std::string& host, int port, const std::string& token);
  absl::StatusOr<UniqueFd> Dial(const std::string& host, int port, const std::string& token, uint32_t channel,
                                std::chrono::nanoseconds deadline) const;
  absl::Status Abandoned(const std::string& what) const;
  std::string MissingAtJoin() const;
  void Run();
  void Send(Link* link, uint32_t kind, const std::string& text);
  void Read(Link* link);
  void Flush(Link* link);
  std::string Describe(int rank) const;

  const CommunicatorOptions options_;
  std::vector<Link> links_;          // by rank; without a control connection: oneself, or of no concern
  UniqueFd wake_;
  mutable std::mutex mutex_;
  mutable std::condition_variable said_;
  std::string activity_, verdict_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace hierad
