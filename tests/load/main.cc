// Load on a hierad, for tools/bench: many clients that submit or list at once, and a node with many workers that all dial
// again when hierad is restarted. Prints one line of JSON.
//   hierad-load submit --server ADDRESS --clients 16 --in-flight 64 --jobs 20000
//   hierad-load list   --server ADDRESS --calls 200
//   hierad-load adopt  --server ADDRESS --workers 200     (until killed; a line for each change of how many are connected)
#include <CLI/CLI.hpp>
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

#include "base/clock.h"
#include "base/job_yaml.h"
#include "hierad/v1/agent.grpc.pb.h"
#include "hierad/v1/control.grpc.pb.h"
#include "hierad/v1/worker.grpc.pb.h"

namespace hierad {
namespace {

using std::chrono::nanoseconds;

nanoseconds Now() { return Clock::System().Monotonic(); }
double Seconds(nanoseconds t) { return std::chrono::duration<double>(t).count(); }

std::shared_ptr<grpc::Channel> Dial(const std::string& server, int number) {
  grpc::ChannelArguments arguments;
  arguments.SetInt("hierad.load.number", number);   // a connection of its own for each client
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 5000);   // also how long an attempt may take, on a machine that is at its limit
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  arguments.SetMaxReceiveMessageSize(64 << 20);
  return grpc::CreateCustomChannel(server, grpc::InsecureChannelCredentials(), arguments);
}

v1::JobSpec SmallJob() {
  auto spec = ParseJobYaml("name: load\ndata: {source: synthetic}\nschedule: {steps: 10}\nresources: {device: cpu}\n", {});
  FillDefaults(&*spec);
  return *spec;
}

void PrintRate(const char* what, std::vector<double> latencies, double seconds, int64_t failed) {
  std::sort(latencies.begin(), latencies.end());
  const auto at = [&](double share) { return latencies.empty() ? 0 : latencies[std::min(latencies.size() - 1, size_t(share * double(latencies.size())))]; };
  std::printf("{\"what\": \"%s\", \"calls\": %zu, \"failed\": %lld, \"seconds\": %.3f, \"per_second\": %.1f, \"p50_ms\": %.2f, \"p99_ms\": %.2f, \"max_ms\": %.2f}\n",
              what, latencies.size(), static_cast<long long>(failed), seconds, double(latencies.size()) / seconds, at(0.5) * 1e3, at(0.99) * 1e3,
              latencies.empty() ? 0 : latencies.back() * 1e3);
}

// One client: its connection, and so many submissions under way at any time, each followed by the next.
class Submitter {
 public:
  Submitter(const std::string& server, int number, int jobs) : stub_(v1::ControlService::NewStub(Dial(server, number))), number_(number), left_(jobs) {}

  void Begin(int in_flight) {
    for (int i = 0; i < in_flight; ++i) Next();
  }
  void Wait() {
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return left_ <= 0 && under_way_ == 0; });
  }
  std::vector<double> latencies;
  std::set<uint64_t> ids;
  int64_t failed = 0;

 private:
  struct Call {
    grpc::ClientContext context;
    v1::SubmitRequest request;
    v1::SubmitReply reply;
    nanoseconds begin{0};
  };

  void Next() {
    auto call = std::make_shared<Call>();
    {
      std::lock_guard lock(mutex_);
      if (left_ <= 0) return;
      call->request.set_client_key("load-" + std::to_string(getpid()) + "-" + std::to_string(number_) + "-" + std::to_string(left_--));
      ++under_way_;
    }
    *call->request.mutable_spec() = spec_;
    call->begin = Now();
    stub_->async()->Submit(&call->context, &call->request, &call->reply, [this, call](const grpc::Status& status) {
      {
        std::lock_guard lock(mutex_);
        latencies.push_back(Seconds(Now() - call->begin));
        status.ok() ? (void)ids.insert(call->reply.job().id()) : (void)++failed;
        if (failed == 1 && !status.ok()) std::fprintf(stderr, "%s\n", status.error_message().c_str());
      }
      Next();
      std::lock_guard lock(mutex_);
      --under_way_;
      done_.notify_all();
    });
  }

  const std::unique_ptr<v1::ControlService::Stub> stub_;
  const int number_;
  const v1::JobSpec spec_ = SmallJob();
  std::mutex mutex_;
  std::condition_variable done_;
  int left_, under_way_ = 0;
};

int Submit(const std::string& server, int clients, int in_flight, int jobs) {
  std::vector<std::unique_ptr<Submitter>> all;
  for (int c = 0; c < clients; ++c) all.push_back(std::make_unique<Submitter>(server, c, jobs / clients));
  const nanoseconds begin = Now();
  for (auto& client : all) client->Begin(in_flight);
  for (auto& client : all) client->Wait();
  const double seconds = Seconds(Now() - begin);
  std::vector<double> latencies;
  std::set<uint64_t> ids;
  int64_t failed = 0;
  for (auto& client : all) {
    latencies.insert(latencies.end(), client->latencies.begin(), client->latencies.end());
    ids.insert(client->ids.begin(), client->ids.end());
    failed += client->failed;
  }
  PrintRate("submit", latencies, seconds, failed);
  // Two submissions that were told one number would be one lost.
  return failed == 0 && ids.size() == latencies.size() ? 0 : 1;
}

