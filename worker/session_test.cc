// Against a server of its own on a unix socket.
#include "worker/session.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <grpcpp/grpcpp.h>

#include <condition_variable>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include <spdlog/spdlog.h>

#include "base/clock.h"
#include "base/fs.h"
#include "base/limits.h"
#include "base/status.h"
#include "base/worker_exit.h"
#include "hierad/v1/worker.grpc.pb.h"

namespace hierad {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr std::chrono::seconds kLong{30};

// Keeps every report; answers each with the orders set.
class Hierad : public v1::WorkerService::Service {
 public:
  grpc::Status Session(grpc::ServerContext* context, grpc::ServerReaderWriter<v1::WorkerOrders, v1::WorkerReport>* stream) override {
    v1::WorkerReport report;
    while (stream->Read(&report)) {
      std::unique_lock lock(mutex_);
      for (const auto& m : report.metrics()) steps_.push_back(m.step());
      reports_.push_back(report);
      if (cut_) {
        cut_ = false;
        context->TryCancel();
        changed_.notify_all();
        return grpc::Status::CANCELLED;
      }
      v1::WorkerOrders orders = orders_;
      if (acknowledge_ && !steps_.empty()) orders.set_acknowledged_step(steps_.back());
      changed_.notify_all();
      lock.unlock();
      stream->Write(orders);
      lock.lock();
      if (!changed_.wait_for(lock, kLong, [this] { return !hold_; })) return grpc::Status::CANCELLED;
    }
    return grpc::Status::OK;
  }

  template <typename F>
  bool Wait(F condition) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, kLong, condition);
  }
  template <typename F>
  void With(F change) {
    {
      std::lock_guard lock(mutex_);
      change();
    }
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<v1::WorkerReport> reports_;
  std::vector<int64_t> steps_;
  v1::WorkerOrders orders_;
  bool acknowledge_ = false, cut_ = false, hold_ = false;
};

class Sessions : public ::testing::Test {
 protected:
  void SetUp() override {
    spdlog::set_level(spdlog::level::off);
    char name[] = "/tmp/session-test-XXXXXX";
    folder_ = mkdtemp(name);
    assignment_.set_job_id(3);
    assignment_.set_attempt(2);
    assignment_.set_rank(1);
    assignment_.set_credential("secret");
    assignment_.set_endpoint("unix:" + folder_ + "/socket");
  }
  void TearDown() override {
    if (server_) server_->Shutdown(std::chrono::system_clock::time_point());
    EXPECT_TRUE(RemoveTree(folder_).ok());
  }
  void Serve() {
    grpc::ServerBuilder builder;
    builder.AddListeningPort(assignment_.endpoint(), grpc::InsecureServerCredentials());
    builder.RegisterService(&hierad_);
    server_ = builder.BuildAndStart();
    ASSERT_NE(server_, nullptr);
  }
  static v1::StepMetrics Metrics(int64_t step) {
    v1::StepMetrics m;
    m.set_step(step);
    return m;
  }

  std::string folder_;
  v1::Assignment assignment_;
  Hierad hierad_;
  std::unique_ptr<grpc::Server> server_;
};

// Forks, so it comes before any thread of gRPC in this process: the test's name sorts first and the child starts first.
TEST_F(Sessions, AFencedProcessEndsAtOnce) {
  const pid_t child = fork();
  if (child == 0) {
    const auto session = ConnectSession(assignment_, nullptr);
    session->SetPhase(v1::PHASE_TRAINING);
    session->End(v1::REASON_COMPLETED, "done", kLong);
    _exit(1);
  }
  hierad_.orders_.set_fenced(true);
  Serve();
  int status = 0;
  waitpid(child, &status, 0);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), kWorkerExitFenced);
}

TEST_F(Sessions, SaysTheWholeStateAndBringsOrders) {
  const auto session = ConnectSession(assignment_, nullptr);   // hierad is not there yet
  session->SetPhase(v1::PHASE_LOADING);
  session->SetProgress(7, 100, 5);
  session->SetCounters(1, 3.5);
  v1::DataCounters data;
  data.set_bytes(99);
  data.set_slowest("a\n" + std::string(5000, 'x'));
  session->SetDataCounters(data);
  session->SetWaitingIn([] { return std::string("barrier"); });
  v1::CheckpointInfo info;
  info.set_step(4);
  session->SetCheckpoints({info});
  hierad_.orders_.set_want(v1::WorkerOrders::WANT_PAUSE);
  hierad_.orders_.set_checkpoint_request(6);
  Serve();
  ASSERT_TRUE(hierad_.Wait([&] { return !hierad_.reports_.empty(); }));
  const v1::WorkerReport report = hierad_.reports_.front();
  EXPECT_EQ(report.job_id(), 3u);
  EXPECT_EQ(report.attempt(), 2);
  EXPECT_EQ(report.rank(), 1);
  EXPECT_EQ(report.data().bytes(), 99);
  EXPECT_LE(report.data().slowest().size(), 1024u);   // what hierad takes, on one line
  EXPECT_EQ(report.data().slowest().find('\n'), std::string::npos);
  EXPECT_EQ(report.credential(), "secret");
  EXPECT_EQ(report.phase(), v1::PHASE_LOADING);
  EXPECT_EQ(report.step(), 7);
  EXPECT_EQ(report.first_step(), 5);
  EXPECT_EQ(report.nan_steps(), 1);
  EXPECT_EQ(report.samples_per_s(), 3.5);
  EXPECT_EQ(report.waiting_in(), "barrier");
  EXPECT_TRUE(report.checkpoints_known());
  EXPECT_EQ(report.checkpoints(0).step(), 4);
  EXPECT_EQ(report.pid(), getpid());
  std::atomic<bool> abandon{false};
  session->AbandonOnStop(&abandon);
  EXPECT_EQ(ReasonOf(session->AwaitRendezvous(kLong).status()), v1::REASON_CANCELLED);   // a pause is wanted
  EXPECT_TRUE(abandon);
  EXPECT_EQ(session->want(), Session::Want::kPause);
  EXPECT_EQ(session->checkpoint_request(), 6);
  // At least once a second, without any change.
  const size_t seen = hierad_.reports_.size();
  EXPECT_TRUE(hierad_.Wait([&] { return hierad_.reports_.size() > seen + 1; }));
}

