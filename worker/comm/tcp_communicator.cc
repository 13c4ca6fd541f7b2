// Collectives over TcpLinks. Every rank but 0 announces the collective and sends its part; rank 0 adds the parts in rank
// order, chunk by chunk, and sends each sum as soon as it is made, while the next chunk comes in. The additions are those
// of the shared-memory communicator in the same order, so the bits are the same. A rank's sums overwrite its own part: a
// sum comes back only after the part was sent.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <poll.h>
#include <sys/socket.h>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/clock.h"
#include "base/status.h"
#include "worker/comm/collective.h"
#include "worker/comm/communicator.h"
#include "worker/comm/tcp_links.h"

namespace hierad {
namespace {

constexpr int64_t kChunk = 256 << 10;    // bytes summed at a time: small beside a step, large beside a packet
constexpr int kLookMs = 50;              // between two looks at the peers
constexpr std::chrono::seconds kVerdictWait{1};

struct Announcement {
  uint64_t collective, tag;
};

// Bytes moved by one call that does not block; 0: none now; -1: the connection is gone.
int64_t Moved(ssize_t n) {
  if (n > 0) return n;
  return n < 0 && (errno == EAGAIN || errno == EINTR) ? 0 : -1;
}
int64_t SendSome(int fd, const void* from, int64_t bytes) { return Moved(send(fd, from, size_t(bytes), MSG_NOSIGNAL)); }
int64_t ReceiveSome(int fd, void* to, int64_t bytes) { return Moved(recv(fd, to, size_t(bytes), 0)); }

struct Job {
  Collective kind;
  char* data;
  int64_t bytes;
  int root;
  uint64_t tag;
  bool Gives(int rank) const { return kind == Collective::kAllReduce || (kind == Collective::kBroadcast && rank == root); }
  bool Takes(int rank) const { return kind == Collective::kAllReduce || (kind == Collective::kBroadcast && rank != root); }
};

class TcpCommunicator : public Communicator {
 public:
  TcpCommunicator(const CommunicatorOptions& options, std::unique_ptr<TcpLinks> links) : options_(options), links_(std::move(links)) {
    if (rank() == 0) parts_.resize(size_t(size()) * kChunk);
  }

  int rank() const override { return options_.rank; }
  int size() const override { return options_.size; }

  absl::Status AllReduceSum(float* data, int64_t count, void*) override {
    return Run(Collective::kAllReduce, reinterpret_cast<char*>(data), count, count * int64_t(sizeof(float)), 0);
  }
  absl::Status Broadcast(void* data, int64_t bytes, int root, void*) override {
    return Run(Collective::kBroadcast, static_cast<char*>(data), bytes, bytes, root);
  }
  absl::Status BroadcastHost(void* data, int64_t bytes, int root) override { return Broadcast(data, bytes, root, nullptr); }
  absl::Status Barrier() override { return Run(Collective::kBarrier, nullptr, 0, 0, 0); }

  std::string WaitingIn() const override { return activity_.WaitingIn(); }
  void SetActivity(const std::string& activity) override {
    links_->SetActivity(activity);
    activity_.SetActivity(activity);
  }

 private:
  // Rank 0's view of another rank within one collective.
  struct Leaf {
    Announcement said;
    int64_t said_bytes = 0;
    int64_t received = 0;       // of its part
    int64_t sent = 0;           // of the answer: one byte "go", then the result
  };

  // A failed communicator stays failed: its ranks no longer count alike.
  absl::Status Run(Collective kind, char* data, int64_t count, int64_t bytes, int root) {
    if (!failed_.ok()) return failed_;
    ++collective_;
    activity_.Enter(kind, count);
    begin_ = Clock::System().Monotonic();
    const Job job{kind, data, bytes, root, CollectiveTag(kind, count, root)};
    failed_ = rank() == 0 ? RunHub(job) : RunLeaf(job);
    activity_.Enter(Collective::kNone, 0);
    return failed_;
  }

  absl::Status Lost(const std::string& who) const {
    return ErrorOf(v1::REASON_PEER_LOST, absl::StrCat("rank ", rank(), " waiting in ", WaitingIn(), ": ", who));
  }
  absl::Status CheckAbandoned() const {
    if (options_.abandon == nullptr || !options_.abandon->load()) return absl::OkStatus();
    return ErrorOf(v1::REASON_CANCELLED, absl::StrCat("rank ", rank(), " gave up waiting in ", WaitingIn()));
  }
  std::chrono::nanoseconds Waited() const { return Clock::System().Monotonic() - begin_; }

  // --- ranks other than 0

