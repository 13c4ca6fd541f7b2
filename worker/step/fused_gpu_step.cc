// step.mode fused on a GPU: the plan's arenas in device memory, the plan's operations recorded once into CUDA graphs and
// replayed every step. What changes from step to step (learning rate, loss weight, seed of the draws) lies in device
// memory, so nothing is recorded again. One rank: one graph is the whole step, update and record included. Several: one
// graph of forward and backward, the all-reduce, one graph of the update.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/random.h"
#include "base/status.h"
#include "worker/kernels/kernels.h"
#include "worker/model/initialize.h"
#include "worker/step/fused_layout.h"
#include "worker/step/fused_op_gpu.h"
#include "worker/step/lanes.h"
#include "worker/step/numerics.h"
#include "worker/step/step.h"

namespace hierad {
namespace {

// Frees what it holds; `host`: pinned.
template <bool host>
struct CudaFree {
  void operator()(void* p) const { host ? cudaFreeHost(p) : cudaFree(p); }
};
template <typename V>
using Pinned = std::unique_ptr<V[], CudaFree<true>>;
using DeviceMemory = std::unique_ptr<std::byte[], CudaFree<false>>;
struct DestroyGraph {
  void operator()(cudaGraphExec_t graph) const { cudaGraphExecDestroy(graph); }
};
using Graph = std::unique_ptr<std::remove_pointer_t<cudaGraphExec_t>, DestroyGraph>;

template <typename V>
absl::StatusOr<Pinned<V>> AllocatePinned(size_t count) {
  V* p = nullptr;
  RETURN_IF_ERROR(CudaStatus(cudaMallocHost(reinterpret_cast<void**>(&p), count * sizeof(V)), "allocating pinned host memory"));
  return Pinned<V>(p);
}

// The arenas of one plan on the device, its constants in place.
class DeviceArenas {
 public:
  static absl::StatusOr<std::unique_ptr<DeviceArenas>> Make(Plan plan) {
    std::unique_ptr<DeviceArenas> arenas(new DeviceArenas(std::move(plan)));
    const Plan& p = arenas->plan;
    arenas->addresses.plan = &p;
    for (int i = 0; i < kNumArenas; ++i) {
      if (p.arena_bytes[i] == 0) continue;
      std::byte* memory = nullptr;
      const cudaError_t error = cudaMalloc(reinterpret_cast<void**>(&memory), p.arena_bytes[i]);
      if (error == cudaErrorMemoryAllocation) {
        cudaGetLastError();
        size_t free = 0, total = 0;
        cudaMemGetInfo(&free, &total);
        return ErrorOf(v1::REASON_CUDA_OOM, absl::StrCat("the step needs ", p.TotalBytes() >> 20, " MiB of GPU memory, an arena of ",
                                                         p.arena_bytes[i] >> 20, " MiB could not be had with ", free >> 20, " of ", total >> 20,
                                                         " MiB free; use a smaller step.batch_per_rank."));
      }
      RETURN_IF_ERROR(CudaStatus(error, "allocating GPU memory"));
      arenas->memory_[i].reset(memory);
      arenas->addresses.arena[i] = memory;
      RETURN_IF_ERROR(CudaStatus(cudaMemset(memory, 0, p.arena_bytes[i]), "clearing GPU memory"));
    }
    for (const Constant& constant : p.constants) {
      RETURN_IF_ERROR(CudaStatus(cudaMemcpy(arenas->addresses.At(constant.tensor), constant.bytes.data(), constant.bytes.size(),
                                            cudaMemcpyHostToDevice), "copying an index table"));
    }
    return arenas;
  }

  const Plan plan;
  Addresses addresses;

 private:
  explicit DeviceArenas(Plan p) : plan(std::move(p)) {}
  DeviceMemory memory_[kNumArenas];
};

class FusedGpuStep : public Step {
 public:
  FusedGpuStep(const StepOptions& options, const ParameterTable& table, Communicator* communicator)
      : spec_(options.spec), options_beside_(options.beside), table_(table), communicator_(*communicator) {}

  ~FusedGpuStep() override {
    step_graph_.reset(), micro_graph_.reset(), update_graph_.reset();   // before the stream and what they refer to
    lanes_.reset();
    for (cudaEvent_t event : {copied_[0], copied_[1], used_[0], used_[1]}) {
      if (event != nullptr) cudaEventDestroy(event);
    }
    for (cudaStream_t stream : {stream_, beside_, copy_}) {
      if (stream != nullptr) cudaStreamDestroy(stream);
    }
  }