TEST_F(Sessions, TakeOnAnotherLogLevelAtOnce) {
  Serve();
  const auto session = ConnectSession(assignment_, nullptr);
  const auto becomes = [&](const std::string& word, spdlog::level::level_enum level) {
    hierad_.With([&] { hierad_.orders_.set_log_level(word); });
    session->SetPhase(v1::PHASE_TRAINING);   // a report is answered with the orders
    for (const auto until = Clock::System().Monotonic() + kLong; spdlog::get_level() != level && Clock::System().Monotonic() < until;) {
      SleepFor(std::chrono::milliseconds(1));
    }
    return spdlog::get_level() == level;
  };
  EXPECT_TRUE(becomes("debug", spdlog::level::debug));
  EXPECT_TRUE(becomes("error", spdlog::level::err));
  session->SetPhase(v1::PHASE_STOPPING);
  spdlog::set_level(spdlog::level::off);   // what is said again is no change
  EXPECT_TRUE(becomes("warn", spdlog::level::warn));
}

TEST_F(Sessions, BringTheRendezvousOrSayThatItNeverCame) {
  const auto session = ConnectSession(assignment_, nullptr);
  const auto late = session->AwaitRendezvous(std::chrono::milliseconds(10));
  EXPECT_EQ(ReasonOf(late.status()), v1::REASON_PEER_LOST);
  hierad_.orders_.set_rendezvous("blob");
  Serve();
  const auto blob = session->AwaitRendezvous(kLong);
  ASSERT_TRUE(blob.ok()) << blob.status();
  EXPECT_EQ(*blob, "blob");
}

TEST_F(Sessions, SigtermAbandonsAWaitWithoutHierad) {
  std::atomic<bool> terminate{false}, abandon{false};
  const auto session = ConnectSession(assignment_, &terminate);
  session->AbandonOnStop(&abandon);
  terminate = true;
  EXPECT_EQ(ReasonOf(session->AwaitRendezvous(kLong).status()), v1::REASON_CANCELLED);
  session->AbandonOnStop(&abandon);
  EXPECT_TRUE(abandon);
}

TEST_F(Sessions, SendMetricsOnceAStreamAndAgainAfterItBroke) {
  Serve();
  const auto session = ConnectSession(assignment_, nullptr);
  for (int64_t step = 1; step <= 3; ++step) session->AddMetrics(Metrics(step));
  ASSERT_TRUE(hierad_.Wait([&] { return hierad_.steps_.size() >= 3; }));
  EXPECT_THAT(hierad_.steps_, ElementsAre(1, 2, 3));
  // Nothing was acknowledged: after a break all come again, and go once acknowledged.
  hierad_.With([&] {
    hierad_.steps_.clear();
    hierad_.cut_ = true;
  });
  session->AddMetrics(Metrics(4));
  ASSERT_TRUE(hierad_.Wait([&] { return hierad_.steps_ == std::vector<int64_t>{4, 1, 2, 3, 4}; }));
  hierad_.With([&] { hierad_.acknowledge_ = true; });
  session->AddMetrics(Metrics(5));
  const size_t seen = hierad_.reports_.size();
  ASSERT_TRUE(hierad_.Wait([&] { return hierad_.reports_.size() > seen + 2; }));   // the acknowledgement has come back
  hierad_.With([&] {
    hierad_.steps_.clear();
    hierad_.cut_ = true;
  });
  session->AddMetrics(Metrics(6));
  ASSERT_TRUE(hierad_.Wait([&] { return hierad_.steps_ == std::vector<int64_t>{6, 6}; }));
}

TEST_F(Sessions, TheEndFollowsAllMetricsAndIsConfirmed) {
  const auto session = ConnectSession(assignment_, nullptr);
  const int64_t many = 3 * limits::kMetricBatch;
  for (int64_t step = 1; step <= many; ++step) session->AddMetrics(Metrics(step));
  Serve();
  EXPECT_TRUE(session->End(v1::REASON_DATA_ERROR, "a \"bad\"\nfile", kLong));
  EXPECT_EQ(int64_t(hierad_.steps_.size()), many);
  const v1::WorkerReport& last = hierad_.reports_.back();
  EXPECT_EQ(last.end().reason(), v1::REASON_DATA_ERROR);
  EXPECT_THAT(last.end().message(), HasSubstr("a \"bad\""));
  EXPECT_EQ(last.phase(), v1::PHASE_DONE);
}

TEST_F(Sessions, AnEndThatNobodyStoresIsNotConfirmed) {
  {
    const auto session = ConnectSession(assignment_, nullptr);
    EXPECT_FALSE(session->End(v1::REASON_COMPLETED, "done", std::chrono::milliseconds(300)));
  }
  hierad_.hold_ = true;   // hears it, but does not come to an end
  Serve();
  const auto session = ConnectSession(assignment_, nullptr);
  EXPECT_FALSE(session->End(v1::REASON_COMPLETED, "done", std::chrono::milliseconds(300)));
  hierad_.With([&] { hierad_.hold_ = false; });
}

}  // namespace
}  // namespace hierad
