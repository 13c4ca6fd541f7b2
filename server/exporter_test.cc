#include "server/exporter.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmath>
#include <map>
#include <regex>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "base/text.h"

namespace hierad {
namespace {

using testing::HasSubstr;

Overview OneJob(const std::string& name) {
  Overview overview;
  overview.jobs_by_state = {{v1::RUNNING, 1}, {v1::FAILED, 3}};
  overview.slots_busy = 2;
  v1::Job& job = overview.live.emplace_back();
  job.set_id(7);
  job.mutable_spec()->set_name(name);
  job.set_submitter("me");
  job.set_state(v1::RUNNING);
  job.set_attempt(2);
  job.set_step(41);
  job.mutable_last()->set_loss(0.25);
  job.mutable_last()->set_grad_norm(1.5);
  job.mutable_last()->set_lr(1e-4);
  job.set_samples_per_s(99.5);
  return overview;
}

std::string Scrape(int port) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  const std::string request = "GET /metrics HTTP/1.0\r\n\r\n";
  EXPECT_EQ(write(fd, request.data(), request.size()), static_cast<ssize_t>(request.size()));
  std::string all;
  char buffer[4096];
  for (ssize_t got; (got = read(fd, buffer, sizeof(buffer))) > 0;) all.append(buffer, static_cast<size_t>(got));
  close(fd);
  return all.substr(all.find("\r\n\r\n") + 4);
}

// Reads the text format, strictly: every line a comment or a sample whose labels are quoted right. Returns the samples,
// labels unescaped.
using Samples = std::multimap<std::string, std::pair<std::map<std::string, std::string>, std::string>>;
Samples Parse(const std::string& text) {
  static const std::regex line_form(R"re(([a-zA-Z_:][a-zA-Z0-9_:]*)(\{(.*)\})? (\S+))re");
  static const std::regex label_form(R"re(([a-zA-Z_]\w*)="((?:[^"\\\n]|\\["\\n])*)"(,|$))re");
  Samples samples;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    EXPECT_TRUE(IsUtf8(line)) << Printable(line);
    if (line.empty() || line[0] == '#') continue;
    std::smatch match;
    if (!std::regex_match(line, match, line_form)) {
      ADD_FAILURE() << "no sample: " << line;
      continue;
    }
    std::map<std::string, std::string> labels;
    std::string rest = match[3];
    for (std::smatch label; !rest.empty();) {
      if (!std::regex_search(rest, label, label_form, std::regex_constants::match_continuous)) {
        ADD_FAILURE() << "no label: " << rest;
        break;
      }
      std::string value;
      const std::string raw = label[2];
      for (size_t i = 0; i < raw.size(); ++i) value += raw[i] == '\\' ? (raw[++i] == 'n' ? '\n' : raw[i]) : raw[i];
      labels[label[1]] = value;
      rest = label.suffix();
    }
    samples.emplace(match[1], std::make_pair(labels, match[4]));
  }
  return samples;
}

class ExporterTest : public testing::Test {
 protected:
  ExporterTest() {
    auto exporter = Exporter::Listen("127.0.0.1:0");
    EXPECT_TRUE(exporter.ok()) << exporter.status();
    exporter_ = *std::move(exporter);
    exporter_->Serve([this] { return overview_; }, "1.0", "abc");
  }
  Samples Get() { return Parse(Scrape(exporter_->port())); }
  static double Value(const Samples& samples, const std::string& name) {
    const auto found = samples.find(name);
    return found == samples.end() ? -1 : std::stod(found->second.second);
  }
  absl::StatusOr<Overview> overview_ = Overview();
  std::unique_ptr<Exporter> exporter_;
};

