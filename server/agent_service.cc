#include "server/agent_service.h"

#include "server/session_stream.h"

namespace hierad {

grpc::ServerBidiReactor<v1::AgentReport, v1::AgentOrders>* AgentService::Session(grpc::CallbackServerContext*) {
  Coordinator* const c = coordinator_;
  return new SessionStream<v1::AgentReport, v1::AgentOrders, AgentLink>({
      [c](std::shared_ptr<AgentLink> link) { return c->OpenAgent(std::move(link)); },
      [c](uint64_t session, v1::AgentReport report, std::function<void()> done) { c->ReportAgent(session, std::move(report), std::move(done)); },
      [c](uint64_t session) { c->CloseAgent(session); }});
}

}  // namespace hierad
