// Products with GELU in their epilogue on a GPU: for odd shapes and those of Base, errors against double on the same bf16
// inputs, poisoned outputs; then time against the library's product (its first choice, and the fastest of its candidates)
// with an elementwise kernel behind it, and against the bytes and operations there are. One JSON line a measurement; exit 1
// if a bound is broken.
#include <cuda_bf16.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/job_yaml.h"
#include "base/plan/plan.h"
#include "base/plan/products.h"
#include "worker/kernels/gemm.h"
#include "worker/kernels/gemm_gelu_tiles.h"
#include "worker/kernels/gemm_resident.h"
#include "worker/kernels/kernels.h"

using namespace hierad::kernels;
using bf16 = __nv_bfloat16;

namespace {

constexpr double kFlops = 735e12, kBytes = 4.2e12;   // what the card does in a second
constexpr int kSets = 3, kRepeats = 12, kReplays = 31;

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

template <typename T>
struct Buffer {
  explicit Buffer(size_t n) : n(n) {
    Check(cudaMalloc(&p, n * sizeof(T)), "cudaMalloc");
    Poison();
  }
  Buffer(const Buffer&) = delete;
  ~Buffer() { cudaFree(p); }
  void Poison() { Check(cudaMemset(p, 0xFF, n * sizeof(T)), "cudaMemset"); }   // NaN: an element that is not written shows
  T* p = nullptr;
  size_t n;
};

template <typename T>
__global__ void Fill(T* p, size_t n, unsigned seed, float scale) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x) {
    unsigned long long x = (i + 1) * 0x9E3779B97F4A7C15ull + seed * 0xD1342543DE82EF95ull;
    float sum = 0;
    for (int k = 0; k < 4; ++k) {   // sum of uniforms: near normal
      x ^= x >> 31, x *= 0x7FB5D329728EA185ull, x ^= x >> 27;
      sum += float(x >> 40) * (1.0f / 16777216.0f) - 0.5f;
    }
    p[i] = T(sum * 1.7320508f * scale);
  }
}

// Squared differences and squares of the reference, a block's share each: h, g, dh in turn.
__global__ void Compare(int64_t m, int64_t n, int64_t k, const bf16* a, const bf16* w, const float* bias, const bf16* w_kn, const bf16* h, const bf16* g, const bf16* dh,
                        bool backward, double* difference, double* size) {
  __shared__ double sums[256];
  double d[3] = {}, s[3] = {};
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < m * n; i += int64_t(gridDim.x) * blockDim.x) {
    const int64_t row = i / n, column = i % n;
    double x = backward ? 0.0 : double(bias[column]);
    for (int64_t e = 0; e < k; ++e) x += double(float(a[row * k + e])) * double(float(backward ? w_kn[e * n + column] : w[column * k + e]));
    const double stored = double(float(h[i])), half = 0.5 * (1 + erf(stored * 0.70710678118654752440));
    auto add = [&](int which, double got, double expected) { d[which] += (got - expected) * (got - expected), s[which] += expected * expected; };
    if (!backward) add(0, stored, x);
    add(1, double(float(g[i])), stored * half);
    if (backward) add(2, double(float(dh[i])), x * (half + stored * 0.39894228040143267794 * exp(-0.5 * stored * stored)));
  }
  for (int which = 0; which < 6; ++which) {
    __syncthreads();
    sums[threadIdx.x] = which < 3 ? d[which] : s[which - 3];
    __syncthreads();
    if (threadIdx.x != 0) continue;
    double total = 0;
    for (int t = 0; t < 256; ++t) total += sums[t];
    (which < 3 ? difference : size)[which % 3 * gridDim.x + blockIdx.x] = total;
  }
}

// The same of c = a w (+ bias), w[n, k] or, across, w[k, n]; into the first of three.
__global__ void ComparePlain(int64_t m, int64_t n, int64_t k, const bf16* a, const bf16* w, bool across, const bf16* bias, const bf16* c, double* difference, double* size) {
  __shared__ double sums[2][256];
  double d = 0, s = 0;
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < m * n; i += int64_t(gridDim.x) * blockDim.x) {
    const int64_t row = i / n, column = i % n;
    double x = bias == nullptr ? 0.0 : double(float(bias[column]));
    for (int64_t e = 0; e < k; ++e) x += double(float(a[row * k + e])) * double(float(across ? w[e * n + column] : w[column * k + e]));
    const double got = double(float(c[i]));
    d += (got - x) * (got - x), s += x * x;
  }
  sums[0][threadIdx.x] = d, sums[1][threadIdx.x] = s;
  __syncthreads();
  if (threadIdx.x != 0) return;
  double total[2] = {};
  for (int t = 0; t < 256; ++t) total[0] += sums[0][t], total[1] += sums[1][t];
  difference[blockIdx.x] = total[0], size[blockIdx.x] = total[1];
}

