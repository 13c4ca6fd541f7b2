// The agent as it is installed (its own process, keepers, real workers), against an AgentService in this process.
#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <signal.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/fs.h"
#include "base/limits.h"
#include "gtest/gtest.h"
#include "hierad/v1/agent.grpc.pb.h"
#include "server/agent/process_tree.h"
#include "server/agent/rank_name.h"

extern char** environ;

namespace hierad {
namespace {

using std::chrono::seconds;
using std::chrono::steady_clock;

constexpr seconds kDeadline{20};

// Keeps the newest report and sends the newest orders, as hierad would.
class FakeHierad : public v1::AgentService::Service {
 public:
  explicit FakeHierad(const std::string& endpoint) : endpoint_(endpoint) { Start(); }
  ~FakeHierad() override { Stop(); }

  void Start() {
    stopping_ = false;
    grpc::ServerBuilder builder;
    builder.AddListeningPort(endpoint_, grpc::InsecureServerCredentials());
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    ASSERT_NE(server_, nullptr);
  }
  void Stop() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
      changed_.notify_all();
    }
    if (server_) server_->Shutdown(std::chrono::system_clock::now());
    server_.reset();
    std::lock_guard lock(mutex_);
    report_.reset();
  }

  void Order(const std::function<void(v1::AgentOrders*)>& change) {
    std::lock_guard lock(mutex_);
    change(&orders_);
    orders_.set_sequence(orders_.sequence() + 1);
    changed_.notify_all();
  }

  // The first report from now on that satisfies `wanted`.
  std::optional<v1::AgentReport> WaitFor(const std::function<bool(const v1::AgentReport&)>& wanted,
                                         seconds deadline = kDeadline) {
    std::unique_lock lock(mutex_);
    const bool found = changed_.wait_for(lock, deadline, [&] { return report_ && wanted(*report_); });
    return found ? report_ : std::nullopt;
  }
  // Reports received so far.
  int count() {
    std::lock_guard lock(mutex_);
    return count_;
  }

 private:
  grpc::Status Session(grpc::ServerContext* context,
                       grpc::ServerReaderWriter<v1::AgentOrders, v1::AgentReport>* stream) override {
    std::thread writer([&] {
      uint64_t sent = 0;
      std::unique_lock lock(mutex_);
      while (!stopping_ && !context->IsCancelled()) {
        if (orders_.sequence() > sent) {
          const v1::AgentOrders orders = orders_;
          sent = orders.sequence();
          lock.unlock();
          stream->Write(orders);
          lock.lock();
        }
        changed_.wait_for(lock, std::chrono::milliseconds(100));
      }
      context->TryCancel();
    });
    v1::AgentReport report;
    while (stream->Read(&report)) {
      std::lock_guard lock(mutex_);
      report_ = report;
      ++count_;
      changed_.notify_all();
    }
    context->TryCancel();
    writer.join();
    return grpc::Status::OK;
  }

  const std::string endpoint_;
  std::unique_ptr<grpc::Server> server_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<v1::AgentReport> report_;
  v1::AgentOrders orders_;
  int count_ = 0;
  bool stopping_ = false;
};

bool Alive(pid_t pid) {
  // A zombie that nobody has collected is dead for our purpose.
  const absl::StatusOr<std::string> stat = ReadFile("/proc/" + std::to_string(pid) + "/stat", 4096);
  return stat.ok() && stat->find(") Z ") == std::string::npos;
}

