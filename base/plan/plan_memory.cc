// Where every tensor lies. Flat arenas: the order in which backward finishes the gradients. Activations: two tensors whose
// lifetimes meet never share a byte; the rest may. Index tables are here too, as they are bytes that the plan places, and
// the bytes that operations move, as only now their tensors have sizes.

#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "base/plan/plan_builder.h"

namespace hierad {
namespace {

// Operations by which one that runs beside the others may lag: about half a block's backward. In the update either queue may lag: there is room
// where the activations were.
constexpr int kBeside = 8;

int64_t RoundUp(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

void OrderParameters(Plan* plan) {
  std::map<std::string, int> finished;   // parameter -> last operation that writes its gradient
  for (size_t i = 0; i < plan->forward_backward.size(); ++i) {
    for (TensorId id : plan->forward_backward[i].writes) {
      const TensorSpec& t = plan->tensors[id];
      if (t.arena == Arena::kGradients && id != plan->gradients) finished[t.name.substr(5)] = int(i);   // "grad:"
    }
  }
  const auto& parameters = plan->table.parameters;
  std::vector<int> order(parameters.size());
  std::iota(order.begin(), order.end(), 0);
  auto when = [&](int p) {
    auto it = finished.find(parameters[p].name);
    return it == finished.end() ? int(plan->forward_backward.size()) : it->second;
  };
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return when(a) < when(b); });
  plan->parameter_offset.assign(parameters.size(), 0);
  plan->flat_size = 0;
  Bucket bucket{0, 0, 0};
  for (int p : order) {
    plan->parameter_offset[p] = plan->flat_size;
    plan->flat_size += RoundUp(parameters[p].size, kParameterAlign);
    bucket.size = plan->flat_size - bucket.offset;
    bucket.ready = when(p);
    if (bucket.size < plan->options.bucket_elements && p != order.back()) continue;
    if (plan->sharded) {   // so that every rank's part is as large
      bucket.size = RoundUp(bucket.size, plan->ranks * kParameterAlign);
      plan->flat_size = bucket.offset + bucket.size;
    }
    if (!plan->options.features) plan->buckets.push_back(bucket);
    bucket.offset = plan->flat_size;
  }
}

void PlaceParameters(Plan* plan) {
  std::map<std::string, int64_t> offset;
  for (size_t p = 0; p < plan->table.parameters.size(); ++p) {
    offset[plan->table.parameters[p].name] = plan->parameter_offset[p];
  }
  const TensorId whole[] = {plan->master, plan->gradients, plan->compute, plan->moments};
  if (plan->tail != kNone) {
    TensorSpec& tail = plan->tensors[plan->tail];
    tail.shape = {kGradientTail};
    tail.bytes = kGradientTail * SizeOf(tail.dtype);
    tail.offset = plan->flat_size * SizeOf(tail.dtype);
  }
  for (TensorId id = 0; id < TensorId(plan->tensors.size()); ++id) {
    TensorSpec& t = plan->tensors[id];
    if (id == plan->tail) continue;
    if (t.arena != Arena::kMaster && t.arena != Arena::kGradients && t.arena != Arena::kCompute && t.arena != Arena::kMoments) continue;
    if (std::find(std::begin(whole), std::end(whole), id) != std::end(whole)) {
      t.shape = {t.arena == Arena::kMoments ? plan->num_moments * plan->flat_size / (plan->sharded ? plan->ranks : 1) : plan->flat_size};
      t.bytes = t.shape[0] * SizeOf(t.dtype);
      const int64_t tail = t.arena == Arena::kGradients ? kGradientTail : 0;
      plan->arena_bytes[int(t.arena)] = t.bytes + tail * SizeOf(t.dtype);
      continue;
    }
    const size_t colon = t.name.find(':');
    t.offset = offset.at(colon == std::string::npos ? t.name : t.name.substr(colon + 1)) * SizeOf(t.dtype);
  }
}

// Tables with a value per kParameterAlign elements: padding counts.
void SizeUpdateTables(Plan* plan) {
  for (const char* name : {"decay", "rate factors"}) {
    const TensorId id = plan->Find(name);
    if (id == kNone) continue;
    TensorSpec& t = plan->tensors[id];
    t.shape = {plan->flat_size / kParameterAlign};
    t.bytes = t.shape[0] * SizeOf(t.dtype);
  }
  for (Op& op : plan->snapshot) {
    if (auto* gather = std::get_if<GatherMoments>(&op.args)) gather->bytes = plan->tensors[plan->moments].bytes;
  }
}

// Master, moments of all ranks and record behind one another.
void PlaceSnapshot(Plan* plan) {
  if (plan->saved == kNone) return;
  TensorSpec& t = plan->tensors[plan->saved];
  for (TensorId id : {plan->master, plan->moments, plan->record}) {
    t.bytes += plan->tensors[id].bytes * (id == plan->moments && plan->sharded ? plan->ranks : 1);
  }
  t.shape = {t.bytes};
  plan->arena_bytes[int(Arena::kSnapshot)] = t.bytes;
}

// First fit by falling size: each tensor goes to the lowest gap left by those already placed whose lifetime meets its own.
void PlaceActivations(Plan* plan) {
  std::vector<TensorId> ids;
  for (TensorId id = 0; id < TensorId(plan->tensors.size()); ++id) {
    TensorSpec& t = plan->tensors[id];
    t.first = t.last = -1;
    if (t.arena == Arena::kActivations) ids.push_back(id);
  }
  const int passes = int(plan->forward_backward.size());
  const int all = passes + int(plan->update.size());
  for (int i = 0; i < all; ++i) {
    const Op& op = i < passes ? plan->forward_backward[i] : plan->update[i - passes];
    const bool lags = op.beside || (i >= passes && !std::holds_alternative<MuonProducts>(op.args));   // those have the card to themselves
    for (const auto* list : {&op.reads, &op.writes}) {
      for (TensorId id : *list) {
        TensorSpec& t = plan->tensors[id];
        if (t.first < 0) t.first = i;
        // What runs beside the others needs its operands a while longer.
        t.last = std::max(t.last, lags ? std::min(i + kBeside, (i < passes ? passes : all) - 1) : i);
      }
    }
  }
  std::stable_sort(ids.begin(), ids.end(), [&](TensorId a, TensorId b) { return plan->tensors[a].bytes > plan->tensors[b].bytes; });
  std::vector<TensorId> placed;   // by offset
  int64_t end = 0;
  for (TensorId id : ids) {
    TensorSpec& t = plan->tensors[id];
    const int64_t bytes = RoundUp(t.bytes, kArenaAlign);
    int64_t offset = 0;
    for (TensorId other_id : placed) {
      const TensorSpec& other = plan->tensors[other_id];
      if (other.last < t.first || t.last < other.first) continue;
      if (offset + bytes <= other.offset) break;
      offset = std::max(offset, other.offset + RoundUp(other.bytes, kArenaAlign));
    }
    t.offset = offset;
    end = std::max(end, offset + bytes);
    placed.insert(std::upper_bound(placed.begin(), placed.end(), offset,
                                   [&](int64_t value, TensorId o) { return value < plan->tensors[o].offset; }), id);
  }
  plan->arena_bytes[int(Arena::kActivations)] = end;
}

void PlaceInARow(Plan* plan, Arena arena) {
  int64_t end = 0;
  for (TensorSpec& t : plan->tensors) {
    if (t.arena != arena) continue;
    t.offset = end;
    end += RoundUp(t.bytes, kArenaAlign);
  }
  plan->arena_bytes[int(arena)] = end;
}

// Each tensor read once and written once; of what has two staging slots, one.
void CountBytes(Plan* plan) {
  const TensorId slots[] = {plan->source, plan->source_ids, plan->source_labels};
  for (std::vector<Op>* ops : {&plan->forward_backward, &plan->update}) {
    for (Op& op : *ops) {
      op.bytes = 0;
      for (const auto* list : {&op.reads, &op.writes}) {
        for (TensorId id : *list) {
          const bool two = std::find(std::begin(slots), std::end(slots), id) != std::end(slots);
          op.bytes += double(plan->tensors[id].bytes) / (two ? 2 : 1);
        }
      }
      if (op.part == Part::kCommunication) op.bytes = 0;   // told apart: PlanReport::communication_bytes
    }
  }
}

}  // namespace