TEST_F(ExporterTest, ShowsAJob) {
  overview_ = OneJob("my-job");
  const Samples samples = Get();
  EXPECT_EQ(Value(samples, "hierad_job_step"), 41);
  EXPECT_EQ(Value(samples, "hierad_job_loss"), 0.25);
  EXPECT_EQ(Value(samples, "hierad_job_grad_norm"), 1.5);
  EXPECT_EQ(Value(samples, "hierad_job_learning_rate"), 1e-4);
  EXPECT_EQ(Value(samples, "hierad_job_samples_per_second"), 99.5);
  EXPECT_EQ(Value(samples, "hierad_job_attempts_total"), 2);
  EXPECT_EQ(Value(samples, "hierad_build_info"), 1);
  EXPECT_GT(Value(samples, "process_resident_memory_bytes"), 1e6);
  EXPECT_EQ(samples.find("hierad_job_info")->second.first.at("name"), "my-job");
  EXPECT_EQ(samples.find("hierad_job_info")->second.first.at("state"), "running");
  EXPECT_EQ(samples.count("hierad_jobs"), 8u);   // one a state, zeros included
}

TEST_F(ExporterTest, HostileNamesHurtNobody) {
  const std::string cases[][2] = {
      {"quote\"d", "quote\"d"},
      {"back\\slash", "back\\slash"},
      {"new\nline", "new\nline"},
      {"bad\xff" "byte", "bad\xEF\xBF\xBD" "byte"},
      {"\"} 1\nhierad_job_step{job_id=\"7\"} 666", "\"} 1\nhierad_job_step{job_id=\"7\"} 666"},
      {"cut \xE2\x82", "cut \xEF\xBF\xBD\xEF\xBF\xBD"},
      {std::string(2000, 'x'), std::string(128, 'x')},
  };
  for (const auto& [name, shown] : cases) {
    overview_ = OneJob(name);
    const Samples samples = Get();
    ASSERT_EQ(samples.count("hierad_job_info"), 1u) << name;
    EXPECT_EQ(samples.find("hierad_job_info")->second.first.at("name"), shown);
    EXPECT_EQ(Value(samples, "hierad_job_step"), 41);
  }
}

TEST_F(ExporterTest, CutsBetweenCharacters) {
  std::string name;
  for (int i = 0; i < 100; ++i) name += "\xE2\x82\xAC";   // three bytes each
  EXPECT_EQ(CleanLabel(name).size(), 126u);
  EXPECT_TRUE(IsUtf8(CleanLabel(name)));
}

TEST_F(ExporterTest, SeriesLeaveWithTheJob) {
  overview_ = OneJob("a");
  EXPECT_EQ(Get().count("hierad_job_step"), 1u);
  overview_ = Overview();
  const Samples samples = Get();
  for (const auto& [name, sample] : samples) EXPECT_EQ(sample.first.count("job_id"), 0u) << name;
}

TEST_F(ExporterTest, NonFiniteValuesParse) {
  Overview overview = OneJob("a");
  overview.live[0].mutable_last()->set_loss(std::nan(""));
  overview.live[0].mutable_last()->set_grad_norm(INFINITY);
  overview_ = overview;
  const Samples samples = Get();
  EXPECT_EQ(samples.find("hierad_job_loss")->second.second, "Nan");
  EXPECT_EQ(samples.find("hierad_job_grad_norm")->second.second, "+Inf");
}

TEST_F(ExporterTest, ABusyOrForeignAddressIsOneSentence) {
  const std::string address = absl::StrCat("127.0.0.1:", exporter_->port());
  const absl::Status busy = Exporter::Listen(address).status();
  EXPECT_EQ(busy.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(busy.message()), testing::AllOf(HasSubstr(address), HasSubstr("in use")));
  EXPECT_THAT(std::string(Exporter::Listen("192.0.2.1:9464").status().message()), HasSubstr("192.0.2.1"));
  EXPECT_FALSE(Exporter::Listen("nonsense").ok());
  EXPECT_FALSE(Exporter::Listen("127.0.0.1:99999").ok());
}

}  // namespace
}  // namespace hierad