bool Eventually(const std::function<bool()>& condition, seconds deadline = kDeadline) {
  const auto end = steady_clock::now() + deadline;
  while (!condition()) {
    if (steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return true;
}

class AgentTest : public testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/hierad-agent-XXXXXX";
    folder_ = mkdtemp(name);
    endpoint_ = "unix:" + Path("h.sock");
    hierad_ = std::make_unique<FakeHierad>(endpoint_);
    hierad_->Order([](v1::AgentOrders* orders) { orders->set_grace_ms(300); });
  }
  void TearDown() override {
    if (agent_ > 0) {
      kill(agent_, SIGKILL);
      waitpid(agent_, nullptr, 0);
    }
    EXPECT_TRUE(Eventually([this] { return Survivors().empty(); })) << "processes outlived the agent";
    hierad_.reset();
    EXPECT_TRUE(RemoveTree(folder_).ok());
  }

  std::string Path(const std::string& name) const { return JoinPath(folder_, name); }
  void Write(const std::string& name, const std::string& text) {
    ASSERT_TRUE(WriteFileAtomic(Path(name), text, 0755).ok());
  }
  std::string Read(const std::string& name) const { return ReadFile(Path(name), 1 << 20).value_or(""); }

  pid_t Spawn(std::vector<std::string> flags) {
    const char* bin = std::getenv("HIERAD_BIN_DIR");
    std::vector<std::string> words = {bin == nullptr ? "hierad-agent" : JoinPath(bin, "hierad-agent"), "--server",
                                      endpoint_, "--node", "here", "--state", Path("state"), "--gpus", "none",
                                      "--cpu-slots", "3", "--worker", Path("worker")};
    words.insert(words.end(), flags.begin(), flags.end());
    if (std::find(flags.begin(), flags.end(), "--root-ranks") == flags.end()) words.insert(words.end(), {"--root-ranks", "allow"});
    std::vector<char*> arguments;
    for (std::string& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 2, Path("agent.log").c_str(), O_WRONLY | O_CREAT | O_APPEND, 0644);
    pid_t pid = -1;
    EXPECT_EQ(posix_spawn(&pid, arguments[0], &actions, nullptr, arguments.data(), environ), 0) << arguments[0];
    posix_spawn_file_actions_destroy(&actions);
    return pid;
  }
  // A worker that runs the shell `script` in the run's folder.
  void StartAgent(const std::string& script, std::vector<std::string> flags = {}) {
    if (!script.empty()) Write("worker", "#!/bin/sh\n" + script + "\n");
    agent_ = Spawn(std::move(flags));
    ASSERT_TRUE(hierad_->WaitFor([](const v1::AgentReport& report) { return report.slots_size() > 0; })) << Read("agent.log");
  }
  int StopAgent(int signal_number) {
    int status = 0;
    kill(agent_, signal_number);
    waitpid(agent_, &status, 0);
    agent_ = -1;
    return status;
  }

  void Assign(int rank = 0) {
    hierad_->Order([&](v1::AgentOrders* orders) {
      v1::Assignment* assignment = orders->add_assignments();
      assignment->set_job_id(7);
      assignment->set_attempt(1);
      assignment->set_rank(rank);
      assignment->set_world_size(2);
      assignment->set_local_rank(rank);
      assignment->set_local_world_size(2);
      assignment->set_run_folder(Path("run"));
      assignment->set_credential("secret");
      assignment->set_user("root");
      assignment->mutable_slot()->set_id("cpu-" + std::to_string(rank));
      assignment->mutable_slot()->set_kind(v1::Slot::CPU);
      assignment->mutable_slot()->set_threads(5);
    });
  }
  void Unassign() {
    hierad_->Order([](v1::AgentOrders* orders) { orders->clear_assignments(); });
  }
  void Acknowledge() {
    hierad_->Order([](v1::AgentOrders* orders) {
      v1::RankId* id = orders->add_acknowledged();
      id->set_job_id(7);
      id->set_attempt(1);
    });
  }
  static const v1::RankProcess* Rank(const v1::AgentReport& report, int rank) {
    for (const v1::RankProcess& process : report.processes()) {
      if (process.rank() == rank) return &process;
    }
    return nullptr;
  }
  // Waits until rank 0 runs; its pid.
  pid_t Running(int rank = 0) {
    pid_t pid = 0;
    EXPECT_TRUE(hierad_->WaitFor([&](const v1::AgentReport& report) {
      const v1::RankProcess* process = Rank(report, rank);
      pid = process == nullptr || process->ended() ? 0 : process->pid();
      return pid > 0;
    })) << Read("agent.log");
    return pid;
  }
  v1::RankProcess Ended(int rank = 0) {
    v1::RankProcess ended;
    EXPECT_TRUE(hierad_->WaitFor([&](const v1::AgentReport& report) {
      const v1::RankProcess* process = Rank(report, rank);
      if (process != nullptr) ended = *process;
      return process != nullptr && process->ended();
    })) << Read("agent.log");
    return ended;
  }
  // A number that a script writes to a file of the run's folder.
  pid_t PidIn(const std::string& file) {
    EXPECT_TRUE(Eventually([&] { return Read("run/" + file).find('\n') != std::string::npos; })) << file;
    return std::atoi(Read("run/" + file).c_str());
  }
  // Of this agent's ranks, or of one.
  std::vector<pid_t> Survivors(const std::string& rank = "") const {
    const std::string id = Read("state/agent.id");
    return ProcessesByEnvironment(kRankVariable, [&](std::string_view value) {
      return value.ends_with("." + id) && value.starts_with(rank);
    });
  }

  std::string folder_, endpoint_;
  std::unique_ptr<FakeHierad> hierad_;
  pid_t agent_ = -1;
};

