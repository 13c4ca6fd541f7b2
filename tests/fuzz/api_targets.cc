// The API's targets: a submission through the checks of Submit (submit), what agents, workers and users do to a coordinator
// (sessions), and every RPC on a running server (rpc).
#include <grpcpp/grpcpp.h>
#include <grpcpp/impl/codegen/client_unary_call.h>
#include <grpcpp/support/byte_buffer.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <thread>

#include "absl/strings/str_cat.h"
#include "base/job_yaml.h"
#include "base/plan/plan_report.h"
#include "server/rpc_server.h"
#include "server/submission.h"
#include "tests/fuzz/api_frames.h"
#include "tests/fuzz/targets.h"

namespace hierad {
namespace {

void Require(bool holds, const std::string& what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what.c_str());
  std::abort();
}

// A folder in memory where there is one: each input opens a store.
struct Folder {
  Folder() {
    std::string name = std::filesystem::exists("/dev/shm") ? "/dev/shm/hierad-fuzz-XXXXXX" : "/tmp/hierad-fuzz-XXXXXX";
    Require(mkdtemp(name.data()) != nullptr, "no folder for a store");
    path = name;
  }
  ~Folder() { std::filesystem::remove_all(path); }
  std::string path;
};

// A model whose plan is soon made.
v1::JobSpec SmallSpec() {
  auto spec = ParseJobYaml(R"(name: job
model: {input_size: [64], in_chans: 4, embed_dim: 16, num_heads: 1, stages: [1, 1], q_pool: 1, q_stride: [2], mask_unit_size: [2],
  mask_unit_attn: [true, false], patch_kernel: [4], patch_stride: [4], patch_padding: [0], decoder_embed_dim: 16, decoder_depth: 1,
  decoder_num_heads: 2, mask_ratio: 0.5}
data: {source: synthetic}
schedule: {steps: 100}
step: {batch_per_rank: 8}
resources: {device: cpu}
)", {});
  Require(spec.ok(), "the small job is not legal");
  return *std::move(spec);
}

struct SilentAgent : AgentLink {
  void Send(const v1::AgentOrders& orders) override { last = orders; }
  void Close(const absl::Status&) override { closed = true; }
  v1::AgentOrders last;
  bool closed = false;
};
struct SilentWorker : WorkerLink {
  void Send(const v1::WorkerOrders&) override {}
  void Close(const absl::Status&) override { closed = true; }
  bool closed = false;
};

CoordinatorOptions OptionsIn(const std::string& folder) {
  CoordinatorOptions options;
  options.runs_folder = folder + "/runs";
  options.disk_reserve_bytes = 0;
  options.free_bytes = [](const std::string&) -> absl::StatusOr<int64_t> { return int64_t{1} << 40; };
  return options;
}

v1::AgentReport FirstReport() {
  v1::AgentReport report;
  report.set_node("node");
  report.set_instance("i");
  report.set_version("1");
  for (const char* id : {"cpu-0", "cpu-1"}) {
    v1::Slot* slot = report.add_slots();
    slot->set_id(id);
    slot->set_kind(v1::Slot::CPU);
  }
  return report;
}

// A coordinator with a node of two slots, on which a job of one rank trains; a second job waits. The clock is the input's.
class SmallHierad {
 public:
  SmallHierad() {
    auto store = Store::Open(folder_.path + "/hierad.db", 50);
    Require(store.ok(), "no store");
    auto made = Coordinator::Create(OptionsIn(folder_.path), *std::move(store), &clock_);
    Require(made.ok(), "no coordinator");
    coordinator_ = *std::move(made);
    agent_ = coordinator_->OpenAgent(agent_link_);
    Report(FirstReport());
    for (const int ranks : {1, 2}) {
      v1::SubmitRequest request;
      request.set_client_key(absl::StrCat("k", ranks));
      *request.mutable_spec() = SmallSpec();
      request.mutable_spec()->mutable_resources()->set_ranks(ranks);
      request.mutable_spec()->mutable_resources()->set_device("cpu");
      Submit(std::move(request));
    }
    coordinator_->Turn();
    Require(agent_link_->last.assignments_size() == 1, "the first job was not placed");
    const v1::Assignment& assignment = agent_link_->last.assignments(0);
    credential_ = assignment.credential();
    v1::AgentReport report = FirstReport();
    report.set_orders_seen(agent_link_->last.sequence());
    v1::RankProcess* process = report.add_processes();
    process->set_job_id(assignment.job_id());
    process->set_attempt(assignment.attempt());
    process->set_slot_id(assignment.slot().id());
    process->set_pid(100);
    Report(report);
    worker_ = coordinator_->OpenWorker(worker_link_);
  }