  absl::Status RunLeaf(const Job& job) {
    const Announcement own{collective_, job.tag};
    const int64_t give = job.Gives(rank()) ? job.bytes : 0, take = job.Takes(rank()) ? job.bytes : 0;
    const int64_t head = sizeof own;
    int64_t sent = 0, received = -1;   // of the result; -1: not even "go"
    while (sent < head + give || received < take) {
      pollfd ready{links_->data(0), short(POLLIN | (sent < head + give ? POLLOUT : 0)), 0};
      if (poll(&ready, 1, kLookMs) <= 0) {
        RETURN_IF_ERROR(LookAtHub());
        continue;
      }
      if ((ready.revents & POLLOUT) != 0) {
        const int64_t n = sent < head ? SendSome(ready.fd, reinterpret_cast<const char*>(&own) + sent, head - sent)
                                      : SendSome(ready.fd, job.data + (sent - head), head + give - sent);
        if (n < 0) return HubGone();
        sent += n;
      }
      if ((ready.revents & ~POLLOUT) == 0) continue;
      char go;
      const int64_t n = received < 0 ? ReceiveSome(ready.fd, &go, 1)
                        : received < take ? ReceiveSome(ready.fd, job.data + received, take - received)
                                          : -1;
      if (n < 0) return HubGone();
      received += n;
      // Not before the part is sent: rank 0 cannot have summed what it has not got.
      if (job.kind == Collective::kAllReduce && received > std::max<int64_t>(0, sent - head)) {
        return absl::InternalError("rank 0 sent sums before it had all parts");
      }
    }
    return absl::OkStatus();
  }

  absl::Status LookAtHub() const {
    RETURN_IF_ERROR(CheckAbandoned());
    if (const std::string verdict = links_->AwaitVerdict({}); !verdict.empty()) return Lost(verdict);
    if (const std::string loss = links_->Loss(0, Waited()); !loss.empty()) return HubGone();
    return absl::OkStatus();
  }

  // Rank 0 may have left because another rank is lost: its word on that is on the way.
  absl::Status HubGone() const {
    const std::string verdict = links_->AwaitVerdict(kVerdictWait);
    if (!verdict.empty()) return Lost(verdict);
    const std::string loss = links_->Loss(0, Waited());
    return Lost(loss.empty() ? links_->Gone(0) : loss);
  }

  // --- rank 0

  absl::Status RunHub(const Job& job) {
    std::vector<Leaf> leaves(static_cast<size_t>(size()));
    bool agreed = false;
    int64_t ready = job.kind == Collective::kBroadcast && job.root == 0 ? job.bytes : 0;   // bytes of the result that stand
    const auto answer = [&](int r) { return agreed ? 1 + (job.Takes(r) ? ready : 0) : 0; };   // bytes that may be sent
    const auto wants = [&](int r) { return Wants(job, leaves[size_t(r)], r, ready); };
    const auto finished = [&](int r) {
      const Leaf& leaf = leaves[size_t(r)];
      return leaf.sent == 1 + (job.Takes(r) ? job.bytes : 0) && leaf.received == (job.Gives(r) ? job.bytes : 0);
    };
    std::vector<pollfd> fds;
    std::vector<int> who;
    while (true) {
      fds.clear();
      who.clear();
      for (int r = 1; r < size(); ++r) {
        if (finished(r)) continue;
        fds.push_back({links_->data(r), short((wants(r) > 0 ? POLLIN : POLLRDHUP) | (leaves[size_t(r)].sent < answer(r) ? POLLOUT : 0)), 0});
        who.push_back(r);
      }
      if (fds.empty()) return absl::OkStatus();
      if (poll(fds.data(), fds.size(), kLookMs) <= 0) {
        RETURN_IF_ERROR(CheckAbandoned());
        RETURN_IF_ERROR(LookAtLeaves(who, [&](int r) { return wants(r) > 0 || leaves[size_t(r)].sent < answer(r); }));
        continue;
      }
      for (size_t i = 0; i < fds.size(); ++i) {
        const int r = who[i];
        if ((fds[i].revents & POLLOUT) != 0 && !SendResult(job, r, answer(r), &leaves[size_t(r)])) return LeafGone(r);
        if ((fds[i].revents & ~POLLOUT) == 0) continue;
        if (wants(r) <= 0 || !Receive(job, r, wants(r), &leaves[size_t(r)])) return LeafGone(r);
      }
      if (!agreed) {
        agreed = true;
        for (int r = 1; r < size(); ++r) {
          const Leaf& leaf = leaves[size_t(r)];
          if (leaf.said_bytes < int64_t(sizeof leaf.said)) {
            agreed = false;
          } else if (leaf.said.collective != collective_ || leaf.said.tag != job.tag) {
            return Fail(absl::InternalError(MismatchText(0, WaitingIn(), r, leaf.said.tag)));
          }
        }
      }
      if (agreed) ready = Advance(job, leaves, ready);
    }
  }