int List(const std::string& server, int calls) {
  const auto stub = v1::ControlService::NewStub(Dial(server, 0));
  std::vector<double> latencies;
  int64_t failed = 0;
  const nanoseconds begin = Now();
  for (int i = 0; i < calls; ++i) {
    grpc::ClientContext context;
    v1::ListRequest request;
    request.set_limit(50);   // as hierctl list asks
    v1::ListReply reply;
    const nanoseconds start = Now();
    failed += !stub->List(&context, request, &reply).ok() || reply.jobs_size() != 50;
    latencies.push_back(Seconds(Now() - start));
  }
  PrintRate("list", latencies, Seconds(Now() - begin), failed);
  return failed == 0 ? 0 : 1;
}

// A session that says the same report each second and dials again when it breaks. One thread.
template <typename Stub, typename Report, typename Orders>
void Speak(Stub* stub, const std::atomic<bool>& stop, const std::function<Report()>& report, const std::function<void(const Orders&)>& hear,
           const std::function<void(bool)>& connected) {
  while (!stop) {
    grpc::ClientContext context;
    auto stream = stub->Session(&context);
    std::thread reader([&] {
      Orders orders;
      bool first = true;
      while (stream->Read(&orders)) {
        if (std::exchange(first, false)) connected(true);
        hear(orders);
      }
      if (!first) connected(false);
    });
    while (!stop && stream->Write(report())) SleepFor(std::chrono::seconds(1));
    context.TryCancel();
    reader.join();
    (void)stream->Finish();
    SleepFor(std::chrono::milliseconds(100));
  }
}

// A node of so many slots and the workers that hierad orders there.
class FakeNode {
 public:
  FakeNode(std::string server, int slots) : server_(std::move(server)), slots_(slots) {}

  void Run() {
    const auto stub = v1::AgentService::NewStub(Dial(server_, -1));
    Speak<v1::AgentService::Stub, v1::AgentReport, v1::AgentOrders>(
        stub.get(), stop_, [this] { return Report(); }, [this](const v1::AgentOrders& orders) { Obey(orders); }, [](bool) {});
  }

 private:
  v1::AgentReport Report() {
    std::lock_guard lock(mutex_);
    v1::AgentReport report;
    report.set_node("load");
    report.set_instance("load");
    report.set_version("load");
    report.set_orders_seen(seen_);
    for (int i = 0; i < slots_; ++i) {
      v1::Slot* slot = report.add_slots();
      slot->set_id("cpu-" + std::to_string(i));
      slot->set_kind(v1::Slot::CPU);
    }
    for (const v1::RankProcess& process : processes_) *report.add_processes() = process;
    return report;
  }

  void Obey(const v1::AgentOrders& orders) {
    std::lock_guard lock(mutex_);
    seen_ = orders.sequence();
    for (const v1::Assignment& a : orders.assignments()) {
      if (!started_.insert(a.job_id()).second) continue;
      v1::RankProcess& process = processes_.emplace_back();
      process.set_job_id(a.job_id());
      process.set_attempt(a.attempt());
      process.set_rank(a.rank());
      process.set_slot_id(a.slot().id());
      process.set_pid(100000 + int(processes_.size()));
      threads_.emplace_back([this, a] { Work(a); });
    }
  }

  void Work(const v1::Assignment& a) {
    const auto stub = v1::WorkerService::NewStub(Dial(server_, int(a.job_id())));
    v1::WorkerReport report;
    report.set_job_id(a.job_id());
    report.set_attempt(a.attempt());
    report.set_rank(a.rank());
    report.set_credential(a.credential());
    report.set_phase(v1::PHASE_TRAINING);
    report.set_total_steps(1000000);
    int64_t step = 0;
    Speak<v1::WorkerService::Stub, v1::WorkerReport, v1::WorkerOrders>(
        stub.get(), stop_, [&] { report.set_step(++step); return report; }, [](const v1::WorkerOrders&) {}, [this](bool here) {
          const int now = connected_ += here ? 1 : -1;
          std::printf("{\"connected\": %d, \"unix_ms\": %lld}\n", now, static_cast<long long>(Clock::System().UnixMs()));
          std::fflush(stdout);
        });
  }

  const std::string server_;
  const int slots_;
  std::atomic<bool> stop_{false};
  std::atomic<int> connected_{0};
  std::mutex mutex_;
  uint64_t seen_ = 0;
  std::set<uint64_t> started_;
  std::deque<v1::RankProcess> processes_;
  std::vector<std::thread> threads_;
};

int Main(int argc, char** argv) {
  CLI::App app("Load on a hierad, for tools/bench");
  app.require_subcommand(1);
  std::string server;
  app.add_option("--server", server, "unix:/path")->required();
  int clients = 16, in_flight = 64, jobs = 20000, calls = 200, workers = 200;
  CLI::App* submit = app.add_subcommand("submit", "Jobs by many clients at once")->fallthrough();
  submit->add_option("--clients", clients);
  submit->add_option("--in-flight", in_flight, "Of each client");
  submit->add_option("--jobs", jobs, "In all");
  CLI::App* list = app.add_subcommand("list", "The newest 50 jobs, again and again")->fallthrough();
  list->add_option("--calls", calls);
  app.add_subcommand("adopt", "A node with workers that dial again")->fallthrough()->add_option("--workers", workers);
  CLI11_PARSE(app, argc, argv);
  if (submit->parsed()) return Submit(server, clients, in_flight, jobs);
  if (list->parsed()) return List(server, calls);
  FakeNode(server, workers).Run();
  return 0;
}

}  // namespace
}  // namespace hierad

int main(int argc, char** argv) { return hierad::Main(argc, argv); }
