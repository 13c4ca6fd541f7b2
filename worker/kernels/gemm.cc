#include "worker/kernels/gemm.h"

#include <cublasLt.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/plan/products.h"
#include "base/status.h"
#include "base/text.h"
#include "worker/kernels/algorithm_table.h"

namespace hierad::kernels {
namespace {

constexpr int kCandidates = 24;   // algorithms that Tune asks for and times
constexpr int kTimedRuns = 7, kLaunchesARun = 4;

absl::Status Failed(const char* what, const GemmShape& shape, int code) {
  return ErrorOf(v1::REASON_CRASHED, absl::StrCat("cuBLASLt: ", what, " failed with status ", code, " for the product ", shape.Key(), "."));
}

}  // namespace

struct GemmLibrary::Prepared {
  GemmShape shape;
  cublasLtMatmulDesc_t desc = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, c = nullptr;   // as cuBLAS sees them: column-major, operands exchanged
  cublasLtMatmulAlgo_t algo;

  ~Prepared() {
    for (cublasLtMatrixLayout_t layout : {a, b, c}) {
      if (layout != nullptr) cublasLtMatrixLayoutDestroy(layout);
    }
    if (desc != nullptr) cublasLtMatmulDescDestroy(desc);
  }
};

absl::StatusOr<std::unique_ptr<GemmLibrary>> GemmLibrary::Make(int64_t workspace_bytes) {
  std::unique_ptr<GemmLibrary> library(new GemmLibrary);
  if (const int code = cublasLtCreate(reinterpret_cast<cublasLtHandle_t*>(&library->handle_)); code != 0) {
    return ErrorOf(v1::REASON_CRASHED, absl::StrCat("cuBLASLt could not be started (status ", code, ")."));
  }
  if (cudaMalloc(reinterpret_cast<void**>(&library->workspace_), kLanes * workspace_bytes) != cudaSuccess) {
    return ErrorOf(v1::REASON_CUDA_OOM, absl::StrCat("no room for ", kLanes * workspace_bytes, " bytes of workspace on the GPU."));
  }
  library->workspace_bytes_ = workspace_bytes;
  const std::string name = AlgorithmTableName();
  constexpr size_t kRow = sizeof(cublasLtMatmulAlgo_t);
  RETURN_IF_ERROR(library->table_.Read(CommittedAlgorithms(name), kRow, /*measured_here=*/false));
  const auto cached = CachedAlgorithms(name);
  if (const absl::Status read = cached.ok() ? library->table_.Read(*cached, kRow, /*measured_here=*/true) : cached.status(); !read.ok()) {
    return Annotate(read, absl::StrCat(Printable(CachedAlgorithmsFile(name)), " (make it readable, or remove it)"));
  }
  return library;
}

GemmLibrary::~GemmLibrary() {
  prepared_.clear();
  if (workspace_ != nullptr) cudaFree(workspace_);
  if (handle_ != nullptr) cublasLtDestroy(static_cast<cublasLtHandle_t>(handle_));
}

namespace {

// Of every operand, in bytes; those of a batch lie behind one another.
uint32_t AlignmentOf(const GemmShape& s) {
  if (s.batch == 1) return 16;
  const int64_t strides = (s.k * s.n | s.m * s.k | s.m * s.n) * (s.bf16 ? 2 : 4);
  return uint32_t(std::min<int64_t>(16, strides & -strides));
}

// Up to `most` algorithms, the library's favourite first.
std::vector<cublasLtMatmulHeuristicResult_t> Candidates(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a,
                                                        cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, uint32_t alignment, uint64_t workspace,
                                                        int most) {
  cublasLtMatmulPreference_t preference;
  if (cublasLtMatmulPreferenceCreate(&preference) != CUBLAS_STATUS_SUCCESS) return {};
  cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace);
  for (auto which : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                     CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
    cublasLtMatmulPreferenceSetAttribute(preference, which, &alignment, sizeof alignment);
  }
  std::vector<cublasLtMatmulHeuristicResult_t> results(most);
  int found = 0;
  cublasLtMatmulAlgoGetHeuristic(handle, desc, a, b, c, c, preference, most, results.data(), &found);
  cublasLtMatmulPreferenceDestroy(preference);
  results.resize(found);
  return results;
}

}  // namespace