  void Do(const Frame& frame) {
    switch (frame.kind % 8) {
      case 0: case 1: {
        v1::AgentReport report;
        if (report.ParseFromString(frame.payload)) Report(report);
        break;
      }
      case 2: case 3: case 4: {
        v1::WorkerReport report;
        if (!report.ParseFromString(frame.payload)) break;
        if (report.credential() == "C") report.set_credential(credential_);
        coordinator_->ReportWorker(worker_, report, [] {});
        break;
      }
      case 5: {
        v1::SubmitRequest request;
        if (request.ParseFromString(frame.payload)) Submit(std::move(request));
        break;
      }
      case 6: Ask(frame.payload); break;
      default: Pass(frame.payload); break;
    }
    coordinator_->Turn();
  }

 private:
  void Report(const v1::AgentReport& report) {
    coordinator_->ReportAgent(agent_, report, [] {});
    coordinator_->Turn();
  }
  void Submit(v1::SubmitRequest request) {
    if (!CheckClientKey(request.client_key()).ok() || !PrepareSpec(request.mutable_spec()).empty()) return;
    request.mutable_spec()->mutable_output()->clear_folder();   // nothing is written beside this folder
    coordinator_->Submit(std::move(request), "me", absl::OkStatus(), [](auto) {});
  }
  void Ask(const std::string& payload) {
    const uint64_t id = payload.size() > 1 ? uint8_t(payload[1]) % 4 : 1;
    const auto done = [](absl::StatusOr<v1::Job>) {};
    switch (payload.empty() ? 0 : uint8_t(payload[0]) % 8) {
      case 0: return coordinator_->Cancel(id, false, done);
      case 1: return coordinator_->Cancel(id, true, done);
      case 2: return coordinator_->Pause(id, done);
      case 3: return coordinator_->Resume(id, done);
      case 4: return coordinator_->Checkpoint(id, done);
      case 5: return coordinator_->SetLr(id, payload.size() > 2 ? uint8_t(payload[2]) * 0.01 : -1, done);
      case 6: return payload.size() > 2 ? coordinator_->SetLogLevel(id, payload.substr(2), done) : coordinator_->Get(id, done);
      default: return coordinator_->DrainNode("node", payload.size() > 2 && payload[2] != 0, [](auto) {});
    }
  }
  // Time goes on, or a session ends and the next begins.
  void Pass(const std::string& payload) {
    const int what = payload.empty() ? 0 : uint8_t(payload[0]);
    if (what == 255) {
      coordinator_->CloseAgent(agent_);
      agent_ = coordinator_->OpenAgent(agent_link_);
    } else if (what == 254) {
      coordinator_->CloseWorker(worker_);
      worker_ = coordinator_->OpenWorker(worker_link_);
    } else {
      clock_.Advance(std::chrono::milliseconds(100 * what));
    }
  }

