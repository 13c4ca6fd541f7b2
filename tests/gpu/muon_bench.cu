// Newton-Schulz's products on a GPU (muon_products.h): for odd shapes and those of Base, errors against double on the same bf16 or
// fp16 inputs, poisoned outputs, the same bits twice; then the time of each phase and of all rounds against the library's batched products,
// shape by shape in two streams. Exit 1 if a bound is broken.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/job_yaml.h"
#include "base/plan/plan.h"
#include "worker/kernels/device.cuh"
#include "worker/kernels/gemm.h"
#include "worker/kernels/muon_products.h"

using namespace hierad::kernels;
using hierad::GemmShape;
using hierad::MuonPhase;

namespace {

constexpr int kReplays = 15;
constexpr MuonPhase kPhases[] = {MuonPhase::kGram, MuonPhase::kPolynomial, MuonPhase::kTurn};
const char* const kNames[] = {"gram", "polynomial", "turn"};

void Check(cudaError_t e, const char* what) {
  if (e == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(e));
  std::exit(2);
}
void Check(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  std::exit(2);
}

struct Buffer {
  explicit Buffer(size_t bytes) : bytes(bytes) {
    Check(cudaMalloc(&p, bytes), "cudaMalloc");
    Poison();
  }
  Buffer(const Buffer&) = delete;
  ~Buffer() { cudaFree(p); }
  void Poison() { Check(cudaMemset(p, 0xFF, bytes), "cudaMemset"); }   // NaN: an element that is not written shows
  void* p = nullptr;
  size_t bytes;
};

__device__ float Noise(uint64_t i, uint64_t seed) {
  uint64_t x = (i + 1) * 0x9E3779B97F4A7C15ull + seed * 0xD1342543DE82EF95ull;
  float sum = 0;
  for (int k = 0; k < 4; ++k) x ^= x >> 31, x *= 0x7FB5D329728EA185ull, x ^= x >> 27, sum += float(x >> 40) * (1.0f / 16777216.0f) - 0.5f;
  return sum * 1.7320508f;   // near normal
}
// Of `columns` columns a row; symmetric matrices where asked.
template <typename T>
__global__ void Fill(T* p, int64_t n, int rows, int columns, bool symmetric, uint64_t seed, float scale) {
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x) {
    const int64_t matrix = i / (int64_t(rows) * columns), r = i / columns % rows, c = i % columns;
    p[i] = FromFloat<T>(scale * Noise(symmetric ? (matrix * rows + min(r, c)) * columns + max(r, c) : i, seed));
  }
}
// A thread an element, in double: squared differences and squares of the reference, a block's share each.
template <typename T>
__global__ void Compare(MuonPhase phase, int64_t n, int shorter, int longer, const T* x, const T* square, const T* out, double* difference, double* size) {
  __shared__ double sums[2][256];
  const int columns = phase == MuonPhase::kTurn ? longer : shorter;
  double d = 0, s = 0;
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x) {
    const int64_t matrix = i / (int64_t(shorter) * columns), r = i / columns % shorter, c = i % columns;
    const T *const xs = x + matrix * shorter * longer, *const squares = square + matrix * shorter * shorter;
    double sum = 0;
    for (int k = 0; k < (phase == MuonPhase::kGram ? longer : shorter); ++k) {
      const float a = ToFloat(phase == MuonPhase::kGram ? xs[r * longer + k] : squares[r * shorter + k]);
      const float b = ToFloat(phase == MuonPhase::kGram ? xs[c * longer + k] : phase == MuonPhase::kPolynomial ? squares[int64_t(k) * shorter + c] : xs[int64_t(k) * longer + c]);
      sum += double(a) * double(b);
    }
    if (phase == MuonPhase::kPolynomial) sum = hierad::kMuonC * sum + hierad::kMuonB * double(ToFloat(squares[r * shorter + c]));
    if (phase == MuonPhase::kTurn) sum += hierad::kMuonA * double(ToFloat(xs[r * longer + c]));
    const double got = double(ToFloat(out[i]));
    d += (got - sum) * (got - sum), s += sum * sum;
  }
  sums[0][threadIdx.x] = d, sums[1][threadIdx.x] = s;
  __syncthreads();
  if (threadIdx.x != 0) return;
  double total[2] = {};
  for (int t = 0; t < 256; ++t) total[0] += sums[0][t], total[1] += sums[1][t];
  difference[blockIdx.x] = total[0], size[blockIdx.x] = total[1];
}