struct Shape {
  const char* name;
  int64_t m, n, k;
  int times;   // a step of Base
};

struct Operands {
  explicit Operands(const Shape& s, unsigned seed)
      : a(s.m * s.k), w(s.n * s.k), h(s.m * s.n), g(s.m * s.n), dh(s.m * s.n), bias(s.n), parts((s.m / 64 + 257) * s.n) {
    Fill<<<512, 256>>>(a.p, a.n, seed, 1.0f);
    Fill<<<512, 256>>>(w.p, w.n, seed + 1, 1.0f / std::sqrt(float(s.k)));
    Fill<<<512, 256>>>(bias.p, bias.n, seed + 2, 1.0f);
    Fill<<<512, 256>>>(h.p, h.n, seed + 3, 1.5f);
  }
  Buffer<bf16> a, w, h, g, dh;
  Buffer<float> bias, parts;
};

struct Variant {
  const char* name;
  bool (*takes)(int64_t n, int64_t k);
  cudaError_t (*forward)(const GemmGeluForward&, int, cudaStream_t);      // null: none
  cudaError_t (*backward)(const GemmGeluBackward&, int, cudaStream_t);   // null: none
};
GemmGeluForward ForwardOf(const Shape& s, const Operands& o) { return {s.m, s.n, s.k, o.a.p, o.w.p, o.bias.p, o.h.p, o.g.p}; }
GemmGeluBackward BackwardOf(const Shape& s, const Operands& o) { return {s.m, s.n, s.k, o.a.p, o.w.p, o.h.p, o.dh.p, o.g.p, o.parts.p}; }

double Root(const std::vector<double>& d, const std::vector<double>& s, int which) {
  const size_t blocks = d.size() / 3;
  double difference = 0, size = 0;
  for (size_t i = which * blocks; i < (which + 1) * blocks; ++i) difference += d[i], size += s[i];
  return std::sqrt(difference / size);
}

bool Correct(const Shape& s, const Variant& v, int sms, unsigned seed) {
  if (!v.takes(s.n, s.k)) return true;
  Operands o(s, seed);
  constexpr int kBlocks = 1024;
  Buffer<double> difference(3 * kBlocks), size(3 * kBlocks);
  double error[4] = {};
  bool good = true;
  for (bool backward : {false, true}) {
    if (backward ? v.backward == nullptr : v.forward == nullptr) continue;
    o.g.Poison(), o.dh.Poison(), o.parts.Poison();
    if (!backward) o.h.Poison();
    else Fill<<<512, 256>>>(o.h.p, o.h.n, seed + 3, 1.5f);
    Check(backward ? v.backward(BackwardOf(s, o), sms, nullptr) : v.forward(ForwardOf(s, o), sms, nullptr), v.name);
    Check(cudaDeviceSynchronize(), v.name);
    Compare<<<kBlocks, 256>>>(s.m, s.n, s.k, o.a.p, o.w.p, o.bias.p, o.w.p, o.h.p, o.g.p, o.dh.p, backward, difference.p, size.p);
    std::vector<double> d(3 * kBlocks), r(3 * kBlocks);
    Check(cudaMemcpy(d.data(), difference.p, d.size() * 8, cudaMemcpyDeviceToHost), "cudaMemcpy");
    Check(cudaMemcpy(r.data(), size.p, r.size() * 8, cudaMemcpyDeviceToHost), "cudaMemcpy");
    if (!backward) error[0] = Root(d, r, 0);
    else error[2] = Root(d, r, 2);
    error[1] = std::max(error[1], Root(d, r, 1));
    good = good && error[1] < 3e-3 && (backward ? error[2] : error[0]) < 3e-3;
    if (!backward) continue;
    // Sums over the rows, from dh as it is stored: rounded, so within its resolution.
    const int64_t tiles = (s.m + hierad::kGeluPartRows - 1) / hierad::kGeluPartRows;
    std::vector<float> parts(tiles * s.n);
    std::vector<bf16> dh(s.m * s.n);
    Check(cudaMemcpy(parts.data(), o.parts.p, parts.size() * 4, cudaMemcpyDeviceToHost), "cudaMemcpy");
    Check(cudaMemcpy(dh.data(), o.dh.p, dh.size() * 2, cudaMemcpyDeviceToHost), "cudaMemcpy");
    double off = 0, norm = 0;
    for (int64_t c = 0; c < s.n; ++c) {
      double expected = 0, got = 0;
      for (int64_t r = 0; r < s.m; ++r) expected += double(__bfloat162float(dh[r * s.n + c])), norm += std::pow(double(__bfloat162float(dh[r * s.n + c])), 2);
      for (int64_t t = 0; t < tiles; ++t) got += parts[t * s.n + c];
      off += (got - expected) * (got - expected);
    }
    error[3] = std::sqrt(off / norm);
    good = good && error[3] < 3e-3;
  }
  std::printf("{\"check\": \"%s\", \"variant\": \"%s\", \"m\": %ld, \"n\": %ld, \"k\": %ld, \"h\": %.2e, \"g\": %.2e, \"dh\": %.2e, \"sum\": %.2e, \"good\": %s}\n", s.name, v.name,
              long(s.m), long(s.n), long(s.k), error[0], error[1], error[2], error[3], good ? "true" : "false");
  return good;
}

