// hierctl's commands against a ControlService in this process.
#include <gmock/gmock.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cmath>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <sstream>

#include "base/fs.h"
#include "client/command_line.h"
#include "client/connection.h"
#include "client/job_json.h"
#include "hierad/v1/control.grpc.pb.h"

namespace hierad {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

v1::Job MakeJob(uint64_t id, v1::JobState state) {
  v1::Job job;
  job.set_id(id);
  job.mutable_spec()->set_name("job-" + std::to_string(id));
  job.set_state(state);
  job.set_run_folder("/runs/" + std::to_string(id));
  return job;
}

// Answers what the test has put in.
class FakeControl : public v1::ControlService::Service {
 public:
  grpc::Status Submit(grpc::ServerContext*, const v1::SubmitRequest* request, v1::SubmitReply* reply) override {
    std::lock_guard lock(mutex);
    submits.push_back(*request);
    if (refusals > 0) {
      --refusals;
      return {grpc::StatusCode::UNAVAILABLE, "stopping"};
    }
    if (!submit_error.ok()) return submit_error;
    *reply->mutable_job() = MakeJob(7, v1::QUEUED);
    return grpc::Status::OK;
  }
  grpc::Status Validate(grpc::ServerContext*, const v1::ValidateRequest*, v1::ValidateReply* reply) override {
    std::lock_guard lock(mutex);
    *reply = validation;
    return grpc::Status::OK;
  }
  grpc::Status Get(grpc::ServerContext*, const v1::GetRequest* request, v1::Job* reply) override {
    return Find(request->job_id(), reply);
  }
  grpc::Status List(grpc::ServerContext*, const v1::ListRequest* request, v1::ListReply* reply) override {
    std::lock_guard lock(mutex);
    list_request = *request;
    for (const v1::Job& job : jobs) *reply->add_jobs() = job;
    return grpc::Status::OK;
  }
  grpc::Status Cancel(grpc::ServerContext*, const v1::CancelRequest* request, v1::Job* reply) override {
    return Find(request->job_id(), reply);
  }
  grpc::Status SetLr(grpc::ServerContext*, const v1::SetLrRequest* request, v1::Job* reply) override {
    {
      std::lock_guard lock(mutex);
      for (v1::Job& job : jobs) job.mutable_spec()->mutable_optimizer()->set_lr(request->lr());
    }
    return Find(request->job_id(), reply);
  }
  grpc::Status SetLogLevel(grpc::ServerContext*, const v1::SetLogLevelRequest* request, v1::Job* reply) override {
    {
      std::lock_guard lock(mutex);
      for (v1::Job& job : jobs) job.mutable_spec()->mutable_output()->set_log_level(request->level());
    }
    return Find(request->job_id(), reply);
  }
  grpc::Status Watch(grpc::ServerContext* context, const v1::WatchRequest* request, grpc::ServerWriter<v1::WatchReply>* writer) override {
    std::vector<v1::WatchReply> replies;
    grpc::Status status = grpc::Status::OK;
    {
      std::lock_guard lock(mutex);
      watches.push_back(*request);
      if (!watch_scripts.empty()) {
        replies = watch_scripts.front().first;
        status = watch_scripts.front().second;
        watch_scripts.pop_front();
      } else {
        v1::WatchReply reply;
        for (const v1::Job& job : jobs) {
          if (job.id() == request->job_id()) *reply.mutable_job() = job;
        }
        if (!reply.has_job()) return {grpc::StatusCode::NOT_FOUND, "there is no job " + std::to_string(request->job_id())};
        replies.push_back(reply);
      }
    }
    for (const v1::WatchReply& reply : replies) writer->Write(reply);
    // A job that goes on: the stream stays open until the client's deadline.
    if (status.ok() && !IsEnd(replies.back().job().state())) {
      std::mutex idle;
      std::unique_lock lock(idle);
      std::condition_variable never;
      while (!context->IsCancelled()) never.wait_for(lock, std::chrono::milliseconds(5));
    }
    return status;
  }
  grpc::Status Logs(grpc::ServerContext*, const v1::LogsRequest* request, grpc::ServerWriter<v1::LogsReply>* writer) override {
    std::lock_guard lock(mutex);
    logs_request = *request;
    for (const std::string& chunk : log_chunks) {
      v1::LogsReply reply;
      reply.set_chunk(chunk);
      writer->Write(reply);
    }
    for (const v1::LogsReply& reply : log_replies) writer->Write(reply);
    return log_status;
  }
  grpc::Status ListCheckpoints(grpc::ServerContext*, const v1::ListCheckpointsRequest*, v1::ListCheckpointsReply* reply) override {
    std::lock_guard lock(mutex);
    for (const v1::CheckpointInfo& c : checkpoints) *reply->add_checkpoints() = c;
    return grpc::Status::OK;
  }
  grpc::Status Nodes(grpc::ServerContext*, const v1::NodesRequest*, v1::NodesReply* reply) override {
    std::lock_guard lock(mutex);
    *reply = nodes;
    return grpc::Status::OK;
  }
  grpc::Status Version(grpc::ServerContext*, const v1::VersionRequest*, v1::VersionReply* reply) override {
    reply->set_version("9.9.9");
    reply->set_commit("abc");
    return grpc::Status::OK;
  }