struct Set {   // of one shape
  explicit Set(const MuonMatrices& m, int rounds)
      : m(m), xs(size_t(m.count) * m.shorter * m.longer), squares(size_t(m.count) * m.shorter * m.shorter) {
    for (int i = 0; i <= rounds; ++i) x.push_back(std::make_unique<Buffer>(2 * xs));
    for (int i = 0; i < 2; ++i) square.push_back(std::make_unique<Buffer>(2 * squares));
  }
  double Flops(MuonPhase phase) const {
    return 2.0 * m.count * m.shorter * m.shorter * (phase == MuonPhase::kPolynomial ? m.shorter : m.longer);
  }
  MuonMatrices m;
  size_t xs, squares;
  std::vector<std::unique_ptr<Buffer>> x, square;   // of each round; gram and polynomial
  MuonGroup Group(MuonPhase phase, int round) const {
    switch (phase) {
      case MuonPhase::kGram: return {m, x[round]->p, nullptr, square[0]->p};
      case MuonPhase::kPolynomial: return {m, nullptr, square[0]->p, square[1]->p};
      case MuonPhase::kTurn: return {m, x[round]->p, square[1]->p, x[round + 1]->p};
    }
    return {};
  }
};
using Sets = std::vector<std::unique_ptr<Set>>;

std::vector<MuonGroup> GroupsOf(const Sets& sets, MuonPhase phase, int round) {
  std::vector<MuonGroup> groups;
  for (const auto& set : sets) groups.push_back(set->Group(phase, round));
  return groups;
}

template <typename T>
void FillAll(const Sets& sets, uint64_t seed) {
  for (const auto& s : sets) {
    Fill<T><<<1024, 256>>>(static_cast<T*>(s->x[0]->p), s->xs, s->m.shorter, s->m.longer, false, ++seed, 1 / std::sqrt(float(s->m.longer)));
    for (const auto& square : s->square) Fill<T><<<1024, 256>>>(static_cast<T*>(square->p), s->squares, s->m.shorter, s->m.shorter, true, ++seed, 1 / std::sqrt(float(s->m.shorter)));
  }
  Check(cudaDeviceSynchronize(), "fill");
}

uint64_t Hash(const Buffer& b) {
  std::vector<uint64_t> bytes(b.bytes / 8);
  Check(cudaMemcpy(bytes.data(), b.p, bytes.size() * 8, cudaMemcpyDeviceToHost), "cudaMemcpy");
  uint64_t h = 1469598103934665603ull;
  for (uint64_t v : bytes) h = (h ^ v) * 1099511628211ull, h ^= h >> 29;
  return h;
}

