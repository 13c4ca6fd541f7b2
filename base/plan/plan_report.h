// What a plan costs, for people and programs: `hierctl plan`, and whoever asks whether a job fits.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "base/plan/plan.h"
#include "base/plan/products.h"

namespace hierad {

// Rates that matrix products (dense), copies and the link to a peer reach at best.
struct Card {
  const char* name;
  double bf16_flops, fp32_flops, tf32_flops;   // per second; fp16 as bf16
  double bytes_per_s;                          // read + written
  double link_bytes_per_s;                     // one way
  int64_t memory_bytes;
  int capability;                              // 90: 9.0
  bool measured;                               // bf16 and copies, by us; else, and the other rates: the data sheet's
};
const std::vector<Card>& Cards();
absl::StatusOr<Card> FindCard(std::string_view name);   // any case
double PeakFlops(const Card& card, const v1::StepSpec& step);   // of its precision

struct PlanReportOptions {
  std::string card = "H200";
  double memory_gib = 0;   // for the largest batch; 0: the card's
  int64_t samples = 0;     // of the data set, where the job does not tell it (it does for data.source synthetic)
  bool fit = false;        // look for what fits into memory_gib: PlanReport::fits
};

// What a CUDA process takes beside its arenas before it trains: context, kernels' code, the libraries' handles.
inline constexpr int64_t kContextBytes = int64_t{640} << 20;

// The keys of Json() are the names of these fields and stable; sizes are bytes, times milliseconds. One rank's share.
struct PlanReport {
  std::string step_mode;               // as the job says it; the figures are those of fused
  bool exact = false;                  // step_mode is fused, which takes these arenas; else peak_device_bytes is an upper estimate
  std::string precision;
  int64_t batch_per_rank = 0, ranks = 1, accumulation = 1;
  int64_t parameters = 0;              // elements, without padding
  struct ArenaSize { std::string name; int64_t bytes; };
  std::vector<ArenaSize> arena_bytes;  // of fused, on its device; JSON: an object
  int64_t pinned_host_bytes = 0;       // of fused on a GPU: rank 0's snapshot
  int64_t peak_device_bytes = 0;       // exact: the sum of the arenas. Else what autograd may hold at most
  // Beside it on a GPU, 0 on a CPU: fused's workspaces for products, and kContextBytes.
  int64_t workspace_bytes = 0, context_bytes = 0;
  int64_t total_device_bytes() const { return peak_device_bytes + workspace_bytes + context_bytes; }   // JSON too
  // Of an optimizer step: accumulation micro-batches and the update.
  double flops_per_step = 0, bytes_per_step = 0;
  int64_t kernels_per_step = 0;        // operations of the plan
  struct PartCost { std::string part; double flops = 0, bytes = 0, floor_ms = 0; int64_t kernels = 0; };
  // Where mode fused makes them on a GPU: with GELU in the epilogue, by an algorithm of `algorithm_table`, or by the library's choice.
  // The table is the card's newest; with another version of the library, its choice takes the place of the table's.
  std::vector<PlannedProduct> products;
  std::string algorithm_table;         // empty: the card has none
  std::vector<PartCost> parts;         // input, patch, stage1.., heads, decoder, loss, optimizer
  int64_t communication_bytes = 0;     // what each rank sends in a step; not in bytes_per_step
  int64_t update_communication_bytes = 0;   // of them after backward, with nothing to hide behind: what ranks update in parts
  int64_t buckets = 0;                 // of the all-reduce
  double communication_floor_ms = 0;   // of the all-reduce over the card's link; most of it hides behind backward
  std::string card;
  double floor_ms = 0;                 // sum over operations of the longer of their FLOP and byte time on `card`
  double memory_gib = 0;
  int64_t largest_batch = 0;           // per rank, whose total_device_bytes fit in memory_gib; 0: not even one sample
  // From the floor, by what docs/performance.md's rows need over theirs on the H200; modes eager and optimized are slower.
  double predicted_step_ms = 0;
  int64_t steps_per_epoch = 0;         // 0: the number of samples is not known
  double epoch_floor_s = 0, predicted_epoch_s = 0;

  // With PlanReportOptions::fit: of the job's own batch, what to compute again with the least work added (absent where nothing
  // helps); then the largest batch with nothing and with everything computed again.
  struct Fit {
    int64_t batch_per_rank = 0;
    std::vector<int> checkpoint_stages;
    bool checkpoint_decoder = false;
    int64_t peak_device_bytes = 0;     // the arenas; workspaces and context are beside them
    double flops_ratio = 1;            // of a sample, to nothing computed again
  };
  bool fit_asked = false;
  std::vector<Fit> fits;               // JSON: only where asked for

  std::string Json() const;            // one object, ends with a newline
  std::string Table() const;
};

// What a rank of the job takes on its device at least: the arenas of its plan. fused takes these, other modes more. Errors:
// Plan::Make's.
absl::StatusOr<int64_t> LeastMemory(const v1::JobSpec& spec);

// `spec` has its defaults filled in. Errors: Plan::Make's, an unknown card.
absl::StatusOr<PlanReport> ReportPlan(const v1::JobSpec& spec, const PlanReportOptions& options);

}  // namespace hierad
