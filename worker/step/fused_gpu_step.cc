// step.mode fused on a GPU: the plan's arenas in device memory, the plan's operations recorded once into CUDA graphs and
// replayed every step. What changes from step to step (learning rate, loss weight, seed of the draws) lies in device
// memory, so nothing is recorded again. The forward pass is a graph of its own, since it is a chain: in a graph with branches each node
// waits longer for the one before it. The last micro-batch's other graph is the whole rest of the step: backward with the all-reduces
// under it, update, record; those before it have one of backward alone. The host enqueues and goes on: the last kernel writes what came
// of the step into a ring in the host's memory.
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/plan/products.h"
#include "base/random.h"
#include "base/status.h"
#include "worker/kernels/algorithm_table.h"
#include "worker/kernels/card.h"
#include "worker/kernels/kernels.h"
#include "worker/model/initialize.h"
#include "worker/step/fused_layout.h"
#include "worker/step/fused_op_gpu.h"
#include "worker/step/lanes.h"
#include "worker/step/reconstruct.h"
#include "worker/step/record_reader.h"
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

constexpr int kStepsInFlight = 4;              // enqueued and not over; the next one waits for the first of them
constexpr std::chrono::microseconds kPoll{50};
constexpr int kSpins = 200;                    // looks for a record before the first pause

template <typename V>
absl::StatusOr<Pinned<V>> AllocatePinned(size_t count, unsigned flags = cudaHostAllocDefault) {
  V* p = nullptr;
  RETURN_IF_ERROR(CudaStatus(cudaHostAlloc(reinterpret_cast<void**>(&p), count * sizeof(V), flags), "allocating pinned host memory"));
  return Pinned<V>(p);
}

// Returns when the bytes are there: a small copy from pageable memory may still be under way when cudaMemcpy returns, and streams
// that do not block would overtake it.
absl::Status CopyToGpu(void* to, const void* from, int64_t bytes, const char* what) {
  RETURN_IF_ERROR(CudaStatus(cudaMemcpy(to, from, size_t(bytes), cudaMemcpyHostToDevice), what));
  return CudaStatus(cudaStreamSynchronize(cudaStreamLegacy), what);
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
      if (OnHost(Arena(i))) {
        Pinned<std::byte>& memory = arenas->host_[i];
        ASSIGN_OR_RETURN(memory, AllocatePinned<std::byte>(p.arena_bytes[i], cudaHostAllocMapped));
        if (Arena(i) == Arena::kRecords) std::memset(memory.get(), 0, p.arena_bytes[i]);
        void* on_device = nullptr;
        RETURN_IF_ERROR(CudaStatus(cudaHostGetDevicePointer(&on_device, memory.get(), 0), "mapping host memory"));
        arenas->addresses.arena[i] = static_cast<std::byte*>(on_device);
        continue;
      }
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
      RETURN_IF_ERROR(CopyToGpu(arenas->addresses.At(constant.tensor), constant.bytes.data(), int64_t(constant.bytes.size()), "copying an index table"));
    }
    RETURN_IF_ERROR(CudaStatus(cudaStreamSynchronize(cudaStreamLegacy), "clearing GPU memory"));
    return arenas;
  }

  const Plan plan;
  Addresses addresses;
  // The ring, as the host sees it.
  RecordSlot* ring() const { return reinterpret_cast<RecordSlot*>(host(Arena::kRecords) + plan.tensors[plan.ring].offset); }
  CollectiveProgress* progress() const {   // nullptr: one rank
    return plan.progress == kNone ? nullptr : reinterpret_cast<CollectiveProgress*>(host(Arena::kRecords) + plan.tensors[plan.progress].offset);
  }
  const std::byte* snapshot() const { return host(Arena::kSnapshot); }

 private:
  explicit DeviceArenas(Plan p) : plan(std::move(p)) {}
  std::byte* host(Arena arena) const { return host_[int(arena)].get(); }
  DeviceMemory memory_[kNumArenas];
  Pinned<std::byte> host_[kNumArenas];   // of those that are OnHost
};

// What lies in the snapshot arena once `taken` is over.
class SavedState : public StateSnapshot {
 public:
  SavedState(const DeviceArenas& arenas, cudaEvent_t taken, std::atomic<bool>* lent) : arenas_(arenas), taken_(taken), lent_(lent) {}
  ~SavedState() override { *lent_ = false; }

