#include "worker/kernels/gemm_resident.h"

#include "worker/kernels/card.h"
#include "worker/kernels/gemm_resident.cuh"

namespace hierad::kernels {
namespace {

using resident::Epilogue;

using Runner = cudaError_t (*)(const resident::Arguments&, int, cudaStream_t);

// That of kK which is k.
template <int kColumns, bool kAcross, Epilogue kEpilogue, int... kK>
Runner OfWidth(int64_t k) {
  Runner runner = nullptr;
  ((k == kK ? void(runner = &resident::Run<bf16, kColumns, kK, kAcross, kEpilogue>) : void()), ...);
  return runner;
}

// Null: none.
Runner RunnerOf(const GemmShape& s) {
  const bool plain = s.bf16 && !s.wide_out && !s.trans_a && !s.accumulate && s.batch == 1 && s.alpha == 1 && s.beta == 0;
  if (!plain || ThisCard().capability != 90 || s.bias != s.trans_b || s.m < 1 || s.m > INT32_MAX - 64) return nullptr;
  if (s.trans_b) {
    if (s.n % 128 == 0) return OfWidth<128, false, Epilogue::kBias, 192, 384, 512, 768>(s.k);
    if (s.n % 96 == 0) return OfWidth<96, false, Epilogue::kBias, 96, 192, 384, 768>(s.k);
  } else {
    if (s.n % 128 == 0 && s.k <= 768) return OfWidth<128, true, Epilogue::kPlain, 384, 512, 768>(s.k);
    if (s.n % 96 == 0) return OfWidth<96, true, Epilogue::kPlain, 96, 192, 288, 384, 576, 768, 1152>(s.k);
  }
  return nullptr;
}

}  // namespace

bool ResidentHas(const GemmShape& shape) { return RunnerOf(shape) != nullptr; }

cudaError_t RunResident(const GemmShape& s, const void* a, const void* b, void* c, const void* bias, cudaStream_t stream) {
  const Runner run = RunnerOf(s);
  if (run == nullptr) return cudaErrorNotSupported;
  return run({int(s.m), int(s.n), a, b, bias, c, nullptr, nullptr, nullptr, 0}, ThisCard().sm_count, stream);
}

}  // namespace hierad::kernels