  absl::Status Prepare(Plan plan) {
    RETURN_IF_ERROR(MakeStreams());
    ASSIGN_OR_RETURN(arenas_, DeviceArenas::Make(std::move(plan)));
    lanes_ = std::make_unique<Lanes>(this->plan(), stream_, options_beside_ ? beside_ : stream_);
    ASSIGN_OR_RETURN(gemm_, kernels::GemmLibrary::Make());
    ASSIGN_OR_RETURN(scalars_, AllocatePinned<StepScalars>(spec_.step().accumulation() + 1));
    ASSIGN_OR_RETURN(record_, AllocatePinned<StepRecord>(1));
    std::memset(record_.get(), 0, sizeof(StepRecord));
    // Everything once before it is recorded: libraries load what they need, algorithms are chosen.
    RETURN_IF_ERROR(RunAll(this->plan().forward_backward, this->plan().forward_backward.size()));
    RETURN_IF_ERROR(RunAll(this->plan().update, this->plan().update.size()));
    RETURN_IF_ERROR(Synchronize());
    if (spec_.step().accumulation() == 1 && communicator_.size() == 1) {
      ASSIGN_OR_RETURN(step_graph_, Capture([this] { return Both(); }));
    }
    ASSIGN_OR_RETURN(micro_graph_, Capture([this] { return RunAll(this->plan().forward_backward, this->plan().forward_backward.size()); }));
    ASSIGN_OR_RETURN(update_graph_, Capture([this] { return Update(); }));
    return absl::OkStatus();
  }

  absl::Status Initialize() override {
    TrainState state;
    state.parameters.resize(table_.flat_size);
    InitializeParameters(table_, spec_.seed(), state.parameters.data());
    state.exp_avg.resize(table_.flat_size);
    state.exp_avg_sq.resize(table_.flat_size);
    return Load(state);
  }

  absl::Status Load(const TrainState& state) override {
    RETURN_IF_ERROR(CheckState(state, table_));
    auto* moments = Get<float>(plan().moments);
    std::vector<float> flat(plan().flat_size, 0.0f);
    auto upload = [&](const std::vector<float>& from, float* to) {
      ToPlanOrder(plan(), from.data(), flat.data());
      return CudaStatus(cudaMemcpy(to, flat.data(), flat.size() * sizeof(float), cudaMemcpyHostToDevice), "copying a state to the GPU");
    };
    RETURN_IF_ERROR(upload(state.parameters, Get<float>(plan().master)));
    RETURN_IF_ERROR(upload(state.exp_avg, moments));
    RETURN_IF_ERROR(upload(state.exp_avg_sq, moments + plan().flat_size));
    RETURN_IF_ERROR(RefreshComputeCopyOnGpu(arenas_->addresses, stream_));
    prefetched_.reset(), next_.reset();
    step_ = state.step;
    StepRecord& r = record_[0];
    r = StepRecord{};
    r.updates = state.updates, r.nan_in_row = state.nan_steps_in_row;
    RETURN_IF_ERROR(CudaStatus(cudaMemcpyAsync(Get<StepRecord>(plan().record), &r, sizeof r, cudaMemcpyHostToDevice, stream_), "copying the counters"));
    features_are_fresh_ = false;
    return Synchronize();
  }

  absl::StatusOr<TrainState> Save() override {
    TrainState state{step_, record_[0].updates, record_[0].nan_in_row, {}, {}, {}};
    RETURN_IF_ERROR(Synchronize());
    std::vector<float> flat(plan().flat_size);
    auto download = [&](const float* from, std::vector<float>* to) {
      RETURN_IF_ERROR(CudaStatus(cudaMemcpy(flat.data(), from, flat.size() * sizeof(float), cudaMemcpyDeviceToHost), "copying the state from the GPU"));
      to->assign(table_.flat_size, 0.0f);
      FromPlanOrder(plan(), flat.data(), to->data());
      return absl::OkStatus();
    };
    const auto* moments = Get<float>(plan().moments);
    RETURN_IF_ERROR(download(Get<float>(plan().master), &state.parameters));
    RETURN_IF_ERROR(download(moments, &state.exp_avg));
    RETURN_IF_ERROR(download(moments + plan().flat_size, &state.exp_avg_sq));
    return state;
  }

