// What needs the engine is done by hiera-worker, which hierctl becomes.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/context.h"

namespace hierad {

// `hiera-worker WORDS...` in place of hierctl: the terminal, its signals and the exit code are the tool's own. Returns only
// if it cannot be started.
int BecomeWorkerTool(std::vector<std::string> words, const Context& context);

// hiera-worker's path; FailedPrecondition says where it was looked for.
absl::StatusOr<std::string> FindWorker();

}  // namespace hierad