// Starts a process that hides in every way a process can: forked twice, its own session, no environment, deaf to TERM.
constexpr char kHide[] =
    "(setsid env -i /bin/sh -c 'trap \"\" TERM HUP INT; echo $$ > hidden.tmp; mv hidden.tmp hidden; "
    "while :; do sleep 1; done' &)\n";
constexpr char kStay[] = "while :; do sleep 1; done";

TEST_F(AgentTest, TellsItsSlotsAndSpeaksEverySecond) {
  StartAgent("exit 0");
  const auto report = hierad_->WaitFor([](const v1::AgentReport& r) { return r.orders_seen() == 1; });
  ASSERT_TRUE(report);
  EXPECT_EQ(report->node(), "here");
  EXPECT_FALSE(report->instance().empty());
  EXPECT_EQ(report->slots_size(), 3);
  EXPECT_EQ(report->processes_size(), 0);
  const int before = hierad_->count();
  const auto start = steady_clock::now();
  EXPECT_TRUE(Eventually([&] { return hierad_->count() >= before + 3; }, seconds(4)));
  EXPECT_GT(steady_clock::now() - start, seconds(1)) << "nothing changes: it need not shout";
}

TEST_F(AgentTest, RankGetsItsAssignmentItsEnvironmentAndItsLog) {
  StartAgent("env > env.txt; cat <&3 > assignment; echo \"$@\" > arguments; echo to stdout; echo to stderr >&2");
  Assign();
  const v1::RankProcess ended = Ended();
  EXPECT_EQ(ended.reason(), v1::REASON_COMPLETED);
  EXPECT_EQ(ended.exit_code(), 0);
  EXPECT_EQ(ended.slot_id(), "cpu-0");
  EXPECT_EQ(ended.last_words(), "to stdout\nto stderr\n");
  v1::Assignment assignment;
  ASSERT_TRUE(assignment.ParseFromString(Read("run/assignment")));
  EXPECT_EQ(assignment.credential(), "secret");
  EXPECT_EQ(assignment.endpoint(), endpoint_);          // what the agent itself dials
  EXPECT_EQ(assignment.node_address(), "127.0.0.1");
  EXPECT_EQ(Read("run/arguments"), "run --assignment-fd 3\n");
  const std::string environment = Read("run/env.txt");
  for (const char* line : {"RANK=0\n", "LOCAL_RANK=0\n", "WORLD_SIZE=2\n", "LOCAL_WORLD_SIZE=2\n",
                           "CUDA_VISIBLE_DEVICES=\n", "OMP_NUM_THREADS=5\n", "HIERAD_ATTEMPT=7.1.0."}) {
    EXPECT_NE(environment.find(line), std::string::npos) << line << environment;
  }
  const std::string log = Read("run/rank-0.log");
  EXPECT_EQ(log.rfind("---- job 7, attempt 1, rank 0, cpu-0, ", 0), 0u) << log;
  EXPECT_TRUE(log.ends_with("to stdout\nto stderr\n")) << log;
}