  absl::StatusOr<StepResult> Run(absl::Span<const MicroBatch> micro_batches, int64_t real_samples, double lr, StepSignals signals) override {
    if (int(micro_batches.size()) > spec_.step().accumulation()) {
      return ErrorOf(v1::REASON_INTERNAL, absl::StrCat(micro_batches.size(), " micro-batches were given to a step planned for ", spec_.step().accumulation(), "."));
    }
    features_are_fresh_ = false;
    StepScalars s{};
    s.seed = spec_.seed(), s.step = step_ + 1, s.lr = lr, s.train = 1, s.mask_draw = uint32_t(Draw::kMask);
    s.loss_weight = 1.0 / (double(std::max<int64_t>(1, real_samples)) * double(LossElements(plan().geometry)));
    s.signals = (signals.stop ? 1 : 0) | (signals.checkpoint ? 2 : 0);
    const bool whole = step_graph_ != nullptr && micro_batches.size() == 1 && micro_batches[0].real > 0;
    if (!whole) RETURN_IF_ERROR(ClearSums());
    bool staged = false;
    for (size_t i = 0; i < micro_batches.size(); ++i) {
      if (micro_batches[i].real == 0) continue;
      RETURN_IF_ERROR(Stage(micro_batches[i], s, int(i), *arenas_));
      staged = true;
      RETURN_IF_ERROR(CudaStatus(cudaGraphLaunch((whole ? step_graph_ : micro_graph_).get(), stream_), "the step"));
      RETURN_IF_ERROR(CudaStatus(cudaEventRecord(used_[slot_], stream_), "ordering copies"));
    }
    StepResult result;
    result.signals = signals;
    if (!whole) {
      if (!staged) RETURN_IF_ERROR(CopyScalars(s, int(micro_batches.size()), *arenas_));
      RETURN_IF_ERROR(Reduce());
      RETURN_IF_ERROR(CudaStatus(cudaGraphLaunch(update_graph_.get(), stream_), "the update"));
    }
    RETURN_IF_ERROR(CopyNext());
    RETURN_IF_ERROR(Synchronize());
    const StepRecord& r = record_[0];
    if (communicator_.size() > 1) result.signals = {(r.signals & 1) != 0, (r.signals & 2) != 0};
    result.loss = r.loss, result.grad_norm = r.grad_norm, result.skipped = r.skipped != 0;
    ++step_;
    RETURN_IF_ERROR(CheckNumerics(spec_, result, step_, r.nan_in_row, lr));
    return result;
  }

  void Prefetch(const MicroBatch& next) override { next_ = next; }

  absl::StatusOr<LossSum> Evaluate(const MicroBatch& batch) override {
    if (batch.real == 0) return LossSum{};
    StepScalars s{};
    s.seed = spec_.seed(), s.mask_draw = uint32_t(Draw::kEvalMask), s.loss_weight = 1;
    RETURN_IF_ERROR(ClearSums());
    RETURN_IF_ERROR(Stage(batch, s, 0, *arenas_));
    RETURN_IF_ERROR(RunAll(plan().forward_backward, plan().forward_ops));
    std::vector<double> partials(plan().batch);
    RETURN_IF_ERROR(Synchronize());
    RETURN_IF_ERROR(CudaStatus(cudaMemcpy(partials.data(), Get<double>(plan().loss_partials), partials.size() * sizeof(double), cudaMemcpyDeviceToHost),
                               "copying the loss"));
    double sum = 0;
    for (double partial : partials) sum += partial;
    return LossSum{sum, double(batch.real) * double(LossElements(plan().geometry))};
  }

  absl::StatusOr<std::vector<float>> Features(const MicroBatch& batch) override {
    const int64_t dim = plan().geometry.encoder_dim_out;
    std::vector<float> features(batch.real * dim);
    if (batch.real == 0) return features;
    RETURN_IF_ERROR(PrepareFeatures());
    StepScalars s{};
    s.seed = spec_.seed();
    RETURN_IF_ERROR(Stage(batch, s, 0, *features_));
    const Plan& p = features_->plan;
    for (int i = 0; i < p.forward_ops; ++i) RETURN_IF_ERROR(RunOpOnGpu(p.forward_backward[i], features_->addresses, Context()));
    const int64_t rows = p.tensors[p.encoded].shape[0], tokens = rows / p.batch;
    // The mean over tokens in fp32, on the host: once a probe, not once a step.
    std::vector<float> encoded(rows * dim);
    if (p.options.compute == ComputeType::kBF16) {
      std::vector<uint16_t> narrow(encoded.size());
      RETURN_IF_ERROR(Synchronize());
      RETURN_IF_ERROR(CudaStatus(cudaMemcpy(narrow.data(), features_->addresses.At(p.encoded), narrow.size() * 2, cudaMemcpyDeviceToHost), "copying features"));
      for (size_t i = 0; i < narrow.size(); ++i) encoded[i] = std::bit_cast<float>(uint32_t{narrow[i]} << 16);
    } else {
      RETURN_IF_ERROR(Synchronize());
      RETURN_IF_ERROR(CudaStatus(cudaMemcpy(encoded.data(), features_->addresses.At(p.encoded), encoded.size() * 4, cudaMemcpyDeviceToHost), "copying features"));
    }
    for (int64_t b = 0; b < batch.real; ++b) {
      for (int64_t c = 0; c < dim; ++c) {
        double sum = 0;
        for (int64_t n = 0; n < tokens; ++n) sum += encoded[(b * tokens + n) * dim + c];
        features[b * dim + c] = float(sum / double(tokens));
      }
    }
    return features;
  }

