// The matrix products of a plan on a GPU: their shapes as the library sees them, and by whom each is made. The choice is by
// measurement: tables of algorithms (algorithms/, a line a shape, "<GemmShape::Key> <algorithm in hex>" or kResidentAlgorithm, each of one card and
// one version of the library), and the rule for products with GELU in their epilogue.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/plan/gemm_shape.h"
#include "base/plan/plan.h"

namespace hierad {

// In bf16, fp16 or fp32; tf32 counts in fp32 only.
GemmShape ShapeOf(const Gemm& op, const Plan& plan, bool tf32);
// The products of GemmGelu and GemmGeluBackward without their elementwise part.
Gemm ProductOf(const GemmGelu& op);
Gemm ProductOf(const GemmGeluBackward& op);

// d = alpha a op(b) + beta c of `count` products of one shape, row-major, contiguous: a group of MuonProducts.
struct BatchedGemm { TensorId a, b, c, d; int64_t count, m, n, k; bool trans_b; double alpha, beta; };
BatchedGemm ProductOf(MuonPhase phase, const MuonProducts::Group& group);
GemmShape ShapeOf(const BatchedGemm& op, const Plan& plan, bool tf32);
// Whether a card of this capability makes a group's products with those of the others, in one launch (worker/kernels/muon_products.h).
bool TakesMuonGroup(int capability, ComputeType type, const MuonProducts::Group& group);

// Who makes a product m x n x k with GELU (or, backward, its derivative) in the epilogue on a card of this capability (90: 9.0).
enum class GeluEpilogue {
  kNone,       // the library, and an elementwise kernel
  kRing,       // columns of the weights stay in shared memory, rows come through a ring
  kTiles256,   // cooperative tiles of 128 rows by so many columns, bf16 alone
};
GeluEpilogue GeluEpilogueOf(int capability, ComputeType type, bool backward, int64_t m, int64_t n, int64_t k);
// n and k of kRing.
bool RingTakes(int64_t n, int64_t k);

// In a table instead of an algorithm: by the kernel of ours that keeps weights in shared memory.
inline constexpr char kResidentAlgorithm[] = "resident";

// The committed table of this name, "<card>.cublasLt-<version>"; empty: there is none.
std::string CommittedAlgorithms(std::string_view name);
// The newest committed table of a card, by its name of plan_report.h; empty: there is none.
std::string NewestAlgorithmTable(std::string_view card);

// Products of one shape in a step.
struct PlannedProduct {
  std::string key;         // GemmShape::Key
  std::string made_by;     // "epilogue ..." (GeluEpilogue), "grouped" (TakesMuonGroup), "table", "resident", or "library" (its own first choice)
  int64_t count;           // in an optimizer step
  double flops;            // of all of them
};
// By key. `card`: of plan_report.h. `accumulation`: micro-batches of a step.
std::vector<PlannedProduct> ProductsOf(const Plan& plan, std::string_view card, int capability, bool tf32, int64_t accumulation);

}  // namespace hierad
