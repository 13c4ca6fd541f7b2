// Attention kernels on a GPU: for every shape and every path that takes it, errors against the plain kernel in double on the
// same bf16 inputs, poisoned outputs, the same bits twice; then times, all paths in turn, against the bytes that must move.
// Prints one JSON line a shape; exit 1 if a bound is broken.
//   attention_bench [--seed N] [--check] [--time] [--only NAME] [--path N] [--profile NAME PATH]   (neither: both; profile: one run, for ncu)
#include <cuda_bf16.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "worker/kernels/attention.h"

using namespace hierad::kernels;
using bf16 = __nv_bfloat16;

namespace {

constexpr int kPaths = 7;   // the choice, then AttentionShape::path

void Check(cudaError_t e, const char* what) {
  if (e == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(e));
  std::exit(2);
}

template <typename T>
T* Allocate(size_t n) {
  T* p = nullptr;
  Check(cudaMalloc(&p, n * sizeof(T)), "cudaMalloc");
  Check(cudaMemset(p, 0xFF, n * sizeof(T)), "cudaMemset");   // NaN: an element that is not written shows
  return p;
}

template <typename T>
std::vector<T> Download(const T* p, size_t n) {
  std::vector<T> v(n);
  Check(cudaMemcpy(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
  return v;
}

// Near normal. With `width` (heads x head_dim) more than 0 the first column of every head of Q is at 30 and of K at -40: scores
// whose exponentials overflow unless the largest is taken off, and probabilities of keys beyond the last that would.
__global__ void Fill(bf16* p, double* wide, size_t n, unsigned seed, int width = 0, int head_dim = 1) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x) {
    unsigned long long x = (i + 1) * 0x9E3779B97F4A7C15ull + seed * 0xD1342543DE82EF95ull;
    float sum = 0;
    for (int k = 0; k < 4; ++k) {   // sum of uniforms: near normal
      x ^= x >> 31, x *= 0x7FB5D329728EA185ull, x ^= x >> 27;
      sum += float(x >> 40) * (1.0f / 16777216.0f) - 0.5f;
    }
    const bool shifted = width > 0 && int(i % width) % head_dim == 0 && i / width % 3 != 2;
    p[i] = __float2bfloat16(sum * 1.7320508f + (shifted ? (i / width % 3 == 0 ? 30.0f : -40.0f) : 0.0f));
    if (wide != nullptr) wide[i] = double(__bfloat162float(p[i]));
  }
}

// RMS of the difference over the RMS of the reference; NaN never passes.
double Error(const std::vector<bf16>& a, const std::vector<double>& b) {
  double difference = 0, size = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    const double d = double(__bfloat162float(a[i])) - b[i];
    difference += d * d, size += b[i] * b[i];
  }
  return std::sqrt(difference / (size > 0 ? size : double(b.size())));   // of one key all gradients but dV are 0
}

struct Buffers {
  AttentionShape s;
  size_t width, n_qkv, n_o, n_lse;
  bf16 *qkv, *o, *go, *dqkv;
  float *lse, *scratch;
  uint8_t* argmax;
  explicit Buffers(const AttentionShape& shape)
      : s(shape), width(size_t(s.heads) * s.head_dim), n_qkv(size_t(s.batch) * s.keys * s.windows * 3 * width),
        n_o(size_t(s.batch) * s.queries() * s.windows * width), n_lse(s.units() * s.queries()), qkv(Allocate<bf16>(n_qkv)),
        o(Allocate<bf16>(n_o)), go(Allocate<bf16>(n_o)), dqkv(Allocate<bf16>(n_qkv)), lse(Allocate<float>(n_lse)),
        scratch(Allocate<float>(n_lse)), argmax(Allocate<uint8_t>(n_o)) {}
  ~Buffers() {
    for (void* p : {(void*)qkv, (void*)o, (void*)go, (void*)dqkv, (void*)lse, (void*)scratch, (void*)argmax}) cudaFree(p);
  }
  void Poison() {
    Check(cudaMemset(o, 0xFF, n_o * 2), "cudaMemset"), Check(cudaMemset(dqkv, 0xFF, n_qkv * 2), "cudaMemset");
    Check(cudaMemset(lse, 0xFF, n_lse * 4), "cudaMemset"), Check(cudaMemset(scratch, 0xFF, n_lse * 4), "cudaMemset");
    Check(cudaMemset(argmax, 0xFF, n_o), "cudaMemset");
  }
  void Forward(int path) {
    s.path = path;
    Check(AttentionForward(s, qkv, o, lse, argmax, 0), "forward");
  }
  void Backward(int path) {
    s.path = path;
    Check(AttentionBackward(s, qkv, o, go, lse, argmax, dqkv, scratch, 0), "backward");
  }
};

