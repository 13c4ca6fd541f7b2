// What agents and workers send is checked before any of it is used: sizes, ranges, text.
#pragma once

#include "absl/status/status.h"
#include "hierad/v1/agent.pb.h"
#include "hierad/v1/worker.pb.h"

namespace hierad {

absl::Status CheckAgentReport(const v1::AgentReport& report);
absl::Status CheckWorkerReport(const v1::WorkerReport& report);

}  // namespace hierad
