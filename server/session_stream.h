// The server's end of a session: a bidirectional stream of whole states. Reads one report at a time (the next only after
// the last was taken in, so nothing piles up) and writes the newest orders (an older one not yet written is replaced).
// The stream deletes itself when gRPC is done with it; the link outlives it and then does nothing.
#pragma once

#include <grpcpp/grpcpp.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>

#include "server/live_state.h"
#include "server/rpc_status.h"

namespace hierad {

template <typename Report, typename Orders, typename LinkBase>
class SessionStream : public grpc::ServerBidiReactor<Report, Orders> {
 public:
  struct Hooks {
    std::function<uint64_t(std::shared_ptr<LinkBase>)> open;
    std::function<void(uint64_t, Report, std::function<void()>)> report;
    std::function<void(uint64_t)> close;
  };

  explicit SessionStream(Hooks hooks) : hooks_(std::move(hooks)), link_(std::make_shared<Link>(this)) {
    session_ = hooks_.open(link_);
    link_->Read();
  }

  void OnReadDone(bool ok) override {
    if (!ok) {
      link_->Close(absl::OkStatus());
      return;
    }
    hooks_.report(session_, std::move(report_), [link = link_] { link->Read(); });
  }
  void OnWriteDone(bool ok) override { link_->Written(ok); }
  void OnCancel() override { link_->Close(absl::CancelledError("the stream was cancelled")); }
  void OnDone() override {
    link_->Detach();
    hooks_.close(session_);
    delete this;
  }

 private:
  class Link : public LinkBase {
   public:
    explicit Link(SessionStream* stream) : stream_(stream) {}

    void Send(const Orders& orders) override {
      std::lock_guard lock(mutex_);
      if (stream_ == nullptr || closing_) return;
      next_ = orders;
      if (!writing_) WriteNext();
    }
    void Close(const absl::Status& status) override {
      std::lock_guard lock(mutex_);
      if (closing_) return;
      closing_ = status;
      if (!writing_) Finish();
    }
    void Read() {
      std::lock_guard lock(mutex_);
      if (stream_ == nullptr || finished_) return;
      stream_->report_.Clear();
      stream_->StartRead(&stream_->report_);
    }
    void Written(bool ok) {
      std::lock_guard lock(mutex_);
      writing_ = false;
      if (ok && next_) {
        WriteNext();
      } else if (closing_) {
        Finish();
      }
    }
    void Detach() {
      std::lock_guard lock(mutex_);
      stream_ = nullptr;
    }

   private:
    void WriteNext() {
      stream_->orders_ = *std::move(next_);
      next_.reset();
      writing_ = true;
      stream_->StartWrite(&stream_->orders_);
    }
    void Finish() {
      if (stream_ == nullptr || finished_) return;
      finished_ = true;
      stream_->Finish(ToRpc(*closing_));
    }

    std::mutex mutex_;
    SessionStream* stream_;
    std::optional<Orders> next_;
    std::optional<absl::Status> closing_;
    bool writing_ = false, finished_ = false;
  };

  const Hooks hooks_;
  const std::shared_ptr<Link> link_;
  uint64_t session_ = 0;
  Report report_;
  Orders orders_;
};

}  // namespace hierad
