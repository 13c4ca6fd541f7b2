// The gRPC server: control, agents, workers, health and reflection, on a unix socket and, if asked for, on a TCP port that
// speaks mutual TLS only; its certificates are read again when their files change. Authz is asked before every call.
// Limits of limits.h on every message, keepalive from this side too.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/agent_service.h"
#include "server/authz.h"
#include "server/control_service.h"
#include "server/peer_identity.h"
#include "server/worker_service.h"

namespace hierad {

struct RpcServerOptions {
  std::string listen;         // unix:/path
  std::string tcp;            // host:port; empty: none
  std::string version, commit;
  const History* history = nullptr;   // outlives the server; none: no job has steps
  std::string owner;          // the user that hierad runs as
  std::string certificates;   // folder, for tcp
  std::string access = "owner";   // who may open the unix socket: owner, group, everyone
  std::string access_group;
  std::vector<std::string> allowed_roots;   // of jobs' paths; empty: anywhere
};

class RpcServer {
 public:
  // The coordinator outlives the server, and its loop must run until Stop has returned.
  static absl::StatusOr<std::unique_ptr<RpcServer>> Start(const RpcServerOptions& options, Coordinator* coordinator, const Clock* clock);
  ~RpcServer();
  void Stop();   // ends streams, waits for calls under way
  // What a process of this user on this machine may on the unix socket; no roles: it cannot open it. For other ways in.
  Caller CallerOfUser(uid_t uid) const;

 private:
  RpcServer(const RpcServerOptions& options, std::unique_ptr<PeerIdentity> peers, Coordinator* coordinator, const Clock* clock);
  const std::unique_ptr<PeerIdentity> peers_;   // null: the socket is private
  const Authz authz_;
  gid_t group_ = static_cast<gid_t>(-1);   // whose members alone may open the socket; -1: not asked
  ControlService control_;
  AgentService agents_;
  WorkerService workers_;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace hierad
