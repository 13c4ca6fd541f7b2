#include "base/plan/plan_report.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <optional>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/job_validate.h"
#include "base/status.h"
#include "nlohmann/json.hpp"

namespace hierad {
namespace {

constexpr double kGib = 1024.0 * 1024 * 1024;
constexpr int64_t kMostBatch = 65536;   // step.batch_per_rank's bound
// What torch holds beside what autograd keeps: its allocator's rounding, and the workspaces of its libraries.
constexpr double kAllocatorSlack = 1.1;
constexpr int64_t kTorchWorkspaceBytes = int64_t{128} << 20;
// A step's time as kTimeOverFloor x floor + kKernelMs x operations, fitted to the fused column of docs/performance.md's "All
// rows" (f550c5a); its graph_safe column is kTorchOverFused of that.
constexpr double kTimeOverFloor = 1.40, kKernelMs = 0.003, kTorchOverFused = 2.1;

const char* NameOf(Arena arena) {
  switch (arena) {
    case Arena::kMaster: return "master";
    case Arena::kCompute: return "compute";
    case Arena::kGradients: return "gradients";
    case Arena::kMoments: return "moments";
    case Arena::kActivations: return "activations";
    case Arena::kStaging: return "staging";
    case Arena::kPersistent: return "persistent";
    case Arena::kSnapshot: return "snapshot";
    case Arena::kRecords: return "records";
  }
  return "";
}

const char* NameOf(Part part) {
  switch (part) {
    case Part::kInput: return "input";
    case Part::kPatch: return "patch";
    case Part::kStage1: return "stage1";
    case Part::kStage2: return "stage2";
    case Part::kStage3: return "stage3";
    case Part::kStage4: return "stage4";
    case Part::kStage5: return "stage5";
    case Part::kStage6: return "stage6";
    case Part::kHeads: return "heads";
    case Part::kDecoder: return "decoder";
    case Part::kLoss: return "loss";
    case Part::kCommunication: return "communication";
    case Part::kOptimizer: return "optimizer";
  }
  return "";
}

absl::StatusOr<Plan> MakePlan(v1::JobSpec spec, int64_t batch) {
  spec.mutable_step()->set_batch_per_rank(int32_t(batch));
  PlanOptions options{.compute = ComputeTypeOf(spec.step()), .sizes_only = true};
  ASSIGN_OR_RETURN(const Geometry geometry, Geometry::From(spec.model()));
  options.rows = WidestRows(spec.data(), geometry);
  return Plan::Make(spec, options);
}

// What autograd keeps: everything forward makes, nothing packed; what backward makes lives as in the plan, beside flat
// copies of the gradients in T. Math attention also keeps its probabilities, twice and in fp32 at most.
int64_t AutogradBytes(const Plan& plan, bool math_attention) {
  std::vector<int64_t> backward(plan.forward_backward.size() + 1, 0);   // change at each operation of what lives
  double forward = 0;
  for (const TensorSpec& t : plan.tensors) {
    if (t.arena != Arena::kActivations || t.first < 0) continue;
    if (t.first < plan.forward_ops) {
      forward += double(t.bytes);
    } else {
      backward[t.first] += t.bytes;
      backward[t.last + 1] -= t.bytes;
    }
  }
  int64_t lives = 0, most = 0;
  for (const int64_t change : backward) most = std::max(most, lives += change);
  for (const Op& op : plan.forward_backward) {
    const auto* a = std::get_if<Attention>(&op.args);
    if (math_attention && a != nullptr) forward += 3.0 * 4 * double(a->batch) * double(a->heads * a->windows) * double(a->keys / a->q_stride) * double(a->keys);
  }
  double flat = double(plan.arena_bytes[int(Arena::kCompute)]);   // the gradients of the copy in T
  for (const Arena arena : {Arena::kMaster, Arena::kCompute, Arena::kGradients, Arena::kMoments, Arena::kStaging}) flat += double(plan.arena_bytes[int(arena)]);
  return int64_t(flat + kAllocatorSlack * (forward + double(most))) + kTorchWorkspaceBytes;
}

int64_t BytesOfItsDevice(const Plan& plan, const v1::JobSpec& spec) { return plan.TotalBytes() + (UsesGpu(spec) ? 0 : plan.SnapshotBytes()); }

int64_t PeakBytes(const Plan& plan, const v1::JobSpec& spec) {
  if (spec.step().mode() == "fused") return BytesOfItsDevice(plan, spec);
  return AutogradBytes(plan, spec.step().mode() == "eager" || spec.step().sdpa_backend() == "math" || !UsesGpu(spec));
}

int64_t WorkspaceBytes(const v1::JobSpec& spec) { return UsesGpu(spec) && spec.step().mode() == "fused" ? kGemmLanes * kGemmWorkspaceBytes : 0; }
int64_t ContextBytes(const v1::JobSpec& spec) { return UsesGpu(spec) ? kContextBytes : 0; }

// Memory grows with the batch, so the largest that fits is found by halving.
absl::StatusOr<int64_t> LargestBatch(const v1::JobSpec& spec, double bytes) {
  bytes -= double(WorkspaceBytes(spec) + ContextBytes(spec));
  int64_t fits = 0, too_large = kMostBatch + 1;
  while (too_large - fits > 1) {
    // From below first: plans of huge batches are as cheap to make, but most cards hold hundreds, not thousands.
    const int64_t batch = fits == 0 ? std::min<int64_t>(128, too_large / 2) : too_large > kMostBatch ? std::min(2 * fits, kMostBatch) : (fits + too_large) / 2;
    ASSIGN_OR_RETURN(const Plan plan, MakePlan(spec, batch));
    (double(PeakBytes(plan, spec)) <= bytes ? fits : too_large) = batch;
    if (fits == kMostBatch) break;
  }
  return fits;
}

v1::JobSpec WithCheckpointed(v1::JobSpec spec, uint32_t which) {
  v1::StepSpec& step = *spec.mutable_step();
  step.set_mode("fused");   // the mode that does it
  step.clear_checkpoint_stages();
  step.set_checkpoint_decoder((which & 1) != 0);
  for (int stage = 1; which >> stage != 0; ++stage) {
    if ((which >> stage & 1) != 0) step.add_checkpoint_stages(stage);
  }
  return spec;
}

double FlopsOf(const Plan& plan) {
  double flops = 0;
  for (const Op& op : plan.forward_backward) flops += op.flops;
  return flops;
}

absl::StatusOr<PlanReport::Fit> FitOf(const v1::JobSpec& spec, int64_t batch, double plain_flops_a_sample) {
  ASSIGN_OR_RETURN(const Plan plan, MakePlan(spec, batch));
  const auto& stages = spec.step().checkpoint_stages();
  return PlanReport::Fit{batch, {stages.begin(), stages.end()}, spec.step().checkpoint_decoder(), BytesOfItsDevice(plan, spec),
                         FlopsOf(plan) / double(batch) / plain_flops_a_sample};
}

absl::StatusOr<std::vector<PlanReport::Fit>> Fits(const v1::JobSpec& spec, double bytes) {
  const int64_t batch = spec.step().batch_per_rank();
  ASSIGN_OR_RETURN(const Plan plain, MakePlan(WithCheckpointed(spec, 0), batch));
  const double flops = FlopsOf(plain) / double(batch);
  const bool decoder = plain.geometry.spec.task() == "mae";
  const uint32_t ways = uint32_t{2} << plain.geometry.spec.stages_size();   // bit 0: the decoder
  const double for_arenas = bytes - double(WorkspaceBytes(WithCheckpointed(spec, 0)) + ContextBytes(spec));
  std::optional<PlanReport::Fit> best;
  for (uint32_t which = 0; which < ways; ++which) {
    if (!decoder && (which & 1) != 0) continue;
    ASSIGN_OR_RETURN(PlanReport::Fit fit, FitOf(WithCheckpointed(spec, which), batch, flops));
    if (double(fit.peak_device_bytes) <= for_arenas && (!best.has_value() || fit.flops_ratio < best->flops_ratio)) best = std::move(fit);
  }
  std::vector<PlanReport::Fit> fits;
  if (best.has_value()) fits.push_back(*std::move(best));
  for (uint32_t which : {uint32_t{0}, decoder ? ways - 1 : ways - 2}) {
    const v1::JobSpec way = WithCheckpointed(spec, which);
    ASSIGN_OR_RETURN(const int64_t largest, LargestBatch(way, bytes));
    if (largest == 0) continue;
    ASSIGN_OR_RETURN(PlanReport::Fit fit, FitOf(way, largest, flops));
    fits.push_back(std::move(fit));
  }
  return fits;
}

void Account(const Plan& plan, const Card& card, double flop_rate, PlanReport* report) {
  std::vector<PlanReport::PartCost> parts(int(Part::kOptimizer) + 1);
  for (size_t p = 0; p < parts.size(); ++p) parts[p].part = NameOf(Part(p));
  auto add = [&](const std::vector<Op>& ops, double times) {
    for (const Op& op : ops) {
      PlanReport::PartCost& part = parts[int(op.part)];
      part.flops += times * op.flops;
      part.bytes += times * op.bytes;
      part.floor_ms += times * 1e3 * std::max(op.flops / flop_rate, op.bytes / card.bytes_per_s);
      part.kernels += int64_t(times);
    }
  };
  add(plan.forward_backward, double(report->accumulation));
  add(plan.update, 1);
  for (PlanReport::PartCost& part : parts) {
    if (part.kernels == 0) continue;
    report->flops_per_step += part.flops;
    report->bytes_per_step += part.bytes;
    report->floor_ms += part.floor_ms;
    report->kernels_per_step += part.kernels;
    report->parts.push_back(std::move(part));
  }
}

// By rings: a reduction in parts, and a gathering, send (ranks - 1) / ranks of the bytes; an all-reduce both.
void CountCommunication(const Plan& plan, PlanReport* report) {
  const double share = double(plan.ranks - 1) / double(plan.ranks);
  double reduced = 0, gathered = 0;
  for (const Op& op : plan.forward_backward) {
    if (const auto* bucket = std::get_if<ReduceBucket>(&op.args)) {
      const DType dtype = plan.tensors[bucket->staging == kNone ? bucket->slice : bucket->staging].dtype;
      reduced += (plan.sharded ? 1 : 2) * share * double(bucket->size * SizeOf(dtype));
      if (bucket->tail != kNone) reduced += 2 * share * double(plan.tensors[bucket->tail].bytes);
    }
  }
  for (const Op& op : plan.update) {
    if (const auto* bucket = std::get_if<GatherBucket>(&op.args)) gathered += share * double(plan.tensors[bucket->slice].bytes);
    if (const auto* matrices = std::get_if<GatherMatrices>(&op.args)) gathered += share * double(plan.tensors[matrices->all].bytes);
  }
  report->communication_bytes = int64_t(reduced + gathered);
  report->update_communication_bytes = int64_t(gathered);
}

// Of a step on a GPU, as docs/performance.md's rows take it.
double PredictedMs(const PlanReport& report) {
  const double ms = kTimeOverFloor * report.floor_ms + kKernelMs * double(report.kernels_per_step);
  double unhidden = 0;   // the last bucket, and what follows backward
  if (report.communication_bytes > 0) {
    const double after = double(report.update_communication_bytes) / double(report.communication_bytes);
    unhidden = report.communication_floor_ms * (after + (1 - after) / double(report.buckets));
  }
  return (report.step_mode == "fused" ? 1 : kTorchOverFused) * ms + unhidden;
}

void CountEpoch(const v1::JobSpec& spec, int64_t samples, PlanReport* report) {
  if (spec.data().source() == "synthetic") samples = spec.data().synthetic_samples();
  if (samples == 0) return;
  const int64_t visits = samples * spec.data().repeat();
  const int64_t effective = report->batch_per_rank * report->ranks * report->accumulation;
  report->steps_per_epoch = spec.data().last_batch() == "drop" ? visits / effective : (visits + effective - 1) / effective;
  report->epoch_floor_s = double(report->steps_per_epoch) * report->floor_ms / 1e3;
  report->predicted_epoch_s = double(report->steps_per_epoch) * report->predicted_step_ms / 1e3;
}

std::string Amount(double value, double unit, const char* name) { return absl::StrFormat("%.2f %s", value / unit, name); }

}  // namespace

const std::vector<Card>& Cards() {
  static const std::vector<Card>& cards = *new std::vector<Card>{
      {"H200", 735e12, 67e12, 494e12, 4.2e12, 450e9, int64_t(139 * kGib), 90, true},
      {"H100", 989e12, 67e12, 494e12, 3.35e12, 450e9, int64_t(79 * kGib), 90, false},
      {"B200", 2250e12, 75e12, 1125e12, 8e12, 900e9, int64_t(178 * kGib), 100, false},
      {"A100", 312e12, 19.5e12, 156e12, 2.039e12, 300e9, int64_t(79 * kGib), 80, false},
      {"L40S", 362e12, 91.6e12, 183e12, 864e9, 32e9, int64_t(44 * kGib), 89, false},
      {"RTX4090", 165e12, 82.6e12, 82.6e12, 1008e9, 32e9, int64_t(23.5 * kGib), 89, false},
  };
  return cards;
}

double PeakFlops(const Card& card, const v1::StepSpec& step) {
  if (ComputeTypeOf(step) != ComputeType::kF32) return card.bf16_flops;
  return step.tf32() ? card.tf32_flops : card.fp32_flops;
}

absl::StatusOr<Card> FindCard(std::string_view name) {
  std::string known;
  for (const Card& card : Cards()) {
    if (absl::AsciiStrToLower(std::string(name)) == absl::AsciiStrToLower(card.name)) return card;
    absl::StrAppend(&known, known.empty() ? "" : ", ", card.name);
  }
  return ErrorOf(v1::REASON_USER_ERROR, absl::StrCat("card: '", std::string(name), "' is not known; known are ", known, "."));
}

absl::StatusOr<int64_t> LeastMemory(const v1::JobSpec& spec) {
  ASSIGN_OR_RETURN(const Plan plan, MakePlan(spec, spec.step().batch_per_rank()));
  return BytesOfItsDevice(plan, spec);
}

absl::StatusOr<PlanReport> ReportPlan(const v1::JobSpec& job, const PlanReportOptions& options) {
  v1::JobSpec spec = job;
  spec.mutable_step()->set_mode(ResolvedMode(job.step(), UsesGpu(job)));
  ASSIGN_OR_RETURN(const Card card, FindCard(options.card));
  ASSIGN_OR_RETURN(const Plan plan, MakePlan(spec, spec.step().batch_per_rank()));
  PlanReport report;
  report.step_mode = spec.step().mode();
  report.exact = report.step_mode == "fused";
  report.precision = spec.step().precision();
  report.batch_per_rank = plan.batch;
  report.ranks = spec.resources().ranks();
  report.accumulation = spec.step().accumulation();
  report.parameters = plan.table.num_elements;
  for (int arena = 0; arena < int(Arena::kRecords); ++arena) {
    const bool on_host = UsesGpu(spec) && OnHost(Arena(arena));
    report.arena_bytes.push_back({NameOf(Arena(arena)), on_host ? 0 : plan.arena_bytes[arena]});
    if (on_host) report.pinned_host_bytes += plan.arena_bytes[arena];
  }
  report.peak_device_bytes = PeakBytes(plan, spec);
  report.workspace_bytes = WorkspaceBytes(spec);
  report.context_bytes = ContextBytes(spec);
  report.card = card.name;
  Account(plan, card, PeakFlops(card, spec.step()), &report);
  if (report.exact && UsesGpu(spec)) {
    report.products = ProductsOf(plan, card.name, card.capability, spec.step().tf32(), report.accumulation);
    report.algorithm_table = NewestAlgorithmTable(card.name);
  }
  CountCommunication(plan, &report);
  report.buckets = int64_t(plan.buckets.size());
  report.communication_floor_ms = 1e3 * double(report.communication_bytes) / card.link_bytes_per_s;
  report.predicted_step_ms = PredictedMs(report);
  report.memory_gib = options.memory_gib > 0 ? options.memory_gib : double(card.memory_bytes) / kGib;
  ASSIGN_OR_RETURN(report.largest_batch, LargestBatch(spec, report.memory_gib * kGib));
  if (options.fit) {
    ASSIGN_OR_RETURN(report.fits, Fits(spec, report.memory_gib * kGib));
    report.fit_asked = true;
  }
  CountEpoch(spec, options.samples, &report);
  return report;
}

std::string PlanReport::Json() const {
  nlohmann::ordered_json json = {{"step_mode", step_mode},
                                 {"exact", exact},
                                 {"precision", precision},
                                 {"batch_per_rank", batch_per_rank},
                                 {"ranks", ranks},
                                 {"accumulation", accumulation},
                                 {"parameters", parameters}};
  for (const ArenaSize& arena : arena_bytes) json["arena_bytes"][arena.name] = arena.bytes;
  json["pinned_host_bytes"] = pinned_host_bytes;
  json["peak_device_bytes"] = peak_device_bytes;
  json["workspace_bytes"] = workspace_bytes;
  json["context_bytes"] = context_bytes;
  json["total_device_bytes"] = total_device_bytes();
  json["flops_per_step"] = flops_per_step;
  json["bytes_per_step"] = bytes_per_step;
  json["kernels_per_step"] = kernels_per_step;
  json["parts"] = nlohmann::ordered_json::array();
  for (const PartCost& part : parts) {
    json["parts"].push_back({{"part", part.part}, {"flops", part.flops}, {"bytes", part.bytes}, {"kernels", part.kernels}, {"floor_ms", part.floor_ms}});
  }
  json["products"] = nlohmann::ordered_json::array();
  for (const PlannedProduct& p : products) json["products"].push_back({{"product", p.key}, {"made_by", p.made_by}, {"count", p.count}, {"flops", p.flops}});
  json["algorithm_table"] = algorithm_table;
  json["communication_bytes"] = communication_bytes;
  json["update_communication_bytes"] = update_communication_bytes;
  json["buckets"] = buckets;
  json["communication_floor_ms"] = communication_floor_ms;
  json["card"] = card;
  json["floor_ms"] = floor_ms;
  json["memory_gib"] = memory_gib;
  json["largest_batch"] = largest_batch;
  json["predicted_step_ms"] = predicted_step_ms;
  json["steps_per_epoch"] = steps_per_epoch;
  json["epoch_floor_s"] = epoch_floor_s;
  json["predicted_epoch_s"] = predicted_epoch_s;
  if (fit_asked) json["fits"] = nlohmann::ordered_json::array();
  for (const Fit& fit : fits) {
    json["fits"].push_back({{"batch_per_rank", fit.batch_per_rank}, {"checkpoint_stages", fit.checkpoint_stages},
                            {"checkpoint_decoder", fit.checkpoint_decoder}, {"peak_device_bytes", fit.peak_device_bytes},
                            {"flops_ratio", fit.flops_ratio}});
  }
  return json.dump(2) + "\n";
}

std::string PlanReport::Table() const {
  std::string text = absl::StrFormat("%.1f M parameters, batch %d x %d rank%s x %d, %s\n\n", double(parameters) / 1e6, batch_per_rank, ranks,
                                     ranks == 1 ? "" : "s", accumulation, precision);
  absl::StrAppendFormat(&text, "%-12s %10s\n", "memory", "size");
  for (const ArenaSize& arena : arena_bytes) {
    if (arena.bytes > 0) absl::StrAppendFormat(&text, "%-12s %10s\n", arena.name, Amount(double(arena.bytes), kGib, "GiB"));
  }
  int64_t arenas = 0;
  for (const ArenaSize& arena : arena_bytes) arenas += arena.bytes;
  absl::StrAppendFormat(&text, "%-12s %10s\n", "in all", Amount(double(arenas), kGib, "GiB"));
  if (!exact) absl::StrAppendFormat(&text, "%-12s %10s   an upper estimate; the arenas are those of mode fused\n", step_mode, Amount(double(peak_device_bytes), kGib, "GiB"));
  if (context_bytes > 0) absl::StrAppendFormat(&text, "%-12s %10s   CUDA context and libraries\n", "beside it", Amount(double(workspace_bytes + context_bytes), kGib, "GiB"));
  if (pinned_host_bytes > 0) absl::StrAppendFormat(&text, "%-12s %10s   pinned, for the checkpoint that is being written\n", "host", Amount(double(pinned_host_bytes), kGib, "GiB"));
  absl::StrAppend(&text, "\n");
  absl::StrAppendFormat(&text, "%-10s %8s %12s %12s %10s\n", "part", "kernels", "TFLOP", "GB", "floor ms");
  auto row = [&](const std::string& name, int64_t kernels, double flops, double bytes, double ms) {
    absl::StrAppendFormat(&text, "%-10s %8d %12.3f %12.3f %10.3f\n", name, kernels, flops / 1e12, bytes / 1e9, ms);
  };
  for (const PartCost& part : parts) row(part.part, part.kernels, part.flops, part.bytes, part.floor_ms);
  row("step", kernels_per_step, flops_per_step, bytes_per_step, floor_ms);
  absl::StrAppendFormat(&text, "\nFloor on %s: these operations one after the other, each at the card's best FLOP or byte rate.\n", card);
  if (!products.empty()) {
    std::map<std::string, int64_t> made;
    for (const PlannedProduct& p : products) made[p.made_by] += p.count;
    absl::StrAppendFormat(&text, "Matrix products: %d with GELU in their epilogue, %d by an algorithm of %s, %d by the library's choice.\n", made["epilogue"],
                          made["table"], algorithm_table.empty() ? "a table (this card has none)" : algorithm_table, made["library"]);
  }
  if (ranks > 1) {
    absl::StrAppendFormat(&text, "Between ranks: %s a rank and step in %d bucket%s, at least %.3f ms, most of it behind backward%s.\n",
                          Amount(double(communication_bytes), 1e6, "MB"), buckets, buckets == 1 ? "" : "s", communication_floor_ms,
                          update_communication_bytes == 0 ? "" : absl::StrCat("; ", Amount(double(update_communication_bytes), 1e6, "MB"), " of it after"));
  }
  absl::StrAppendFormat(&text, "Predicted step: %.1f ms, %.0f samples/s.\n", predicted_step_ms, double(batch_per_rank * ranks * accumulation) / predicted_step_ms * 1e3);
  if (steps_per_epoch > 0) absl::StrAppendFormat(&text, "An epoch has %d steps: about %.1f s, at least %.1f s.\n", steps_per_epoch, predicted_epoch_s, epoch_floor_s);
  absl::StrAppendFormat(&text, "Largest batch per rank in %.1f GiB: %d.\n", memory_gib, largest_batch);
  if (fit_asked) absl::StrAppendFormat(&text, "What fits in %.1f GiB (in step.mode fused):\n", memory_gib);
  if (fit_asked && fits.empty()) absl::StrAppend(&text, "  not even one sample\n");
  for (const Fit& fit : fits) {
    const std::string stages = fit.checkpoint_stages.empty() ? "" : absl::StrCat("checkpoint_stages: [", absl::StrJoin(fit.checkpoint_stages, ", "), "], ");
    absl::StrAppendFormat(&text, "  batch_per_rank: %d, %scheckpoint_decoder: %s: %s, work of a sample x %.2f\n", fit.batch_per_rank, stages,
                          fit.checkpoint_decoder ? "true" : "false",
                          Amount(double(fit.peak_device_bytes), kGib, "GiB"), fit.flops_ratio);
  }
  return text;
}

}  // namespace hierad