  std::mutex mutex;
  std::vector<v1::Job> jobs;
  std::vector<v1::SubmitRequest> submits;
  int refusals = 0;
  grpc::Status submit_error = grpc::Status::OK;
  v1::ValidateReply validation;
  v1::ListRequest list_request;
  std::vector<v1::WatchRequest> watches;
  std::deque<std::pair<std::vector<v1::WatchReply>, grpc::Status>> watch_scripts;
  v1::LogsRequest logs_request;
  std::vector<v1::LogsReply> log_replies;   // after the chunks
  grpc::Status log_status;
  std::vector<std::string> log_chunks;
  std::vector<v1::CheckpointInfo> checkpoints;
  v1::NodesReply nodes;

 private:
  grpc::Status Find(uint64_t id, v1::Job* reply) {
    std::lock_guard lock(mutex);
    for (const v1::Job& job : jobs) {
      if (job.id() != id) continue;
      *reply = job;
      return grpc::Status::OK;
    }
    return {grpc::StatusCode::NOT_FOUND, "there is no job " + std::to_string(id)};
  }
};

class CommandTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = "/tmp/hierctl_test-XXXXXX";
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
    server_address_ = "unix:" + folder_ + "/h.sock";
    ASSERT_TRUE(WriteFileAtomic(Path("job.yaml"), "name: a\ndata: {source: npy, path: x.npy}\nschedule: {epochs: 1}\n").ok());
    ASSERT_TRUE(WriteFileAtomic(Path("x.npy"), "").ok());
  }
  void TearDown() override {
    if (server_) server_->Shutdown(std::chrono::system_clock::now());
    EXPECT_TRUE(RemoveTree(folder_).ok());
  }

  void Serve() {
    grpc::ServerBuilder builder;
    builder.AddListeningPort(server_address_, grpc::InsecureServerCredentials());
    builder.RegisterService(&control_);
    server_ = builder.BuildAndStart();
    ASSERT_NE(server_, nullptr);
  }

  int Run(std::vector<std::string> words) {
    std::vector<const char*> argv = {"hierctl"};
    for (const std::string& word : words) argv.push_back(word.c_str());
    out_.str("");
    err_.str("");
    Context context;
    context.out = &out_;
    context.err = &err_;
    context.clock = &Clock::System();
    context.server = server_address_;
    return RunCommandLine(int(argv.size()), argv.data(), context);
  }

  std::string Path(const std::string& name) const { return JoinPath(folder_, name); }
  std::string out() const { return out_.str(); }
  std::string err() const { return err_.str(); }
  Json json() const { return Json::parse(out_.str()); }

  std::string folder_, server_address_;
  FakeControl control_;
  std::unique_ptr<grpc::Server> server_;
  std::ostringstream out_, err_;
};

v1::WatchReply At(v1::JobState state, int64_t step) {
  v1::WatchReply reply;
  *reply.mutable_job() = MakeJob(7, state);
  reply.mutable_job()->set_step(step);
  reply.mutable_job()->set_total_steps(100);
  if (step > 0) {
    reply.add_metrics()->set_step(step);
    reply.mutable_metrics(0)->set_loss(0.5);
    *reply.mutable_job()->mutable_last() = reply.metrics(0);
  }
  return reply;
}

TEST_F(CommandTest, WithoutHieradEveryCommandSaysWhatToCheck) {
  for (const std::vector<std::string>& words : std::vector<std::vector<std::string>>{
           {"list"}, {"describe", "1"}, {"watch", "1"}, {"wait", "1"}, {"logs", "1"}, {"cancel", "1"}, {"checkpoints", "1"}, {"nodes"}, {"version"}}) {
    EXPECT_EQ(Run(words), kExitUnreachable) << words[0];
    EXPECT_THAT(err(), StartsWith("hierctl: cannot reach hierad: there is no socket at " + server_address_ + "; start hierad")) << words[0];
    EXPECT_THAT(err(), HasSubstr("--server"));
  }
}

