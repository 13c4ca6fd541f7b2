// Every rule about a JobSpec that does not need the machine: used by hierctl, by hierad on every submission (it trusts
// no client) and by the worker before it allocates.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "hierad/v1/job.pb.h"

namespace hierad {

// Problems as sentences that begin with the key's path and say the value seen, the value allowed and, for a size, the
// nearest legal ones. Empty: the job is legal. `spec` has its defaults filled in.
std::vector<std::string> ValidateJob(const v1::JobSpec& spec);

// The problems as one InvalidArgument (REASON_USER_ERROR), or OK.
absl::Status CheckJob(const v1::JobSpec& spec);

// batch_per_rank * ranks * accumulation.
int64_t EffectiveBatch(const v1::JobSpec& spec);
// Peak learning rate: lr, or blr * effective batch / 256.
double PeakLr(const v1::JobSpec& spec);

// step.mode, or what auto stands for: on a GPU fused, or graph_safe where tf32 or sdpa_backend ask for what fused has not;
// on a CPU optimized.
std::string ResolvedMode(const v1::StepSpec& step, bool gpu);
// Whether the job's ranks use a GPU, where there is one or there is none (resources.device auto). What is said of a job on any machine
// (its rules, its plan) is said for a machine with one.
bool UsesGpu(const v1::JobSpec& spec, bool there_is_one = true);

}  // namespace hierad
