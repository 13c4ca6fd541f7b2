// The order of samples, and the threads that read ahead in it. The order is a pure function of (seed, epoch): the same
// at any world size and after any resume; a loader may start at any step without reading what lies before it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "hierad/v1/job.pb.h"
#include "worker/data/dataset.h"

namespace hierad {

// Length of a run in steps and samples. Visits per epoch = count * repeat.
struct RunLength {
  int64_t visits_per_epoch;
  int64_t effective_batch;
  int64_t steps_per_epoch;     // last_batch pad: rounded up; drop: down
  int64_t total_steps;
  // 0 steps, or fewer samples than one batch with drop: InvalidArgument with the numbers.
  static absl::StatusOr<RunLength> For(const v1::JobSpec& spec, int64_t dataset_count);
  // Real samples, over all ranks, of 0-based optimizer step `step`.
  int64_t RealSamples(int64_t step) const;
};

// Position `i` of the shuffled order of an epoch (Fisher-Yates over Philox draws; `visits` entries).
std::vector<uint64_t> EpochOrder(uint64_t seed, uint32_t epoch, int64_t visits);

// One rank's share of one micro-step, in host memory (pinned where there is a GPU). Rows at and beyond `real` are zeros.
struct MicroBatch {
  const float* x_BCS = nullptr;          // [batch_per_rank, in_chans, input_size...]
  const int64_t* labels_B = nullptr;     // -1: none
  const uint64_t* visit_ids_B = nullptr; // keys of mask, drop path and dropout draws
  int32_t real = 0;
  uint32_t epoch = 0;
};

class Loader {
 public:
  struct Options {
    v1::JobSpec spec;          // defaults filled in
    int rank = 0, world_size = 1;
    int64_t first_step = 0;    // 0-based optimizer step to start with
    bool pinned = false;
    int threads = 1;
  };
  virtual ~Loader() = default;
  // The next micro-batch in order (accumulation micro-steps per optimizer step). Its memory stays valid until the call
  // after the next. Blocks until read; `data_wait_s` grows by the time waited.
  virtual absl::StatusOr<MicroBatch> Next() = 0;
  virtual double data_wait_s() const = 0;          // total so far
  virtual int64_t skipped_samples() const = 0;     // with data.on_error: skip
  virtual std::string WaitingIn() const = 0;       // file being read while Next() waits; any thread may ask
};

absl::StatusOr<std::unique_ptr<Loader>> MakeLoader(std::shared_ptr<const Dataset> dataset, const Loader::Options& options);

}  // namespace hierad
