// hierctl's way to hierad: a gRPC channel to a Unix socket or to host:port, and errors as sentences.
#pragma once

#include <grpcpp/client_context.h>
#include <grpcpp/security/credentials.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "hierad/v1/control.grpc.pb.h"

namespace hierad {

// Answers are at hand in hierad; longer means that something is stuck.
inline constexpr std::chrono::seconds kCallTimeout{15};

// Where hierad may listen when nothing is said: the service's socket, then those that hierad makes when a person starts it.
std::vector<std::string> DefaultSockets();
// The first of them that answers, else the first that exists, else the service's.
std::string DefaultServer();

// "unix:/path", "/path" (the same) or "host:port", as gRPC wants it; InvalidArgument: none of these.
absl::StatusOr<std::string> ServerTarget(const std::string& address);

// Where the certificates for host:port are: HIERAD_CERTIFICATES, else ~/.config/hierad.
std::string CertificatesFolder();

class Connection {
 public:
  using Stub = v1::ControlService::Stub;

  // Connects at the first call. `address` empty: DefaultServer().
  static absl::StatusOr<std::unique_ptr<Connection>> Open(const std::string& address);

  // One request, one reply.
  template <typename Request, typename Reply>
  absl::StatusOr<Reply> Call(grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Reply*),
                             const Request& request, std::chrono::nanoseconds timeout = kCallTimeout) {
    grpc::ClientContext context;
    SetDeadline(&context, timeout);
    Reply reply;
    const grpc::Status status = (stub_.get()->*method)(&context, request, &reply);
    if (!status.ok()) return ErrorFrom(status);
    return reply;
  }

  Stub& stub() { return *stub_; }
  const std::string& target() const { return target_; }
  static void SetDeadline(grpc::ClientContext* context, std::chrono::nanoseconds timeout);

  // Unavailable and DeadlineExceeded say which address was tried and what to check.
  absl::Status ErrorFrom(const grpc::Status& status) const;

 private:
  Connection(std::string target, bool guessed, const std::shared_ptr<grpc::ChannelCredentials>& credentials);

  std::string target_;
  bool guessed_;
  std::unique_ptr<Stub> stub_;
};

}  // namespace hierad