  // Of the arenas and the products' workspace.
  int64_t peak_memory_bytes() const override { return plan().TotalBytes() + gemm_->workspace_bytes(); }

  std::string Describe() const override {
    cudaDeviceProp device{};
    cudaGetDeviceProperties(&device, 0);
    return absl::StrCat("fused on ", device.name, ", ", spec_.step().precision(), ", ", plan().forward_backward.size() + plan().update.size(),
                        " operations in ", step_graph_ != nullptr ? "one graph" : "two graphs", ", ", plan().TotalBytes() >> 20, " MiB planned");
  }

  // Times the candidates of every product on what the arenas hold now, and records the graphs again.
  absl::Status Tune() {
    GpuContext context = Context();
    context.tune = true;
    for (const Op& op : plan().forward_backward) {
      if (std::holds_alternative<Gemm>(op.args)) RETURN_IF_ERROR(RunOpOnGpu(op, arenas_->addresses, context));
    }
    RETURN_IF_ERROR(Synchronize());
    if (step_graph_ != nullptr) {
      ASSIGN_OR_RETURN(step_graph_, Capture([this] { return Both(); }));
    }
    ASSIGN_OR_RETURN(micro_graph_, Capture([this] { return RunAll(plan().forward_backward, plan().forward_backward.size()); }));
    return absl::OkStatus();
  }

 private:
  const Plan& plan() const { return arenas_->plan; }
  template <typename V>
  V* Get(TensorId id) const { return arenas_->addresses.Get<V>(id); }
  GpuContext Context() const { return {gemm_.get(), stream_, 0, spec_.step().tf32(), false}; }
  absl::Status Synchronize() { return CudaStatus(cudaStreamSynchronize(stream_), "the step on the GPU"); }

  absl::Status RunAll(const std::vector<Op>& ops, size_t count) {
    return lanes_->Run(ops, count, [&](const Op& op, cudaStream_t stream, int lane) {
      GpuContext context = Context();
      context.stream = stream, context.lane = lane;
      return RunOpOnGpu(op, arenas_->addresses, context);
    });
  }
  absl::Status Update() {
    RETURN_IF_ERROR(RunAll(plan().update, plan().update.size()));
    return CudaStatus(cudaMemcpyAsync(record_.get(), Get<StepRecord>(plan().record), sizeof(StepRecord), cudaMemcpyDeviceToHost, stream_),
                      "copying the record");
  }
  absl::Status Both() {
    RETURN_IF_ERROR(RunAll(plan().forward_backward, plan().forward_backward.size()));
    return Update();
  }

  absl::Status MakeStreams() {
    int least = 0, greatest = 0;
    RETURN_IF_ERROR(CudaStatus(cudaDeviceGetStreamPriorityRange(&least, &greatest), "asking for stream priorities"));
    RETURN_IF_ERROR(CudaStatus(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest), "creating a stream"));
    RETURN_IF_ERROR(CudaStatus(cudaStreamCreateWithPriority(&beside_, cudaStreamNonBlocking, least), "creating a stream"));
    RETURN_IF_ERROR(CudaStatus(cudaStreamCreateWithFlags(&copy_, cudaStreamNonBlocking), "creating a stream"));
    for (cudaEvent_t* event : {&copied_[0], &copied_[1], &used_[0], &used_[1]}) {
      RETURN_IF_ERROR(CudaStatus(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "creating an event"));
    }
    return absl::OkStatus();
  }