  Folder folder_;
  FakeClock clock_;
  std::unique_ptr<Coordinator> coordinator_;
  std::shared_ptr<SilentAgent> agent_link_ = std::make_shared<SilentAgent>();
  std::shared_ptr<SilentWorker> worker_link_ = std::make_shared<SilentWorker>();
  uint64_t agent_ = 0, worker_ = 0;
  std::string credential_;
};

std::unique_ptr<google::protobuf::Message> SessionMessage(uint8_t kind) {
  switch (kind % 8) {
    case 0: case 1: return std::make_unique<v1::AgentReport>();
    case 2: case 3: case 4: return std::make_unique<v1::WorkerReport>();
    case 5: return std::make_unique<v1::SubmitRequest>();
    default: return nullptr;
  }
}

void Sessions(std::string_view input) {
  SmallHierad hierad;
  for (const Frame& frame : SplitFrames(input)) hierad.Do(frame);
}

// What is let in is complete, stays as it is when it is checked again, and is the same after it was a job.yaml.
void Submit(std::string_view input) {
  v1::SubmitRequest request;
  if (!request.ParseFromArray(input.data(), int(input.size()))) return;
  (void)CheckClientKey(request.client_key());
  v1::JobSpec within = request.spec();
  (void)PrepareSpec(&within, {"/tmp", "/data"});
  v1::JobSpec spec = request.spec();
  if (!PrepareSpec(&spec).empty()) return;
  (void)LeastMemory(spec);
  v1::JobSpec again = spec;
  Require(PrepareSpec(&again).empty() && again.SerializeAsString() == spec.SerializeAsString(), "a legal job changes when it is checked again");
  auto read = ParseJobYaml(ToJobYaml(spec), {});
  Require(read.ok(), "a legal job is not legal as job.yaml");
  FillDefaults(&*read);
  Require(ToJobYaml(*read) == ToJobYaml(spec), "a legal job is another after job.yaml");
}

std::unique_ptr<google::protobuf::Message> SubmitMessage() { return std::make_unique<v1::SubmitRequest>(); }

// A server over its socket, begun anew now and then.
class RunningHierad {
 public:
  RunningHierad() {
    auto store = Store::Open(folder_.path + "/hierad.db");
    auto history = History::Open(folder_.path + "/history");
    Require(store.ok() && history.ok(), "no store");
    history_ = *std::move(history);
    CoordinatorOptions options = OptionsIn(folder_.path);
    options.history = history_.get();
    options.node_lost_after = options.hang_after = std::chrono::hours(1);
    coordinator_ = *Coordinator::Create(options, *std::move(store), &Clock::System());
    loop_ = std::thread([this] { coordinator_->Run(); });
    RpcServerOptions rpc;
    rpc.listen = "unix:" + folder_.path + "/s";
    rpc.version = rpc.commit = "1";
    rpc.history = history_.get();
    rpc.owner = "me";
    rpc.allowed_roots = {folder_.path};
    auto server = RpcServer::Start(rpc, coordinator_.get(), &Clock::System());
    Require(server.ok(), "no server");
    server_ = *std::move(server);
    channel_ = grpc::CreateChannel(rpc.listen, grpc::InsecureChannelCredentials());
    for (const char* service : {"hierad.v1.ControlService", "hierad.v1.AgentService", "hierad.v1.WorkerService"}) {
      const auto* found = google::protobuf::DescriptorPool::generated_pool()->FindServiceByName(service);
      for (int m = 0; m < found->method_count(); ++m) methods_.push_back(found->method(m));
    }
    v1::SubmitRequest first;
    first.set_client_key("k");
    *first.mutable_spec() = SmallSpec();
    Call(*methods_[0], {first.SerializeAsString()});
  }
  ~RunningHierad() {
    server_->Stop();
    server_.reset();
    coordinator_->Stop();
    loop_.join();
  }
  const std::vector<const google::protobuf::MethodDescriptor*>& methods() const { return methods_; }

  // Who follows the log of a job that has not begun hears nothing until then, and may take leave at any time.
  static bool MayBeSilent(const google::protobuf::MethodDescriptor& method, const std::vector<std::string>& payloads) {
    v1::LogsRequest request;
    return method.input_type() == v1::LogsRequest::descriptor() && request.ParseFromString(payloads.at(0)) && request.follow();
  }