// What was written before is beside it once, and the rank goes on writing into the same, emptied file.
TEST_F(AgentTest, TheLogOfARankIsRotatedOnce) {
  StartAgent("echo early; until [ -e go ]; do sleep 0.02; done; echo late; " + std::string(kStay));
  Assign();
  Running();
  ASSERT_TRUE(Eventually([this] { return Read("run/rank-0.log").ends_with("early\n"); }));
  std::error_code error;
  std::filesystem::resize_file(Path("run/rank-0.log"), uint64_t(limits::kLogFileBytes) + 1, error);   // a hole takes no room
  ASSERT_FALSE(error) << error.message();
  const std::string head = "---- job 7, attempt 1, rank 0, cpu-0, ";
  const auto begun_anew = [&](const std::string& end) {
    const std::string log = Read("run/rank-0.log");
    return log.rfind(head, 0) == 0 && log.ends_with(end) && log.find('\0') == std::string::npos;
  };
  ASSERT_TRUE(Eventually([&] { return begun_anew(", continued\n"); })) << "the log says whose it is";
  EXPECT_EQ(std::filesystem::file_size(Path("run/rank-0.log.1")), uint64_t(limits::kLogFileBytes) + 1);
  Write("run/go", "");
  EXPECT_TRUE(Eventually([&] { return begun_anew(", continued\nlate\n"); })) << Read("run/rank-0.log");
}

// What a job's user may put where the log comes: a pipe without a reader, a link, a folder. The keeper neither waits for it nor follows it.
TEST_F(AgentTest, WhatStandsInPlaceOfALogIsRefused) {
  ASSERT_TRUE(MakeFolders(Path("run/rank-2.log")).ok());
  ASSERT_EQ(mkfifo(Path("run/rank-0.log").c_str(), 0600), 0);
  ASSERT_EQ(symlink(Path("victim").c_str(), Path("run/rank-1.log").c_str()), 0);
  StartAgent("exit 0");
  for (int rank = 0; rank < 3; ++rank) {
    Assign(rank);
    const v1::RankProcess ended = Ended(rank);
    EXPECT_EQ(ended.reason(), v1::REASON_USER_ERROR);
    for (const char* words : {"output.folder: cannot write the log", ".log\" is not a file", "remove it"}) {
      EXPECT_NE(ended.last_words().find(words), std::string::npos) << ended.last_words();
    }
  }
  EXPECT_FALSE(Exists(Path("victim")));
}

TEST_F(AgentTest, WhatStandsInPlaceOfTheOldLogIsReplaced) {
  ASSERT_TRUE(MakeFolders(Path("run")).ok());
  Write("victim", "kept");
  ASSERT_EQ(mkfifo(Path("run/rank-0.log.1").c_str(), 0600), 0);
  ASSERT_EQ(symlink(Path("victim").c_str(), Path("run/rank-1.log.1").c_str()), 0);
  StartAgent("head -c 5000 /dev/zero | tr '\\0' x; " + std::string(kStay), {"--log-bytes", "4096"});
  for (int rank = 0; rank < 2; ++rank) {
    Assign(rank);
    Running(rank);
    const std::string old = "run/rank-" + std::to_string(rank) + ".log.1";
    EXPECT_TRUE(Eventually([&] {
      struct stat info {};
      return lstat(Path(old).c_str(), &info) == 0 && S_ISREG(info.st_mode) && Read(old).ends_with("xxx");
    })) << old;
  }
  EXPECT_EQ(Read("victim"), "kept");
}

// The folder's owner renames it and puts a link in its place, while the rank runs: its old log goes to the folder that it had.
TEST_F(AgentTest, TheRunFolderIsTheOneThatWasMade) {
  ASSERT_TRUE(MakeFolders(Path("elsewhere")).ok());
  StartAgent("until [ -e go ]; do sleep 0.02; done; head -c 5000 /dev/zero | tr '\\0' x; " + std::string(kStay), {"--log-bytes", "4096"});
  Assign();
  Running();
  ASSERT_EQ(rename(Path("run").c_str(), Path("away").c_str()), 0);
  ASSERT_EQ(symlink("elsewhere", Path("run").c_str()), 0);
  Write("away/go", "");
  EXPECT_TRUE(Eventually([this] { return Read("away/rank-0.log.1").ends_with("xxx"); })) << Read("agent.log");
  EXPECT_TRUE(ListFolder(Path("elsewhere"))->empty());
}

