// The program itself: what it refuses at its start, and that it comes back with everything it has acknowledged.
#include <arpa/inet.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/fs.h"
#include "base/subprocess.h"
#include "hierad/v1/control.grpc.pb.h"
#include "server/config.h"

namespace hierad {
namespace {

using testing::HasSubstr;

std::string Program() { return JoinPath(std::getenv("HIERAD_BIN_DIR"), "hierad"); }

class HieradTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string path = "/tmp/hierad_process_XXXXXX";   // short: a socket's path is limited
    folder_ = mkdtemp(path.data());
  }
  void TearDown() override {
    daemon_.reset();
    std::filesystem::remove_all(folder_);
  }
  // What it says when it ends by itself; it is given half a minute.
  CommandResult Run(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), Program());
    auto result = RunCommand({.argv = arguments}, std::chrono::seconds(30));
    EXPECT_TRUE(result.ok()) << result.status();
    return result.ok() ? *result : CommandResult();
  }
  void ExpectRefusal(std::vector<std::string> arguments, const std::string& words) {
    const CommandResult result = Run(std::move(arguments));
    EXPECT_EQ(result.exit.code, 1) << result.exit.Describe() << result.err;
    EXPECT_THAT(result.err, HasSubstr(words));
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;   // one sentence
  }
  std::string State() const { return folder_ + "/state"; }
  void Start() {
    auto started = Subprocess::Start({.argv = {Program(), "--state", State(), "--metrics", "off", "--agent", "none", "--root-ranks", "allow", "--log-level", "error"}});
    ASSERT_TRUE(started.ok()) << started.status();
    daemon_ = std::make_unique<Subprocess>(*std::move(started));
    grpc::ChannelArguments own;   // no connection of an earlier daemon is taken for this one's
    own.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    own.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 50);
    own.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 200);
    channel_ = grpc::CreateCustomChannel("unix:" + State() + "/hierad.sock", grpc::InsecureChannelCredentials(), own);
    ASSERT_TRUE(channel_->WaitForConnected(std::chrono::system_clock::now() + std::chrono::seconds(30)));
    control_ = v1::ControlService::NewStub(channel_);
  }
  ExitStatus End(int signal) {
    kill(daemon_->pid(), signal);
    auto exit = daemon_->Wait(std::chrono::seconds(30));
    EXPECT_TRUE(exit.ok()) << exit.status();
    return exit.ok() ? *exit : ExitStatus{-1, 0};
  }
  // 0: not acknowledged.
  uint64_t Submit(const std::string& key) {
    grpc::ClientContext context;
    v1::SubmitRequest request;
    request.set_client_key(key);
    request.mutable_spec()->set_name("job");
    request.mutable_spec()->mutable_data()->set_source("synthetic");
    request.mutable_spec()->mutable_schedule()->set_steps(5);
    v1::SubmitReply reply;
    return control_->Submit(&context, request, &reply).ok() ? reply.job().id() : 0;
  }

  std::string folder_;
  std::unique_ptr<Subprocess> daemon_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::ControlService::Stub> control_;
};

TEST_F(HieradTest, RefusesWhatItCannotUseBeforeItChangesAnything) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  ASSERT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), size), 0);
  ASSERT_EQ(listen(fd, 1), 0);
  ASSERT_EQ(getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size), 0);
  const std::string taken = absl::StrCat("127.0.0.1:", ntohs(address.sin_port));
  ExpectRefusal({"--state", State(), "--metrics", taken}, taken);
  ExpectRefusal({"--state", State(), "--metrics", "off", "--tcp", taken, "--certificates", folder_}, taken);
  ExpectRefusal({"--state", State(), "--tcp", "0.0.0.0:7000"}, "mutual TLS");
  ExpectRefusal({"--state", State(), "--metrics", "192.0.2.1:9000"}, "192.0.2.1:9000");
  EXPECT_FALSE(Exists(State()));
  close(fd);
  std::ofstream(folder_ + "/file") << "x";
  ExpectRefusal({"--state", folder_ + "/file", "--metrics", "off"}, "is not a folder");
  ExpectRefusal({"--config", folder_ + "/missing.yaml"}, "missing.yaml");
}

TEST_F(HieradTest, ASecondOneOnTheFolderIsRefused) {
  Start();
  ExpectRefusal({"--state", State(), "--metrics", "off", "--agent", "none"}, absl::StrCat("process ", daemon_->pid()));
  EXPECT_NE(Submit("k"), 0u);   // the first does not mind
}

TEST_F(HieradTest, SaysItsVersion) {
  const CommandResult result = Run({"--version"});
  EXPECT_EQ(result.exit.code, 0);
  EXPECT_THAT(result.out, testing::MatchesRegex("[0-9]+\\.[0-9]+\\.[0-9]+ \\(.*\\)\n"));
}

TEST_F(HieradTest, EndsCleanlyOnASignal) {
  for (int signal : {SIGTERM, SIGINT, SIGHUP}) {
    Start();
    EXPECT_TRUE(End(signal).ok());
  }
}

// SIGHUP is a terminal that goes; another log level comes by SIGUSR1, and hierad goes on.
TEST_F(HieradTest, ReadsItsLogLevelAgain) {
  const std::string settings = folder_ + "/hierad.yaml", log = folder_ + "/hierad.log";
  const auto set = [&](const std::string& level) {
    std::ofstream(settings) << "log_level: " << level << "\nlog_file: " << log << "\nmetrics: off\nagent: none\nstate_folder: " << State() << "\n";
  };
  const auto said = [&](const std::string& words) {
    for (int i = 0; i < 1000; ++i) {
      if (const auto text = ReadFile(log, 1 << 20); text.ok() && text->find(words) != std::string::npos) return true;
      SleepFor(std::chrono::milliseconds(10));
    }
    return false;
  };
  set("info");
  auto started = Subprocess::Start({.argv = {Program(), "--config", settings}});
  ASSERT_TRUE(started.ok()) << started.status();
  daemon_ = std::make_unique<Subprocess>(*std::move(started));
  ASSERT_TRUE(said("listens on"));
  set("debug");
  kill(daemon_->pid(), SIGUSR1);
  EXPECT_TRUE(said("log level debug, as " + settings));
  set("loud");
  kill(daemon_->pid(), SIGUSR1);
  EXPECT_TRUE(said("the log level stays as it is: log_level: \"loud\" is none of"));
  EXPECT_TRUE(End(SIGTERM).ok());
}

TEST_F(HieradTest, AcknowledgedJobsSurviveKills) {
  std::map<std::string, uint64_t> acknowledged;
  for (int round = 0; round < 4; ++round) {
    Start();
    for (int i = 0; i < 5; ++i) {
      const std::string key = absl::StrCat("k", round, "-", i);
      const uint64_t id = Submit(key);
      ASSERT_NE(id, 0u);
      acknowledged[key] = id;
    }
    EXPECT_EQ(End(SIGKILL).signal, SIGKILL);
  }
  Start();
  for (const auto& [key, id] : acknowledged) EXPECT_EQ(Submit(key), id);
}

}  // namespace
}  // namespace hierad