TEST_F(CommandTest, ASocketThatNobodyServesIsToldApart) {
  const int fd = ::socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::snprintf(address.sun_path, sizeof address.sun_path, "%s", Path("h.sock").c_str());
  ASSERT_EQ(::bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  ::close(fd);
  EXPECT_EQ(Run({"list"}), kExitUnreachable);
  EXPECT_THAT(err(), HasSubstr("nothing listens at"));
}

TEST_F(CommandTest, WrongUsageIsOne) {
  EXPECT_EQ(Run({}), kExitUsage);
  EXPECT_EQ(Run({"lst"}), kExitUsage);
  EXPECT_EQ(Run({"describe", "x"}), kExitUsage);
  EXPECT_EQ(Run({"describe", "-1"}), kExitUsage);
  EXPECT_EQ(Run({"describe"}), kExitUsage);
  EXPECT_EQ(Run({"list", "-o", "xml"}), kExitUsage);
  EXPECT_EQ(Run({"list", "--state", "asleep"}), kExitUsage);
  EXPECT_THAT(err(), HasSubstr("QUEUED, STARTING, RUNNING"));
  EXPECT_EQ(Run({"list", "--server", "nowhere"}), kExitUsage);
  EXPECT_THAT(err(), HasSubstr("unix:/path or host:port"));
  EXPECT_EQ(Run({"--help"}), kExitOk);
  EXPECT_THAT(out(), HasSubstr("103 the job was CANCELLED"));
}

TEST_F(CommandTest, SubmitSendsTheWholeJobWithAbsolutePaths) {
  Serve();
  EXPECT_EQ(Run({"submit", Path("job.yaml"), "--set", "step.batch_per_rank=8", "--set", "model.stages=[1, 1, 2]"}), kExitOk) << err();
  ASSERT_EQ(control_.submits.size(), 1u);
  const v1::JobSpec& spec = control_.submits[0].spec();
  EXPECT_EQ(spec.data().path(), folder_ + "/x.npy");
  EXPECT_EQ(spec.step().batch_per_rank(), 8);
  EXPECT_THAT(spec.model().stages(), ElementsAre(1, 1, 2));
  EXPECT_EQ(spec.optimizer().blr(), 8e-4) << "defaults are filled in";
  EXPECT_GE(control_.submits[0].client_key().size(), 32u);
  EXPECT_EQ(out(), "job 7 (job-7) is queued; run folder /runs/7\n");
  EXPECT_EQ(Run({"submit", Path("job.yaml"), "-o", "json"}), kExitOk);
  EXPECT_EQ(json()["job"]["id"], 7);
  EXPECT_EQ(json()["existed"], false);
  EXPECT_NE(control_.submits[1].client_key(), control_.submits[0].client_key());
}

TEST_F(CommandTest, SubmitTriesAgainWithTheSameKey) {
  Serve();
  control_.refusals = 2;
  EXPECT_EQ(Run({"submit", Path("job.yaml")}), kExitOk) << err();
  ASSERT_EQ(control_.submits.size(), 3u);
  EXPECT_EQ(control_.submits[0].client_key(), control_.submits[2].client_key());
  EXPECT_EQ(Run({"submit", Path("job.yaml"), "--client-key", "mine"}), kExitOk);
  EXPECT_EQ(control_.submits.back().client_key(), "mine");
}

TEST_F(CommandTest, WhatHieradRefusesIsShownLineByLine) {
  Serve();
  control_.submit_error = {grpc::StatusCode::INVALID_ARGUMENT, "data.path: \x1b[31mno\nstep.mode: no"};
  EXPECT_EQ(Run({"submit", Path("job.yaml")}), kExitUsage);
  EXPECT_EQ(err(), "hierctl: data.path: \\x1b[31mno\nstep.mode: no\n");
  EXPECT_EQ(Run({"submit", Path("job.yaml"), "-o", "json"}), kExitUsage);
  EXPECT_EQ(json()["error"]["code"], "INVALID_ARGUMENT");
}

TEST_F(CommandTest, AWrongFileIsRefusedBeforeHieradIsAsked) {
  ASSERT_TRUE(WriteFileAtomic(Path("job.yaml"), "name: a b\ndata: {source: synthetic}\nnum-epochs: 3\n").ok());
  EXPECT_EQ(Run({"submit", Path("job.yaml")}), kExitUsage);
  EXPECT_THAT(err(), HasSubstr(Path("job.yaml") + ":1: name: "));
  EXPECT_THAT(err(), HasSubstr(Path("job.yaml") + ":3: num-epochs: unknown key; did you mean schedule.epochs?"));
  EXPECT_EQ(Run({"submit", Path("job.yaml"), "--set", "optimzer.lr=1"}), kExitUsage);
  EXPECT_THAT(err(), HasSubstr("did you mean optimizer.lr?"));
  EXPECT_EQ(Run({"submit", Path("none.yaml")}), kExitUsage);
  EXPECT_THAT(err(), HasSubstr("No such file"));
}

TEST_F(CommandTest, RulesBetweenKeysNameTheLine) {
  ASSERT_TRUE(WriteFileAtomic(Path("job.yaml"), "name: a\ndata:\n  source: synthetic\nmodel:\n  input_size: [225, 224]\n"
                                                "schedule: {epochs: 1}\n").ok());
  EXPECT_EQ(Run({"validate", Path("job.yaml")}), kExitUsage);
  EXPECT_THAT(err(), StartsWith(Path("job.yaml") + ":5: model.input_size: 225"));
  EXPECT_EQ(Run({"validate", Path("job.yaml"), "-o", "json"}), kExitUsage);
  EXPECT_EQ(json()["valid"], false);
  EXPECT_EQ(json()["problems"].size(), 1u);
}

TEST_F(CommandTest, DryRunExplainsEveryValue) {
  EXPECT_EQ(Run({"submit", Path("job.yaml"), "--dry-run", "--set", "step.batch_per_rank=8"}), kExitOk) << err();
  EXPECT_THAT(out(), testing::ContainsRegex("path: " + folder_ + "/x.npy +# " + Path("job.yaml") + ":2\n"));
  EXPECT_THAT(out(), testing::ContainsRegex("batch_per_rank: 8 +# --set\n"));
  EXPECT_THAT(out(), testing::ContainsRegex("embed_dim: 96 +# derived\n"));
  EXPECT_THAT(out(), testing::ContainsRegex("lr: 2.5e-05 +# derived\n"));
  EXPECT_THAT(out(), HasSubstr("19 of 49 mask units kept"));
}

TEST_F(CommandTest, ValidateWorksWithoutHieradAndAsksItWhereItIs) {
  EXPECT_EQ(Run({"validate", Path("job.yaml")}), kExitOk) << err();
  EXPECT_THAT(out(), HasSubstr("is valid: mae on [224, 224] x 3 channels"));
  EXPECT_THAT(out(), HasSubstr("no hierad was asked"));
  Serve();
  control_.validation.add_warnings("resources: it waits");
  EXPECT_EQ(Run({"validate", Path("job.yaml")}), kExitOk);
  EXPECT_EQ(err(), "warning: resources: it waits\n");
  control_.validation.add_problems("output.folder: not writable");
  EXPECT_EQ(Run({"validate", Path("job.yaml"), "-o", "json"}), kExitUsage);
  EXPECT_EQ(json()["problems"][0], "output.folder: not writable");
}

TEST_F(CommandTest, AFileThatIsNotHereIsToldWithItsLineAndItsNearest) {
  Serve();
  ASSERT_TRUE(WriteFileAtomic(Path("eeg_train.npy"), "x").ok());
  ASSERT_TRUE(WriteFileAtomic(Path("job.yaml"), "name: a\ndata:\n  source: npy\n  path: eeg_trian.npy\nschedule: {epochs: 1}\n").ok());
  const std::string told = Path("job.yaml") + ":4: data.path: \"" + Path("eeg_trian.npy") + "\" is not on this machine; did you mean \"eeg_train.npy\"?";
  EXPECT_EQ(Run({"validate", Path("job.yaml")}), kExitOk);
  EXPECT_EQ(err(), "warning: " + told + "\n");
  EXPECT_EQ(Run({"validate", Path("job.yaml"), "-o", "json"}), kExitOk);
  EXPECT_EQ(json()["warnings"], Json::array({told}));
  EXPECT_EQ(Run({"submit", Path("job.yaml")}), kExitOk);
  EXPECT_EQ(err(), "warning: " + told + "\n");
  EXPECT_EQ(control_.submits.size(), 1u) << "another node may have it";
  EXPECT_EQ(Run({"validate", Path("job.yaml"), "--set", "data.path=" + Path("no/folder")}), kExitOk);
  EXPECT_EQ(err(), "warning: --set: data.path: \"" + Path("no/folder") + "\" is not on this machine\n");
  EXPECT_EQ(Run({"validate", Path("job.yaml"), "--set", "data.path=" + Path("eeg_train.npy")}), kExitOk);
  EXPECT_EQ(err(), "");
}

TEST_F(CommandTest, PlanNeedsNoHierad) {
  EXPECT_EQ(Run({"plan", Path("job.yaml"), "--set", "step.batch_per_rank=8"}), kExitOk) << err();
  EXPECT_THAT(out(), HasSubstr("Largest batch per rank in 139.0 GiB: "));
  EXPECT_EQ(Run({"plan", Path("job.yaml"), "--memory", "4", "-o", "json"}), kExitOk) << err();
  EXPECT_GT(json()["peak_device_bytes"], 0);
  EXPECT_EQ(json()["memory_gib"], 4);
  EXPECT_EQ(Run({"plan", Path("job.yaml"), "--fit", "4096 MiB", "--samples", "1000", "-o", "json"}), kExitOk) << err();
  EXPECT_EQ(json()["memory_gib"], 4);
  EXPECT_EQ(json()["steps_per_epoch"], 16);
  for (const char* wrong : {"", "GiB", "-4GiB", "4 apples", "nan"}) {
    EXPECT_EQ(Run({"plan", Path("job.yaml"), "--fit", wrong}), wrong[0] == 0 ? kExitOk : kExitUsage) << wrong;
  }
  EXPECT_EQ(Run({"plan", Path("job.yaml"), "--card", "X9"}), kExitUsage);
  EXPECT_THAT(err(), HasSubstr("known are H200"));
  EXPECT_EQ(Run({"plan", Path("job.yaml"), "--set", "model.input_size=[225,224]"}), kExitUsage);
}

TEST_F(CommandTest, TheExitCodeIsTheJobsEnd) {
  Serve();
  control_.jobs = {MakeJob(1, v1::SUCCEEDED), MakeJob(2, v1::FAILED), MakeJob(3, v1::CANCELLED), MakeJob(4, v1::RUNNING)};
  control_.jobs[1].set_reason(v1::REASON_CUDA_OOM);
  control_.jobs[1].set_message("rank 0 ran out of memory");
  EXPECT_EQ(Run({"wait", "1"}), kExitOk);
  EXPECT_EQ(Run({"wait", "2"}), kExitFailed);
  EXPECT_EQ(out(), "job 2 (job-2): FAILED, CUDA_OOM: rank 0 ran out of memory\n");
  EXPECT_EQ(Run({"wait", "3"}), kExitCancelled);
  EXPECT_EQ(Run({"watch", "2"}), kExitFailed);
  EXPECT_EQ(Run({"wait", "4", "--timeout", "0.05"}), kExitNotFinished);
  EXPECT_EQ(Run({"watch", "4", "--timeout", "0.05"}), kExitNotFinished);
  EXPECT_EQ(Run({"wait", "5"}), kExitNotFound);
  EXPECT_EQ(Run({"describe", "5"}), kExitNotFound);
  EXPECT_EQ(err(), "hierctl: there is no job 5\n");
  EXPECT_EQ(Run({"wait", "1", "3", "2"}), kExitCancelled) << "the first that did not succeed";
  EXPECT_EQ(Run({"wait", "1", "2", "-o", "json"}), kExitFailed);
  EXPECT_EQ(json()["jobs"][1]["reason"], "CUDA_OOM");
}

TEST_F(CommandTest, SetChangesTheRateAndTheLogLevel) {
  control_.jobs = {MakeJob(3, v1::RUNNING)};
  Serve();
  EXPECT_EQ(Run({"set", "3", "lr=2e-4", "log_level=debug"}), kExitOk) << err();
  EXPECT_THAT(out(), HasSubstr("job 3 has the peak rate 0.0002 from its next step on, and logs lines of level debug and above"));
  EXPECT_EQ(Run({"describe", "3"}), kExitOk);
  EXPECT_THAT(out(), testing::ContainsRegex("log level +debug"));
  EXPECT_EQ(Run({"set", "3", "output.log_level=warn", "-o", "json"}), kExitOk);
  EXPECT_THAT(out(), testing::ContainsRegex("\"log_level\": ?\"warn\""));
  for (const char* wrong : {"log_level", "log_level=", "log_levl=debug", "lr=x"}) EXPECT_EQ(Run({"set", "3", wrong}), kExitUsage) << wrong;
  EXPECT_EQ(Run({"completion", "bash"}), kExitOk);
  EXPECT_THAT(out(), HasSubstr("log_level=debug"));
  EXPECT_EQ(Run({"man"}), kExitOk);
  EXPECT_THAT(out(), HasSubstr("log_level=debug, info, warn or error"));
}

TEST_F(CommandTest, SubmitAndFollow) {
  Serve();
  control_.watch_scripts.push_back({{At(v1::QUEUED, 0), At(v1::RUNNING, 1), At(v1::SUCCEEDED, 100)}, grpc::Status::OK});
  EXPECT_EQ(Run({"submit", Path("job.yaml"), "--follow"}), kExitOk) << err();
  EXPECT_THAT(out(), HasSubstr("Ctrl-C ends the watching, not the job"));
  EXPECT_THAT(out(), HasSubstr("QUEUED  step 0/100"));
  EXPECT_THAT(out(), HasSubstr("job 7 (job-7): SUCCEEDED after 100 of 100 steps, loss 0.5\n"));
  control_.watch_scripts.push_back({{At(v1::FAILED, 3)}, grpc::Status::OK});
  EXPECT_EQ(Run({"submit", Path("job.yaml"), "--wait", "-o", "json"}), kExitFailed);
  EXPECT_EQ(json()["jobs"][0]["state"], "FAILED");
}

TEST_F(CommandTest, AWatchOutlivesARestartOfHierad) {
  Serve();
  control_.watch_scripts.push_back({{At(v1::RUNNING, 5)}, {grpc::StatusCode::UNAVAILABLE, "hierad is stopping"}});
  control_.watch_scripts.push_back({{At(v1::RUNNING, 6), At(v1::SUCCEEDED, 100)}, grpc::Status::OK});
  EXPECT_EQ(Run({"watch", "7", "--every", "1"}), kExitOk) << err();
  ASSERT_EQ(control_.watches.size(), 2u);
  EXPECT_EQ(control_.watches[1].after_step(), 5) << "goes on where it was";
  EXPECT_THAT(err(), HasSubstr("hierad is away"));
}

TEST_F(CommandTest, WatchAsJsonIsOneObjectALine) {
  Serve();
  v1::WatchReply bad = At(v1::RUNNING, 1);
  bad.mutable_metrics(0)->set_loss(NAN);
  control_.watch_scripts.push_back({{bad, At(v1::SUCCEEDED, 2)}, grpc::Status::OK});
  EXPECT_EQ(Run({"watch", "7", "-o", "json"}), kExitOk);
  std::istringstream lines(out());
  std::string line;
  ASSERT_TRUE(std::getline(lines, line));
  EXPECT_EQ(Json::parse(line)["metrics"][0]["loss"], "NaN");
  ASSERT_TRUE(std::getline(lines, line));
  EXPECT_EQ(Json::parse(line)["job"]["state"], "SUCCEEDED");
  EXPECT_FALSE(std::getline(lines, line));
}

TEST_F(CommandTest, ListShowsNamesSafely) {
  Serve();
  EXPECT_EQ(Run({"list"}), kExitOk);
  EXPECT_EQ(out(), "no jobs\n");
  control_.jobs = {MakeJob(2, v1::RUNNING), MakeJob(1, v1::SUCCEEDED)};
  control_.jobs[0].mutable_spec()->set_name("a\x1b[2J|\"b\nc");
  control_.jobs[0].mutable_last()->set_loss(NAN);
  EXPECT_EQ(Run({"list", "--state", "running", "--state", "SUCCEEDED", "--limit", "5"}), kExitOk);
  EXPECT_THAT(control_.list_request.states(), ElementsAre(v1::RUNNING, v1::SUCCEEDED));
  EXPECT_EQ(control_.list_request.limit(), 5u);
  EXPECT_THAT(out(), HasSubstr("a\\x1b[2J|\"b\\x0ac  RUNNING"));
  EXPECT_THAT(out(), HasSubstr("NaN"));
  EXPECT_EQ(Run({"list", "-o", "json"}), kExitOk);
  EXPECT_EQ(json()["jobs"][0]["name"], "a\x1b[2J|\"b\nc");
}

TEST_F(CommandTest, WhatAJobReadsIsNamed) {
  Serve();
  control_.jobs = {MakeJob(2, v1::SUCCEEDED), MakeJob(1, v1::SUCCEEDED)};
  control_.jobs[0].mutable_spec()->mutable_data()->set_source("synthetic");
  control_.jobs[1].mutable_spec()->mutable_data()->set_source("npy");
  control_.jobs[1].mutable_spec()->mutable_data()->set_path("/data/a.npy");
  EXPECT_EQ(Run({"list", "--columns", "id,data"}), kExitOk);
  EXPECT_THAT(out(), testing::AllOf(HasSubstr("2  synthetic (random numbers)\n"), HasSubstr("1  npy /data/a.npy\n")));
  EXPECT_EQ(Run({"describe", "2"}), kExitOk);
  EXPECT_THAT(out(), HasSubstr("data          synthetic (random numbers)\n"));
}

TEST_F(CommandTest, DescribeNamesDamagedCheckpoints) {
  Serve();
  control_.jobs = {MakeJob(2, v1::RUNNING)};
  v1::CheckpointInfo good, bad;
  bad.set_step(20);
  bad.set_path("/runs/2/checkpoints/step-000000020");
  bad.set_damaged(true);
  good.set_step(10);
  good.set_best(true);
  good.set_eval_loss(0.25);
  control_.checkpoints = {bad, good};
  EXPECT_EQ(Run({"describe", "2"}), kExitOk);
  EXPECT_THAT(out(), HasSubstr("damaged       step 20: /runs/2/checkpoints/step-000000020 failed verification"));
  EXPECT_THAT(out(), HasSubstr("best          step 10, eval loss 0.25"));
  EXPECT_EQ(Run({"checkpoints", "2"}), kExitOk);
  EXPECT_THAT(out(), HasSubstr("damaged"));
  EXPECT_EQ(Run({"checkpoints", "2", "-o", "json"}), kExitOk);
  EXPECT_EQ(json()["checkpoints"][1]["best"], true);
  EXPECT_EQ(Run({"describe", "2", "-o", "json"}), kExitOk);
  EXPECT_EQ(json()["checkpoints"][0]["damaged"], true);
}

TEST_F(CommandTest, LogsAreLinesWithoutControlCharacters) {
  Serve();
  control_.log_chunks = {"first\tx\nsec", "ond \x1b[31mred\xff\n", "no newline at the end"};
  EXPECT_EQ(Run({"logs", "3", "--rank", "2", "--tail", "10", "-f"}), kExitOk);
  EXPECT_EQ(out(), "first\tx\nsecond \\x1b[31mred\\xff\nno newline at the end\n");
  EXPECT_EQ(control_.logs_request.rank(), 2);
  EXPECT_EQ(control_.logs_request.tail_lines(), 10u);
  EXPECT_TRUE(control_.logs_request.follow());
  EXPECT_EQ(Run({"logs", "3", "--raw"}), kExitOk);
  EXPECT_EQ(out(), "first\tx\nsecond \x1b[31mred\xff\nno newline at the end");
  EXPECT_EQ(Run({"logs", "3", "-o", "json"}), kExitOk);
  std::istringstream lines(out());
  std::string line;
  std::getline(lines, line);
  EXPECT_EQ(Json::parse(line)["line"], "first\tx");
}

TEST_F(CommandTest, LogsSayWhatIsMissingWhateverIsLookedFor) {
  Serve();
  const auto add = [&](int attempt, const std::string& chunk, const std::string& notice) {
    v1::LogsReply& reply = control_.log_replies.emplace_back();
    reply.set_attempt(attempt);
    reply.set_chunk(chunk);
    reply.set_notice(notice);
  };
  add(1, "needle one\nhay", "");
  add(1, "", "---- the rest of attempt 1 is missing");
  add(2, "needle two\n", "");
  control_.log_status = grpc::Status(grpc::FAILED_PRECONDITION, "the rest of attempt 1 is missing");
  EXPECT_EQ(Run({"logs", "3"}), kExitUsage);
  EXPECT_EQ(out(), "needle one\nhay\n---- the rest of attempt 1 is missing\nneedle two\n");
  EXPECT_THAT(err(), HasSubstr("the rest of attempt 1 is missing"));
  EXPECT_EQ(Run({"logs", "3", "--raw"}), kExitUsage);
  EXPECT_EQ(out(), "needle one\nhay\n---- the rest of attempt 1 is missing\nneedle two\n");
  EXPECT_EQ(Run({"logs", "3", "--grep", "needle"}), kExitUsage);
  EXPECT_EQ(out(), "needle one\n---- the rest of attempt 1 is missing\nneedle two\n");
  EXPECT_EQ(Run({"logs", "3", "--attempt", "2", "--grep", "needle"}), kExitUsage);
  EXPECT_EQ(control_.logs_request.attempt(), 2);
  EXPECT_EQ(Run({"logs", "3", "-o", "json"}), kExitUsage);
  std::istringstream lines(out());
  std::string line;
  std::vector<Json> all;
  while (std::getline(lines, line)) all.push_back(Json::parse(line));
  ASSERT_EQ(all.size(), 5u);   // the error is the last
  EXPECT_EQ(all[1]["notice"], false);
  EXPECT_EQ(all[1]["attempt"], 1);
  EXPECT_EQ(all[2]["notice"], true);
  EXPECT_EQ(all[2]["line"], "---- the rest of attempt 1 is missing");
  EXPECT_EQ(all[3]["attempt"], 2);
}

TEST_F(CommandTest, CancelSaysWhatHappens) {
  Serve();
  control_.jobs = {MakeJob(1, v1::STOPPING), MakeJob(2, v1::CANCELLED), MakeJob(3, v1::SUCCEEDED)};
  EXPECT_EQ(Run({"cancel", "1"}), kExitOk);
  EXPECT_THAT(out(), HasSubstr("hierctl wait 1"));
  EXPECT_EQ(Run({"cancel", "2"}), kExitOk);
  EXPECT_EQ(out(), "job 2 is cancelled\n");
  EXPECT_EQ(Run({"cancel", "3"}), kExitOk);
  EXPECT_EQ(out(), "job 3 had ended already: SUCCEEDED\n");
  EXPECT_EQ(Run({"cancel", "9"}), kExitNotFound);
}

TEST_F(CommandTest, NodesAndVersion) {
  Serve();
  v1::Node& node = *control_.nodes.add_nodes();
  node.set_name("n1");
  node.set_connected(true);
  node.add_slots()->mutable_slot()->set_id("cpu-0");
  node.mutable_slots(0)->set_job_id(7);
  node.add_slots()->mutable_slot()->set_id("cpu-1");
  node.add_slots()->set_fault("Xid 79: restart\x1b the machine");
  EXPECT_EQ(Run({"nodes"}), kExitOk);
  EXPECT_THAT(out(), HasSubstr("out of use: Xid 79: restart"));
  EXPECT_THAT(out(), testing::Not(HasSubstr("\x1b")));
  EXPECT_THAT(out(), HasSubstr("job 7 rank 0"));
  EXPECT_THAT(out(), HasSubstr("free"));
  EXPECT_EQ(Run({"nodes", "-o", "json"}), kExitOk);
  EXPECT_TRUE(json()["nodes"][0]["slots"][1]["job_id"].is_null());
  EXPECT_TRUE(json()["nodes"][0]["slots"][1]["fault"].is_null());
  EXPECT_THAT(json()["nodes"][0]["slots"][2]["fault"].get<std::string>(), HasSubstr("Xid 79"));
  EXPECT_EQ(Run({"version"}), kExitOk);
  EXPECT_THAT(out(), HasSubstr("hierad  9.9.9 (abc)"));
  EXPECT_EQ(Run({"version", "-o", "json"}), kExitOk);
  EXPECT_EQ(json()["hierad"]["version"], "9.9.9");
}

TEST_F(CommandTest, ProbeWithoutAWorkerSaysWhereItLooked) {
  const std::string path = std::getenv("PATH");
  ::setenv("PATH", "/none", 1);
  const auto found = Run({"probe", "/runs/1", "--seed", "3"});
  ::setenv("PATH", path.c_str(), 1);
  EXPECT_EQ(found, kExitUsage);
  EXPECT_THAT(err(), HasSubstr("hiera-worker is neither at "));
  ::setenv("PATH", "/none", 1);
  const auto data = Run({"data", "inspect", "/x"});
  ::setenv("PATH", path.c_str(), 1);
  EXPECT_EQ(data, kExitUsage);
}

TEST_F(CommandTest, ExportOfAJobAsksForItsFolder) {
  EXPECT_EQ(Run({"export", "7"}), kExitUnreachable);
  Serve();
  EXPECT_EQ(Run({"export", "9"}), kExitNotFound);
  EXPECT_THAT(err(), HasSubstr("there is no job 9"));
  EXPECT_EQ(Run({"export", "/runs/7", "--to", "onnx"}), kExitUsage);
  control_.jobs.push_back(MakeJob(7, v1::SUCCEEDED));
  const std::string path = std::getenv("PATH");
  ::setenv("PATH", "/none", 1);
  for (const char* source : {"7", "/runs/7"}) {
    EXPECT_EQ(Run({"export", source, "--to", "timm", "-o", "w.safetensors"}), kExitUsage) << source;
    EXPECT_THAT(err(), HasSubstr("hiera-worker is neither at ")) << source;
  }
  ::setenv("PATH", path.c_str(), 1);
}

TEST(Connection, Addresses) {
  EXPECT_EQ(*ServerTarget("unix:/run/x.sock"), "unix:/run/x.sock");
  EXPECT_EQ(*ServerTarget("/run/x.sock"), "unix:/run/x.sock");
  EXPECT_EQ(*ServerTarget("node1:7070"), "dns:///node1:7070");
  EXPECT_EQ(*ServerTarget("[::1]:7070"), "dns:///[::1]:7070");
  for (const char* wrong : {"", "node1", "node1:", "node1:0", "node1:70700", ":70", "node1:7x", "unix:"}) {
    EXPECT_FALSE(ServerTarget(wrong).ok()) << wrong;
  }
  EXPECT_THAT(std::string(ServerTarget("unix:/" + std::string(200, 'x')).status().message()), HasSubstr("the system allows 107"));
}

}  // namespace
}  // namespace hierad
