// Attention kernels on a GPU: for every shape, errors against the plain kernel in double on the same bf16 inputs, poisoned
// outputs, and time against the bytes that must move. Prints one JSON line a shape; exit 1 if a bound is broken.
#include <cuda_bf16.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "worker/kernels/attention.h"

using namespace hierad::kernels;
using bf16 = __nv_bfloat16;

namespace {

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

__global__ void Fill(bf16* p, double* wide, size_t n, unsigned seed) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x) {
    unsigned long long x = (i + 1) * 0x9E3779B97F4A7C15ull + seed * 0xD1342543DE82EF95ull;
    float sum = 0;
    for (int k = 0; k < 4; ++k) {   // sum of uniforms: near normal
      x ^= x >> 31, x *= 0x7FB5D329728EA185ull, x ^= x >> 27;
      sum += float(x >> 40) * (1.0f / 16777216.0f) - 0.5f;
    }
    p[i] = __float2bfloat16(sum * 1.7320508f);
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
  return std::sqrt(difference / size);
}

template <typename F>
float MedianUs(F f) {
  cudaEvent_t a, b;
  cudaEventCreate(&a), cudaEventCreate(&b);
  for (int i = 0; i < 5; ++i) f();
  std::vector<float> us;
  for (int i = 0; i < 30; ++i) {
    cudaEventRecord(a), f(), cudaEventRecord(b), cudaEventSynchronize(b);
    float ms = 0;
    cudaEventElapsedTime(&ms, a, b);
    us.push_back(ms * 1000);
  }
  std::sort(us.begin(), us.end());
  return us[us.size() / 2];
}

bool Run(const char* name, AttentionShape s, unsigned seed, bool timed) {
  const size_t width = size_t(s.heads) * s.head_dim, n_qkv = size_t(s.batch) * s.keys * s.windows * 3 * width;
  const size_t n_o = size_t(s.batch) * s.queries() * s.windows * width, n_lse = s.units() * s.queries();
  bf16 *qkv = Allocate<bf16>(n_qkv), *o = Allocate<bf16>(n_o), *go = Allocate<bf16>(n_o), *dqkv = Allocate<bf16>(n_qkv);
  float *lse = Allocate<float>(n_lse), *scratch = Allocate<float>(n_lse);
  uint8_t *argmax = Allocate<uint8_t>(n_o), *argmax_wide = Allocate<uint8_t>(n_o);
  bool good = true;
  double errors[4] = {};
  if (!timed) {
    double *qkv_d = Allocate<double>(n_qkv), *o_d = Allocate<double>(n_o), *go_d = Allocate<double>(n_o), *dqkv_d = Allocate<double>(n_qkv);
    double *lse_d = Allocate<double>(n_lse), *scratch_d = Allocate<double>(n_lse);
    Fill<<<1024, 256>>>(qkv, qkv_d, n_qkv, seed);
    Fill<<<1024, 256>>>(go, go_d, n_o, seed + 1);
    Check(AttentionForward(s, qkv, o, lse, argmax, 0), "forward");
    Check(AttentionBackward(s, qkv, o, go, lse, argmax, dqkv, scratch, 0), "backward");
    Check(AttentionForward(s, qkv_d, o_d, lse_d, argmax_wide, 0), "plain forward");
    Check(AttentionBackward(s, qkv_d, o_d, go_d, lse_d, argmax_wide, dqkv_d, scratch_d, 0), "plain backward");
    Check(cudaDeviceSynchronize(), "run");
    errors[0] = Error(Download(o, n_o), Download(o_d, n_o));
    const auto g = Download(dqkv, n_qkv);
    const auto g_d = Download(dqkv_d, n_qkv);
    for (int which = 0; which < 3; ++which) {
      std::vector<bf16> part;
      std::vector<double> part_d;
      for (size_t i = 0; i < n_qkv; ++i) {
        if (int(i / width % 3) == which) part.push_back(g[i]), part_d.push_back(g_d[i]);
      }
      errors[1 + which] = Error(part, part_d);
    }
    if (s.q_stride > 1) good = Download(argmax, n_o) == Download(argmax_wide, n_o);
    bf16* again = Allocate<bf16>(n_qkv);   // the same bits twice
    Check(AttentionBackward(s, qkv, o, go, lse, argmax, again, scratch, 0), "backward");
    const auto g2 = Download(again, n_qkv);
    for (size_t i = 0; i < n_qkv && good; ++i) good = __bfloat162float(g[i]) == __bfloat162float(g2[i]);
    for (void* p : {(void*)qkv_d, (void*)o_d, (void*)go_d, (void*)dqkv_d, (void*)lse_d, (void*)scratch_d, (void*)again}) cudaFree(p);
    for (double e : errors) good = good && e < 6e-3;   // bf16 operands: 2^-9 a rounding
    std::printf("{\"check\": \"%s\", \"ok\": %s, \"o\": %.2e, \"dq\": %.2e, \"dk\": %.2e, \"dv\": %.2e}\n", name, good ? "true" : "false",
                errors[0], errors[1], errors[2], errors[3]);
  } else {
    Fill<<<1024, 256>>>(qkv, nullptr, n_qkv, seed);
    Fill<<<1024, 256>>>(go, nullptr, n_o, seed + 1);
    const float forward = MedianUs([&] { Check(AttentionForward(s, qkv, o, lse, argmax, 0), "forward"); });
    const float backward = MedianUs([&] { Check(AttentionBackward(s, qkv, o, go, lse, argmax, dqkv, scratch, 0), "backward"); });
    Check(cudaDeviceSynchronize(), "run");
    const double bytes_f = 2.0 * (n_qkv + n_o), bytes_b = 2.0 * (2 * n_qkv + 2 * n_o);
    std::printf("{\"time\": \"%s\", \"forward_us\": %.1f, \"backward_us\": %.1f, \"floor_forward_us\": %.1f, \"floor_backward_us\": %.1f}\n",
                name, forward, backward, bytes_f / 4.2e6, bytes_b / 4.2e6);
  }
  for (void* p : {(void*)qkv, (void*)o, (void*)go, (void*)dqkv, (void*)lse, (void*)scratch, (void*)argmax, (void*)argmax_wide}) cudaFree(p);
  std::fflush(stdout);
  return good;
}

}  // namespace