  template <typename Body>
  absl::StatusOr<Graph> Capture(const Body& body) {
    RETURN_IF_ERROR(CudaStatus(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "beginning to record the step"));
    const absl::Status status = body();
    cudaGraph_t graph = nullptr;
    const cudaError_t ended = cudaStreamEndCapture(stream_, &graph);   // also after an error: the stream must become usable
    RETURN_IF_ERROR(status);
    RETURN_IF_ERROR(CudaStatus(ended, "recording the step"));
    cudaGraphExec_t exec = nullptr;
    const cudaError_t made = cudaGraphInstantiate(&exec, graph, 0);
    cudaGraphDestroy(graph);
    RETURN_IF_ERROR(CudaStatus(made, "making a graph of the step"));
    return Graph(exec);
  }

  absl::Status ClearSums() {
    RETURN_IF_ERROR(CudaStatus(cudaMemsetAsync(Get<void>(plan().gradients), 0, plan().arena_bytes[int(Arena::kGradients)], stream_), "clearing gradients"));
    return CudaStatus(cudaMemsetAsync(Get<void>(plan().loss_partials), 0, plan().tensors[plan().loss_partials].bytes, stream_), "clearing the loss");
  }

  absl::Status CopyScalars(const StepScalars& s, int place, const DeviceArenas& arenas) {
    scalars_[place] = s;
    return CudaStatus(cudaMemcpyAsync(arenas.addresses.At(arenas.plan.scalars), &scalars_[place], sizeof s, cudaMemcpyHostToDevice, stream_),
                      "copying the step's values");
  }

  // The batch into a staging slot, and the scalars that go with it, before what is enqueued next. Its copy may be under way
  // already; else it starts as soon as the step that used the slot is over. The copies are over when the step is.
  absl::Status Stage(const MicroBatch& batch, StepScalars s, int micro, const DeviceArenas& arenas) {
    if (!arenas.plan.options.features) RETURN_IF_ERROR(CheckLabels(batch, arenas.plan.geometry));
    if (IsPrefetched(batch) && &arenas == arenas_.get()) {
      slot_ = prefetched_->slot;
    } else {
      slot_ = 1 - slot_;
      RETURN_IF_ERROR(Copy(batch, slot_, arenas));
    }
    prefetched_.reset();
    s.epoch = s.train != 0 ? batch.epoch : 0;
    s.real = batch.real, s.slot = slot_;
    RETURN_IF_ERROR(CudaStatus(cudaStreamWaitEvent(stream_, copied_[slot_], 0), "ordering copies"));
    return CopyScalars(s, micro, arenas);
  }

  // On the copy stream.
  absl::Status Copy(const MicroBatch& batch, int slot, const DeviceArenas& arenas) {
    const Plan& p = arenas.plan;
    const int64_t bytes = p.tensors[p.source].bytes / 2, ids = p.batch * int64_t(sizeof(int64_t));
    auto copy = [&](TensorId to, int64_t slot_bytes, const void* from, int64_t size) {
      return CudaStatus(cudaMemcpyAsync(arenas.addresses.Get<std::byte>(to) + slot * slot_bytes, from, size, cudaMemcpyHostToDevice, copy_),
                        "copying a batch to the GPU");
    };
    RETURN_IF_ERROR(CudaStatus(cudaStreamWaitEvent(copy_, used_[slot], 0), "ordering copies"));
    RETURN_IF_ERROR(copy(p.source, bytes, batch.x_BCS, bytes / p.batch * batch.real));
    RETURN_IF_ERROR(copy(p.source_ids, ids, batch.visit_ids_B, batch.real * int64_t(sizeof(int64_t))));
    if (batch.labels_B != nullptr) RETURN_IF_ERROR(copy(p.source_labels, ids, batch.labels_B, batch.real * int64_t(sizeof(int64_t))));
    return CudaStatus(cudaEventRecord(copied_[slot], copy_), "ordering copies");
  }

  absl::Status CopyNext() {
    const std::optional<MicroBatch> next = std::exchange(next_, std::nullopt);
    if (!next.has_value() || next->real == 0) return absl::OkStatus();
    const int slot = 1 - slot_;
    RETURN_IF_ERROR(Copy(*next, slot, *arenas_));
    prefetched_ = {*next, {next->visit_ids_B, next->visit_ids_B + next->real}, slot};
    return absl::OkStatus();
  }
  bool IsPrefetched(const MicroBatch& batch) const {
    return prefetched_.has_value() && batch.x_BCS == prefetched_->batch.x_BCS && batch.labels_B == prefetched_->batch.labels_B &&
           batch.epoch == prefetched_->batch.epoch && batch.real == prefetched_->batch.real &&
           std::equal(prefetched_->ids.begin(), prefetched_->ids.end(), batch.visit_ids_B);
  }

