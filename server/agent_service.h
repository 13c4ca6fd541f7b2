// AgentService: each stream is a session of the coordinator. The coordinator outlives the server.
#pragma once

#include "hierad/v1/agent.grpc.pb.h"
#include "server/authz.h"
#include "server/coordinator.h"

namespace hierad {

class AgentService : public v1::AgentService::CallbackService {
 public:
  AgentService(Coordinator* coordinator, const Authz* authz) : coordinator_(coordinator), authz_(authz) {}
  grpc::ServerBidiReactor<v1::AgentReport, v1::AgentOrders>* Session(grpc::CallbackServerContext* context) override;

 private:
  Coordinator* const coordinator_;
  const Authz* const authz_;
};

}  // namespace hierad
