// The process around a trainer: signals, log, threads, the assignment, the exit code. Free of torch: the engine is given.
#pragma once

#include <chrono>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "worker/trainer.h"

namespace hierad {

// The engine's parts; give_up is filled in.
using MakeParts = std::function<TrainerParts(const TrainerOptions& options)>;

// SIGTERM, SIGINT and SIGUSR1 ask for an end after the step under way; no memory left is an exit of its class.
void SetUpWorkerProcess();

// One rank of an attempt, as the agent ordered it on descriptor `fd`. Leaves the process; returns (an exit code) only where
// it could not begin. `start`: of the process.
int RunAssigned(int fd, char** argv, std::chrono::nanoseconds start, const MakeParts& make_parts);

// A job of one rank without hierad.
int RunLocal(const std::string& job, const std::string& run_folder, char** argv, std::chrono::nanoseconds start,
             const MakeParts& make_parts);

// Says why on stderr; the exit code of wrong usage.
int RefuseUsage(const absl::Status& status);

}  // namespace hierad