std::string Name(const AttentionShape& s) {
  char name[96];
  std::snprintf(name, sizeof name, "B%d W%d T%d/%d H%d D%d", s.batch, s.windows, s.keys, s.q_stride, s.heads, s.head_dim);
  return name;
}

// o, dq, dk, dv against the plain kernels in double.
bool CheckShape(const AttentionShape& s, unsigned seed, bool shifted, int first, int last) {
  Buffers b(s);
  double *qkv_d = Allocate<double>(b.n_qkv), *o_d = Allocate<double>(b.n_o), *go_d = Allocate<double>(b.n_o), *dqkv_d = Allocate<double>(b.n_qkv);
  double *lse_d = Allocate<double>(b.n_lse), *scratch_d = Allocate<double>(b.n_lse);
  uint8_t* argmax_d = Allocate<uint8_t>(b.n_o);
  Fill<<<1024, 256>>>(b.qkv, qkv_d, b.n_qkv, seed, shifted ? int(b.width) : 0, s.head_dim);
  Fill<<<1024, 256>>>(b.go, go_d, b.n_o, seed + 1);
  Check(AttentionForward(s, qkv_d, o_d, lse_d, argmax_d, 0), "plain forward");
  Check(AttentionBackward(s, qkv_d, o_d, go_d, lse_d, argmax_d, dqkv_d, scratch_d, 0), "plain backward");
  Check(cudaDeviceSynchronize(), "plain");
  const auto o_wide = Download(o_d, b.n_o), g_wide = Download(dqkv_d, b.n_qkv), lse_wide = Download(lse_d, b.n_lse);
  const auto argmax_wide = Download(argmax_d, b.n_o);
  for (void* p : {(void*)qkv_d, (void*)o_d, (void*)go_d, (void*)dqkv_d, (void*)lse_d, (void*)scratch_d, (void*)argmax_d}) cudaFree(p);
  bool all_good = true;
  for (int path = first; path <= last; ++path) {
    if (path > 0 && !HasTensorCoreAttention(s)) break;
    b.Poison();
    b.Forward(path), b.Backward(path);
    Check(cudaDeviceSynchronize(), "run");
    double errors[5] = {Error(Download(b.o, b.n_o), o_wide)};
    const auto g = Download(b.dqkv, b.n_qkv);
    for (int which = 0; which < 3; ++which) {
      std::vector<bf16> part;
      std::vector<double> part_wide;
      for (size_t i = 0; i < b.n_qkv; ++i) {
        if (int(i / b.width % 3) == which) part.push_back(g[i]), part_wide.push_back(g_wide[i]);
      }
      errors[1 + which] = Error(part, part_wide);
    }
    bool good = s.q_stride == 1 || Download(b.argmax, b.n_o) == argmax_wide;
    const auto lse = Download(b.lse, b.n_lse);
    for (size_t i = 0; i < b.n_lse; ++i) {   // NaN must show
      const double e = std::abs(lse[i] - lse_wide[i]) / (1 + std::abs(lse_wide[i]));
      if (!(e <= errors[4])) errors[4] = e;
    }
    Check(cudaMemset(b.dqkv, 0xFF, b.n_qkv * 2), "cudaMemset");
    b.Backward(path);   // the same bits twice
    const auto again = Download(b.dqkv, b.n_qkv);
    good = good && std::memcmp(g.data(), again.data(), b.n_qkv * 2) == 0;
    // bf16 operands: 2^-9 a rounding. Shifted, dQ and dK have one column of sums that cancel.
    for (int i = 0; i < 4; ++i) good = good && errors[i] < (shifted && i > 0 ? 1e-1 : 6e-3);
    good = good && errors[4] < 1e-4;
    if (!good || path == first) {
      std::printf("{\"check\": \"%s\", \"shifted\": %d, \"path\": %d, \"ok\": %s, \"o\": %.2e, \"dq\": %.2e, \"dk\": %.2e, \"dv\": %.2e, \"lse\": %.1e}\n",
                  Name(s).c_str(), shifted, path, good ? "true" : "false", errors[0], errors[1], errors[2], errors[3], errors[4]);
    }
    all_good = all_good && good;
  }
  std::fflush(stdout);
  return all_good;
}

