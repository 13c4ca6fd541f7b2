#include "base/plan/products.h"

#include <map>
#include <sstream>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/plan/committed_algorithms.h"

namespace hierad {

std::string GemmShape::Key() const {
  return absl::StrCat(m, "x", n, "x", k, trans_a ? "-ta" : "", trans_b ? "-tb" : "", accumulate ? "-acc" : "", bias ? "-bias" : "",
                      bf16 ? "-bf16" : f16 ? "-fp16" : tf32 ? "-tf32" : "-fp32", wide_out ? "-out32" : "",
                      batch > 1 ? absl::StrCat("-batch", batch) : "", alpha != 1 || beta != 0 ? absl::StrCat("-alpha", alpha, "-beta", beta) : "");
}

GemmShape ShapeOf(const Gemm& o, const Plan& plan, bool tf32) {
  const bool bf16 = plan.options.compute == ComputeType::kBF16, f16 = plan.options.compute == ComputeType::kF16;
  GemmShape shape{o.m, o.n, o.k, o.trans_a, o.trans_b, o.accumulate, o.bias != kNone, bf16, (bf16 || f16) && plan.tensors[o.c].dtype == DType::kF32,
                  !bf16 && !f16 && tf32};
  shape.f16 = f16;
  return shape;
}

GemmShape ShapeOf(const BatchedGemm& o, const Plan& plan, bool tf32) {
  const bool bf16 = plan.options.compute == ComputeType::kBF16, f16 = plan.options.compute == ComputeType::kF16;
  return {o.m, o.n, o.k, false, o.trans_b, false, false, bf16, false, !bf16 && !f16 && tf32, o.count, float(o.alpha), float(o.beta), f16};
}

BatchedGemm ProductOf(MuonPhase phase, const MuonProducts::Group& g) {
  switch (phase) {
    case MuonPhase::kGram: return {g.x, g.x, kNone, g.gram, g.count, g.shorter, g.shorter, g.longer, true, 1, 0};
    case MuonPhase::kPolynomial: return {g.gram, g.gram, g.gram, g.polynomial, g.count, g.shorter, g.shorter, g.shorter, false, kMuonC, kMuonB};
    case MuonPhase::kTurn: return {g.polynomial, g.x, g.x, g.next, g.count, g.shorter, g.longer, g.shorter, false, 1, kMuonA};
  }
  return {};
}

bool TakesMuonGroup(int capability, ComputeType type, const MuonProducts::Group& g) {
  const bool narrow = type == ComputeType::kBF16 || type == ComputeType::kF16;
  return capability == 90 && narrow && g.shorter % 8 == 0 && g.longer % 8 == 0;
}

Gemm ProductOf(const GemmGelu& o) { return {o.a, o.b, o.h, o.bias, o.m, o.n, o.k, false, true, false}; }
Gemm ProductOf(const GemmGeluBackward& o) { return {o.a, o.b, o.dh, kNone, o.m, o.n, o.k, false, false, false}; }

bool RingTakes(int64_t n, int64_t k) { return n % 8 == 0 && k % 8 == 0 && k <= 512; }

// By measurement (docs/performance.md, "Products and epilogues").
GeluEpilogue GeluEpilogueOf(int capability, ComputeType type, bool backward, int64_t m, int64_t n, int64_t k) {
  const bool bf16 = type == ComputeType::kBF16, narrow = bf16 || type == ComputeType::kF16;
  if (capability != 90 || !narrow || m < 1 || m > INT32_MAX - 128 || n > INT32_MAX || k > INT32_MAX) return GeluEpilogue::kNone;
  if (RingTakes(n, k)) return GeluEpilogue::kRing;
  // Where tiles leave most of the card idle a product and a kernel are faster; backward the launches saved are worth more.
  const bool idle = !backward && (m + 127) / 128 * ((n + 255) / 256) < 96;
  return bf16 && k % 8 == 0 && n % 256 == 0 && !idle ? GeluEpilogue::kTiles256 : GeluEpilogue::kNone;
}

std::string CommittedAlgorithms(std::string_view name) {
  for (const CommittedTable& table : kCommittedAlgorithms) {
    if (name == table.name) return table.text;
  }
  return "";
}

std::string NewestAlgorithmTable(std::string_view card) {
  const std::string prefix = absl::StrCat("NVIDIA-", std::string(card), ".cublasLt-");
  std::string newest;
  for (const CommittedTable& table : kCommittedAlgorithms) {
    if (absl::StartsWithIgnoreCase(table.name, prefix) && table.name > newest) newest = table.name;   // versions have as many digits
  }
  return newest;
}

std::vector<PlannedProduct> ProductsOf(const Plan& plan, std::string_view card, int capability, bool tf32, int64_t accumulation) {
  std::map<std::string, std::string> known;
  std::istringstream table(CommittedAlgorithms(NewestAlgorithmTable(card)));
  for (std::string key, algorithm; table >> key >> algorithm;) known[key] = algorithm;
  std::map<std::pair<std::string, std::string>, PlannedProduct> products;
  auto add = [&](const GemmShape& shape, GeluEpilogue epilogue, double flops, int64_t times, bool grouped = false) {
    const std::string key = shape.Key();
    std::string by = "library";
    if (grouped) by = "grouped";
    else if (epilogue == GeluEpilogue::kRing) by = "epilogue ring";
    else if (epilogue == GeluEpilogue::kTiles256) by = "epilogue 128x256";
    else if (auto entry = known.find(key); entry != known.end()) by = entry->second == kResidentAlgorithm ? "resident" : "table";
    PlannedProduct& p = products.try_emplace({key, by}, PlannedProduct{key, by, 0, 0}).first->second;
    p.count += times, p.flops += double(times) * flops;
  };
  for (const auto& [ops, times] : {std::pair{&plan.forward_backward, accumulation}, {&plan.update, int64_t{1}}}) {
    for (const Op& op : *ops) {
      if (const auto* gemm = std::get_if<Gemm>(&op.args)) {
        add(ShapeOf(*gemm, plan, tf32), GeluEpilogue::kNone, op.flops, times);
      } else if (const auto* muon = std::get_if<MuonProducts>(&op.args)) {
        for (const MuonProducts::Group& g : muon->groups) {
          const BatchedGemm product = ProductOf(muon->phase, g);
          const double flops = 2.0 * double(product.count * product.m * product.n * product.k);
          add(ShapeOf(product, plan, tf32), GeluEpilogue::kNone, flops, times, TakesMuonGroup(capability, plan.options.compute, g));
        }
      } else if (const auto* forward = std::get_if<GemmGelu>(&op.args)) {
        add(ShapeOf(ProductOf(*forward), plan, tf32), GeluEpilogueOf(capability, plan.options.compute, false, forward->m, forward->n, forward->k), op.flops, times);
      } else if (const auto* backward = std::get_if<GemmGeluBackward>(&op.args)) {
        add(ShapeOf(ProductOf(*backward), plan, tf32), GeluEpilogueOf(capability, plan.options.compute, true, backward->m, backward->n, backward->k), op.flops, times);
      }
    }
  }
  std::vector<PlannedProduct> list;
  for (auto& [key, product] : products) list.push_back(std::move(product));
  return list;
}

}  // namespace hierad
