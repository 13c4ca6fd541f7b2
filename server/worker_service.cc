#include "server/worker_service.h"

#include "server/session_stream.h"

namespace hierad {

grpc::ServerBidiReactor<v1::WorkerReport, v1::WorkerOrders>* WorkerService::Session(grpc::CallbackServerContext*) {
  Coordinator* const c = coordinator_;
  return new SessionStream<v1::WorkerReport, v1::WorkerOrders, WorkerLink>({
      [c](std::shared_ptr<WorkerLink> link) { return c->OpenWorker(std::move(link)); },
      [c](uint64_t session, v1::WorkerReport report, std::function<void()> done) { c->ReportWorker(session, std::move(report), std::move(done)); },
      [c](uint64_t session) { c->CloseWorker(session); }});
}

}  // namespace hierad
