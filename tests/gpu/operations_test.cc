// Every operation of random plans on the GPU against its plain CPU reference: the same operands, outputs poisoned before.
// The plan runs on the CPU; before each operation the GPU gets what it reads, after it both results are compared.
#include <cuda_runtime.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/plan/random_jobs.h"
#include "gtest/gtest.h"
#include "worker/kernels/reference/types.h"
#include "worker/step/fused_op_gpu.h"
#include "worker/step/fused_testing.h"

namespace hierad {
namespace {

// The arenas of a plan on the device.
class Device {
 public:
  explicit Device(const Plan& plan) {
    addresses_.plan = &plan;
    for (int a = 0; a < kNumArenas; ++a) {
      if (plan.arena_bytes[a] == 0) continue;
      void* memory = nullptr;
      EXPECT_EQ(cudaMalloc(&memory, plan.arena_bytes[a]), cudaSuccess);
      addresses_.arena[a] = static_cast<std::byte*>(memory);
    }
  }
  ~Device() {
    for (std::byte* memory : addresses_.arena) cudaFree(memory);
  }
  const Addresses& addresses() const { return addresses_; }

 private:
  Addresses addresses_;
};

double Element(const TensorSpec& t, const std::byte* data, int64_t i) {
  switch (t.dtype) {
    case DType::kF64: return reinterpret_cast<const double*>(data)[i];
    case DType::kF32: return reinterpret_cast<const float*>(data)[i];
    case DType::kBF16: return float(reinterpret_cast<const reference::BFloat16*>(data)[i]);
    case DType::kF16: return float(reinterpret_cast<const reference::Float16*>(data)[i]);
    case DType::kI64: return double(reinterpret_cast<const int64_t*>(data)[i]);
    case DType::kI32: return reinterpret_cast<const int32_t*>(data)[i];
    case DType::kU8: return double(uint8_t(data[i]));
    default: return NAN;
  }
}

// Of parts of a sum over rows, whose split is the device's own, the sum counts.
std::vector<double> Values(const TensorSpec& t, const std::byte* data) {
  int64_t count = t.bytes / SizeOf(t.dtype);
  std::vector<double> values(count);
  for (int64_t i = 0; i < count; ++i) values[i] = Element(t, data, i);
  if (!absl::StrContains(t.name, " parts")) return values;
  const int64_t cols = t.shape[1];
  for (int64_t i = cols; i < count; ++i) values[i % cols] += values[i];
  values.resize(cols);
  return values;
}

void ExpectNear(const TensorSpec& t, const std::byte* expected_data, const std::byte* got_data, double bound, const std::string& op) {
  const std::vector<double> expected = Values(t, expected_data), got = Values(t, got_data);
  double distance = 0, norm = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    distance += (got[i] - expected[i]) * (got[i] - expected[i]);
    norm += expected[i] * expected[i];
  }
  const bool exact = t.dtype == DType::kI64 || t.dtype == DType::kI32 || t.dtype == DType::kU8;
  // A sum that cancels to nothing has no digits: the absolute floor is that of its addends, of order one here.
  const double allowed = exact ? 0 : bound * std::sqrt(norm) + 1e-6 * std::sqrt(double(expected.size()));
  EXPECT_TRUE(std::sqrt(distance) <= allowed) << op << ": " << t.name << " is off by " << std::sqrt(distance) << " of " << std::sqrt(norm);
}

void CompareRecords(const StepRecord& a, const StepRecord& b) {
  EXPECT_EQ(a.step, b.step);
  EXPECT_EQ(a.updates, b.updates);
  EXPECT_EQ(a.skipped, b.skipped);
  EXPECT_NEAR(a.loss, b.loss, 1e-6 * std::abs(a.loss));
  EXPECT_NEAR(a.grad_norm, b.grad_norm, 1e-6 * a.grad_norm);
  EXPECT_EQ(a.nan_in_row, b.nan_in_row);
  EXPECT_EQ(a.overflowed, b.overflowed);
  EXPECT_EQ(a.scale.value, b.scale.value);
  EXPECT_EQ(a.scale.good_steps, b.scale.good_steps);
  EXPECT_EQ(a.scaled_by, b.scaled_by);
  EXPECT_EQ(a.halted, b.halted);
  EXPECT_EQ(a.signals, b.signals);
  EXPECT_EQ(a.published, b.published);
  EXPECT_EQ(a.not_finite, b.not_finite);
}

// A gradient in two values of T: their sum, of which a last bit of the first is much of the second.
void ExpectPairNear(const Plan& plan, const LayerNormBackward& norm, FusedExecutor* cpu, const Device& gpu, const std::string& op) {
  std::vector<double> sums[2];
  for (TensorId id : {norm.dx_narrow, norm.dx_low}) {
    const TensorSpec& t = plan.tensors[id];
    std::vector<std::byte> got(t.bytes);
    cudaMemcpy(got.data(), gpu.addresses().At(id), t.bytes, cudaMemcpyDeviceToHost);
    const std::byte* const from[] = {static_cast<const std::byte*>(cpu->addresses().At(id)), got.data()};
    for (int side = 0; side < 2; ++side) {
      const std::vector<double> values = Values(t, from[side]);
      sums[side].resize(values.size());
      for (size_t i = 0; i < values.size(); ++i) sums[side][i] += values[i];
    }
  }
  double distance = 0, norm_of_all = 0;
  for (size_t i = 0; i < sums[0].size(); ++i) distance += std::pow(sums[1][i] - sums[0][i], 2), norm_of_all += std::pow(sums[0][i], 2);
  EXPECT_LE(std::sqrt(distance), 1e-4 * std::sqrt(norm_of_all) + 1e-8) << op;
}

void CompareOperation(const Op& op, FusedExecutor* cpu, const Device& gpu, const GpuContext& context, double bound) {
  const Plan& plan = cpu->plan();
  for (TensorId id : op.writes) {
    if (plan.tensors[id].arena == Arena::kActivations || plan.tensors[id].arena == Arena::kGradients) {
      cudaMemsetAsync(gpu.addresses().At(id), 0xFF, plan.tensors[id].bytes, context.stream);
    }
  }
  // In the stream's order: a small cudaMemcpy may return before its bytes are there.
  for (TensorId id : op.reads) {
    cudaMemcpyAsync(gpu.addresses().At(id), cpu->addresses().At(id), plan.tensors[id].bytes, cudaMemcpyHostToDevice, context.stream);
  }
  const absl::Status status = RunOpOnGpu(op, gpu.addresses(), context);
  ASSERT_TRUE(status.ok()) << status;
  RunOpOnCpu(op, cpu->addresses());
  const cudaError_t error = cudaStreamSynchronize(context.stream);
  ASSERT_EQ(error, cudaSuccess) << op.name << ": " << cudaGetErrorString(error);
  for (TensorId id : op.writes) {
    const TensorSpec& t = plan.tensors[id];
    if (id == plan.saved) continue;   // its record holds the device's own times; FusedGpuTest reads snapshots
    if (absl::StrContains(t.name, "scratch") || t.name == "norm_partials") continue;
    if (const auto* norm = std::get_if<LayerNormBackward>(&op.args); norm != nullptr && id == norm->dx_low) {
      ExpectPairNear(plan, *norm, cpu, gpu, op.name);
      continue;
    }
    std::vector<std::byte> got(t.bytes);
    cudaMemcpy(got.data(), gpu.addresses().At(id), t.bytes, cudaMemcpyDeviceToHost);
    const auto* expected = static_cast<const std::byte*>(cpu->addresses().At(id));
    if (id == plan.ring) {
      const auto* theirs = reinterpret_cast<const RecordSlot*>(got.data());
      const auto* ours = reinterpret_cast<const RecordSlot*>(expected);
      for (int64_t s = 0; s < kRecordSlots; ++s) {
        if (ours[s].number == 0) continue;   // the device's were never cleared
        EXPECT_EQ(theirs[s].number, ours[s].number);
        CompareRecords(ours[s].record, theirs[s].record);
      }
    } else if (id == plan.record) {
      CompareRecords(*reinterpret_cast<const StepRecord*>(expected), *reinterpret_cast<const StepRecord*>(got.data()));
    } else {
      ExpectNear(t, expected, got.data(), bound, op.name);
    }
  }
}

void ComparePlan(const v1::JobSpec& job, ComputeType compute, DType rows, bool epilogues, kernels::GemmLibrary* gemm, cudaStream_t stream) {
  PlanOptions options{.compute = compute, .rows = RowFormat::Plain(*Geometry::From(job.model()))};
  options.rows.type = rows;
  if (rows == DType::kI16) options.rows.scale.assign(options.rows.scale.size(), 0x1p-15f);   // whole numbers up to 32,767 are beyond fp16
  auto plan = Plan::Make(job, options);
  ASSERT_TRUE(plan.ok()) << plan.status();
  FusedRun run(*std::move(plan), /*poison=*/false);
  run.FillParameters();
  run.FillInput(11);
  if (run.plan().batch > 1) run.scalars().real = int32_t(run.plan().batch) - 1;
  run.executor().ClearSums();
  const Device gpu(run.plan());
  // The device's products take biases from the copy in T, which no operation but AdamW writes.
  const auto copy = size_t(run.plan().arena_bytes[int(Arena::kCompute)]);
  if (copy > 0) cudaMemcpy(gpu.addresses().arena[int(Arena::kCompute)], run.executor().addresses().arena[int(Arena::kCompute)], copy, cudaMemcpyHostToDevice);
  kernels::MuonProducts muon;
  const GpuContext context{.gemm = gemm, .stream = stream, .epilogues = epilogues, .muon = epilogues ? &muon : nullptr};
  const double bound = compute == ComputeType::kBF16 ? 2e-2 : compute == ComputeType::kF16 ? 4e-3 : 2e-5;
  for (const std::vector<Op>* ops : {&run.plan().forward_backward, &run.plan().update, &run.plan().snapshot}) {
    for (const Op& op : *ops) {
      CompareOperation(op, &run.executor(), gpu, context, bound);
      if (::testing::Test::HasFailure()) return;
    }
  }
}

class OperationsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto gemm = kernels::GemmLibrary::Make();
    ASSERT_TRUE(gemm.ok()) << gemm.status();
    gemm_ = *std::move(gemm);
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
  }
  void TearDown() override { cudaStreamDestroy(stream_); }
  void Compare(const v1::JobSpec& job, DType rows = DType::kF32) {
    SCOPED_TRACE(job.model().ShortDebugString());
    for (ComputeType compute : {ComputeType::kF32, ComputeType::kBF16, ComputeType::kF16}) ComparePlan(job, compute, rows, true, gemm_.get(), stream_);
    ComparePlan(job, ComputeType::kBF16, rows, /*epilogues=*/false, gemm_.get(), stream_);
  }

  std::unique_ptr<kernels::GemmLibrary> gemm_;
  cudaStream_t stream_ = nullptr;
};

