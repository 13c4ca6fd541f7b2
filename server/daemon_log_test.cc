// hierad's own log: moved aside when it is full, capped, nothing lost at the border; its level is read again.
#include "server/daemon_log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"

namespace hierad {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

class DaemonLogTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string path = testing::TempDir() + "/daemon_log_XXXXXX";
    folder_ = mkdtemp(path.data());
    config_.log_file = folder_ + "/hierad.log";
  }
  void TearDown() override {
    spdlog::set_default_logger(before_);
    spdlog::set_level(spdlog::level::info);
    std::filesystem::remove_all(folder_);
  }
  // Names in the folder, sorted.
  std::vector<std::string> Files() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder_)) names.push_back(entry.path().filename());
    std::sort(names.begin(), names.end());
    return names;
  }
  std::vector<std::string> Lines(const std::string& name) const {
    std::ifstream in(folder_ + "/" + name);
    std::vector<std::string> lines;
    for (std::string line; std::getline(in, line);) lines.push_back(line);
    return lines;
  }
  // From the oldest to the newest.
  std::vector<std::string> AllLines(int older) const {
    std::vector<std::string> all;
    for (int i = older; i >= 0; --i) {
      for (const std::string& line : Lines(i == 0 ? "hierad.log" : absl::StrCat("hierad.", i, ".log"))) all.push_back(line);
    }
    return all;
  }

  std::string folder_;
  ServerConfig config_;
  const std::shared_ptr<spdlog::logger> before_ = spdlog::default_logger();
};

TEST_F(DaemonLogTest, IsMovedAsideWhenFullAndLosesNothingAtTheBorder) {
  SetUpDaemonLog(config_, {.bytes = 4096, .older = 4});
  constexpr int kThreads = 4, kEach = 50;   // some 55 bytes a line: three files
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([t] {
      for (int i = 0; i < kEach; ++i) spdlog::info("thread {} line {}", t, i);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_THAT(Files(), ElementsAre("hierad.1.log", "hierad.2.log", "hierad.log"));
  // Each line once, whole, and those of a thread in their order.
  std::map<int, int> next;
  for (const std::string& line : AllLines(2)) {
    int thread = -1, number = -1;
    ASSERT_EQ(std::sscanf(line.c_str(), "%*s info: thread %d line %d", &thread, &number), 2) << line;
    EXPECT_EQ(number, next[thread]++) << line;
  }
  for (int t = 0; t < kThreads; ++t) EXPECT_EQ(next[t], kEach) << "thread " << t;
}

TEST_F(DaemonLogTest, KeepsItsCapOverRestartsAndTheNewestLines) {
  constexpr size_t kBytes = 2048;
  int written = 0;
  for (int restart = 0; restart < 3; ++restart) {
    SetUpDaemonLog(config_, {.bytes = kBytes, .older = 2});
    for (int i = 0; i < 150; ++i) spdlog::info("line {}", written++);
    EXPECT_THAT(Files(), ElementsAre("hierad.1.log", "hierad.2.log", "hierad.log"));
    for (const std::string& name : Files()) EXPECT_LE(std::filesystem::file_size(folder_ + "/" + name), kBytes) << name;
  }
  const std::vector<std::string> lines = AllLines(2);
  ASSERT_GT(lines.size(), 2 * kBytes / 60);   // two full files at least
  for (size_t i = 0; i < lines.size(); ++i) {
    EXPECT_THAT(lines[i], testing::EndsWith(absl::StrCat(": line ", written - int(lines.size()) + int(i)))) << "no gap up to the newest";
  }
}

TEST_F(DaemonLogTest, AFileThatCannotBeOpenedIsNoReasonToBeSilent) {
  config_.log_file = folder_ + "/file/hierad.log";
  std::ofstream(folder_ + "/file") << "no folder";
  testing::internal::CaptureStderr();
  SetUpDaemonLog(config_);
  spdlog::warn("still heard");
  EXPECT_THAT(testing::internal::GetCapturedStderr(), testing::AllOf(HasSubstr("hierad: log_file: "), HasSubstr("still heard")));
}

TEST_F(DaemonLogTest, TheLevelIsReadAgain) {
  SetUpDaemonLog(config_);
  const std::string settings = folder_ + "/hierad.yaml";
  std::ofstream(settings) << "log_level: debug\n";
  ASSERT_TRUE(ReloadLogLevel(settings).ok());
  EXPECT_EQ(spdlog::get_level(), spdlog::level::debug);
  std::ofstream(settings) << "log_level: error\n";
  ASSERT_TRUE(ReloadLogLevel(settings).ok());
  spdlog::info("not written");
  EXPECT_THAT(Lines("hierad.log"), ElementsAre(HasSubstr(" info: log level debug, as "), HasSubstr(" info: log level error, as ")));
  for (const char* wrong : {"log_level: loud\n", "log_level:\n  - info\n"}) {
    std::ofstream(settings) << wrong;
    EXPECT_FALSE(ReloadLogLevel(settings).ok()) << wrong;
    EXPECT_EQ(spdlog::get_level(), spdlog::level::err) << wrong;
  }
  EXPECT_FALSE(ReloadLogLevel(folder_ + "/missing.yaml").ok());
  EXPECT_THAT(std::string(ReloadLogLevel("").message()), HasSubstr("--config"));
}

}  // namespace
}  // namespace hierad
