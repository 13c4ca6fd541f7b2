// What each operation of a step takes on a GPU: the plan's operations run once in order, then each alone, ten times in a graph on
// its own operands, median of nine replays. Prints the sums by kind of operation (digits left out of its name), largest
// first, with the bytes and operations that the plan counts. Alone, what the cache holds from the run before helps small ones.
//   step_profile [muon] [BATCH [SIZE...]]: Hiera-Base, 8 channels, bf16
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "base/job_yaml.h"
#include "base/plan/plan.h"
#include "base/random.h"
#include "worker/step/fused_op_gpu.h"

namespace hierad {
namespace {

constexpr int kRepeats = 10, kReplays = 9;

void Check(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  std::exit(1);
}
void Check(cudaError_t error) { Check(CudaStatus(error, "a call of the profile")); }

void FillWithNoise(float* on_device, int64_t count, float scale, uint64_t seed) {
  std::vector<float> values(count);
  const RandomStream stream{seed, Draw::kSynthetic, 0, seed};
  for (int64_t i = 0; i < count; ++i) values[i] = scale * float(2 * stream.Uniform(i) - 1);
  Check(cudaMemcpy(on_device, values.data(), count * sizeof(float), cudaMemcpyHostToDevice));
}

double Milliseconds(const Op& op, const Addresses& addresses, const GpuContext& context) {
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  cudaEvent_t start, stop;
  Check(cudaStreamBeginCapture(context.stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < kRepeats; ++i) Check(RunOpOnGpu(op, addresses, context));
  Check(cudaStreamEndCapture(context.stream, &graph));
  Check(cudaGraphInstantiate(&exec, graph, 0));
  Check(cudaEventCreate(&start)), Check(cudaEventCreate(&stop));
  std::vector<float> times;
  for (int i = 0; i < kReplays; ++i) {
    Check(cudaEventRecord(start, context.stream));
    Check(cudaGraphLaunch(exec, context.stream));
    Check(cudaEventRecord(stop, context.stream));
    Check(cudaStreamSynchronize(context.stream));
    times.push_back(0);
    Check(cudaEventElapsedTime(&times.back(), start, stop));
  }
  std::sort(times.begin(), times.end());
  Check(cudaGraphExecDestroy(exec)), Check(cudaGraphDestroy(graph)), Check(cudaEventDestroy(start)), Check(cudaEventDestroy(stop));
  return double(times[kReplays / 2]) / kRepeats;
}

std::string KindOf(const std::string& name) {
  std::string kind;
  for (char c : name) {
    if (c < '0' || c > '9') kind += c;
    else if (kind.empty() || kind.back() != 'N') kind += 'N';
  }
  return kind;
}

void Profile(const v1::JobSpec& job) {
  auto made = Plan::Make(job, {.compute = ComputeType::kBF16});
  Check(made.status());
  const Plan plan = *std::move(made);
  Addresses addresses;
  addresses.plan = &plan;
  for (int a = 0; a < kNumArenas; ++a) {
    if (plan.arena_bytes[a] == 0) continue;
    void* memory = nullptr;
    Check(cudaMalloc(&memory, plan.arena_bytes[a]));
    Check(cudaMemset(memory, 0, plan.arena_bytes[a]));
    addresses.arena[a] = static_cast<std::byte*>(memory);
  }
  for (const Constant& c : plan.constants) Check(cudaMemcpy(addresses.At(c.tensor), c.bytes.data(), c.bytes.size(), cudaMemcpyHostToDevice));
  FillWithNoise(addresses.Get<float>(plan.master), plan.flat_size, 0.05f, 1);
  FillWithNoise(addresses.Get<float>(plan.source), plan.tensors[plan.source].bytes / 8, 1.0f, 2);
  std::vector<int64_t> ids(plan.batch);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = int64_t(i);
  Check(cudaMemcpy(addresses.At(plan.source_ids), ids.data(), ids.size() * 8, cudaMemcpyHostToDevice));
  StepScalars scalars{};
  scalars.seed = 1, scalars.step = 1, scalars.loss_weight = 1e-6, scalars.lr = 1e-6, scalars.mask_draw = uint32_t(Draw::kMask), scalars.real = int32_t(plan.batch), scalars.train = 1;
  Check(cudaMemcpy(addresses.At(plan.scalars), &scalars, sizeof scalars, cudaMemcpyHostToDevice));
  auto gemm = kernels::GemmLibrary::Make();
  Check(gemm.status());
  Check(cudaDeviceSynchronize());   // copies and clears are on the default stream
  cudaStream_t stream;
  Check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  Check(RefreshComputeCopyOnGpu(addresses, stream));
  kernels::MuonProducts muon;
  const GpuContext context{.gemm = gemm->get(), .stream = stream, .muon = &muon};
  std::vector<const Op*> ops;
  for (const std::vector<Op>* list : {&plan.forward_backward, &plan.update}) {
    for (const Op& op : *list) ops.push_back(&op);
  }
  for (const Op* op : ops) Check(RunOpOnGpu(*op, addresses, context));
  Check(cudaStreamSynchronize(stream));
  struct Row { double ms = 0, flops = 0, bytes = 0; int count = 0; };
  std::map<std::string, Row> rows;
  double total = 0;
  for (const Op* op : ops) {
    const double ms = Milliseconds(*op, addresses, context);
    Row& row = rows[KindOf(op->name) + (op->backward && op->name.find("grad") == std::string::npos && op->name.find("backward") == std::string::npos ? " (b)" : "")];
    row.ms += ms, row.flops += op->flops, row.bytes += op->bytes, ++row.count;
    total += ms;
  }
  std::vector<std::pair<std::string, Row>> sorted(rows.begin(), rows.end());
  std::sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) { return a.second.ms > b.second.ms; });
  std::printf("B = %d: %zu operations, %.2f ms alone\n%9s %5s %9s %9s  kind\n", int(plan.batch), ops.size(), total, "ms", "times", "TFLOP/s", "GB/s");
  for (const auto& [kind, row] : sorted) {
    if (row.ms < 0.002 * total) break;
    std::printf("%9.3f %5d %9.0f %9.0f  %s\n", row.ms, row.count, row.flops / row.ms * 1e-9, row.bytes / row.ms * 1e-6, kind.c_str());
  }
}

}  // namespace
}  // namespace hierad

int main(int argc, char** argv) {
  hierad::v1::JobSpec job;
  if (argc > 1 && std::string(argv[1]) == "muon") {
    job.mutable_optimizer()->set_name("muon");
    --argc, ++argv;
  }
  for (int i = 1; i < argc; ++i) {
    if (std::atoi(argv[i]) > 0) continue;
    std::fprintf(stderr, "usage: step_profile [muon] [BATCH [INPUT_SIZE...]]\n");
    return 1;
  }
  job.mutable_data()->set_source("synthetic");
  job.mutable_model()->set_in_chans(8);
  for (int i = 2; i < argc; ++i) job.mutable_model()->add_input_size(std::atoi(argv[i]));
  if (argc <= 2) job.mutable_model()->add_input_size(224), job.mutable_model()->add_input_size(224);
  job.mutable_step()->set_batch_per_rank(argc > 1 ? std::atoi(argv[1]) : 128);
  job.mutable_step()->set_precision("bf16");
  hierad::FillDefaults(&job);
  hierad::Profile(job);
  return 0;
}
