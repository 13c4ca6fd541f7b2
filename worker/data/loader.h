// The order of samples, and the threads that read ahead in it. The order is a pure function of (seed, epoch): the same
// at any world size and after any resume; a loader may start at any step without reading what lies before it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
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

// One rank's share of one micro-step, in host memory (pinned where there is a GPU), in the rows of its data set
// (Dataset::row_format; of a synthetic set they have no bytes). Those at and beyond `real` are zero bytes.
struct MicroBatch {
  const void* x_BCS = nullptr;           // [batch_per_rank, in_chans, input_size...]
  const int64_t* labels_B = nullptr;     // -1: none
  const uint64_t* visit_ids_B = nullptr; // keys of mask, drop path and dropout draws
  int32_t real = 0;
  uint32_t epoch = 0;
};

// The batches of one rank, read ahead by threads. Position of (step s, micro-step m, rank r, row b) in its epoch's order:
// step s takes [s * E, (s + 1) * E), of which (m, r) takes [(m * world_size + r) * B, ...); batches never cross epochs.
// Memory: (accumulation + 1 + read-ahead) batches. Next is called by one thread; the other methods by any.
class Loader {
 public:
  struct Options {
    v1::JobSpec spec;          // defaults filled in
    int rank = 0, world_size = 1;
    int64_t first_step = 0;    // 0-based optimizer step to start with
    int threads = 1;           // at most; as many of them read as keep pace with the step, by the time that both take
    // One pass for evaluation and features: the dataset's own order, every sample once, not augmented, epoch 0, no
    // accumulation. Every rank gets the same number of batches (some may hold no real row); then Next is OutOfRange.
    bool one_pass = false;
    // Where batches live; pinned memory is given from outside. Default: operator new, 64-byte aligned.
    std::function<void*(size_t bytes)> allocate;
    std::function<void(void* memory)> release;
  };
  virtual ~Loader() = default;
  // The next micro-batch in order (accumulation micro-steps per optimizer step); OutOfRange after the last. Its memory
  // stays valid for `accumulation` further calls: a whole step's batches can be held. Blocks until read.
  // data.on_error fail: an unreadable sample is DATA_ERROR here, naming file and sample. skip: it is left out, so `real`
  // falls and every other row is what it would have been; more than max_skipped distinct ones end the job.
  virtual absl::StatusOr<MicroBatch> Next() = 0;
  virtual double data_wait_s() const = 0;          // total time that Next() waited
  virtual v1::DataCounters counters() const = 0;
  virtual std::string WaitingIn() const = 0;       // sample being read while Next() waits, else empty
};

// Reader threads of a rank: data.workers; else its share of the node's cores where a GPU computes, and one where the rank's
// own cores do, which is enough for what they take in.
int LoaderThreads(const v1::JobSpec& spec, bool cuda, int cores);

// `dataset` is shared with the threads, which end with the loader.
absl::StatusOr<std::unique_ptr<Loader>> MakeLoader(std::shared_ptr<const Dataset> dataset, const Loader::Options& options);

}  // namespace hierad
