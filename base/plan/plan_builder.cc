#include "base/plan/plan_builder.h"

#include <algorithm>
#include <cstring>

namespace hierad {

TensorId PlanBuilder::Add(std::string name, std::vector<int64_t> shape, DType dtype, Arena arena) {
  TensorSpec tensor;
  tensor.name = std::move(name);
  tensor.dtype = dtype;
  tensor.arena = arena;
  tensor.bytes = SizeOf(dtype);
  for (int64_t extent : shape) tensor.bytes *= extent;
  tensor.shape = std::move(shape);
  plan_.tensors.push_back(std::move(tensor));
  return TensorId(plan_.tensors.size()) - 1;
}

namespace {
template <typename V>
Constant MakeConstant(TensorId tensor, const std::vector<V>& values) {
  Constant constant{tensor, std::vector<uint8_t>(values.size() * sizeof(V))};
  std::memcpy(constant.bytes.data(), values.data(), constant.bytes.size());
  return constant;
}
}  // namespace

TensorId PlanBuilder::Table(std::string name, int64_t size, const std::function<std::vector<int32_t>()>& values) {
  const TensorId id = Add(std::move(name), {size}, DType::kI32, Arena::kPersistent);
  if (!plan_.options.sizes_only) plan_.constants.push_back(MakeConstant(id, values()));
  return id;
}

TensorId PlanBuilder::Constants(std::string name, const std::vector<float>& values) {
  const TensorId id = Add(std::move(name), {int64_t(values.size())}, DType::kF32, Arena::kPersistent);
  plan_.constants.push_back(MakeConstant(id, values));
  return id;
}

TensorId PlanBuilder::ParameterTensor(const std::string& name, std::map<std::string, TensorId>* known, DType dtype,
                                      Arena arena, const char* prefix) {
  auto [it, fresh] = known->try_emplace(name, kNone);
  if (fresh) it->second = Add(prefix + name, plan_.table.Find(name)->shape, dtype, arena);
  return it->second;
}

Op PlanBuilder::MakeOp(std::string name, OpArgs args, std::vector<TensorId> reads, std::vector<TensorId> writes, double flops) const {
  Op op;
  op.name = std::move(name);
  op.args = std::move(args);
  op.part = part_;
  op.backward = backward_;
  op.flops = flops;
  for (std::vector<TensorId>* list : {&reads, &writes}) {
    list->erase(std::remove(list->begin(), list->end(), kNone), list->end());
  }
  op.reads = std::move(reads);
  op.writes = std::move(writes);
  return op;
}

void PlanBuilder::Emit(std::string name, OpArgs args, std::vector<TensorId> reads, std::vector<TensorId> writes, double flops) {
  (part_ == Part::kOptimizer ? plan_.update : plan_.forward_backward)
      .push_back(MakeOp(std::move(name), std::move(args), std::move(reads), std::move(writes), flops));
}

void PlanBuilder::EmitSnapshot(std::string name, OpArgs args, std::vector<TensorId> reads, std::vector<TensorId> writes) {
  plan_.snapshot.push_back(MakeOp(std::move(name), std::move(args), std::move(reads), std::move(writes), 0));
}

void PlanBuilder::EmitBeside(std::string name, OpArgs args, std::vector<TensorId> reads, std::vector<TensorId> writes, double flops) {
  Emit(std::move(name), std::move(args), std::move(reads), std::move(writes), flops);
  plan_.forward_backward.back().beside = true;
}

void PlanBuilder::Linear(const std::string& parameter, TensorId x, TensorId y, int64_t rows, int64_t in, int64_t out,
                         bool accumulate) {
  const TensorId w = Weight(parameter + ".weight"), b = Master(parameter + ".bias");
  std::vector<TensorId> reads{x, w, b};
  if (accumulate) reads.push_back(y);
  Emit(parameter, Gemm{x, w, y, b, rows, out, in, false, true, accumulate}, std::move(reads), {y}, 2.0 * rows * in * out);
}

void PlanBuilder::InputGradient(const std::string& parameter, TensorId dy, TensorId dx, int64_t rows, int64_t in,
                                int64_t out, bool accumulate) {
  const TensorId w = Weight(parameter + ".weight");
  Emit(parameter + " dgrad", Gemm{dy, w, dx, kNone, rows, in, out, false, false, accumulate},
       {dy, w, accumulate ? dx : kNone}, {dx}, 2.0 * rows * in * out);
}

void PlanBuilder::LinearGelu(const std::string& parameter, TensorId x, TensorId h, TensorId g, int64_t rows, int64_t in, int64_t out) {
  const TensorId w = Weight(parameter + ".weight"), b = Master(parameter + ".bias");
  Emit(parameter, GemmGelu{x, w, b, h, g, rows, out, in}, {x, w, b}, {h, g}, 2.0 * rows * in * out);
}

TensorId PlanBuilder::InputGradientGelu(const std::string& parameter, TensorId dy, TensorId h, TensorId dh, TensorId g, int64_t rows,
                                        int64_t in, int64_t out) {
  const TensorId w = Weight(parameter + ".weight");
  const int64_t num_parts = (rows + kGeluPartRows - 1) / kGeluPartRows;
  const TensorId parts = Activation(parameter + " input bias parts", {num_parts, in}, real_);
  Emit(parameter + " dgrad", GemmGeluBackward{dy, w, h, dh, g, parts, rows, in, out, num_parts}, {dy, w, h}, {dh, g, parts}, 2.0 * rows * in * out);
  return parts;
}

void PlanBuilder::WeightGradient(const std::string& parameter, TensorId x, TensorId dy, int64_t rows, int64_t in, int64_t out,
                                 TensorId bias_parts) {
  const TensorId dw = Gradient(parameter + ".weight");
  const bool add = plan_.accumulate;
  EmitBeside(parameter + " wgrad", Gemm{dy, x, dw, kNone, out, in, rows, true, false, add}, {dy, x, add ? dw : kNone}, {dw},
             2.0 * rows * in * out);
  if (bias_parts == kNone) {
    bias_parts = Parts(parameter + " bias parts", rows, out);
    EmitBeside(parameter + " bias grad", ColumnSum{dy, bias_parts, rows, out, ReduceParts(rows)}, {dy}, {bias_parts});
  }
  SumLater(parameter + ".bias", bias_parts);
}

void PlanBuilder::LinearBackward(const std::string& parameter, TensorId x, TensorId dy, TensorId dx, int64_t rows,
                                 int64_t in, int64_t out, TensorId bias_parts, bool accumulate_dx) {
  if (dx != kNone) InputGradient(parameter, dy, dx, rows, in, out, accumulate_dx);
  WeightGradient(parameter, x, dy, rows, in, out, bias_parts);
}

void PlanBuilder::SumLater(const std::string& parameter, TensorId parts) {
  sums_.push_back({parts, Gradient(parameter), At(parts).shape[1], At(parts).shape[0]});
}

void PlanBuilder::EmitSums(std::string name) {
  if (sums_.empty()) return;
  std::vector<TensorId> reads, writes;
  for (const SumParts::Sum& sum : sums_) {
    // Parts of one sum may serve several gradients: they stand among the reads once.
    if (std::find(reads.begin(), reads.end(), sum.parts) == reads.end()) reads.push_back(sum.parts);
    if (plan_.accumulate) reads.push_back(sum.grad);
    writes.push_back(sum.grad);
  }
  EmitBeside(std::move(name), SumParts{std::move(sums_), plan_.accumulate}, std::move(reads), std::move(writes));
  sums_.clear();
}

}  // namespace hierad
