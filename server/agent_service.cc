#include "server/agent_service.h"

#include "server/session_stream.h"

namespace hierad {

grpc::ServerBidiReactor<v1::AgentReport, v1::AgentOrders>* AgentService::Session(grpc::CallbackServerContext* context) {
  Coordinator* const c = coordinator_;
  // Roles were checked before; a certificate binds its agent to one node.
  auto caller = authz_->CallerOf(*context);
  const std::string node = caller.ok() && caller->bound ? caller->name : "";
  return new SessionStream<v1::AgentReport, v1::AgentOrders, AgentLink>({
      [c, node](std::shared_ptr<AgentLink> link) { return c->OpenAgent(std::move(link), node); },
      [c](uint64_t session, v1::AgentReport report, std::function<void()> done) { c->ReportAgent(session, std::move(report), std::move(done)); },
      [c](uint64_t session) { c->CloseAgent(session); }});
}

}  // namespace hierad
