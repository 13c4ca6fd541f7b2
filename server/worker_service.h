// WorkerService: each stream is a session of the coordinator. The coordinator outlives the server.
#pragma once

#include "hierad/v1/worker.grpc.pb.h"
#include "server/coordinator.h"

namespace hierad {

class WorkerService : public v1::WorkerService::CallbackService {
 public:
  explicit WorkerService(Coordinator* coordinator) : coordinator_(coordinator) {}
  grpc::ServerBidiReactor<v1::WorkerReport, v1::WorkerOrders>* Session(grpc::CallbackServerContext* context) override;

 private:
  Coordinator* const coordinator_;
};

}  // namespace hierad