// Median time of one launch, in microseconds, in a graph of kRepeats over kSets operands.
double Time(const std::function<void(int, cudaStream_t)>& launch) {
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  cudaEvent_t start, stop;
  Check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  launch(0, stream);
  Check(cudaStreamSynchronize(stream), "first launch");
  Check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  for (int i = 0; i < kRepeats; ++i) launch(i % kSets, stream);
  Check(cudaStreamEndCapture(stream, &graph), "capture");
  Check(cudaGraphInstantiate(&exec, graph, 0), "graph");
  cudaEventCreate(&start), cudaEventCreate(&stop);
  std::vector<float> times;
  for (int i = 0; i < kReplays + 3; ++i) {
    cudaEventRecord(start, stream);
    Check(cudaGraphLaunch(exec, stream), "replay");
    cudaEventRecord(stop, stream);
    Check(cudaStreamSynchronize(stream), "replay");
    float ms = 0;
    cudaEventElapsedTime(&ms, start, stop);
    if (i >= 3) times.push_back(ms);
  }
  std::sort(times.begin(), times.end());
  cudaGraphExecDestroy(exec), cudaGraphDestroy(graph), cudaStreamDestroy(stream), cudaEventDestroy(start), cudaEventDestroy(stop);
  return double(times[times.size() / 2]) * 1e3 / kRepeats;
}

void Say(const Shape& s, bool backward, const char* variant, double us, double floor_us) {
  std::printf("{\"time\": \"%s\", \"pass\": \"%s\", \"variant\": \"%s\", \"us\": %.1f, \"floor_us\": %.1f, \"fraction\": %.2f, \"step_ms\": %.3f}\n", s.name, backward ? "backward" : "forward",
              variant, us, floor_us, floor_us / us, us * s.times / 1e3);
  std::fflush(stdout);
}

void Measure(const Shape& s, const std::vector<Variant>& variants, int sms) {
  std::vector<std::unique_ptr<Operands>> sets;
  for (int i = 0; i < kSets; ++i) sets.push_back(std::make_unique<Operands>(s, 17 * i + 5));
  Check(cudaDeviceSynchronize(), "fill");   // on the default stream
  const double product = 2.0 * s.m * s.n * s.k / kFlops, operands = 2.0 * (s.m * s.k + s.n * s.k), hidden = 2.0 * s.m * s.n;
  const double floors[] = {1e6 * std::max(product, (operands + 2 * hidden) / kBytes), 1e6 * std::max(product, (operands + 3 * hidden) / kBytes)};
  Buffer<bf16> narrow_bias(s.n);
  Fill<<<64, 256>>>(narrow_bias.p, narrow_bias.n, 3u, 1.0f);
  const int parts = int(std::min<int64_t>(256, std::max<int64_t>(1, s.m / 16)));
  for (bool tuned : {false, true}) {
    auto made = GemmLibrary::Make();
    Check(made.status());
    GemmLibrary& gemm = **made;
    const GemmShape forward{s.m, s.n, s.k, false, true, false, true, true, false, false}, backward{s.m, s.n, s.k, false, false, false, false, true, false, false};
    if (tuned) {
      Check(gemm.Tune(forward, sets[0]->a.p, sets[0]->w.p, sets[0]->h.p, narrow_bias.p, nullptr));
      Check(gemm.Tune(backward, sets[0]->a.p, sets[0]->w.p, sets[0]->dh.p, nullptr, nullptr));
    }
    auto first = [&](int i, cudaStream_t stream) { Check(gemm.Run(forward, sets[i]->a.p, sets[i]->w.p, sets[i]->h.p, narrow_bias.p, stream)); };
    auto second = [&](int i, cudaStream_t stream) { Check(gemm.Run(backward, sets[i]->a.p, sets[i]->w.p, sets[i]->dh.p, nullptr, stream)); };
    Say(s, false, tuned ? "library tuned, product alone" : "library, product alone", Time(first), floors[0]);
    Say(s, false, tuned ? "library tuned" : "library", Time([&](int i, cudaStream_t stream) {
          first(i, stream);
          Check(Gelu(sets[i]->h.p, sets[i]->g.p, s.m * s.n, stream), "gelu");
        }), floors[0]);
    Say(s, true, tuned ? "library tuned, product alone" : "library, product alone", Time(second), floors[1]);
    Say(s, true, tuned ? "library tuned" : "library", Time([&](int i, cudaStream_t stream) {
          second(i, stream);
          Check(GeluBackward(sets[i]->h.p, sets[i]->dh.p, sets[i]->dh.p, sets[i]->g.p, sets[i]->parts.p, s.m, int(s.n), parts, stream), "gelu backward");
        }), floors[1]);
  }
  for (const Variant& v : variants) {
    if (!v.takes(s.n, s.k)) continue;
    if (v.forward != nullptr) Say(s, false, v.name, Time([&](int i, cudaStream_t stream) { Check(v.forward(ForwardOf(s, *sets[i]), sms, stream), v.name); }), floors[0]);
    if (v.backward == nullptr) continue;
    Say(s, true, v.name, Time([&](int i, cudaStream_t stream) { Check(v.backward(BackwardOf(s, *sets[i]), sms, stream), v.name); }), floors[1]);
  }
}