  // Messages as bytes; what comes back is not looked at, as long as something does.
  void Call(const google::protobuf::MethodDescriptor& method, const std::vector<std::string>& payloads) {
    const std::string name = absl::StrCat("/", method.service()->full_name(), "/", method.name());
    grpc::ClientContext context;
    const bool silent = MayBeSilent(method, payloads);
    context.set_deadline(std::chrono::system_clock::now() + (silent ? std::chrono::milliseconds(300) : std::chrono::seconds(20)));
    std::vector<grpc::ByteBuffer> buffers;
    for (const std::string& payload : payloads) {
      const grpc::Slice slice(payload);
      buffers.emplace_back(&slice, 1);
    }
    grpc::ByteBuffer reply;
    grpc::Status status;
    if (method.client_streaming()) {
      const grpc::internal::RpcMethod rpc(name.c_str(), grpc::internal::RpcMethod::BIDI_STREAMING, channel_);
      std::unique_ptr<grpc::ClientReaderWriter<grpc::ByteBuffer, grpc::ByteBuffer>> stream(
          grpc::internal::ClientReaderWriterFactory<grpc::ByteBuffer, grpc::ByteBuffer>::Create(channel_.get(), rpc, &context));
      for (const grpc::ByteBuffer& buffer : buffers) {
        if (!stream->Write(buffer)) break;
      }
      stream->WritesDone();
      while (stream->Read(&reply)) {
      }
      status = stream->Finish();
    } else if (method.server_streaming()) {
      const grpc::internal::RpcMethod rpc(name.c_str(), grpc::internal::RpcMethod::SERVER_STREAMING, channel_);
      std::unique_ptr<grpc::ClientReader<grpc::ByteBuffer>> stream(
          grpc::internal::ClientReaderFactory<grpc::ByteBuffer>::Create(channel_.get(), rpc, &context, buffers.at(0)));
      stream->Read(&reply);
      context.TryCancel();
      status = stream->Finish();
    } else {
      const grpc::internal::RpcMethod rpc(name.c_str(), grpc::internal::RpcMethod::NORMAL_RPC, channel_);
      status = grpc::internal::BlockingUnaryCall<grpc::ByteBuffer, grpc::ByteBuffer>(channel_.get(), rpc, &context, buffers.at(0), &reply);
    }
    Require(silent || status.error_code() != grpc::StatusCode::DEADLINE_EXCEEDED, absl::StrCat(name, ": no answer within 20 s"));
  }

 private:
  Folder folder_;
  std::unique_ptr<History> history_;
  std::unique_ptr<Coordinator> coordinator_;
  std::thread loop_;
  std::unique_ptr<RpcServer> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::vector<const google::protobuf::MethodDescriptor*> methods_;
};

// Of the method's own place in methods(): the mutator must know it without a server.
std::unique_ptr<google::protobuf::Message> RpcMessage(uint8_t kind) {
  std::vector<const google::protobuf::Descriptor*> inputs;
  for (const char* service : {"hierad.v1.ControlService", "hierad.v1.AgentService", "hierad.v1.WorkerService"}) {
    const auto* found = google::protobuf::DescriptorPool::generated_pool()->FindServiceByName(service);
    for (int m = 0; m < found->method_count(); ++m) inputs.push_back(found->method(m)->input_type());
  }
  const auto* prototype = google::protobuf::MessageFactory::generated_factory()->GetPrototype(inputs[kind % inputs.size()]);
  return std::unique_ptr<google::protobuf::Message>(prototype->New());
}

// What a job of the input says goes to disk only beneath the server's own folder: allowed_roots.
void Rpc(std::string_view input) {
  static std::unique_ptr<RunningHierad> hierad;
  static int inputs = 0;
  if (inputs++ % 500 == 0) {
    hierad.reset();   // its jobs and history grow
    hierad = std::make_unique<RunningHierad>();
  }
  const std::vector<Frame> frames = SplitFrames(input);
  for (size_t at = 0; at < frames.size(); ++at) {
    const auto& method = *hierad->methods()[frames[at].kind % hierad->methods().size()];
    std::vector<std::string> payloads = {frames[at].payload};
    while (method.client_streaming() && at + 1 < frames.size() && frames[at + 1].kind == frames[at].kind) payloads.push_back(frames[++at].payload);
    hierad->Call(method, payloads);
  }
}

}  // namespace