// Medians of 30, the contenders in turn; four runs a measurement, so that starting one is not what is measured.
std::vector<double> MediansUs(const std::vector<std::function<void()>>& contenders) {
  cudaEvent_t a, b;
  cudaEventCreate(&a), cudaEventCreate(&b);
  std::vector<std::vector<float>> us(contenders.size());
  for (int i = -5; i < 30; ++i) {
    for (size_t c = 0; c < contenders.size(); ++c) {
      cudaEventRecord(a);
      for (int k = 0; k < 4; ++k) contenders[c]();
      cudaEventRecord(b), cudaEventSynchronize(b);
      float ms = 0;
      cudaEventElapsedTime(&ms, a, b);
      if (i >= 0) us[c].push_back(ms * 250);
    }
  }
  cudaEventDestroy(a), cudaEventDestroy(b);
  std::vector<double> medians;
  for (auto& v : us) std::sort(v.begin(), v.end()), medians.push_back(v[v.size() / 2]);
  return medians;
}

// One shape of a model, and how often a step runs it.
struct Case {
  const char* name;
  AttentionShape s;
  int times;
};

void Time(const Case& c, unsigned seed, int first, int last) {
  Buffers b(c.s);
  Fill<<<1024, 256>>>(b.qkv, nullptr, b.n_qkv, seed);
  Fill<<<1024, 256>>>(b.go, nullptr, b.n_o, seed + 1);
  std::vector<std::function<void()>> forward, backward;
  for (int path = first; path <= last; ++path) {
    forward.push_back([&b, path] { b.Forward(path); });
    backward.push_back([&b, path] { b.Backward(path); });
  }
  const auto f = MediansUs(forward), g = MediansUs(backward);
  Check(cudaDeviceSynchronize(), "run");
  const double work = 4.0 * double(c.s.units()) * c.s.queries() * c.s.keys * c.s.head_dim;
  const auto list = [](const std::vector<double>& us) {
    std::string text;
    char number[32];
    for (double u : us) std::snprintf(number, sizeof number, "%s%.1f", text.empty() ? "" : ", ", u), text += number;
    return text;
  };
  std::printf("{\"time\": \"%s\", \"times\": %d, \"forward_us\": [%s], \"backward_us\": [%s], \"floor_us\": [%.1f, %.1f], \"tflops\": [%.0f, %.0f]}\n",
              c.name, c.times, list(f).c_str(), list(g).c_str(), 2e-6 * double(b.n_qkv + b.n_o) / 4.2, 2e-6 * double(2 * b.n_qkv + 2 * b.n_o) / 4.2,
              work / f[0] / 1e6, 2.5 * work / g[0] / 1e6);
  std::fflush(stdout);
}

// batch, windows, keys, q_stride, heads, head_dim: every kind of shape of the listed models, odd lengths and tails.
const AttentionShape kShapes[] = {
    {3, 5, 64, 1, 1, 96}, {3, 5, 64, 4, 2, 96}, {3, 5, 16, 1, 2, 96}, {3, 5, 16, 4, 4, 96}, {2, 1, 76, 1, 4, 96}, {2, 1, 196, 1, 16, 32},
    {2, 1, 304, 1, 4, 96}, {2, 1, 784, 1, 4, 32}, {2, 1, 76, 4, 8, 96}, {2, 1, 19, 1, 8, 96}, {2, 1, 49, 1, 16, 32}, {3, 7, 8, 1, 1, 96},
    {3, 7, 8, 2, 2, 96}, {3, 7, 4, 2, 4, 96}, {3, 7, 4, 1, 2, 96}, {2, 1, 6, 1, 4, 96}, {2, 1, 1568, 1, 2, 32}, {1, 1, 156, 1, 4, 96},
    {3, 3, 64, 1, 2, 72}, {2, 1, 76, 1, 8, 72}, {3, 3, 64, 1, 2, 56}, {2, 1, 100, 1, 4, 56}, {2, 2, 64, 1, 4, 64}, {2, 1, 33, 1, 2, 128},
    {2, 2, 64, 4, 2, 16}, {2, 1, 130, 1, 2, 128}, {2, 1, 130, 2, 2, 48}, {2, 1, 50, 1, 2, 20}, {2, 1, 260, 1, 3, 48}, {1, 2, 784, 4, 2, 32},
    {1, 1, 392, 2, 2, 96}, {1, 3, 1, 1, 2, 32}, {1, 1, 225, 1, 2, 64}, {1, 1, 257, 1, 1, 112}, {2, 1, 304, 4, 8, 96}, {1, 1, 129, 1, 3, 80},
    {2, 3, 64, 8, 2, 96}, {2, 2, 12, 3, 4, 56}, {1, 1, 300, 2, 2, 32}};