  absl::StatusOr<TrainState> Read() override {
    RETURN_IF_ERROR(CudaStatus(cudaEventSynchronize(taken_), "copying a snapshot from the GPU"));
    const Plan& plan = arenas_.plan;
    const auto* buffers = reinterpret_cast<const float*>(arenas_.snapshot());
    return StateOfSnapshot(plan, buffers, *reinterpret_cast<const StepRecord*>(buffers + (1 + plan.num_moments) * plan.flat_size));
  }

 private:
  const DeviceArenas& arenas_;
  const cudaEvent_t taken_;
  std::atomic<bool>* const lent_;
};

class FusedGpuStep : public Step {
 public:
  FusedGpuStep(const StepOptions& options, const ParameterTable& table, Communicator* communicator)
      : spec_(options.spec), options_beside_(options.beside), epilogues_(options.epilogues),
        priorities_(options.priorities), table_(table), communicator_(*communicator) {}

  ~FusedGpuStep() override {
    if (stream_ != nullptr) cudaStreamSynchronize(stream_);   // what is enqueued refers to memory of this object
    forward_graph_.reset(), last_graph_.reset(), micro_graph_.reset(), update_graph_.reset();   // before the streams and the communicator
    lanes_.reset();
    for (cudaEvent_t event : Events()) {
      if (event != nullptr) cudaEventDestroy(event);
    }
    for (cudaStream_t stream : {stream_, beside_, reductions_, copy_}) {
      if (stream != nullptr) cudaStreamDestroy(stream);
    }
  }

  absl::Status Prepare(Plan plan) {
    RETURN_IF_ERROR(MakeStreams());
    ASSIGN_OR_RETURN(arenas_, DeviceArenas::Make(std::move(plan)));
    lanes_ = std::make_unique<Lanes>(this->plan(), stream_, options_beside_ ? beside_ : stream_, reductions_);
    ASSIGN_OR_RETURN(gemm_, kernels::GemmLibrary::Make());
    ASSIGN_OR_RETURN(scalars_, AllocatePinned<StepScalars>(size_t(kStepsInFlight) * ScalarsAStep()));
    reader_.emplace(arenas_->ring());
    // Everything once before it is recorded: libraries load what they need, algorithms are chosen.
    RETURN_IF_ERROR(RunOps(Forward()));
    RETURN_IF_ERROR(RunPart(kWhole));
    RETURN_IF_ERROR(RunOps(this->plan().snapshot));
    RETURN_IF_ERROR(Synchronize());
    return Record();
  }

  absl::Status Initialize() override {
    TrainState state;
    state.parameters.resize(table_.flat_size);
    InitializeParameters(table_, spec_.seed(), state.parameters.data());
    if (plan().num_moments == 2) return Place(state, nullptr);
    state.exp_avg.resize(table_.flat_size);
    state.exp_avg_sq.resize(table_.flat_size);
    return Load(state);
  }

  absl::Status Load(const TrainState& state) override {
    RETURN_IF_ERROR(CheckState(state, table_));
    const std::vector<float> moments = MomentsOf(plan(), plan().options.rank, state);
    return Place(state, &moments);
  }

  // `moments`: as this rank's arena holds them; nullptr: zeros, which the host need not make.
  absl::Status Place(const TrainState& state, const std::vector<float>* moments) {
    RETURN_IF_ERROR(Synchronize());
    std::vector<float> flat(plan().flat_size, 0.0f);
    ToPlanOrder(plan(), state.parameters.data(), flat.data());
    RETURN_IF_ERROR(CopyToGpu(Get<float>(plan().master), flat.data(), int64_t(flat.size() * sizeof(float)), "copying a state to the GPU"));
    if (moments != nullptr) {
      RETURN_IF_ERROR(CopyToGpu(Get<float>(plan().moments), moments->data(), int64_t(moments->size() * sizeof(float)), "copying a state to the GPU"));
    } else {
      RETURN_IF_ERROR(CudaStatus(cudaMemsetAsync(Get<void>(plan().moments), 0, plan().tensors[plan().moments].bytes, stream_), "clearing the moments"));
    }
    RETURN_IF_ERROR(RefreshComputeCopyOnGpu(arenas_->addresses, stream_));
    RETURN_IF_ERROR(Synchronize());
    prefetched_.reset(), next_.reset();
    step_ = state.step;
    ASSIGN_OR_RETURN(const StepRecord before, ReadRecord());
    const StepRecord r = RecordFrom(state, spec_.step(), before.published);
    RETURN_IF_ERROR(CopyToGpu(Get<StepRecord>(plan().record), &r, sizeof r, "copying the counters"));
    given_ = r.published;
    reader_->SkipTo(given_);
    features_are_fresh_ = false;
    return absl::OkStatus();
  }