template <typename T>
bool Correct(const char* what, MuonProducts& products, const std::vector<MuonMatrices>& shapes, double bound) {
  Sets sets;
  for (const MuonMatrices& m : shapes) sets.push_back(std::make_unique<Set>(m, 1));
  constexpr int kBlocks = 1024;
  Buffer difference(8 * kBlocks), size(8 * kBlocks);
  bool good = true;
  for (MuonPhase phase : kPhases) {
    FillAll<T>(sets, 7 + int(phase));
    double worst = 0;
    std::string where;
    std::vector<uint64_t> bits;
    int differ = 0;
    for (int run = 0; run < 2; ++run) {
      const auto groups = GroupsOf(sets, phase, 0);
      for (const auto& s : sets) (phase == MuonPhase::kTurn ? *s->x[1] : *s->square[phase == MuonPhase::kGram ? 0 : 1]).Poison();
      Check(cudaDeviceSynchronize(), "poison");
      Check(products.Run(phase, groups, std::is_same_v<T, half>, nullptr));
      Check(cudaDeviceSynchronize(), kNames[int(phase)]);
      for (size_t i = 0; i < sets.size(); ++i) {
        Set& s = *sets[i];
        const Buffer& out = phase == MuonPhase::kTurn ? *s.x[1] : *s.square[phase == MuonPhase::kGram ? 0 : 1];
        if (run == 1) {
          differ += Hash(out) != bits[i];
          continue;
        }
        bits.push_back(Hash(out));
      }
    }
    for (size_t i = 0; i < sets.size(); ++i) {
      Set& s = *sets[i];
      const Buffer& out = phase == MuonPhase::kTurn ? *s.x[1] : *s.square[phase == MuonPhase::kGram ? 0 : 1];
      const Buffer& square = phase == MuonPhase::kTurn ? *s.square[1] : *s.square[0];
      Compare<T><<<kBlocks, 256>>>(phase, int64_t(out.bytes / 2), s.m.shorter, s.m.longer, static_cast<T*>(s.x[0]->p), static_cast<T*>(square.p), static_cast<T*>(out.p),
                                   static_cast<double*>(difference.p), static_cast<double*>(size.p));
      double d[kBlocks], r[kBlocks], all_d = 0, all_r = 0;
      Check(cudaMemcpy(d, difference.p, sizeof d, cudaMemcpyDeviceToHost), "compare");
      Check(cudaMemcpy(r, size.p, sizeof r, cudaMemcpyDeviceToHost), "compare");
      for (int b = 0; b < kBlocks; ++b) all_d += d[b], all_r += r[b];
      const double error = std::sqrt(all_d / all_r);
      if (error > worst || error != error) worst = error, where = std::to_string(s.m.count) + "x" + std::to_string(s.m.shorter) + "x" + std::to_string(s.m.longer);
      if (!(error < bound)) good = false, std::printf("  %d x %d x %d: %.2e\n", s.m.count, s.m.shorter, s.m.longer, error);
    }
    good = good && differ == 0;
    std::printf("%s %s: worst %.2e (%s), bound %.1e, %d of %zu shapes with other bits the second time\n", what, kNames[int(phase)], worst, where.c_str(), bound, differ, sets.size());
    std::fflush(stdout);
  }
  return good;
}

// Median time of what is recorded, in microseconds.
double Time(const std::function<void(cudaStream_t, cudaStream_t)>& launch) {
  cudaStream_t stream, beside;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  cudaEvent_t start, stop, fork, join;
  Check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  Check(cudaStreamCreateWithFlags(&beside, cudaStreamNonBlocking), "stream");
  for (cudaEvent_t* e : {&start, &stop, &fork, &join}) Check(cudaEventCreate(e), "event");
  launch(stream, beside);
  Check(cudaDeviceSynchronize(), "first launch");
  Check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  Check(cudaEventRecord(fork, stream), "fork"), Check(cudaStreamWaitEvent(beside, fork, 0), "fork");
  launch(stream, beside);
  Check(cudaEventRecord(join, beside), "join"), Check(cudaStreamWaitEvent(stream, join, 0), "join");
  Check(cudaStreamEndCapture(stream, &graph), "capture");
  Check(cudaGraphInstantiate(&exec, graph, 0), "graph");
  std::vector<float> took;
  for (int i = 0; i < kReplays + 2; ++i) {
    cudaEventRecord(start, stream);
    Check(cudaGraphLaunch(exec, stream), "replay");
    cudaEventRecord(stop, stream);
    Check(cudaStreamSynchronize(stream), "replay");
    float ms = 0;
    cudaEventElapsedTime(&ms, start, stop);
    if (i >= 2) took.push_back(ms);
  }
  std::sort(took.begin(), took.end());
  cudaGraphExecDestroy(exec), cudaGraphDestroy(graph), cudaStreamDestroy(stream), cudaStreamDestroy(beside);
  for (cudaEvent_t e : {start, stop, fork, join}) cudaEventDestroy(e);
  return 1e3 * double(took[took.size() / 2]);
}

std::vector<MuonMatrices> ShapesOfBase() {
  hierad::v1::JobSpec job;
  job.mutable_optimizer()->set_name("muon");
  job.mutable_data()->set_source("synthetic");
  job.mutable_model()->set_in_chans(8);
  for (int i = 0; i < 2; ++i) job.mutable_model()->add_input_size(224);
  job.mutable_step()->set_batch_per_rank(8);
  job.mutable_step()->set_precision("bf16");
  hierad::FillDefaults(&job);
  const auto plan = hierad::Plan::Make(job, {.compute = hierad::ComputeType::kBF16});
  Check(plan.status());
  std::vector<MuonMatrices> shapes;
  for (const hierad::Op& op : plan->update) {
    const auto* o = std::get_if<hierad::MuonMomentum>(&op.args);
    if (o != nullptr) shapes.push_back({int(o->count), int(std::min(o->rows, o->cols)), int(std::max(o->rows, o->cols))});
  }
  return shapes;
}

