#include "base/log_format.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>

#include <nlohmann/json.hpp>
#include <sstream>

namespace hierad {
namespace {

std::string Logged(std::unique_ptr<LogLine> line, const std::string& message) {
  std::ostringstream out;
  spdlog::logger logger("test", std::make_shared<spdlog::sinks::ostream_sink_mt>(out));
  logger.set_formatter(std::move(line));
  logger.warn("{}", message);
  return out.str();
}

TEST(LogLines, NameTimeLevelJobAndRank) {
  EXPECT_THAT(Logged(std::make_unique<LogLine>("hiera-worker", LogLine::Fields{{"job", 7}, {"attempt", 1}, {"rank", 0}}, false), "late"),
              testing::MatchesRegex("20[0-9-]+T[0-9:]+[.][0-9]+Z warning job=7 attempt=1 rank=0: late\n"));
}

TEST(LogLines, AreJsonWhateverTheyHold) {
  const std::string hostile = std::string("a \"quote\" \\ \n \x01 \xff \xC3\xA9") + '\0' + "end";
  const auto json = nlohmann::json::parse(Logged(std::make_unique<LogLine>("w", LogLine::Fields{{"job", 7}, {"rank", 3}}, true), hostile));
  EXPECT_EQ(json["job"], 7);
  EXPECT_EQ(json["rank"], 3);
  EXPECT_EQ(json["level"], "warning");
  EXPECT_EQ(json["message"], std::string("a \"quote\" \\ \n \x01 \xEF\xBF\xBD \xC3\xA9") + '\0' + "end");
}

TEST(LogLines, OfHieradOnAJobSayWhich) {
  EXPECT_EQ(nlohmann::json::parse(Logged(std::make_unique<LogLine>("hierad", LogLine::Fields{}, true), "job 42 (eeg): QUEUED -> STARTING"))["job"], 42);
  EXPECT_FALSE(nlohmann::json::parse(Logged(std::make_unique<LogLine>("hierad", LogLine::Fields{}, true), "node n1 is back")).contains("job"));
}

}  // namespace
}  // namespace hierad
