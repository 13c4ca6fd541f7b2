// ControlService: what clients ask. Each call runs on a thread of gRPC's, checks its input, asks the coordinator and
// waits. Streams (Watch, Logs) hold their thread, so there are at most kStreams of them.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <string>

#include "base/clock.h"
#include "hierad/v1/control.grpc.pb.h"
#include "server/authz.h"
#include "server/coordinator.h"
#include "server/history.h"

namespace hierad {

class ControlService : public v1::ControlService::Service {
 public:
  static constexpr int kStreams = 256;
  static constexpr size_t kGarbage = 1000, kGarbageProblems = 100;   // in one reply of CollectGarbage; of them, what cannot go

  // `history` may be null.
  ControlService(Coordinator* coordinator, const Authz* authz, const Clock* clock, const History* history, std::string version, std::string commit,
                 std::vector<std::string> allowed_roots)
      : coordinator_(coordinator), authz_(authz), clock_(clock), history_(history), version_(std::move(version)), commit_(std::move(commit)),
        allowed_roots_(std::move(allowed_roots)),
        started_ms_(clock->UnixMs()) {}

  // Ends the streams; before the server is shut down.
  void EndStreams();

  grpc::Status Submit(grpc::ServerContext* context, const v1::SubmitRequest* request, v1::SubmitReply* reply) override;
  grpc::Status Validate(grpc::ServerContext* context, const v1::ValidateRequest* request, v1::ValidateReply* reply) override;
  grpc::Status Get(grpc::ServerContext* context, const v1::GetRequest* request, v1::Job* reply) override;
  grpc::Status List(grpc::ServerContext* context, const v1::ListRequest* request, v1::ListReply* reply) override;
  grpc::Status Watch(grpc::ServerContext*, const v1::WatchRequest* request, grpc::ServerWriter<v1::WatchReply>* writer) override;
  grpc::Status Logs(grpc::ServerContext*, const v1::LogsRequest* request, grpc::ServerWriter<v1::LogsReply>* writer) override;
  grpc::Status Metrics(grpc::ServerContext*, const v1::MetricsRequest* request, grpc::ServerWriter<v1::MetricsReply>* writer) override;
  grpc::Status Cancel(grpc::ServerContext* context, const v1::CancelRequest* request, v1::Job* reply) override;
  grpc::Status Pause(grpc::ServerContext* context, const v1::PauseRequest* request, v1::Job* reply) override;
  grpc::Status Resume(grpc::ServerContext* context, const v1::ResumeRequest* request, v1::Job* reply) override;
  grpc::Status Checkpoint(grpc::ServerContext* context, const v1::CheckpointRequest* request, v1::Job* reply) override;
  grpc::Status SetLr(grpc::ServerContext* context, const v1::SetLrRequest* request, v1::Job* reply) override;
  grpc::Status SetLogLevel(grpc::ServerContext* context, const v1::SetLogLevelRequest* request, v1::Job* reply) override;
  grpc::Status DrainNode(grpc::ServerContext*, const v1::DrainNodeRequest* request, v1::NodesReply* reply) override;
  grpc::Status CollectGarbage(grpc::ServerContext* context, const v1::CollectGarbageRequest* request, v1::CollectGarbageReply* reply) override;
  grpc::Status ListCheckpoints(grpc::ServerContext* context, const v1::ListCheckpointsRequest* request, v1::ListCheckpointsReply* reply) override;
  grpc::Status Nodes(grpc::ServerContext*, const v1::NodesRequest* request, v1::NodesReply* reply) override;
  grpc::Status Version(grpc::ServerContext*, const v1::VersionRequest* request, v1::VersionReply* reply) override;

 private:
  class StreamSlot;
  bool WriteEarlier(const WatchView& view, int64_t after_step, grpc::ServerWriter<v1::WatchReply>* writer, int64_t* found);
  bool Rest(grpc::ServerContext* context, std::chrono::milliseconds wait);   // false: the stream is over
  void Remove(const std::optional<Account>& account, v1::Garbage* garbage);
  // Whether there is an account that the caller's jobs may run as.
  absl::Status CheckAccount(const Caller& caller) const;
  // With whose rights the paths of the caller's jobs are looked at, so that no answer tells what these may not see: the ranks', and
  // nobody's where there is no such account.
  std::optional<Account> RightsFor(const std::string& user) const;
  // For each method that names a job: OK, or why the caller may neither see nor change it. (Roles are checked before.)
  absl::Status CheckOwn(const grpc::ServerContext& context, uint64_t job_id) const;

  Coordinator* const coordinator_;
  const Authz* const authz_;
  const Clock* const clock_;
  const History* const history_;
  const std::string version_, commit_;
  const std::vector<std::string> allowed_roots_;
  const int64_t started_ms_;
  std::atomic<int> streams_{0};
  std::mutex mutex_;
  std::condition_variable ended_;
  bool ending_ = false;
};

}  // namespace hierad
