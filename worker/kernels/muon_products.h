// Newton-Schulz's products on cards of capability 9.0, in bf16 or fp16: one launch makes a phase of a round for all matrices of
// all shapes (muon_schedule.h), of symmetric results the half above the diagonal, mirrored. Sums in fp32, rounded once; the same
// bits each time.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/plan/step_values.h"
#include "worker/kernels/muon_schedule.h"

namespace hierad::kernels {

// `count` matrices behind one another, 16-byte rows (both sides multiples of 8), 16-byte aligned.
//   kGram: out = x x^T; kPolynomial: out = kMuonB square + kMuonC square square; kTurn: out = kMuonA x + square x
// x [shorter, longer], square [shorter, shorter], symmetric.
struct MuonGroup {
  MuonMatrices matrices;
  const void* x;        // not the polynomial's
  const void* square;   // not the Gram matrix's
  void* out;
};

class MuonProducts {
 public:
  MuonProducts();
  ~MuonProducts();
  // What these operands need on the device is prepared when they are new (not while capturing) and kept.
  absl::Status Run(MuonPhase phase, const std::vector<MuonGroup>& groups, bool f16, cudaStream_t stream);

 private:
  struct Prepared;
  std::map<std::string, std::unique_ptr<Prepared>> prepared_;
};

inline constexpr int kMuonBlocks = 2;   // of threads, a multiprocessor
// The launch. maps: on the device, of each group the left operand, the right one and the result, in boxes of kMuonBox rows and columns, 128-byte
// swizzle. `begins`: where each block's tiles begin, and the end.
cudaError_t StartMuonProducts(MuonPhase phase, bool f16, int blocks, const void* maps, const MuonTile* tiles, const int* begins, cudaStream_t stream);

}  // namespace hierad::kernels
