// Where a run starts: rank 0 reads the newest checkpoint that verifies, all ranks get its very bytes.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/plan/parameters.h"
#include "worker/checkpoint/checkpoint.h"
#include "worker/comm/communicator.h"

namespace hierad {

struct StartingPoint {
  bool resumed = false;
  CheckpointContents contents;         // meaningful with `resumed`
  std::vector<std::string> damaged;    // on rank 0: those found damaged
};

// `known_step`: of the newest checkpoint hierad knows (0: none): then a folder without any is an error, not a start from 0.
// Every rank returns the same error.
absl::StatusOr<StartingPoint> ReadStartingPoint(const std::string& run_folder, const ParameterTable& table, int64_t known_step,
                                                Communicator* communicator);

// Overwrites the parameters found in the safetensors file at `path` by name; the moments stay. A tensor of another shape,
// or a file with none of this model's names, is REASON_USER_ERROR. Returns one line for the log.
absl::StatusOr<std::string> ApplyInitialWeights(const std::string& path, const ParameterTable& table, TrainState* state);

}  // namespace hierad