// What RunResident makes of a product, against double.
bool ResidentIsRight(const GemmShape& s, unsigned seed) {
  Buffer<bf16> a(s.m * s.k), w(s.k * s.n), bias(s.n), c(s.m * s.n);
  Fill<<<512, 256>>>(a.p, a.n, seed, 1.0f);
  Fill<<<512, 256>>>(w.p, w.n, seed + 1, 1.0f / std::sqrt(float(s.k)));
  Fill<<<512, 256>>>(bias.p, bias.n, seed + 2, 1.0f);
  Check(RunResident(s, a.p, w.p, c.p, bias.p, nullptr), "resident");
  constexpr int kBlocks = 1024;
  Buffer<double> difference(3 * kBlocks), size(3 * kBlocks);
  ComparePlain<<<kBlocks, 256>>>(s.m, s.n, s.k, a.p, w.p, !s.trans_b, s.bias ? bias.p : nullptr, c.p, difference.p, size.p);
  std::vector<double> d(3 * kBlocks), r(3 * kBlocks);
  Check(cudaMemcpy(d.data(), difference.p, d.size() * 8, cudaMemcpyDeviceToHost), "cudaMemcpy");
  Check(cudaMemcpy(r.data(), size.p, r.size() * 8, cudaMemcpyDeviceToHost), "cudaMemcpy");
  const double error = Root(d, r, 0);
  const bool good = error < 3e-3;
  std::printf("{\"check\": \"resident\", \"product\": \"%s\", \"error\": %.2e, \"good\": %s}\n", s.Key().c_str(), error, good ? "true" : "false");
  return good;
}