int main(int argc, char** argv) {
  const unsigned seed = argc > 1 ? unsigned(std::strtoul(argv[1], nullptr, 10)) : std::random_device{}();
  std::printf("{\"seed\": %u}\n", seed);
  bool good = true;
  // batch, windows, keys, q_stride, heads, head_dim: every kind of shape of the listed models, odd lengths and tails.
  const AttentionShape shapes[] = {{3, 5, 64, 1, 1, 96}, {3, 5, 64, 4, 2, 96}, {3, 5, 16, 1, 2, 96}, {3, 5, 16, 4, 4, 96}, {2, 1, 76, 1, 4, 96},
                                   {2, 1, 196, 1, 16, 32}, {2, 1, 304, 1, 4, 96}, {2, 1, 784, 1, 4, 32}, {2, 1, 76, 4, 8, 96}, {2, 1, 19, 1, 8, 96},
                                   {2, 1, 49, 1, 16, 32}, {3, 7, 8, 1, 1, 96}, {3, 7, 8, 2, 2, 96}, {3, 7, 4, 2, 4, 96}, {3, 7, 4, 1, 2, 96},
                                   {2, 1, 6, 1, 4, 96}, {2, 1, 1568, 1, 2, 32}, {1, 1, 156, 1, 4, 96}, {3, 3, 64, 1, 2, 72}, {2, 1, 76, 1, 8, 72},
                                   {3, 3, 64, 1, 2, 56}, {2, 1, 100, 1, 4, 56}, {2, 2, 64, 1, 4, 64}, {2, 1, 33, 1, 2, 128}, {2, 2, 64, 4, 2, 16},
                                   {2, 1, 130, 1, 2, 128}, {2, 1, 130, 2, 2, 48}, {2, 1, 50, 1, 2, 20}, {2, 1, 260, 1, 3, 48}};
  for (const AttentionShape& s : shapes) {
    char name[96];
    std::snprintf(name, sizeof name, "B%d W%d T%d/%d H%d D%d", s.batch, s.windows, s.keys, s.q_stride, s.heads, s.head_dim);
    good = Run(name, s, seed, false) && good;
  }
  if (argc > 2) {   // which chunk of queries the short backward kernel should take
    for (int chunk : {16, 32, 48, 64, 80, 112, 208}) {
      std::printf("{\"chunk\": %d}\n", chunk);
      Run("76 h4 d96", {128, 1, 76, 1, 4, 96, chunk}, seed, true);
      Run("64 d96", {128, 19, 64, 1, 1, 96, chunk}, seed, true);
      Run("196 h16 d32", {128, 1, 196, 1, 16, 32, chunk}, seed, true);
    }
  }
  // Hiera-Base, 224 x 224, B = 128, q_pool 2: times a step behind the name.
  Run("stage1 64 d96 x2", {128, 19, 64, 1, 1, 96}, seed, true);
  Run("stage2 64->16 d96 x1", {128, 19, 64, 4, 2, 96}, seed, true);
  Run("stage2 16 d96 x2", {128, 19, 16, 1, 2, 96}, seed, true);
  Run("stage3 16->4 d96 x1", {128, 19, 16, 4, 4, 96}, seed, true);
  Run("stage3 76 h4 d96 x15", {128, 1, 76, 1, 4, 96}, seed, true);
  Run("stage4 76 h8 d96 x3", {128, 1, 76, 1, 8, 96}, seed, true);
  Run("decoder 196 h16 d32 x8", {128, 1, 196, 1, 16, 32}, seed, true);
  return good ? 0 : 1;
}