// 224 x 224, B = 128 (Large: 64); the first seven are Base's step.
const Case kCases[] = {
    {"64 d96", {128, 19, 64, 1, 1, 96}, 2}, {"64->16 d96", {128, 19, 64, 4, 2, 96}, 1}, {"16 d96", {128, 19, 16, 1, 2, 96}, 2},
    {"16->4 d96", {128, 19, 16, 4, 4, 96}, 1}, {"76 h4 d96", {128, 1, 76, 1, 4, 96}, 15}, {"76 h8 d96", {128, 1, 76, 1, 8, 96}, 3},
    {"196 h16 d32", {128, 1, 196, 1, 16, 32}, 8},
    // q_pool 1
    {"16 h4 d96", {128, 19, 16, 1, 4, 96}, 1}, {"304 h4 d96", {128, 1, 304, 1, 4, 96}, 15}, {"304 h8 d96", {128, 1, 304, 1, 8, 96}, 3},
    {"784 h16 d32", {128, 1, 784, 1, 16, 32}, 8},
    // q_pool 3
    {"76->19 h8 d96", {128, 1, 76, 4, 8, 96}, 1}, {"19 h8 d96", {128, 1, 19, 1, 8, 96}, 2}, {"49 h16 d32", {128, 1, 49, 1, 16, 32}, 8},
    // Large
    {"64 h2 d72", {64, 19, 64, 1, 2, 72}, 2}, {"16 h4 d72", {64, 19, 16, 1, 4, 72}, 5}, {"76 h8 d72", {64, 1, 76, 1, 8, 72}, 35},
    {"76 h16 d72", {64, 1, 76, 1, 16, 72}, 4},
    // video
    {"156 h4 d96", {16, 1, 156, 1, 4, 96}, 15}, {"1568 h16 d32", {8, 1, 1568, 1, 16, 32}, 8},
    // other long windows: Large with q_pool 1, and widths between
    {"304 h8 d72", {64, 1, 304, 1, 8, 72}, 35}, {"304 h8 d64", {64, 1, 304, 1, 8, 64}, 1}, {"304 h8 d56", {64, 1, 304, 1, 8, 56}, 1},
    {"132 h8 d96", {64, 1, 132, 1, 8, 96}, 1},
    {"64 h2 d64", {64, 19, 64, 1, 2, 64}, 1}, {"64->16 h4 d72", {64, 19, 64, 4, 4, 72}, 1}, {"76 h8 d56", {64, 1, 76, 1, 8, 56}, 1}};

}  // namespace

int main(int argc, char** argv) {
  unsigned seed = std::random_device{}();
  bool check = false, time = false;
  int first = 0, last = kPaths - 1;
  std::string only;   // cases whose name has it
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    if (arg == "--seed" && i + 1 < argc) seed = unsigned(std::strtoul(argv[++i], nullptr, 10));
    if (arg == "--check") check = true;
    if (arg == "--time") time = true;
    if (arg == "--only" && i + 1 < argc) only = argv[++i];
    if (arg == "--path" && i + 1 < argc) first = last = std::atoi(argv[++i]);
    if (arg == "--profile" && i + 2 < argc) {
      for (const Case& c : kCases) {
        if (std::strcmp(c.name, argv[i + 1]) != 0) continue;
        Buffers b(c.s);
        Fill<<<1024, 256>>>(b.qkv, nullptr, b.n_qkv, seed);
        Fill<<<1024, 256>>>(b.go, nullptr, b.n_o, seed + 1);
        b.Forward(std::atoi(argv[i + 2])), b.Backward(std::atoi(argv[i + 2]));
        Check(cudaDeviceSynchronize(), "run");
      }
      return 0;
    }
  }
  if (!check && !time) check = time = true;
  std::printf("{\"seed\": %u}\n", seed);
  bool good = true;
  if (check) {
    for (const AttentionShape& s : kShapes) good = CheckShape(s, seed, false, first, last) && good;
    for (const AttentionShape& s : kShapes) good = (s.keys > 600 || CheckShape(s, seed, true, first, last)) && good;
  }
  if (time) {
    for (const Case& c : kCases) {
      if (std::strstr(c.name, only.c_str()) != nullptr) Time(c, seed, first, last);
    }
  }
  return good ? 0 : 1;
}