TEST_F(OperationsTest, OddShapesEqualTheReference) {
  RandomJobs jobs(211);
  for (int i = 0; i < 60 && !HasFailure(); ++i) {
    v1::JobSpec job = jobs.Next();
    if (i % 3 == 1) job.mutable_optimizer()->set_name("muon");
    if (i % 3 == 2) job.mutable_optimizer()->set_layer_decay(0.7);
    Compare(job, std::vector{DType::kF32, DType::kU8, DType::kI16, DType::kF16}[i % 4]);
  }
}

// The widths of the named models, few tokens.
TEST_F(OperationsTest, WidthsOfTheModelsEqualTheReference) {
  struct Model { int embed, heads, q_pool, decoder, decoder_heads; std::vector<int> input; double drop_path; };
  for (const Model& model : {Model{96, 1, 2, 512, 16, {64, 64}, 0.0}, Model{144, 2, 3, 128, 4, {64, 64}, 0.2},
                             Model{112, 2, 1, 64, 2, {64, 64}, 0.0}, Model{96, 1, 2, 256, 8, {512}, 0.1}}) {
    if (HasFailure()) return;
    v1::JobSpec job;
    job.mutable_data()->set_source("synthetic");
    v1::ModelSpec* m = job.mutable_model();
    m->set_embed_dim(model.embed);
    m->set_num_heads(model.heads);
    m->set_in_chans(4);
    for (int size : model.input) m->add_input_size(size);
    for (int s = 0; s < 4; ++s) m->add_stages(s == 2 ? 2 : 1);
    m->set_q_pool(model.q_pool);
    m->set_decoder_embed_dim(model.decoder);
    m->set_decoder_num_heads(model.decoder_heads);
    m->set_decoder_depth(1);
    m->set_drop_path_rate(model.drop_path);
    job.mutable_step()->set_batch_per_rank(2);
    FillDefaults(&job);
    Compare(job);
  }
}

}  // namespace
}  // namespace hierad