// A rank may give its log any size, with nothing in it: it is not copied, however large the disk.
TEST_F(AgentTest, ALogThatIsAllHoleIsEmptied) {
  StartAgent("truncate -s 5G rank-0.log; " + std::string(kStay));
  Assign();
  Running();
  EXPECT_TRUE(Eventually([this] { return Read("run/rank-0.log").find("this log had 5368709120 bytes") != std::string::npos; }, seconds(6))) << Read("agent.log");
  EXPECT_FALSE(Exists(Path("run/rank-0.log.1")));
  StopAgent(SIGTERM);
  agent_ = Spawn({"--log-bytes", std::to_string(limits::kLogFileMost + 1)});
  int status = 0;
  EXPECT_EQ(waitpid(agent_, &status, 0), agent_);
  agent_ = -1;
  EXPECT_NE(status, 0);
  EXPECT_NE(Read("agent.log").find("--log-bytes"), std::string::npos);
  StartAgent("");   // takes its rank back, and ends it
  Unassign();
  Ended();
}

TEST_F(AgentTest, RankOfAnotherAccountHasItsRightsOnly) {
  if (geteuid() != 0) {
    std::fprintf(stderr, "not run here, for want of root: ranks of another account\n");
    return;
  }
  ASSERT_EQ(chmod(folder_.c_str(), 0755), 0);
  ASSERT_TRUE(MakeFolders(Path("run")).ok());
  ASSERT_EQ(chmod(Path("run").c_str(), 0777), 0);
  StartAgent("id -u > who; grep -E '^(CapEff|CapBnd|NoNewPrivs)' /proc/self/status >> who; cat " + Path("state/agent.id") +
                 " 2>&1 >> who | grep -c denied >> who; echo $USER >> who; kill -0 $PPID 2>/dev/null || echo alone >> who",
             {"--worker-user", "nobody"});
  Assign();
  const v1::RankProcess ended = Ended();
  EXPECT_EQ(ended.reason(), v1::REASON_COMPLETED) << ended.last_words();
  EXPECT_EQ(Read("run/who"), "65534\nCapEff:\t0000000000000000\nCapBnd:\t0000000000000000\nNoNewPrivs:\t1\n1\nnobody\nalone\n");
  struct stat info {};
  ASSERT_EQ(stat(Path("run/rank-0.log").c_str(), &info), 0);
  EXPECT_EQ(info.st_uid, 65534u);
}

TEST_F(AgentTest, RankOfAnotherAccountIsEndedWithItsTree) {
  if (geteuid() != 0) return;   // said above
  ASSERT_EQ(chmod(folder_.c_str(), 0755), 0);
  ASSERT_TRUE(MakeFolders(Path("run")).ok());
  ASSERT_EQ(chmod(Path("run").c_str(), 0777), 0);
  StartAgent(std::string("trap '' TERM\n") + kHide + kStay, {"--worker-user", "nobody"});
  Assign();
  const pid_t pid = Running(), hidden = PidIn("hidden");
  Unassign();
  Ended();
  EXPECT_FALSE(Alive(pid));
  EXPECT_FALSE(Alive(hidden));
}

TEST_F(AgentTest, JobOfRootIsRefusedWhereRanksAreTheSubmitters) {
  if (geteuid() != 0) return;   // said above
  StartAgent("exit 0", {"--root-ranks", "refuse"});   // the submitters' also without --worker-user
  Assign();
  const v1::RankProcess ended = Ended();
  EXPECT_EQ(ended.reason(), v1::REASON_USER_ERROR);
  EXPECT_NE(ended.last_words().find("submitted by root"), std::string::npos) << ended.last_words();
}

TEST_F(AgentTest, ExitIsReportedUntilAcknowledgedEvenAcrossTheAgentsDeath) {
  StartAgent("echo bye; exit 7");
  Assign();
  EXPECT_EQ(Ended().exit_code(), 7);
  StopAgent(SIGKILL);
  hierad_->Stop();
  hierad_->Start();
  StartAgent("");
  const v1::RankProcess again = Ended();
  EXPECT_EQ(again.exit_code(), 7);
  EXPECT_EQ(again.last_words(), "bye\n");
  // Acknowledged while the assignment is still listed: it must not be started anew.
  Acknowledge();
  EXPECT_TRUE(hierad_->WaitFor([](const v1::AgentReport& r) { return r.orders_seen() == 3 && r.processes_size() == 0; }));
  const int before = hierad_->count();
  EXPECT_TRUE(Eventually([&] { return hierad_->count() > before + 1; }));
  EXPECT_TRUE(hierad_->WaitFor([](const v1::AgentReport& r) { return r.processes_size() == 0; }, seconds(0)));
  EXPECT_TRUE(ListFolder(Path("state/ranks"))->empty());
}