void PlaceTensors(Plan* plan) {
  OrderParameters(plan);
  PlaceParameters(plan);
  SizeUpdateTables(plan);
  PlaceSnapshot(plan);
  AddReductions(plan);
  NumberCollectives(plan);
  PlaceActivations(plan);
  PlaceInARow(plan, Arena::kStaging);
  PlaceInARow(plan, Arena::kPersistent);
  PlaceInARow(plan, Arena::kRecords);
  CountBytes(plan);
}

std::vector<int32_t> FusionOrder(const Geometry& g, int stage) {
  // Coordinates inside a mask unit after `pools` poolings: pos = s_1 + q (s_2 + ...), s_1 the slowest index of t.
  const int pools = std::min(stage, g.spec.q_pool());
  const int levels = g.spec.stages_size() - 1 - pools;
  std::vector<int64_t> grid(g.dims), kernel(g.dims);
  int64_t tokens = 1;
  for (int d = 0; d < g.dims; ++d) {
    grid[d] = g.mask_unit_size[d];
    for (int p = 0; p < pools; ++p) grid[d] /= g.q_stride[d];
    kernel[d] = grid[d] / g.mask_unit_final[d];
    tokens *= grid[d];
  }
  std::vector<int32_t> order(tokens);
  int64_t taps = 1;
  for (int64_t k : kernel) taps *= k;
  for (int64_t t = 0; t < tokens; ++t) {
    std::vector<int64_t> coordinate(g.dims, 0), scale(grid);
    int64_t rest = t;
    for (int level = levels; level >= 1; --level) {   // s_L, the coarsest, is the fastest index
      int64_t s = rest % g.flat_q_stride;
      rest /= g.flat_q_stride;
      for (int d = g.dims - 1; d >= 0; --d) {
        scale[d] /= g.q_stride[d];
        coordinate[d] += s % g.q_stride[d] * scale[d];
        s /= g.q_stride[d];
      }
    }
    int64_t final_token = 0, tap = 0;
    for (int d = 0; d < g.dims; ++d) {
      final_token = final_token * g.mask_unit_final[d] + coordinate[d] / kernel[d];
      tap = tap * kernel[d] + coordinate[d] % kernel[d];
    }
    order[final_token * taps + tap] = int32_t(t);
  }
  return order;
}

