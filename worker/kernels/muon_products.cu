#include "worker/kernels/muon_products.cuh"

namespace hierad::kernels {
namespace {

template <typename T, MuonPhase kPhase>
cudaError_t Start(int blocks, const CUtensorMap* maps, const MuonTile* tiles, const int* begins, cudaStream_t stream) {
  const auto kernel = muon::Products<T, kPhase>;
  if (const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, muon::kBytes); e != cudaSuccess) return e;
  return Launch(kernel, dim3(unsigned(blocks)), dim3(muon::kThreads), muon::kBytes, stream, maps, tiles, begins);
}

template <typename T>
cudaError_t StartPhase(MuonPhase phase, int blocks, const CUtensorMap* maps, const MuonTile* tiles, const int* begins, cudaStream_t stream) {
  switch (phase) {
    case MuonPhase::kGram: return Start<T, MuonPhase::kGram>(blocks, maps, tiles, begins, stream);
    case MuonPhase::kPolynomial: return Start<T, MuonPhase::kPolynomial>(blocks, maps, tiles, begins, stream);
    case MuonPhase::kTurn: return Start<T, MuonPhase::kTurn>(blocks, maps, tiles, begins, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t StartMuonProducts(MuonPhase phase, bool f16, int blocks, const void* maps, const MuonTile* tiles, const int* begins, cudaStream_t stream) {
  return (f16 ? StartPhase<half> : StartPhase<bf16>)(phase, blocks, static_cast<const CUtensorMap*>(maps), tiles, begins, stream);
}

}  // namespace hierad::kernels