  // Bytes that may come from the rank now: the rest of its announcement, or of its part as far as there is room.
  static int64_t Wants(const Job& job, const Leaf& leaf, int r, int64_t ready) {
    if (leaf.said_bytes < int64_t(sizeof leaf.said)) return int64_t(sizeof leaf.said) - leaf.said_bytes;
    if (!job.Gives(r)) return 0;
    const int64_t end = job.kind == Collective::kAllReduce ? std::min(job.bytes, ready + kChunk) : job.bytes;
    return end - leaf.received;
  }

  bool Receive(const Job& job, int r, int64_t most, Leaf* leaf) {
    const int fd = links_->data(r);
    if (leaf->said_bytes < int64_t(sizeof leaf->said)) {
      const int64_t n = ReceiveSome(fd, reinterpret_cast<char*>(&leaf->said) + leaf->said_bytes, most);
      leaf->said_bytes += std::max<int64_t>(0, n);
      return n >= 0;
    }
    // A sum stands in whole chunks, so a part's place in its buffer is what remains.
    char* to = job.kind == Collective::kAllReduce ? Part(r) + leaf->received % kChunk : job.data + leaf->received;
    const int64_t n = ReceiveSome(fd, to, most);
    leaf->received += std::max<int64_t>(0, n);
    return n >= 0;
  }

  bool SendResult(const Job& job, int r, int64_t allowed, Leaf* leaf) {
    const int64_t n = leaf->sent == 0 ? SendSome(links_->data(r), "g", 1)
                                      : SendSome(links_->data(r), job.data + (leaf->sent - 1), allowed - leaf->sent);
    leaf->sent += std::max<int64_t>(0, n);
    return n >= 0;
  }

  // The bytes of the result that stand now.
  int64_t Advance(const Job& job, const std::vector<Leaf>& leaves, int64_t ready) {
    if (job.kind == Collective::kBroadcast) return job.root == 0 ? job.bytes : leaves[size_t(job.root)].received;
    const int64_t end = std::min(job.bytes, ready + kChunk);
    for (int r = 1; r < size(); ++r) {
      if (leaves[size_t(r)].received < end) return ready;
    }
    float* sum = reinterpret_cast<float*>(job.data + ready);
    const int64_t n = (end - ready) / int64_t(sizeof(float));
    for (int r = 1; r < size(); ++r) {
      const float* theirs = reinterpret_cast<const float*>(Part(r));
      for (int64_t i = 0; i < n; ++i) sum[i] += theirs[i];
    }
    return end;
  }

  template <typename Awaited>
  absl::Status LookAtLeaves(const std::vector<int>& who, const Awaited& awaited) {
    std::vector<std::string> lost;
    for (const int r : who) {
      if (!awaited(r)) continue;
      if (std::string loss = links_->Loss(r, Waited()); !loss.empty()) lost.push_back(std::move(loss));
    }
    return lost.empty() ? absl::OkStatus() : Fail(Lost(absl::StrJoin(lost, "; ")), absl::StrJoin(lost, "; "));
  }
  absl::Status LeafGone(int r) {
    const std::string gone = links_->Gone(r);
    return Fail(Lost(gone), gone);
  }
  absl::Status Fail(const absl::Status& status, std::string verdict = "") {
    links_->SendVerdict(verdict.empty() ? std::string(status.message()) : verdict);
    return status;
  }

  char* Part(int r) { return parts_.data() + int64_t(r) * kChunk; }

  const CommunicatorOptions options_;
  const std::unique_ptr<TcpLinks> links_;
  std::vector<char> parts_;          // rank 0: one chunk of each rank
  uint64_t collective_ = 0;
  std::chrono::nanoseconds begin_{0};
  absl::Status failed_;
  CollectiveActivity activity_;
};

}  // namespace

absl::StatusOr<std::string> MakeTcpRendezvous(const std::string& address) { return TcpLinks::Listen(address); }

absl::StatusOr<std::unique_ptr<Communicator>> JoinTcp(const CommunicatorOptions& options, const std::string& rendezvous) {
  ASSIGN_OR_RETURN(auto links, TcpLinks::Join(options, rendezvous));
  return std::unique_ptr<Communicator>(std::make_unique<TcpCommunicator>(options, std::move(links)));
}

absl::StatusOr<std::unique_ptr<Communicator>> JoinCpu(const CommunicatorOptions& options, const std::string& rendezvous) {
  return rendezvous.rfind("hierad-tcp-", 0) == 0 ? JoinTcp(options, rendezvous) : JoinSharedMemory(options, rendezvous);
}

}  // namespace hierad
