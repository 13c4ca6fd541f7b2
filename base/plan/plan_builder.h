// How a Plan is put together: tensors by kind, operations with what they read and write. Private to base/plan.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/plan/plan.h"

namespace hierad {

class PlanBuilder {
 public:
  PlanBuilder(Plan* plan, DType compute, DType real) : plan_(*plan), compute_(compute), real_(real) {}

  TensorId Add(std::string name, std::vector<int64_t> shape, DType dtype, Arena arena);
  TensorId Activation(std::string name, std::vector<int64_t> shape, DType dtype) {
    return Add(std::move(name), std::move(shape), dtype, Arena::kActivations);
  }
  TensorId InT(std::string name, int64_t rows, int64_t cols) { return Activation(std::move(name), {rows, cols}, compute_); }
  TensorId InReal(std::string name, int64_t rows, int64_t cols) { return Activation(std::move(name), {rows, cols}, real_); }
  TensorId Table(std::string name, int64_t size, const std::function<std::vector<int32_t>()>& values);
  TensorId Constants(std::string name, const std::vector<float>& values);

  // A parameter by FAIR's name: its master value, the copy in T, its gradient.
  TensorId Master(const std::string& name) { return ParameterTensor(name, &masters_, real_, Arena::kMaster, ""); }
  TensorId Weight(const std::string& name) {
    return compute_ == real_ ? Master(name) : ParameterTensor(name, &weights_, compute_, Arena::kCompute, "compute:");
  }
  TensorId Gradient(const std::string& name) { return ParameterTensor(name, &gradients_, real_, Arena::kGradients, "grad:"); }

  // Operations after this call belong to this part.
  void Enter(Part part, bool backward) { part_ = part, backward_ = backward; }
  // kNone among reads or writes is left out. `flops` beyond data movement.
  void Emit(std::string name, OpArgs args, std::vector<TensorId> reads, std::vector<TensorId> writes, double flops = 0);
  void EmitSnapshot(std::string name, OpArgs args, std::vector<TensorId> reads, std::vector<TensorId> writes);
  // As Emit, with Op::beside.
  void EmitBeside(std::string name, OpArgs args, std::vector<TensorId> reads, std::vector<TensorId> writes, double flops = 0);

  // y[rows, out] = x[rows, in] W^T + b
  void Linear(const std::string& parameter, TensorId x, TensorId y, int64_t rows, int64_t in, int64_t out, bool accumulate = false);
  // dx = dy W, accumulated on request.
  void InputGradient(const std::string& parameter, TensorId dy, TensorId dx, int64_t rows, int64_t in, int64_t out, bool accumulate = false);
  // Linear, and GELU of it.
  void LinearGelu(const std::string& parameter, TensorId x, TensorId h, TensorId g, int64_t rows, int64_t in, int64_t out);
  // The gradient of h through GELU and the layer behind it, with GELU of h once more; returns the parts of its sum over rows.
  TensorId InputGradientGelu(const std::string& parameter, TensorId dy, TensorId h, TensorId dh, TensorId g, int64_t rows, int64_t in, int64_t out);
  // Gradients of weight and bias; bias_parts: of the sum over rows of dy, where they are there already.
  void WeightGradient(const std::string& parameter, TensorId x, TensorId dy, int64_t rows, int64_t in, int64_t out,
                      TensorId bias_parts = kNone);
  // Both; dx kNone: no input gradient.
  void LinearBackward(const std::string& parameter, TensorId x, TensorId dy, TensorId dx, int64_t rows, int64_t in,
                      int64_t out, TensorId bias_parts = kNone, bool accumulate_dx = false);

  // Parts of a sum over `rows` rows of `cols` columns.
  TensorId Parts(std::string name, int64_t rows, int64_t cols) { return Activation(std::move(name), {ReduceParts(rows), cols}, real_); }
  // The gradient of `parameter` will be the sum of these parts, added up by the next EmitSums.
  void SumLater(const std::string& parameter, TensorId parts);
  void EmitSums(std::string name);

  const TensorSpec& At(TensorId id) const { return plan_.tensors[id]; }
  DType compute() const { return compute_; }
  DType real() const { return real_; }

 private:
  TensorId ParameterTensor(const std::string& name, std::map<std::string, TensorId>* known, DType dtype, Arena arena,
                           const char* prefix);
  Op MakeOp(std::string name, OpArgs args, std::vector<TensorId> reads, std::vector<TensorId> writes, double flops) const;

  Plan& plan_;
  const DType compute_, real_;   // T, and the type of statistics and of the residual stream
  Part part_ = Part::kInput;
  bool backward_ = false;
  std::map<std::string, TensorId> masters_, weights_, gradients_;
  std::vector<SumParts::Sum> sums_;   // that wait for EmitSums
};

// A table that is filled when parameters have their places: where the matrices of an operation lie.
struct MuonPlaces {
  TensorId table;
  std::vector<int> matrices;   // by index in the parameter table
};
// The update of the blocks' matrices, behind that of the rest by AdamW. `scale`: AdamW::scale.
std::vector<MuonPlaces> EmitMuon(PlanBuilder* builder, Plan* plan, const v1::OptimizerSpec& optimizer, TensorId scale);

// The order of parameters in the flat arenas, offsets of every tensor, sizes of the arenas.
void PlaceTensors(Plan* plan);
// Of several ranks, once the parameters are placed: the reductions among the passes, what sharding makes of the update.
void AddReductions(Plan* plan);
// Once all operations are there.
void NumberCollectives(Plan* plan);

// Index tables (see the operations that read them).
std::vector<int32_t> FusionOrder(const Geometry& geometry, int stage);   // [finals * taps]; stage beyond q_pool: identity
std::vector<int32_t> FinalOrder(const Geometry& geometry);               // [mask_units * finals] -> row-major final token
std::vector<int32_t> LabelIndex(const Geometry& geometry);               // [tokens_final * pred_dim] -> offset in [C, S...]

}  // namespace hierad