  absl::StatusOr<TrainState> Save() override {
    RETURN_IF_ERROR(Synchronize());
    ASSIGN_OR_RETURN(const StepRecord record, ReadRecord());
    std::vector<float> flat(plan().flat_size), moments(MomentsSize(plan()));
    for (const auto& [from, to] : {std::pair{plan().master, &flat}, {plan().moments, &moments}}) {
      RETURN_IF_ERROR(CudaStatus(cudaMemcpy(to->data(), Get<float>(from), to->size() * sizeof(float), cudaMemcpyDeviceToHost), "copying the state from the GPU"));
    }
    return StateOfRanks(plan(), flat.data(), moments, record, &communicator_);
  }
  bool shared_state() const override { return plan().sharded; }
  std::string WaitingIn() const override { return DescribeProgress(plan(), arenas_->progress()); }

  // On the step's own stream between two steps.
  absl::StatusOr<std::unique_ptr<StateSnapshot>> Snapshot() override {
    if (plan().saved == kNone) {
      RETURN_IF_ERROR(RunOps(plan().snapshot));
      return nullptr;
    }
    if (snapshot_lent_.exchange(true)) return ErrorOf(v1::REASON_INTERNAL, "a snapshot was asked for while another is being read.");
    auto snapshot = std::make_unique<SavedState>(*arenas_, snapshotted_, &snapshot_lent_);
    RETURN_IF_ERROR(RunOps(plan().snapshot));
    RETURN_IF_ERROR(CudaStatus(cudaEventRecord(snapshotted_, stream_), "ordering copies"));
    return snapshot;
  }

  absl::StatusOr<uint64_t> ParameterHash() override {
    ASSIGN_OR_RETURN(const std::vector<float> parameters, Parameters());
    return HashOf(parameters);
  }

  absl::Status Run(absl::Span<const MicroBatch> micro_batches, int64_t real_samples, double lr, StepSignals signals) override {
    if (int(micro_batches.size()) > spec_.step().accumulation()) {
      return ErrorOf(v1::REASON_INTERNAL, absl::StrCat(micro_batches.size(), " micro-batches were given to a step planned for ", spec_.step().accumulation(), "."));
    }
    cudaEvent_t over = over_[given_ % kStepsInFlight];
    RETURN_IF_ERROR(CudaStatus(cudaEventSynchronize(over), "the step on the GPU"));   // its place among the scalars is free
    features_are_fresh_ = false;
    StepScalars s{};
    s.seed = spec_.seed(), s.step = step_ + 1, s.lr = lr, s.train = 1, s.mask_draw = uint32_t(Draw::kMask);
    s.loss_weight = 1.0 / (double(std::max<int64_t>(1, real_samples)) * double(LossElements(plan().geometry)));
    s.signals = (signals.stop ? 1 : 0) | (signals.checkpoint ? 2 : 0);
    s.nan_limit = NanLimit(spec_.step());
    int last = int(micro_batches.size()) - 1;   // of those with samples: the one whose graph reduces and updates
    while (last >= 0 && micro_batches[last].real == 0) --last;
    if (plan().accumulate || last < 0) RETURN_IF_ERROR(ClearSums());
    for (int i = 0; i <= last; ++i) {
      if (micro_batches[i].real == 0) continue;
      RETURN_IF_ERROR(Stage(micro_batches[i], s, i, *arenas_));
      RETURN_IF_ERROR(CudaStatus(cudaGraphLaunch(forward_graph_.get(), stream_), "the step"));
      RETURN_IF_ERROR(CudaStatus(cudaGraphLaunch((i == last ? last_graph_ : micro_graph_).get(), stream_), "the step"));
      RETURN_IF_ERROR(CudaStatus(cudaEventRecord(used_[slot_], stream_), "ordering copies"));
    }
    if (last < 0) {
      RETURN_IF_ERROR(CopyScalars(s, 0, *arenas_));
      RETURN_IF_ERROR(CudaStatus(cudaGraphLaunch(update_graph_.get(), stream_), "the update"));
    }
    RETURN_IF_ERROR(CudaStatus(cudaEventRecord(over, stream_), "ordering steps"));
    ++given_, ++step_;
    // The batches' memory is the caller's again. Their copies are over before the step begins to compute.
    RETURN_IF_ERROR(CudaStatus(cudaEventSynchronize(copied_[slot_]), "copying a batch to the GPU"));
    RETURN_IF_ERROR(CopyNext());
    return CheckPeers();
  }