TEST_F(AgentTest, WholeTreeIsGoneAfterTheGrace) {
  StartAgent(std::string("trap '' TERM\n") + kHide + "sleep 1000 &\n" + kStay);
  Assign();
  const pid_t pid = Running(), hidden = PidIn("hidden");
  Unassign();
  const v1::RankProcess ended = Ended();
  EXPECT_EQ(ended.signal(), SIGKILL);
  EXPECT_EQ(ended.reason(), v1::REASON_UNSPECIFIED) << "on orders: no fault of the rank";
  EXPECT_FALSE(Alive(pid));
  EXPECT_FALSE(Alive(hidden));
  EXPECT_TRUE(Eventually([&] { return Survivors().empty(); })) << "its keeper";
}

TEST_F(AgentTest, TermIsEnoughForAWellBehavedRank) {
  hierad_->Order([](v1::AgentOrders* orders) { orders->set_grace_ms(3'600'000); });
  StartAgent(std::string("trap 'echo saved; exit 5' TERM\necho up > up\n") + kStay);
  Assign();
  Running();
  EXPECT_TRUE(Eventually([&] { return Exists(Path("run/up")); }));
  Unassign();
  const v1::RankProcess ended = Ended();
  EXPECT_EQ(ended.exit_code(), 5);
  EXPECT_TRUE(ended.last_words().ends_with("saved\n")) << ended.last_words();
}

TEST_F(AgentTest, KillNowWaitsForNoGrace) {
  hierad_->Order([](v1::AgentOrders* orders) { orders->set_grace_ms(3'600'000); });
  StartAgent(std::string("trap '' TERM\n") + kStay);
  Assign();
  Running();
  hierad_->Order([](v1::AgentOrders* orders) {
    orders->clear_assignments();
    v1::RankId* id = orders->add_kill_now();
    id->set_job_id(7);
    id->set_attempt(1);
  });
  EXPECT_EQ(Ended().signal(), SIGKILL);
}

TEST_F(AgentTest, WhatARankLeavesBehindDiesWithIt) {
  StartAgent(std::string(kHide) + "while [ ! -e hidden ]; do sleep 0.01; done; exit 3");
  Assign();
  EXPECT_EQ(Ended().exit_code(), 3);
  EXPECT_FALSE(Alive(PidIn("hidden")));
}

TEST_F(AgentTest, CrashIsClassified) {
  StartAgent("kill -SEGV $$");
  Assign();
  const v1::RankProcess ended = Ended();
  EXPECT_EQ(ended.signal(), SIGSEGV);
  EXPECT_EQ(ended.reason(), v1::REASON_CRASHED);
}

TEST_F(AgentTest, MissingWorkerIsASentence) {
  StartAgent("");
  Assign();
  const v1::RankProcess ended = Ended();
  EXPECT_EQ(ended.exit_code(), 127);
  EXPECT_EQ(ended.reason(), v1::REASON_INTERNAL);
  EXPECT_NE(ended.last_words().find("/worker\": No such file or directory"), std::string::npos) << ended.last_words();
}

TEST_F(AgentTest, RunFolderThatCannotBeMadeIsTheUsersError) {
  Write("run", "a file, no folder");
  StartAgent("exit 0");
  Assign();
  const v1::RankProcess ended = Ended();
  EXPECT_EQ(ended.reason(), v1::REASON_USER_ERROR);
  EXPECT_NE(ended.last_words().find(Path("run")), std::string::npos) << ended.last_words();
}

TEST_F(AgentTest, RanksGoOnWhileHieradIsAway) {
  StartAgent(kStay);
  Assign(0);
  Assign(1);
  const pid_t first = Running(0), second = Running(1);
  hierad_->Stop();
  hierad_->Start();
  EXPECT_EQ(Running(0), first);
  EXPECT_EQ(Running(1), second);
  EXPECT_TRUE(Alive(first) && Alive(second));
}