absl::StatusOr<GemmLibrary::Prepared*> GemmLibrary::Prepare(const GemmShape& s) {
  std::unique_ptr<Prepared>& slot = prepared_[s.Key()];
  if (slot != nullptr) return slot.get();
  auto p = std::make_unique<Prepared>();
  p->shape = s;
  const cudaDataType_t in = s.bf16 ? CUDA_R_16BF : s.f16 ? CUDA_R_16F : CUDA_R_32F, out = s.wide_out ? CUDA_R_32F : in;
  const cublasComputeType_t compute = s.tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
  // Row-major c = a b is column-major c^T = b^T a^T: b comes first, and what is stored transposed for us is plain for it.
  const cublasOperation_t first = s.trans_b ? CUBLAS_OP_T : CUBLAS_OP_N, second = s.trans_a ? CUBLAS_OP_T : CUBLAS_OP_N;
  int code = cublasLtMatmulDescCreate(&p->desc, compute, CUDA_R_32F);
  if (code != 0) return Failed("creating a descriptor", s, code);
  cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first);
  cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second);
  if (s.bias) {
    const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
    cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue);
    cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &out, sizeof out);
  }
  code = s.trans_b ? cublasLtMatrixLayoutCreate(&p->a, in, s.k, s.n, s.k) : cublasLtMatrixLayoutCreate(&p->a, in, s.n, s.k, s.n);
  if (code == 0) code = s.trans_a ? cublasLtMatrixLayoutCreate(&p->b, in, s.m, s.k, s.m) : cublasLtMatrixLayoutCreate(&p->b, in, s.k, s.m, s.k);
  if (code == 0) code = cublasLtMatrixLayoutCreate(&p->c, out, s.n, s.m, s.n);
  if (code != 0) return Failed("creating a layout", s, code);
  if (s.batch > 1) {
    const int32_t batch = int32_t(s.batch);
    const std::pair<cublasLtMatrixLayout_t, int64_t> strides[] = {{p->a, s.k * s.n}, {p->b, s.m * s.k}, {p->c, s.m * s.n}};
    for (const auto& [layout, stride] : strides) {
      cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch, sizeof batch);
      cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof stride);
    }
  }
  if (const std::string* known = table_.Find(s.Key())) {
    std::memcpy(&p->algo, known->data(), sizeof p->algo);
    // A table may be another workspace's, or damaged.
    cublasLtMatmulHeuristicResult_t fits{};
    const auto handle = static_cast<cublasLtHandle_t>(handle_);
    if (cublasLtMatmulAlgoCheck(handle, p->desc, p->a, p->b, p->c, p->c, &p->algo, &fits) != CUBLAS_STATUS_SUCCESS ||
        int64_t(fits.workspaceSize) > workspace_bytes_) {
      table_.Forget(s.Key());
    }
  }
  if (table_.Find(s.Key()) == nullptr) {
    const auto results = Candidates(static_cast<cublasLtHandle_t>(handle_), p->desc, p->a, p->b, p->c, AlignmentOf(s), workspace_bytes_, 1);
    if (results.empty()) return Failed("finding an algorithm", s, CUBLAS_STATUS_NOT_SUPPORTED);
    p->algo = results[0].algo;
  }
  slot = std::move(p);
  return slot.get();
}

absl::Status GemmLibrary::Launch(const Prepared& p, const void* a, const void* b, void* c, const void* bias, cudaStream_t stream, int lane,
                                 const void* addend) const {
  if (p.shape.bias) cublasLtMatmulDescSetAttribute(p.desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof bias);
  const float alpha = p.shape.alpha, beta = p.shape.accumulate ? 1 : p.shape.beta;
  const int code = cublasLtMatmul(static_cast<cublasLtHandle_t>(handle_), p.desc, &alpha, b, p.a, a, p.b, &beta, addend != nullptr ? addend : c, p.c, c, p.c, &p.algo,
                                  workspace_ + lane * workspace_bytes_, workspace_bytes_, stream);
  return code == 0 ? absl::OkStatus() : Failed("a product", p.shape, code);
}

absl::Status GemmLibrary::Run(const GemmShape& shape, const void* a, const void* b, void* c, const void* bias, cudaStream_t stream, int lane,
                              const void* addend) {
  ASSIGN_OR_RETURN(Prepared * p, Prepare(shape));
  return Launch(*p, a, b, c, bias, stream, lane, addend);
}

absl::Status GemmLibrary::Tune(const GemmShape& shape, const void* a, const void* b, void* c, const void* bias, cudaStream_t stream) {
  if (table_.Find(shape.Key()) != nullptr) return absl::OkStatus();
  ASSIGN_OR_RETURN(Prepared * p, Prepare(shape));
  const auto results = Candidates(static_cast<cublasLtHandle_t>(handle_), p->desc, p->a, p->b, p->c, AlignmentOf(shape), workspace_bytes_, kCandidates);
  cudaEvent_t start, stop;
  cudaEventCreate(&start), cudaEventCreate(&stop);
  float best = 1e30f;
  cublasLtMatmulAlgo_t choice = p->algo;
  for (const auto& result : results) {
    p->algo = result.algo;
    std::vector<float> times;
    for (int run = 0; run <= kTimedRuns; ++run) {
      cudaEventRecord(start, stream);
      bool launched = true;
      for (int i = 0; i < kLaunchesARun && launched; ++i) launched = Launch(*p, a, b, c, bias, stream, 0).ok();
      if (!launched) break;
      cudaEventRecord(stop, stream);
      cudaEventSynchronize(stop);
      float ms = 0;
      cudaEventElapsedTime(&ms, start, stop);
      if (run > 0) times.push_back(ms);
    }
    if (times.size() != kTimedRuns) continue;
    std::sort(times.begin(), times.end());
    if (times[kTimedRuns / 2] < best) best = times[kTimedRuns / 2], choice = result.algo;
  }
  cudaEventDestroy(start), cudaEventDestroy(stop);
  p->algo = choice;
  table_.KeepMeasured(shape.Key(), std::string(reinterpret_cast<const char*>(&choice), sizeof choice));
  return absl::OkStatus();
}

}  // namespace hierad::kernels