  int records_behind() const override { return 1; }
  int64_t records_lost() const override { return reader_->lost(); }

  absl::StatusOr<StepResult> Take() override {
    if (reader_->taken() >= given_) return ErrorOf(v1::REASON_INTERNAL, "a result was asked for, but every step's was taken.");
    StepRecord record;
    for (int round = 0; !reader_->Next(&record); ++round) {
      // The event of a step long ago marks a later one by now; both are over then.
      const cudaError_t over = cudaEventQuery(over_[reader_->taken() % kStepsInFlight]);
      if (over == cudaSuccess) {
        if (reader_->Next(&record)) break;
        return ErrorOf(v1::REASON_INTERNAL, absl::StrCat("step number ", reader_->taken() + 1, " of this process is over on the GPU, but left no record."));
      }
      if (over != cudaErrorNotReady) return CudaStatus(over, "the step on the GPU");
      RETURN_IF_ERROR(CheckPeers());
      if (round < kSpins) {
        std::this_thread::yield();
      } else {
        SleepFor(kPoll);   // nothing announces a value in mapped memory
      }
    }
    return ResultOf(record);
  }

  void Prefetch(const MicroBatch& next) override { next_ = next; }

  absl::StatusOr<LossSum> Evaluate(const MicroBatch& batch) override {
    if (batch.real == 0) return LossSum{};
    StepScalars s{};
    s.seed = spec_.seed(), s.mask_draw = uint32_t(Draw::kEvalMask), s.loss_weight = 1;
    RETURN_IF_ERROR(Synchronize());   // a step's values may still be on their way from the place that this takes
    RETURN_IF_ERROR(ClearSums());
    RETURN_IF_ERROR(Stage(batch, s, 0, *arenas_));
    RETURN_IF_ERROR(RunOps(Forward()));
    std::vector<double> partials(plan().losses());
    RETURN_IF_ERROR(Synchronize());
    RETURN_IF_ERROR(CudaStatus(cudaMemcpy(partials.data(), Get<double>(plan().loss_partials), partials.size() * sizeof(double), cudaMemcpyDeviceToHost),
                               "copying the loss"));
    double sum = 0;
    for (double partial : partials) sum += partial;
    uint64_t not_finite = 0;
    RETURN_IF_ERROR(CudaStatus(cudaMemcpy(&not_finite, Get<uint64_t>(plan().not_finite), sizeof not_finite, cudaMemcpyDeviceToHost), "copying the loss"));
    RETURN_IF_ERROR(CudaStatus(cudaMemsetAsync(Get<uint64_t>(plan().not_finite), 0, sizeof not_finite, stream_), "clearing the loss"));
    return LossSum{sum, double(batch.real) * double(LossElements(plan().geometry)), VisitOf(not_finite)};
  }

  absl::StatusOr<Reconstruction> Reconstruct(const MicroBatch& batch) override {
    const Geometry& g = plan().geometry;
    if (g.spec.task() != "mae") return Step::Reconstruct(batch);
    if (batch.real == 0) return PutBack(g, 0, nullptr, {}, {});
    RETURN_IF_ERROR(Evaluate(batch).status());   // nothing has written over what it predicted
    const auto to_host = [](const void* from, auto* to) {
      return CudaStatus(cudaMemcpy(to->data(), from, to->size() * sizeof((*to)[0]), cudaMemcpyDeviceToHost), "copying pictures from the GPU");
    };
    std::vector<float> x(plan().tensors[plan().x].bytes / plan().batch * batch.real / int64_t(sizeof(float)));
    std::vector<uint8_t> keep_mask(batch.real * g.num_mask_units);
    std::vector<float> rows(plan().tensors[plan().pred].shape[0] / plan().batch * batch.real * g.pred_dim);   // of removed tokens
    RETURN_IF_ERROR(to_host(Get<float>(plan().x), &x));
    RETURN_IF_ERROR(to_host(Get<uint8_t>(plan().keep_mask), &keep_mask));
    RETURN_IF_ERROR(CopyWidened(*arenas_, plan().pred, &rows, "copying pictures from the GPU"));
    return PutBack(g, batch.real, x.data(), RemovedTokens(g, batch.real, keep_mask.data()),
                   AtRemovedTokens(g, batch.real, keep_mask.data(), rows));
  }

