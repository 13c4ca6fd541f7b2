// One operation of a plan on the CPU: the plain kernels of worker/kernels/reference at the plan's addresses. The
// device's only entry; its sibling on the GPU takes a stream besides.
#pragma once

#include "worker/step/fused_addresses.h"

namespace hierad {

// `op` belongs to `addresses.plan`. Runs on the calling thread and returns when done.
void RunOpOnCpu(const Op& op, const Addresses& addresses);

// What is not an operation of the plan: the compute copy from the master parameters, after they were loaded.
void RefreshComputeCopyOnCpu(const Addresses& addresses);

}  // namespace hierad