TEST_F(AgentTest, KilledAgentLeavesNoProcessAndTheNextOneTells) {
  StartAgent(std::string("trap '' TERM\n") + kHide + kStay);
  Assign();
  const pid_t pid = Running(), hidden = PidIn("hidden");
  StopAgent(SIGKILL);
  EXPECT_TRUE(Eventually([&] { return Survivors().empty() && !Alive(pid) && !Alive(hidden); }));
  hierad_->Stop();
  hierad_->Start();
  StartAgent("");
  const v1::RankProcess ended = Ended();
  EXPECT_EQ(ended.reason(), v1::REASON_NODE_LOST);
  EXPECT_EQ(ended.signal(), SIGKILL);
}

TEST_F(AgentTest, RestartedAgentAdoptsItsRanksAndTheirExits) {
  StartAgent(std::string("if [ $RANK = 0 ]; then while [ ! -e go ]; do sleep 0.05; done; exit 9; fi\n") +
             "while [ ! -e early ]; do sleep 0.05; done; exit 4");
  Assign(0);
  Assign(1);
  const pid_t first = Running(0);
  Running(1);
  EXPECT_EQ(StopAgent(SIGTERM), 0);
  EXPECT_TRUE(Alive(first));
  // Rank 1 ends while there is no agent at all.
  Write("run/early", "");
  EXPECT_TRUE(Eventually([&] { return Exists(Path("state/ranks/7.1.1.exit")); }));
  hierad_->Stop();
  hierad_->Start();
  StartAgent("");
  EXPECT_EQ(Running(0), first);
  EXPECT_EQ(Ended(1).exit_code(), 4);
  Write("run/go", "");
  EXPECT_EQ(Ended(0).exit_code(), 9);
}

TEST_F(AgentTest, AdoptedRankObeysAndDiesWithItsNewAgent) {
  StartAgent(std::string("trap '' TERM\n") + kStay);
  Assign();
  const pid_t pid = Running();
  EXPECT_EQ(StopAgent(SIGTERM), 0);
  hierad_->Stop();
  hierad_->Start();
  StartAgent("");
  EXPECT_EQ(Running(), pid);
  StopAgent(SIGKILL);
  EXPECT_TRUE(Eventually([&] { return !Alive(pid); }));
}

TEST_F(AgentTest, SessionLifetimeEndsTheRanksFirst) {
  StartAgent(std::string("trap '' TERM\n") + kHide + kStay, {"--lifetime", "session"});
  Assign();
  const pid_t pid = Running(), hidden = PidIn("hidden");
  EXPECT_EQ(StopAgent(SIGTERM), 0);
  EXPECT_FALSE(Alive(pid));
  EXPECT_FALSE(Alive(hidden));
}

TEST_F(AgentTest, KilledKeeperEndsItsRank) {
  StartAgent(std::string("(setsid sleep 1000 &)\n") + kStay);
  Assign(0);
  Assign(1);
  const pid_t first = Running(0), second = Running(1);
  const std::string stat = *ReadFile("/proc/" + std::to_string(first) + "/stat", 4096);
  kill(std::atoi(stat.c_str() + stat.rfind(')') + 4), SIGKILL);
  const v1::RankProcess ended = Ended(0);
  EXPECT_EQ(ended.reason(), v1::REASON_CRASHED);
  EXPECT_FALSE(Alive(first));
  EXPECT_TRUE(Alive(second));
  EXPECT_TRUE(Survivors("7.1.0.").empty());
}

TEST_F(AgentTest, LeftRanksEndWhenTheStateFolderIsRemoved) {
  StartAgent(kStay);
  Assign();
  const pid_t pid = Running();
  EXPECT_EQ(StopAgent(SIGTERM), 0);
  ASSERT_TRUE(RemoveTree(Path("state/ranks")).ok());
  EXPECT_TRUE(Eventually([&] { return !Alive(pid); }));
}

TEST_F(AgentTest, SecondAgentOfAStateFolderIsRefused) {
  StartAgent("exit 0");
  int status = 0;
  const std::string before = Read("agent.log");
  waitpid(Spawn({}), &status, 0);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 1);
  const std::string said = Read("agent.log").substr(before.size());
  EXPECT_NE(said.find("is in use by another agent (process " + std::to_string(agent_) + ")"), std::string::npos) << said;
}

}  // namespace
}  // namespace hierad