  absl::StatusOr<std::vector<float>> Features(const MicroBatch& batch) override {
    const int64_t dim = plan().geometry.encoder_dim_out;
    std::vector<float> features(batch.real * dim);
    if (batch.real == 0) return features;
    RETURN_IF_ERROR(PrepareFeatures());
    RETURN_IF_ERROR(Synchronize());
    StepScalars s{};
    s.seed = spec_.seed();
    RETURN_IF_ERROR(Stage(batch, s, 0, *features_));
    const Plan& p = features_->plan;
    for (int i = 0; i < p.forward_ops; ++i) RETURN_IF_ERROR(RunOpOnGpu(p.forward_backward[i], features_->addresses, Context()));
    const int64_t rows = p.tensors[p.encoded].shape[0], tokens = rows / p.batch;
    // The mean over tokens in fp32, on the host: once a probe, not once a step.
    std::vector<float> encoded(rows * dim);
    RETURN_IF_ERROR(Synchronize());
    RETURN_IF_ERROR(CopyWidened(*features_, p.encoded, &encoded, "copying features"));
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
                        " operations in ", spec_.step().accumulation() == 1 ? "two graphs" : "four graphs", ", ", plan().TotalBytes() >> 20, " MiB planned, ", gemm_->table().size(), " products in the card's table");
  }

  std::string algorithms() const override {
    std::vector<std::string> keys;   // of the library's products
    for (const PlannedProduct& p : ProductsOf(plan(), "", kernels::ThisCard().capability, spec_.step().tf32(), spec_.step().accumulation())) {
      if (p.made_by != "epilogue") keys.push_back(p.key);
    }
    return absl::StrCat(kernels::AlgorithmTableName(), " ", gemm_->table().HashOf(keys).substr(0, 16));
  }

  // Times the candidates of every product on what the arenas hold now, and records the graphs again.
  absl::Status Tune() {
    GpuContext context = Context();
    context.tune = true;
    for (const std::vector<Op>* ops : {&plan().forward_backward, &plan().update}) {
      for (const Op& op : *ops) {
        const bool product = std::holds_alternative<Gemm>(op.args) || std::holds_alternative<GemmGelu>(op.args) ||
                             std::holds_alternative<GemmGeluBackward>(op.args) || std::holds_alternative<MuonProducts>(op.args);
        if (product) RETURN_IF_ERROR(RunOpOnGpu(op, arenas_->addresses, context));
      }
    }
    RETURN_IF_ERROR(Synchronize());
    RETURN_IF_ERROR(kernels::CacheAlgorithms(kernels::AlgorithmTableName(), gemm_->table().Measured()));
    return Record();
  }

 private:
  const Plan& plan() const { return arenas_->plan; }
  template <typename V>
  V* Get(TensorId id) const { return arenas_->addresses.Get<V>(id); }
  GpuContext Context() { return {gemm_.get(), stream_, 0, spec_.step().tf32(), &communicator_, false, epilogues_, &muon_products_}; }
  // What NCCL says of the others, with the place; then nothing of it is left under way that this process would wait for.
  absl::Status CheckPeers() {
    absl::Status status = communicator_.CheckAsync();
    if (status.ok()) return status;
    const std::string place = WaitingIn();
    communicator_.Abort();
    for (Graph* graph : {&forward_graph_, &last_graph_, &micro_graph_, &update_graph_}) (void)graph->release();   // they refer to what is gone
    return place.empty() ? status : Annotate(status, place);
  }
  absl::Status Synchronize() { return CudaStatus(cudaStreamSynchronize(stream_), "the step on the GPU"); }

  absl::Status RunOps(absl::Span<const Op> ops, const std::function<bool(const Op&)>& take = [](const Op&) { return true; }) {
    return lanes_->Run(ops, take, [&](const Op& op, cudaStream_t stream, int lane) {
      GpuContext context = Context();
      context.stream = stream, context.lane = lane;
      return RunOpOnGpu(op, arenas_->addresses, context);
    });
  }
  absl::Span<const Op> Forward() const { return absl::MakeSpan(plan().forward_backward).subspan(0, plan().forward_ops); }
  absl::Span<const Op> Backward() const { return absl::MakeSpan(plan().forward_backward).subspan(plan().forward_ops); }

  // What the graphs behind the forward pass's are made of.
  enum StepPart { kMicro, kWhole, kUpdateAlone };
  absl::Status RunPart(StepPart part) {
    RETURN_IF_ERROR(RunOps(Backward(), [part](const Op& op) { return op.reduces ? part != kMicro : part != kUpdateAlone; }));
    return part == kMicro ? absl::OkStatus() : RunOps(plan().update);
  }

  absl::Status Record() {
    ASSIGN_OR_RETURN(forward_graph_, Capture([this] { return RunOps(Forward()); }));
    ASSIGN_OR_RETURN(last_graph_, Capture([this] { return RunPart(kWhole); }));
    ASSIGN_OR_RETURN(update_graph_, Capture([this] { return RunPart(kUpdateAlone); }));
    if (spec_.step().accumulation() == 1) return absl::OkStatus();
    ASSIGN_OR_RETURN(micro_graph_, Capture([this] { return RunPart(kMicro); }));
    return absl::OkStatus();
  }

  std::vector<cudaEvent_t> Events() const {
    std::vector<cudaEvent_t> events{copied_[0], copied_[1], used_[0], used_[1], snapshotted_};
    events.insert(events.end(), std::begin(over_), std::end(over_));
    return events;
  }
  int ScalarsAStep() const { return spec_.step().accumulation() + 1; }

  // The first values of a tensor in T.
  static absl::Status CopyWidened(const DeviceArenas& arenas, TensorId id, std::vector<float>* to, const char* what) {
    std::vector<std::byte> values(to->size() * size_t(SizeOf(arenas.plan.tensors[id].dtype)));
    RETURN_IF_ERROR(CudaStatus(cudaMemcpy(values.data(), arenas.addresses.At(id), values.size(), cudaMemcpyDeviceToHost), what));
    for (size_t i = 0; i < to->size(); ++i) (*to)[i] = Widened(arenas.plan.options.compute, values.data(), int64_t(i));
    return absl::OkStatus();
  }

  absl::StatusOr<StepRecord> ReadRecord() {
    StepRecord record;
    RETURN_IF_ERROR(CudaStatus(cudaMemcpy(&record, Get<StepRecord>(plan().record), sizeof record, cudaMemcpyDeviceToHost), "copying the counters"));
    return record;
  }

  absl::Status MakeStreams() {
    int least = 0, greatest = 0;
    RETURN_IF_ERROR(CudaStatus(cudaDeviceGetStreamPriorityRange(&least, &greatest), "asking for stream priorities"));
    RETURN_IF_ERROR(CudaStatus(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest), "creating a stream"));
    RETURN_IF_ERROR(CudaStatus(cudaStreamCreateWithPriority(&beside_, cudaStreamNonBlocking, least), "creating a stream"));
    // Bytes that others wait for go before work that fills the card.
    RETURN_IF_ERROR(CudaStatus(cudaStreamCreateWithPriority(&reductions_, cudaStreamNonBlocking, greatest), "creating a stream"));
    RETURN_IF_ERROR(CudaStatus(cudaStreamCreateWithFlags(&copy_, cudaStreamNonBlocking), "creating a stream"));
    std::vector<cudaEvent_t*> events{&copied_[0], &copied_[1], &used_[0], &used_[1], &snapshotted_};
    for (cudaEvent_t& event : over_) events.push_back(&event);
    for (cudaEvent_t* event : events) {
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
    // Without the flag every node has the priority of the stream that the graph is launched into, whatever its own was.
    const cudaError_t made = cudaGraphInstantiate(&exec, graph, priorities_ ? cudaGraphInstantiateFlagUseNodePriority : 0);
    cudaGraphDestroy(graph);
    RETURN_IF_ERROR(CudaStatus(made, "making a graph of the step"));
    return Graph(exec);
  }

  absl::Status ClearSums() {
    RETURN_IF_ERROR(CudaStatus(cudaMemsetAsync(Get<void>(plan().gradients), 0, plan().arena_bytes[int(Arena::kGradients)], stream_), "clearing gradients"));
    return CudaStatus(cudaMemsetAsync(Get<void>(plan().loss_partials), 0, plan().tensors[plan().loss_partials].bytes, stream_), "clearing the loss");
  }

  absl::Status CopyScalars(const StepScalars& s, int place, const DeviceArenas& arenas) {
    StepScalars* const from = &scalars_[given_ % kStepsInFlight * ScalarsAStep() + place];
    *from = s;
    return CudaStatus(cudaMemcpyAsync(arenas.addresses.At(arenas.plan.scalars), from, sizeof s, cudaMemcpyHostToDevice, stream_),
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
    const int64_t ids = p.batch * int64_t(sizeof(int64_t));
    auto copy = [&](TensorId to, int64_t slot_bytes, const void* from, int64_t size) {
      return CudaStatus(cudaMemcpyAsync(arenas.addresses.Get<std::byte>(to) + slot * slot_bytes, from, size, cudaMemcpyHostToDevice, copy_),
                        "copying a batch to the GPU");
    };
    RETURN_IF_ERROR(CudaStatus(cudaStreamWaitEvent(copy_, used_[slot], 0), "ordering copies"));
    if (p.source != kNone) {
      const int64_t bytes = p.tensors[p.source].bytes / 2;
      RETURN_IF_ERROR(copy(p.source, bytes, batch.x_BCS, bytes / p.batch * batch.real));
    }
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

  absl::StatusOr<std::vector<float>> Parameters() {
    RETURN_IF_ERROR(Synchronize());
    std::vector<float> flat(plan().flat_size), by_table(table_.flat_size, 0.0f);
    RETURN_IF_ERROR(CudaStatus(cudaMemcpy(flat.data(), Get<float>(plan().master), flat.size() * sizeof(float), cudaMemcpyDeviceToHost), "copying parameters"));
    FromPlanOrder(plan(), flat.data(), by_table.data());
    return by_table;
  }

  absl::Status PrepareFeatures() {
    if (features_ == nullptr) {
      PlanOptions options = plan().options;
      options.features = true;
      ASSIGN_OR_RETURN(Plan features, Plan::Make(spec_, options));
      ASSIGN_OR_RETURN(features_, DeviceArenas::Make(std::move(features)));
    }
    if (features_are_fresh_) return absl::OkStatus();
    ASSIGN_OR_RETURN(const std::vector<float> by_table, Parameters());
    std::vector<float> flat(features_->plan.flat_size, 0.0f);
    ToPlanOrder(features_->plan, by_table.data(), flat.data());
    RETURN_IF_ERROR(CopyToGpu(features_->addresses.At(features_->plan.master), flat.data(), int64_t(flat.size() * sizeof(float)), "copying parameters"));
    features_are_fresh_ = true;
    return RefreshComputeCopyOnGpu(features_->addresses, stream_);
  }

  const v1::JobSpec spec_;
  const bool options_beside_, epilogues_, priorities_;
  const ParameterTable table_;
  Communicator& communicator_;
  cudaStream_t stream_ = nullptr, beside_ = nullptr, reductions_ = nullptr, copy_ = nullptr;
  cudaEvent_t snapshotted_ = nullptr, over_[kStepsInFlight] = {};   // over_: of step number n (from 0) in place n % kStepsInFlight
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
  kernels::MuonProducts muon_products_;
  Pinned<StepScalars> scalars_;   // one a micro-batch of each step in flight: their copies may still be under way
  std::optional<RecordReader> reader_;
  Graph forward_graph_, last_graph_, micro_graph_, update_graph_;
  std::atomic<bool> snapshot_lent_{false};
  bool features_are_fresh_ = false;
  uint64_t given_ = 0;            // steps enqueued since the start: the number of the newest record to come
  int64_t step_ = 0;              // optimizer steps, those to come included
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
  const ComputeType compute = ComputeTypeOf(options.spec.step());
  StepOptions here = options;
  here.spec.mutable_resources()->set_ranks(communicator->size());
  PlanOptions plan_options{.compute = compute, .rows = options.rows, .rank = communicator->rank()};
  if (options.bucket_elements > 0) plan_options.bucket_elements = options.bucket_elements;
  ASSIGN_OR_RETURN(Plan plan, Plan::Make(here.spec, plan_options));
  auto step = std::make_unique<FusedGpuStep>(here, table, communicator);
  RETURN_IF_ERROR(step->Prepare(std::move(plan)));
  if (options.tune) RETURN_IF_ERROR(step->Tune());
  return step;
}

}  // namespace hierad
