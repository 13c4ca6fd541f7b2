#include "worker/kernels/muon_products.h"

#include <cuda.h>

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "worker/kernels/card.h"
#include "worker/kernels/tensor_map.h"

namespace hierad::kernels {
namespace {

absl::Status Failed(const char* what, cudaError_t error) {
  return ErrorOf(error == cudaErrorMemoryAllocation ? v1::REASON_CUDA_OOM : v1::REASON_CRASHED,
                 absl::StrCat("Newton-Schulz's products: ", what, ": ", cudaGetErrorString(error), "."));
}

}  // namespace

// On the device: three maps a group, the tiles, where each block's begin.
struct MuonProducts::Prepared {
  char* memory = nullptr;
  int blocks = 0;
  size_t tiles_at = 0, begins_at = 0;
  ~Prepared() {
    if (memory != nullptr) cudaFree(memory);
  }
};

MuonProducts::MuonProducts() = default;
MuonProducts::~MuonProducts() = default;

absl::Status MuonProducts::Run(MuonPhase phase, const std::vector<MuonGroup>& groups, bool f16, cudaStream_t stream) {
  if (groups.empty()) return absl::OkStatus();
  std::string key = absl::StrCat(int(phase), f16);
  for (const auto& [m, x, square, out] : groups) {
    absl::StrAppend(&key, " ", m.count, "x", m.shorter, "x", m.longer, " ", uintptr_t(x), " ", uintptr_t(square), " ", uintptr_t(out));
  }
  std::unique_ptr<Prepared>& slot = prepared_[key];
  if (slot == nullptr) {
    std::vector<CUtensorMap> maps(3 * groups.size());
    std::vector<MuonMatrices> matrices;
    for (size_t g = 0; g < groups.size(); ++g) {
      const auto& [m, x, square, out] = groups[g];
      const std::pair<const void*, int> operands[] = {phase == MuonPhase::kGram ? std::pair{x, m.longer} : std::pair{square, m.shorter},
                                                      phase == MuonPhase::kPolynomial ? std::pair{square, m.shorter} : std::pair{x, m.longer},
                                                      {out, phase == MuonPhase::kTurn ? m.longer : m.shorter}};
      for (int i = 0; i < 3; ++i) {
        if (MakeTensorMap(operands[i].first, m.count, m.shorter, operands[i].second, f16, &maps[3 * g + i]) == cudaSuccess) continue;
        return ErrorOf(v1::REASON_CRASHED, absl::StrCat("no tensor map can be made of ", m.count, " matrices ", m.shorter, "x", operands[i].second, "."));
      }
      matrices.push_back(m);
    }
    const auto schedule = ScheduleMuon(phase, matrices, ThisCard().sm_count * kMuonBlocks);
    std::vector<MuonTile> tiles;
    std::vector<int> begins{0};
    for (const std::vector<MuonTile>& of_block : schedule) {
      if (of_block.empty()) break;   // fewer tiles than blocks
      tiles.insert(tiles.end(), of_block.begin(), of_block.end());
      begins.push_back(int(tiles.size()));
    }
    auto p = std::make_unique<Prepared>();
    p->blocks = int(begins.size()) - 1;
    p->tiles_at = maps.size() * sizeof maps[0], p->begins_at = p->tiles_at + tiles.size() * sizeof tiles[0];
    std::string bytes(p->begins_at + begins.size() * sizeof begins[0], '\0');
    std::memcpy(bytes.data(), maps.data(), p->tiles_at);
    std::memcpy(bytes.data() + p->tiles_at, tiles.data(), tiles.size() * sizeof tiles[0]);
    std::memcpy(bytes.data() + p->begins_at, begins.data(), begins.size() * sizeof begins[0]);
    cudaError_t error = cudaMalloc(reinterpret_cast<void**>(&p->memory), bytes.size());
    if (error == cudaSuccess) error = cudaMemcpy(p->memory, bytes.data(), bytes.size(), cudaMemcpyHostToDevice);
    if (error == cudaSuccess) error = cudaStreamSynchronize(cudaStreamLegacy);   // streams that do not block would overtake it
    if (error != cudaSuccess) return Failed("preparing a launch", error);
    slot = std::move(p);
  }
  const char* const memory = slot->memory;
  const cudaError_t error = StartMuonProducts(phase, f16, slot->blocks, memory, reinterpret_cast<const MuonTile*>(memory + slot->tiles_at),
                                              reinterpret_cast<const int*>(memory + slot->begins_at), stream);
  return error == cudaSuccess ? absl::OkStatus() : Failed("a launch", error);
}

}  // namespace hierad::kernels
