// The agent's stream to hierad. One object is one try: when it has closed, make another. All calls from one thread, none
// of them blocks (the destructor waits for gRPC to let go, which is short); `wake` is called from gRPC's threads whenever
// there are orders to take or the stream has closed.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "hierad/v1/agent.pb.h"

namespace hierad {

class AgentSession {
 public:
  virtual ~AgentSession() = default;
  // Sends the report; while an older one is still on its way only the newest waits.
  virtual void Offer(const v1::AgentReport& report) = 0;
  // The oldest orders not yet taken.
  virtual std::optional<v1::AgentOrders> TakeOrders() = 0;
  // Why the stream has closed; nullopt while it is open.
  virtual std::optional<absl::Status> Closed() = 0;
};

// `endpoint`: unix:/path, or host:port with the certificates in the folder, which are read anew.
absl::StatusOr<std::unique_ptr<AgentSession>> OpenAgentSession(const std::string& endpoint, const std::string& certificates,
                                                               std::function<void()> wake);

}  // namespace hierad