GemmShape LibraryShape(const MuonMatrices& m, MuonPhase phase) {
  const int64_t s = m.shorter, l = m.longer;
  switch (phase) {
    case MuonPhase::kGram: return {s, s, l, false, true, false, false, true, false, false, m.count, 1, 0};
    case MuonPhase::kPolynomial: return {s, s, s, false, false, false, false, true, false, false, m.count, float(hierad::kMuonC), float(hierad::kMuonB)};
    case MuonPhase::kTurn: return {s, l, s, false, false, false, false, true, false, false, m.count, 1, float(hierad::kMuonA)};
  }
  return {};
}

}  // namespace

int main() {
  const std::vector<MuonMatrices> base = ShapesOfBase();
  const std::vector<MuonMatrices> odd = {{3, 96, 96}, {5, 56, 168}, {2, 144, 432}, {1, 8, 8}, {2, 200, 328}, {3, 72, 520}, {2, 136, 264}, {1, 768, 3072}, {4, 128, 256}, {1, 64, 72}};
  MuonProducts products;
  bool good = true;
  good &= Correct<bf16>("odd bf16", products, odd, 3e-3) && Correct<half>("odd fp16", products, odd, 4e-4);
  if (good) good &= Correct<bf16>("base bf16", products, base, 3e-3);
  if (!good) return 1;

  constexpr int kRounds = hierad::kMuonRounds;
  Sets sets;
  double flops[3] = {}, work[2] = {};
  std::vector<int> queue;
  for (const MuonMatrices& m : base) {
    sets.push_back(std::make_unique<Set>(m, kRounds));
    double all = 0;
    for (MuonPhase phase : kPhases) flops[int(phase)] += kRounds * sets.back()->Flops(phase), all += sets.back()->Flops(phase);
    queue.push_back(work[0] <= work[1] ? 0 : 1);
    work[queue.back()] += all;
  }
  FillAll<bf16>(sets, 3);
  auto made = GemmLibrary::Make();
  Check(made.status());
  GemmLibrary& gemm = **made;
  auto library = [&](size_t i, MuonPhase phase, int round, cudaStream_t stream, int lane) {
    const MuonGroup g = sets[i]->Group(phase, round);
    const void* a = phase == MuonPhase::kGram ? g.x : g.square;
    const void* b = phase == MuonPhase::kPolynomial ? g.square : g.x;
    Check(gemm.Run(LibraryShape(sets[i]->m, phase), a, b, g.out, nullptr, stream, lane, phase == MuonPhase::kGram ? nullptr : b));
  };
  auto ours = [&](MuonPhase phase, int round, cudaStream_t stream) { Check(products.Run(phase, GroupsOf(sets, phase, round), false, stream)); };
  std::printf("%-12s %9s %9s   (%d rounds, us; TFLOP/s of whole products)\n", "phase", "library", "ours", kRounds);
  auto say = [&](const char* what, double count, double a, double b) {
    std::printf("%-12s %9.0f %9.0f   %.0f %.0f\n", what, a, b, count / a * 1e-6, count / b * 1e-6);
    std::fflush(stdout);
  };
  // Each phase by itself, then the rounds as they are.
  auto compare = [&](const char* what, const std::vector<MuonPhase>& phases) {
    double count = 0;
    for (MuonPhase phase : phases) count += flops[int(phase)];
    const double theirs = Time([&](cudaStream_t stream, cudaStream_t beside) {
      for (size_t i = 0; i < sets.size(); ++i) {
        for (int round = 0; round < kRounds; ++round) for (MuonPhase phase : phases) library(i, phase, round, queue[i] ? beside : stream, queue[i]);
      }
    });
    say(what, count, theirs, Time([&](cudaStream_t stream, cudaStream_t) {
      for (int round = 0; round < kRounds; ++round) for (MuonPhase phase : phases) ours(phase, round, stream);
    }));
  };
  for (MuonPhase phase : kPhases) compare(kNames[int(phase)], {phase});
  compare("all", {std::begin(kPhases), std::end(kPhases)});
  return 0;
}
