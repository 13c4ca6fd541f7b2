// The training step on random input, timed: one rank's part.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"
#include "worker/comm/communicator.h"

namespace hierad {

struct BenchArguments {
  std::string config, variant = "base", task = "mae", mode = "auto", precision = "fp32", device = "auto", sdpa = "auto", optimizer = "adamw", rows = "f32";
  std::string reduce_dtype = "fp32";
  std::vector<int> input{224, 224};
  int batch = 8, accumulation = 1, chans = 3, q_pool = -1, steps = 30, warmup = 5, threads = 2;
  int world = 1, channels = 0, bucket_mib = 0;
  double lr = 1e-4, drop_path = 0;
  bool shard = false;
  std::vector<int> checkpoint_stages;   // fused: computed again in backward
  bool checkpoint_decoder = false;
  bool tf32 = false, tune = false, one_stream = false, no_epilogues = false, no_prefetch = false, no_priorities = false, any_order = false;
  // When results are read, in turns: "now" (before the next step is given), "behind" (as the trainer does) and "rarely"
  // (every 32 steps). The first is the row's full_step_median_ms.
  std::vector<std::string> read{"behind"};
};

// `communicator`: of arguments.world ranks, nullptr for one.
absl::StatusOr<nlohmann::json> Bench(const BenchArguments& arguments, bool cuda, Communicator* communicator);

}  // namespace hierad
