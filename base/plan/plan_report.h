// What a plan costs, for people and programs: `hierctl plan`, and whoever asks whether a job fits.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "base/plan/plan.h"

namespace hierad {

// Rates that matrix products and copies reach at best. bf16 and copy rate: measured; fp32 and TF32: the data sheet's.
struct Card {
  const char* name;
  double bf16_flops, fp32_flops, tf32_flops;   // per second
  double bytes_per_s;                          // read + written
  int64_t memory_bytes;
};
const std::vector<Card>& Cards();
absl::StatusOr<Card> FindCard(std::string_view name);   // any case

struct PlanReportOptions {
  std::string card = "H200";
  double memory_gib = 0;   // for the largest batch; 0: the card's
  bool fit = false;        // look for what fits into memory_gib: PlanReport::fits
};

// The keys of Json() are the names of these fields and stable; sizes are bytes, times milliseconds. One rank's share.
struct PlanReport {
  std::string step_mode;               // as the job says it; the figures are those of fused
  bool exact = false;                  // step_mode is fused: the step takes these arenas; other modes take more
  std::string precision;
  int64_t batch_per_rank = 0, ranks = 1, accumulation = 1;
  int64_t parameters = 0;              // elements, without padding
  struct ArenaSize { std::string name; int64_t bytes; };
  std::vector<ArenaSize> arena_bytes;  // JSON: an object
  int64_t peak_device_bytes = 0;       // all arenas; the context's and the libraries' own memory is beside it
  // Of an optimizer step: accumulation micro-batches and the update.
  double flops_per_step = 0, bytes_per_step = 0;
  int64_t kernels_per_step = 0;        // operations of the plan
  struct PartCost { std::string part; double flops = 0, bytes = 0, floor_ms = 0; int64_t kernels = 0; };
  std::vector<PartCost> parts;         // input, patch, stage1.., heads, decoder, loss, optimizer
  int64_t communication_bytes = 0;     // each rank's all-reduce: 2 (ranks - 1) / ranks of the gradients; not in bytes_per_step
  int64_t buckets = 0;                 // of the all-reduce
  std::string card;
  double floor_ms = 0;                 // sum over operations of the longer of their FLOP and byte time on `card`
  double memory_gib = 0;
  int64_t largest_batch = 0;           // per rank, that fits in memory_gib; 0: not even one sample
  int64_t steps_per_epoch = 0;         // where the job alone tells it (data.source synthetic), else 0
  double epoch_floor_s = 0;

  // With PlanReportOptions::fit: of the job's own batch, what to compute again with the least work added (absent where nothing
  // helps); then the largest batch with nothing and with everything computed again.
  struct Fit {
    int64_t batch_per_rank = 0;
    std::vector<int> checkpoint_stages;
    bool checkpoint_decoder = false;
    int64_t peak_device_bytes = 0;
    double flops_ratio = 1;            // of a sample, to nothing computed again
  };
  bool fit_asked = false;
  std::vector<Fit> fits;               // JSON: only where asked for

  std::string Json() const;            // one object, ends with a newline
  std::string Table() const;
};

// `spec` has its defaults filled in. Errors: Plan::Make's, an unknown card.
absl::StatusOr<PlanReport> ReportPlan(const v1::JobSpec& spec, const PlanReportOptions& options);

}  // namespace hierad