std::vector<int32_t> FinalOrder(const Geometry& g) {
  std::vector<int32_t> order(g.num_mask_units * g.mask_unit_final_tokens);
  for (int64_t i = 0; i < int64_t(order.size()); ++i) {
    int64_t unit = i / g.mask_unit_final_tokens, f = i % g.mask_unit_final_tokens;
    int64_t position = 0, scale = 1;
    for (int d = g.dims - 1; d >= 0; --d) {
      const int64_t at = unit % g.mask_units[d] * g.mask_unit_final[d] + f % g.mask_unit_final[d];
      unit /= g.mask_units[d];
      f /= g.mask_unit_final[d];
      position += at * scale;
      scale *= g.tokens_final[d];
    }
    order[i] = int32_t(position);
  }
  return order;
}

std::vector<int32_t> LabelIndex(const Geometry& g) {
  const int64_t channels = g.spec.in_chans(), p = g.pred_stride;
  std::vector<int32_t> index;
  index.reserve(g.num_tokens_final * g.pred_dim);
  int64_t samples = 1;
  for (int64_t s : g.input_size) samples *= s;
  for (int64_t token = 0; token < g.num_tokens_final; ++token) {
    std::vector<int64_t> at(g.dims);
    int64_t rest = token;
    for (int d = g.dims - 1; d >= 0; --d) at[d] = rest % g.tokens_final[d], rest /= g.tokens_final[d];
    for (int64_t e = 0; e < g.pred_dim; ++e) {
      int64_t c, place;
      if (g.dims == 1) {            // sample-major, channel fastest (ours)
        c = e % channels;
        place = at[0] * p + e / channels;
      } else {
        const int64_t h = g.dims - 2, width = g.input_size[h + 1];
        // 2-D: channel slowest (FAIR's unfold); 3-D: channel fastest, first frame of each token.
        c = g.dims == 2 ? e / (p * p) : e % channels;
        const int64_t pixel = g.dims == 2 ? e % (p * p) : e / channels;
        place = (at[h] * p + pixel / p) * width + at[h + 1] * p + pixel % p;
        if (g.dims == 3) place += at[0] * g.patch_stride[0] * g.input_size[1] * width;
      }
      index.push_back(int32_t(c * samples + place));
    }
  }
  return index;
}

}  // namespace hierad