// Every product of Base's step at this batch: by the library with this card's table, and where there is one by our kernel.
bool MeasurePlan(int batch, std::mt19937* random) {
  hierad::v1::JobSpec job;
  job.mutable_data()->set_source("synthetic");
  job.mutable_model()->set_in_chans(8);
  job.mutable_step()->set_batch_per_rank(batch);
  job.mutable_step()->set_precision("bf16");
  hierad::FillDefaults(&job);
  auto plan = hierad::Plan::Make(job, {.compute = hierad::ComputeType::kBF16});
  Check(plan.status());
  struct PlanProduct { GemmShape shape; std::string name; int times = 0; };
  std::map<std::string, PlanProduct> products;
  for (const hierad::Op& op : plan->forward_backward) {
    const auto* gemm = std::get_if<hierad::Gemm>(&op.args);
    if (gemm == nullptr) continue;
    const GemmShape shape = hierad::ShapeOf(*gemm, *plan, false);
    ++products.try_emplace(shape.Key(), PlanProduct{shape, op.name, 0}).first->second.times;
  }
  auto gemm = GemmLibrary::Make();
  Check(gemm.status());
  bool good = true;
  for (const auto& [key, p] : products) {
    const GemmShape& s = p.shape;
    const bool resident = ResidentHas(s);
    if (resident) {
      GemmShape small = s;
      small.m = 1 + int64_t((*random)() % 3000);
      good = ResidentIsRight(small, unsigned((*random)())) && good;
    }
    std::vector<std::unique_ptr<Buffer<bf16>>> operands;
    for (int i = 0; i < kSets; ++i) {
      for (const int64_t size : {s.m * s.k, s.k * s.n, s.m * s.n * (s.wide_out ? 2 : 1), s.n * 2}) {
        operands.push_back(std::make_unique<Buffer<bf16>>(size));
        Fill<<<512, 256>>>(operands.back()->p, operands.back()->n, unsigned(7 * i), 0.1f);
      }
    }
    Check(cudaDeviceSynchronize(), "fill");
    auto run = [&](bool ours) {
      return Time([&](int i, cudaStream_t stream) {
        const bf16* const bias = s.bias ? operands[4 * i + 3]->p : nullptr;
        if (ours) Check(RunResident(s, operands[4 * i]->p, operands[4 * i + 1]->p, operands[4 * i + 2]->p, bias, stream), "resident");
        else Check((*gemm)->Run(s, operands[4 * i]->p, operands[4 * i + 1]->p, operands[4 * i + 2]->p, bias, stream));
      });
    };
    const double us = run(false), ours = resident ? run(true) : 0.0;
    const double flops = 2.0 * s.m * s.n * s.k, bytes = 2.0 * (s.m * s.k + s.k * s.n) + (s.wide_out ? 4.0 : 2.0) * s.m * s.n * (s.accumulate ? 2 : 1);
    const double floor_us = 1e6 * std::max(flops / kFlops, bytes / kBytes);
    std::printf("{\"product\": \"%s\", \"first\": \"%s\", \"times\": %d, \"us\": %.1f, \"floor_us\": %.1f, \"fraction\": %.2f, \"tflops\": %.0f, \"step_ms\": %.3f, \"resident_us\": %.1f}\n", key.c_str(),
                p.name.c_str(), p.times, us, floor_us, floor_us / us, flops / us * 1e-6, us * p.times / 1e3, ours);
    std::fflush(stdout);
  }
  return good;
}

}  // namespace

// Of its parts (check, plan, time) those that are named; none: all.
int main(int argc, char** argv) {
  auto wanted = [&](const std::string& part) { return argc == 1 || std::find(argv + 1, argv + argc, part) != argv + argc; };
  int sms = 0;
  Check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0), "attribute");
  const std::vector<Variant> variants = {{"128x256", [](int64_t n, int64_t) { return n % 256 == 0; }, &GemmGelu128x256, &GemmGeluBackward128x256},
                                         {"ring", &hierad::RingTakes, &GemmGeluRing, &GemmGeluBackwardRing}};
  const unsigned seed = std::random_device{}();
  std::printf("{\"seed\": %u}\n", seed);
  std::mt19937 random(seed);
  bool good = true;
  std::vector<Shape> odd;
  for (int i = 0; i < 14; ++i) odd.push_back({"odd", 1 + int64_t(random() % 900), 768 * (1 + int64_t(random() % 2)), 8 * (1 + int64_t(random() % 60)), 0});
  odd[0].m = 1, odd[1].m = 128, odd[2].m = 129;
  for (int i = 0; i < 8; ++i) odd.push_back({"odd", 1 + int64_t(random() % (i < 2 ? 70 : 3000)), 128 * (1 + int64_t(random() % 12)), 96, 0});
  const std::vector<Shape> base = {{"stage 1", 155648, 384, 96, 2}, {"stage 2", 38912, 768, 192, 3}, {"stage 3", 9728, 1536, 384, 16}, {"stage 4", 9728, 3072, 768, 3},
                                   {"decoder", 25088, 2048, 512, 8}};
  for (const Variant& v : variants) {
    if (!wanted("check")) break;
    for (const Shape& s : odd) good = Correct(s, v, sms, unsigned(random())) && good;
    good = Correct(base[2], v, sms, unsigned(random())) && good;
  }
  std::fflush(stdout);
  if (wanted("plan")) good = MeasurePlan(128, &random) && good;
  if (!wanted("time")) return good ? 0 : 1;
  for (const Shape& s : base) Measure(s, variants, sms);
  for (const Shape& s : {Shape{"B=8 stage 1", 9728, 384, 96, 2}, Shape{"B=8 stage 3", 608, 1536, 384, 16}, Shape{"B=8 stage 4", 608, 3072, 768, 3}, Shape{"B=8 decoder", 1568, 2048, 512, 8}}) {
    Measure(s, variants, sms);
  }
  return good ? 0 : 1;
}
