#include "worker/kernels/muon_products.cuh"

namespace hierad::kernels {
namespace {

template <typename T, MuonPhase kPhase, int kGroups>
cudaError_t Start(int blocks, const CUtensorMap* maps, const MuonTile* tiles, const int* begins, cudaStream_t stream) {
  using L = muon::Layout<kGroups>;
  const auto kernel = muon::Products<T, kPhase, kGroups>;
  if (const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, L::kBytes); e != cudaSuccess) return e;
  return Launch(kernel, dim3(unsigned(blocks)), dim3(L::kThreads), L::kBytes, stream, maps, tiles, begins);
}

template <typename T>
cudaError_t StartPhase(MuonPhase phase, int width, int blocks, const CUtensorMap* maps, const MuonTile* tiles, const int* begins, cudaStream_t stream) {
  switch (phase) {
    case MuonPhase::kGram: return Start<T, MuonPhase::kGram, 1>(blocks, maps, tiles, begins, stream);
    case MuonPhase::kPolynomial: return Start<T, MuonPhase::kPolynomial, 1>(blocks, maps, tiles, begins, stream);
    case MuonPhase::kTurn:
      return width == 1 ? Start<T, MuonPhase::kTurn, 1>(blocks, maps, tiles, begins, stream) : Start<T, MuonPhase::kTurn, 2>(blocks, maps, tiles, begins, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t StartMuonProducts(MuonPhase phase, bool f16, int width, int blocks, const void* maps, const MuonTile* tiles, const int* begins, cudaStream_t stream) {
  return (f16 ? StartPhase<half> : StartPhase<bf16>)(phase, width, blocks, static_cast<const CUtensorMap*>(maps), tiles, begins, stream);
}

}  // namespace hierad::kernels