  // Gradients, loss numerator and signals of all ranks.
  absl::Status Reduce() {
    if (communicator_.size() == 1) return absl::OkStatus();
    auto* gradients = Get<float>(plan().gradients);
    auto* partials = Get<double>(plan().loss_partials);
    float* tail = gradients + plan().flat_size;
    RETURN_IF_ERROR(CudaStatus(kernels::PackTail(Get<StepScalars>(plan().scalars), partials, tail, int(plan().batch), stream_), "packing the loss"));
    RETURN_IF_ERROR(communicator_.AllReduceSum(gradients, plan().flat_size + kTailUsed, stream_));
    RETURN_IF_ERROR(CudaStatus(kernels::UnpackTail(tail, partials, Get<StepRecord>(plan().record), int(plan().batch), stream_), "unpacking the loss"));
    return communicator_.CheckAsync();
  }

  absl::Status PrepareFeatures() {
    if (features_ == nullptr) {
      PlanOptions options = plan().options;
      options.features = true;
      ASSIGN_OR_RETURN(Plan features, Plan::Make(spec_, options));
      ASSIGN_OR_RETURN(features_, DeviceArenas::Make(std::move(features)));
    }
    if (features_are_fresh_) return absl::OkStatus();
    RETURN_IF_ERROR(Synchronize());
    std::vector<float> flat(plan().flat_size), by_table(table_.flat_size, 0.0f);
    RETURN_IF_ERROR(CudaStatus(cudaMemcpy(flat.data(), Get<float>(plan().master), flat.size() * sizeof(float), cudaMemcpyDeviceToHost), "copying parameters"));
    FromPlanOrder(plan(), flat.data(), by_table.data());
    flat.assign(features_->plan.flat_size, 0.0f);
    ToPlanOrder(features_->plan, by_table.data(), flat.data());
    RETURN_IF_ERROR(CudaStatus(cudaMemcpy(features_->addresses.At(features_->plan.master), flat.data(), flat.size() * sizeof(float), cudaMemcpyHostToDevice),
                               "copying parameters"));
    features_are_fresh_ = true;
    return RefreshComputeCopyOnGpu(features_->addresses, stream_);
  }

  const v1::JobSpec spec_;
  const bool options_beside_;
  const ParameterTable table_;
  Communicator& communicator_;
  cudaStream_t stream_ = nullptr, beside_ = nullptr, copy_ = nullptr;
  cudaEvent_t copied_[2] = {}, used_[2] = {};   // of a staging slot: its copy, and the step that read it
  int slot_ = 0;                                // of the newest batch that a step was given
  std::optional<MicroBatch> next_;
  struct Prefetched {
    MicroBatch batch;
    std::vector<uint64_t> ids;
    int slot;
  };
  std::optional<Prefetched> prefetched_;
  std::unique_ptr<Lanes> lanes_;
  std::unique_ptr<DeviceArenas> arenas_, features_;
  std::unique_ptr<kernels::GemmLibrary> gemm_;
  Pinned<StepScalars> scalars_;   // one a micro-batch: their copies may still be under way
  Pinned<StepRecord> record_;
  Graph step_graph_, micro_graph_, update_graph_;
  bool features_are_fresh_ = false;
  int64_t step_ = 0;
};

}  // namespace

HostMemory BatchMemory(bool cuda) {
  if (!cuda) return {};
  return {[](size_t bytes) {
            void* memory = nullptr;
            return cudaMallocHost(&memory, bytes) == cudaSuccess ? memory : nullptr;
          },
          [](void* memory) { cudaFreeHost(memory); }};
}

absl::StatusOr<std::unique_ptr<Step>> MakeFusedGpuStep(const StepOptions& options, const ParameterTable& table, Communicator* communicator) {
  const ComputeType compute = options.spec.step().precision() == "bf16" ? ComputeType::kBF16 : ComputeType::kF32;
  ASSIGN_OR_RETURN(Plan plan, Plan::Make(options.spec, {.compute = compute}));
  auto step = std::make_unique<FusedGpuStep>(options, table, communicator);
  RETURN_IF_ERROR(step->Prepare(std::move(plan)));
  if (options.tune) RETURN_IF_ERROR(step->Tune());
  return step;
}

}  // namespace hierad
