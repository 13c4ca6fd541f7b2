// hiera-bench --world N: the ranks as processes of this machine, each on a GPU (or CPU) of its own.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"
#include "worker/bench/bench.h"

namespace hierad {

// Before this process has threads or has touched a GPU: it forks. The result is rank 0's, with every rank's medians, the
// slowest as full_step_median_ms, and how far the ranks' parameters are apart in the end.
absl::StatusOr<nlohmann::json> BenchRanks(const BenchArguments& arguments);
// Of what each rank said: its JSON, or why it has none. `weight_difference` is the largest, or "NaN" where any rank's is.
absl::StatusOr<nlohmann::json> JoinRanks(const std::vector<std::string>& texts);

}  // namespace hierad
