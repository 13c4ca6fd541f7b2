// Muon among the operations of the update: matrices of one shape together, momentum, the rounds of Newton-Schulz as batched
// products, the update. What is needed on the way lies where the activations were.
#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/plan/plan_builder.h"

namespace hierad {
namespace {

struct Shape {
  int64_t rows, cols;
  std::vector<int> matrices;   // by index in the table
  int64_t count() const { return int64_t(matrices.size()); }
  int64_t shorter() const { return std::min(rows, cols); }
  int64_t longer() const { return std::max(rows, cols); }
  double Work() const { return double(count()) * double(shorter()) * double(shorter()) * double(2 * longer() + shorter()); }
};

class MuonPlan {
 public:
  MuonPlan(PlanBuilder* builder, Plan* plan, const v1::OptimizerSpec& optimizer, TensorId scale)
      : b_(*builder), plan_(*plan), optimizer_(optimizer), scale_(scale) {}

  // In two queues of about as much work: a shape of few small matrices fills no card by itself, and no shape waits for another.
  // The largest first, so that the queues end together.
  std::vector<MuonPlaces> Emit() {
    std::map<std::pair<int64_t, int64_t>, std::vector<int>> found;
    for (size_t p = 0; p < plan_.table.parameters.size(); ++p) {
      const Parameter& parameter = plan_.table.parameters[p];
      if (parameter.matrix) found[{parameter.shape[0], parameter.shape[1]}].push_back(int(p));
    }
    std::vector<Shape> shapes;
    for (auto& [shape, matrices] : found) shapes.push_back({shape.first, shape.second, std::move(matrices)});
    std::stable_sort(shapes.begin(), shapes.end(), [](const Shape& a, const Shape& b) { return a.Work() > b.Work(); });
    std::vector<MuonPlaces> places;
    double chain = 0, beside = 0;
    for (const Shape& shape : shapes) {
      const size_t begin = plan_.update.size();
      places.push_back({EmitShape(shape), shape.matrices});
      const bool to_chain = chain <= beside;
      (to_chain ? chain : beside) += shape.Work();
      for (size_t i = begin; i < plan_.update.size(); ++i) plan_.update[i].beside = !to_chain;
    }
    return places;
  }

 private:
  // Returns the table of places. Every operation declares the matrices that it touches, not the arenas in which they lie.
  TensorId EmitShape(const Shape& shape) {
    const std::string name = absl::StrCat("muon ", shape.rows, "x", shape.cols);
    const int64_t count = shape.count(), shorter = shape.shorter(), longer = shape.longer();
    const TensorId places = b_.Add(name + " places", {count}, DType::kI64, Arena::kPersistent);
    std::vector<TensorId> gradients, moments, masters, copies;
    for (const int p : shape.matrices) {
      const Parameter& parameter = plan_.table.parameters[size_t(p)];
      gradients.push_back(b_.Gradient(parameter.name));
      moments.push_back(b_.Add("moments:" + parameter.name, parameter.shape, b_.real(), Arena::kMoments));
      masters.push_back(b_.Master(parameter.name));
      if (b_.compute() != b_.real()) copies.push_back(b_.Weight(parameter.name));
    }
    // Each rank's share of the matrices; the last ranks may have fewer, or none.
    const int64_t share = (count + plan_.ranks - 1) / plan_.ranks, first = std::min(count, share * plan_.options.rank);
    const int64_t own = std::min(share, count - first);
    const TensorId scratch = b_.Activation(name + " scratch", {count, kMuonParts}, DType::kF64);
    TensorId x = b_.Activation(name + " x", {share, shorter, longer}, b_.compute());
    b_.Emit(name + " momentum",
            MuonMomentum{plan_.record, places, x, scratch, count, shape.rows, shape.cols, optimizer_.muon_momentum(), optimizer_.clip_norm(),
                         optimizer_.muon_nesterov(), first, own},
            Joined({{plan_.record, places}, gradients, moments}), Joined({moments, {x, scratch}}));
    if (own > 0) x = NewtonSchulz(name, x, own, shorter, longer, share);
    if (plan_.ranks > 1) x = Gather(name, x, share, shorter, longer);
    b_.Emit(name + " update", MuonUpdate{plan_.scalars, plan_.record, x, places, scale_, count, shape.rows, shape.cols, optimizer_.weight_decay()},
            Joined({{plan_.scalars, plan_.record, x, places, scale_}, masters}), Joined({masters, copies}));
    return places;
  }

  // Of `own` matrices; room is there for `share`.
  TensorId NewtonSchulz(const std::string& name, TensorId x, int64_t own, int64_t shorter, int64_t longer, int64_t share) {
    for (int round = 0; round < kMuonRounds; ++round) {
      const std::string at = absl::StrCat(name, " round ", round);
      const TensorId gram = b_.Activation(at + " gram", {own, shorter, shorter}, b_.compute());
      b_.Emit(at + " gram", BatchedGemm{x, x, kNone, gram, own, shorter, shorter, longer, true, 1, 0}, {x}, {gram},
              2.0 * double(own * shorter * shorter * longer));
      const TensorId poly = b_.Activation(at + " polynomial", {own, shorter, shorter}, b_.compute());
      b_.Emit(at + " polynomial", BatchedGemm{gram, gram, gram, poly, own, shorter, shorter, shorter, false, kMuonC, kMuonB}, {gram}, {poly},
              2.0 * double(own * shorter * shorter * shorter));
      const TensorId next = b_.Activation(at, {share, shorter, longer}, b_.compute());
      b_.Emit(at, BatchedGemm{poly, x, x, next, own, shorter, longer, shorter, false, 1, kMuonA}, {poly, x}, {next},
              2.0 * double(own * shorter * shorter * longer));
      x = next;
    }
    return x;
  }

  TensorId Gather(const std::string& name, TensorId x, int64_t share, int64_t shorter, int64_t longer) {
    const TensorId all = b_.Activation(name + " of all ranks", {plan_.ranks * share, shorter, longer}, b_.compute());
    b_.Emit(name + " gather", GatherMatrices{x, all, share * shorter * longer, {plan_.scalars, plan_.progress, 0}}, {x, plan_.scalars},
            {all, plan_.progress});
    plan_.update.back().part = Part::kCommunication;
    return all;
  }

  static std::vector<TensorId> Joined(const std::vector<std::vector<TensorId>>& lists) {
    std::vector<TensorId> all;
    for (const auto& list : lists) all.insert(all.end(), list.begin(), list.end());
    return all;
  }

  PlanBuilder& b_;
  Plan& plan_;
  const v1::OptimizerSpec& optimizer_;
  const TensorId scale_;
};

}  // namespace

std::vector<MuonPlaces> EmitMuon(PlanBuilder* builder, Plan* plan, const v1::OptimizerSpec& optimizer, TensorId scale) {
  return MuonPlan(builder, plan, optimizer, scale).Emit();
}

}  // namespace hierad
