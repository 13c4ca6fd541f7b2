// Muon among the operations of the update: the momentum of matrices shape by shape, then the rounds of Newton-Schulz, each phase
// for all shapes at once, so that it fills a card; then the update shape by shape. What is needed on the way lies where the activations were.
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
  int64_t elements() const { return count() * rows * cols; }
  // What the operations before the products and behind them hand on.
  TensorId places = kNone, x = kNone;
  int64_t share = 0, own = 0;   // matrices of each rank; of this one: the last ranks may have fewer, or none
};

class MuonPlan {
 public:
  MuonPlan(PlanBuilder* builder, Plan* plan, const v1::OptimizerSpec& optimizer, TensorId scale)
      : b_(*builder), plan_(*plan), optimizer_(optimizer), scale_(scale) {}

  // Momentum and update in two queues of about as many bytes: small matrices fill no card.
  std::vector<MuonPlaces> Emit() {
    std::map<std::pair<int64_t, int64_t>, std::vector<int>> found;
    for (size_t p = 0; p < plan_.table.parameters.size(); ++p) {
      const Parameter& parameter = plan_.table.parameters[p];
      if (parameter.matrix) found[{parameter.shape[0], parameter.shape[1]}].push_back(int(p));
    }
    std::vector<Shape> shapes;
    for (auto& [shape, matrices] : found) shapes.push_back({shape.first, shape.second, std::move(matrices)});
    std::stable_sort(shapes.begin(), shapes.end(), [](const Shape& a, const Shape& b) { return a.elements() > b.elements(); });
    InTwoQueues(&shapes, [this](Shape* shape) { EmitMomentum(shape); });
    NewtonSchulz(&shapes);
    if (plan_.ranks > 1) {
      for (Shape& shape : shapes) Gather(&shape);
    }
    InTwoQueues(&shapes, [this](Shape* shape) { EmitUpdate(*shape); });
    std::vector<MuonPlaces> places;
    for (const Shape& shape : shapes) places.push_back({shape.places, shape.matrices});
    return places;
  }

 private:
  template <typename EmitOf>
  void InTwoQueues(std::vector<Shape>* shapes, const EmitOf& emit) {
    int64_t chain = 0, beside = 0;
    for (Shape& shape : *shapes) {
      emit(&shape);
      const bool to_chain = chain <= beside;
      (to_chain ? chain : beside) += shape.elements();
      plan_.update.back().beside = !to_chain;
    }
  }

  // These declare the matrices that they touch, not the arenas in which they lie.
  void EmitMomentum(Shape* shape) {
    const std::string name = NameOf(*shape);
    const int64_t count = shape->count();
    shape->places = b_.Add(name + " places", {count}, DType::kI64, Arena::kPersistent);
    std::vector<TensorId> gradients, moments;
    for (const int p : shape->matrices) {
      const Parameter& parameter = plan_.table.parameters[size_t(p)];
      gradients.push_back(b_.Gradient(parameter.name));
      moments.push_back(b_.Add("moments:" + parameter.name, parameter.shape, b_.real(), Arena::kMoments));
    }
    shape->share = (count + plan_.ranks - 1) / plan_.ranks;
    const int64_t first = std::min(count, shape->share * plan_.options.rank);
    shape->own = std::min(shape->share, count - first);
    const TensorId scratch = b_.Activation(name + " scratch", {count, kMuonParts}, DType::kF64);
    shape->x = b_.Activation(name + " x", {shape->share, shape->shorter(), shape->longer()}, b_.compute());
    b_.Emit(name + " momentum",
            MuonMomentum{plan_.record, shape->places, shape->x, scratch, count, shape->rows, shape->cols, optimizer_.muon_momentum(),
                         optimizer_.clip_norm(), optimizer_.muon_nesterov(), first, shape->own},
            Joined({{plan_.record, shape->places}, gradients, moments}), Joined({moments, {shape->x, scratch}}));
  }

  void EmitUpdate(const Shape& shape) {
    std::vector<TensorId> masters, copies;
    for (const int p : shape.matrices) {
      const std::string& name = plan_.table.parameters[size_t(p)].name;
      masters.push_back(b_.Master(name));
      if (b_.compute() != b_.real()) copies.push_back(b_.Weight(name));
    }
    b_.Emit(NameOf(shape) + " update",
            MuonUpdate{plan_.scalars, plan_.record, shape.x, shape.places, scale_, shape.count(), shape.rows, shape.cols, optimizer_.weight_decay()},
            Joined({{plan_.scalars, plan_.record, shape.x, shape.places, scale_}, masters}), Joined({masters, copies}));
  }

  // Of this rank's own matrices; room is there for its share.
  void NewtonSchulz(std::vector<Shape>* shapes) {
    for (int round = 0; round < kMuonRounds; ++round) {
      MuonProducts phases[] = {{MuonPhase::kGram, {}}, {MuonPhase::kPolynomial, {}}, {MuonPhase::kTurn, {}}};
      std::vector<TensorId> reads[3], writes[3];
      double flops[3] = {};
      for (Shape& shape : *shapes) {
        if (shape.own == 0) continue;
        const std::string at = absl::StrCat(NameOf(shape), " round ", round);
        const int64_t own = shape.own, shorter = shape.shorter(), longer = shape.longer();
        const TensorId gram = b_.Activation(at + " gram", {own, shorter, shorter}, b_.compute());
        const TensorId polynomial = b_.Activation(at + " polynomial", {own, shorter, shorter}, b_.compute());
        const TensorId next = b_.Activation(at, {shape.share, shorter, longer}, b_.compute());
        phases[0].groups.push_back({shape.x, gram, kNone, kNone, own, shorter, longer});
        phases[1].groups.push_back({kNone, gram, polynomial, kNone, own, shorter, longer});
        phases[2].groups.push_back({shape.x, kNone, polynomial, next, own, shorter, longer});
        reads[0].push_back(shape.x), writes[0].push_back(gram);
        reads[1].push_back(gram), writes[1].push_back(polynomial);
        reads[2].push_back(polynomial), reads[2].push_back(shape.x), writes[2].push_back(next);
        const double square = 2.0 * double(own * shorter * shorter);   // whole products, also where half of one suffices
        flops[0] += square * double(longer), flops[1] += square * double(shorter), flops[2] += square * double(longer);
        shape.x = next;
      }
      if (writes[0].empty()) return;
      const char* const names[] = {"gram", "polynomial", "turn"};
      for (int i = 0; i < 3; ++i) b_.Emit(absl::StrCat("muon round ", round, " ", names[i]), std::move(phases[i]), reads[i], writes[i], flops[i]);
    }
  }

  void Gather(Shape* shape) {
    const int64_t share = shape->share, shorter = shape->shorter(), longer = shape->longer();
    const TensorId all = b_.Activation(NameOf(*shape) + " of all ranks", {plan_.ranks * share, shorter, longer}, b_.compute());
    b_.Emit(NameOf(*shape) + " gather", GatherMatrices{shape->x, all, share * shorter * longer, {plan_.scalars, plan_.progress, 0}},
            {shape->x, plan_.scalars}, {all, plan_.progress});
    plan_.update.back().part = Part::kCommunication;
    shape->x = all;
  }

  static std::string NameOf(const Shape& shape) { return absl::StrCat("muon ", shape.rows, "x", shape.cols); }
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
