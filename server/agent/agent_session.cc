#include "server/agent/agent_session.h"

#include <grpcpp/grpcpp.h>

#include <condition_variable>
#include <deque>
#include <mutex>

#include "base/channel/certificates.h"
#include "base/channel/channel.h"
#include "base/limits.h"
#include "base/status.h"
#include "hierad/v1/agent.grpc.pb.h"

namespace hierad {
namespace {

constexpr size_t kOrdersWaiting = 1024;   // far more than a loop that is alive ever leaves; then the stream starts anew

std::shared_ptr<grpc::Channel> MakeChannel(const std::string& endpoint, const std::shared_ptr<grpc::ChannelCredentials>& credentials) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(int(limits::kGrpcMessageBytes));
  arguments.SetMaxSendMessageSize(int(limits::kGrpcMessageBytes));
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 20'000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10'000);
  // Each try connects for itself: back-off is the agent's, not the channel's.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return grpc::CreateCustomChannel(endpoint, credentials, arguments);
}

class GrpcSession : public AgentSession, private grpc::ClientBidiReactor<v1::AgentReport, v1::AgentOrders> {
 public:
  GrpcSession(const std::string& endpoint, const std::shared_ptr<grpc::ChannelCredentials>& credentials, std::function<void()> wake)
      : stub_(v1::AgentService::NewStub(MakeChannel(endpoint, credentials))), wake_(std::move(wake)) {
    stub_->async()->Session(&context_, this);
    AddHold();   // Offer starts writes from outside of reactions
    StartRead(&reading_);
    StartCall();
  }

  ~GrpcSession() override {
    context_.TryCancel();
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return closed_.has_value(); });
  }

  void Offer(const v1::AgentReport& report) override {
    std::lock_guard lock(mutex_);
    if (hold_removed_) return;
    waiting_ = report;
    if (!writing_active_) StartNextWrite();
  }

  std::optional<v1::AgentOrders> TakeOrders() override {
    std::lock_guard lock(mutex_);
    if (orders_.empty()) return std::nullopt;
    v1::AgentOrders orders = std::move(orders_.front());
    orders_.pop_front();
    return orders;
  }

  std::optional<absl::Status> Closed() override {
    std::lock_guard lock(mutex_);
    return closed_;
  }

 private:
  void StartNextWrite() {
    writing_ = *std::move(waiting_);
    waiting_.reset();
    writing_active_ = true;
    StartWrite(&writing_);
  }

  void OnReadDone(bool ok) override {
    bool drop = false;
    {
      std::lock_guard lock(mutex_);
      if (ok && orders_.size() < kOrdersWaiting) {
        orders_.push_back(std::move(reading_));
        reading_.Clear();
        StartRead(&reading_);
      } else {
        if (ok) context_.TryCancel();
        drop = !hold_removed_;
        hold_removed_ = true;
      }
    }
    if (drop) RemoveHold();
    wake_();
  }

  void OnWriteDone(bool ok) override {
    std::lock_guard lock(mutex_);
    writing_active_ = false;
    // A failed write is followed by a failed read, which closes.
    if (ok && waiting_ && !hold_removed_) StartNextWrite();
  }

  void OnDone(const grpc::Status& status) override {
    const std::function<void()> wake = wake_;
    std::lock_guard lock(mutex_);
    closed_ = status.ok() ? absl::UnavailableError("hierad has closed the stream")
                          : absl::Status(absl::StatusCode(status.error_code()), status.error_message());
    wake();
    done_.notify_all();   // under the lock: the object may be gone as soon as it is released
  }

  grpc::ClientContext context_;
  std::unique_ptr<v1::AgentService::Stub> stub_;
  const std::function<void()> wake_;
  std::mutex mutex_;
  std::condition_variable done_;
  v1::AgentOrders reading_;
  v1::AgentReport writing_;
  std::optional<v1::AgentReport> waiting_;
  bool writing_active_ = false, hold_removed_ = false;
  std::deque<v1::AgentOrders> orders_;
  std::optional<absl::Status> closed_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<AgentSession>> OpenAgentSession(const std::string& endpoint, const std::string& certificates,
                                                               std::function<void()> wake) {
  v1::Certificates own;
  if (!certificates.empty()) {
    ASSIGN_OR_RETURN(own, ReadCertificates(certificates));
  }
  ASSIGN_OR_RETURN(const auto credentials, CredentialsFor(endpoint, own));
  return std::make_unique<GrpcSession>(endpoint, credentials, std::move(wake));
}

}  // namespace hierad