const NamedTarget kApiTargets[3] = {{"submit", Submit}, {"sessions", Sessions}, {"rpc", Rpc}};

std::optional<std::string> MutateApiInput(std::string_view target, std::string_view input, unsigned seed) {
  if (target == "sessions") return MutateFrames(input, SessionMessage, seed);
  if (target == "rpc") return MutateFrames(input, RpcMessage, seed);
  if (target != "submit") return std::nullopt;
  const auto message = SubmitMessage();
  (void)message->ParsePartialFromArray(input.data(), int(input.size()));
  MutateMessage(message.get(), seed);
  return message->SerializePartialAsString();
}

// usage: fuzz_replay --seeds FOLDER
std::vector<std::pair<std::string, std::string>> ApiSeeds() {
  std::vector<std::pair<std::string, std::string>> seeds;
  v1::SubmitRequest submit;
  submit.set_client_key("key");
  *submit.mutable_spec() = SmallSpec();
  seeds.push_back({"submit/small", submit.SerializeAsString()});
  FillDefaults(submit.mutable_spec());
  seeds.push_back({"submit/whole", submit.SerializeAsString()});
  v1::WorkerReport worker;
  worker.set_job_id(1);
  worker.set_attempt(1);
  worker.set_credential("C");
  worker.set_phase(v1::PHASE_TRAINING);
  worker.set_step(5);
  worker.set_total_steps(100);
  worker.set_checkpoints_known(true);
  v1::StepMetrics* metrics = worker.add_metrics();
  metrics->set_step(5);
  metrics->set_loss(0.5);
  v1::CheckpointInfo* checkpoint = worker.add_checkpoints();
  checkpoint->set_path("/tmp/x");
  checkpoint->set_step(5);
  v1::WorkerReport end = worker;
  end.set_phase(v1::PHASE_DONE);
  end.mutable_end()->set_reason(v1::REASON_DATA_ERROR);
  end.mutable_end()->set_message("no such file");
  v1::AgentReport gone = FirstReport();
  gone.set_instance("j");
  v1::AgentReport ended = FirstReport();
  v1::RankProcess* process = ended.add_processes();
  process->set_job_id(1);
  process->set_attempt(1);
  process->set_slot_id("cpu-0");
  process->set_ended(true);
  process->set_signal(9);
  process->set_reason(v1::REASON_HOST_OOM);
  seeds.push_back({"sessions/train", JoinFrames({{2, worker.SerializeAsString()}, {7, "\x0a"}, {2, end.SerializeAsString()}, {0, ended.SerializeAsString()}, {7, "\xc8"}})});
  seeds.push_back({"sessions/lost", JoinFrames({{2, worker.SerializeAsString()}, {0, gone.SerializeAsString()}, {7, "\xff"}, {7, "\xc8"}, {7, "\xc8"}, {0, gone.SerializeAsString()}})});
  for (const char act : {0, 1, 2, 3, 4, 5, 7}) {
    seeds.push_back({absl::StrCat("sessions/act", int(act)), JoinFrames({{2, worker.SerializeAsString()}, {6, {act, 1, 1}}, {7, "\x50"}, {6, {3, 1, 0}}, {5, submit.SerializeAsString()}})});
  }
  for (uint8_t kind = 0; kind < 19; ++kind) {
    const auto message = RpcMessage(kind);
    const auto* id = message->GetDescriptor()->FindFieldByName("job_id");
    if (id != nullptr) message->GetReflection()->SetUInt64(message.get(), id, 1);
    seeds.push_back({absl::StrCat("rpc/", message->GetDescriptor()->name()), JoinFrames({{kind, message->SerializeAsString()}})});
  }
  seeds.push_back({"rpc/agent", JoinFrames({{17, FirstReport().SerializeAsString()}, {17, gone.SerializeAsString()}, {15, ""}})});
  seeds.push_back({"rpc/worker", JoinFrames({{18, worker.SerializeAsString()}, {18, end.SerializeAsString()}})});
  return seeds;
}

}  // namespace hierad
