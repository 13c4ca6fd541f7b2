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
#include "base/fs.h"
#include "base/job_yaml.h"
#include "base/plan/plan_report.h"
#include "base/text.h"
#include "server/metric_table.h"

namespace hierad {
namespace {

using testing::HasSubstr;

Overview OneJob(const std::string& name) {
  Overview overview;
  overview.jobs_by_state = {{v1::RUNNING, 1}, {v1::FAILED, 3}};
  overview.slots_busy = 2;
  overview.now_ms = 2'000'000;
  Overview::JobLook& look = overview.jobs.emplace_back();
  look.card = "NVIDIA H200";
  v1::Job& job = look.job;
  job.set_id(7);
  job.mutable_spec()->set_name(name);
  job.mutable_spec()->mutable_data()->set_source("synthetic");
  job.set_submitter("me");
  job.set_state(v1::RUNNING);
  job.set_attempt(2);
  job.set_step(41);
  job.mutable_last()->set_loss(0.25);
  job.mutable_last()->set_grad_norm(1.5);
  job.mutable_last()->set_lr(1e-4);
  job.mutable_last()->set_loss_scale(65536);
  job.set_samples_per_s(99.5);
  job.mutable_last()->set_step_s(0.5);
  job.mutable_last()->set_data_wait_s(0.125);
  job.mutable_last()->set_forward_s(0.125);
  job.mutable_last()->set_backward_s(0.125);
  FillDefaults(job.mutable_spec());
  v1::Restart* restart = job.add_restarts();
  restart->set_reason(v1::REASON_CUDA_OOM);
  restart->set_count(1);
  v1::RankView* rank = job.add_ranks();
  rank->set_last_seen_ms(1'999'000);
  rank->mutable_totals()->set_step_count(10);
  rank->mutable_totals()->set_step_s(5);
  rank->mutable_totals()->set_data_wait_s(1);
  rank->mutable_totals()->set_memory_bytes(1 << 30);
  rank->mutable_totals()->set_checkpoint_count(2);
  rank->mutable_totals()->set_checkpoint_s(0.75);
  rank->mutable_totals()->set_checkpoints_left_out(4);
  rank->mutable_data()->set_wait_s(1.25);
  rank->mutable_data()->set_bytes(int64_t{5} << 40);
  rank->mutable_data()->set_slowest_s(0.5);
  rank->mutable_data()->set_slowest("/data/secret name.jpg");
  rank->mutable_data()->set_skipped_samples(3);
  Overview::NodeLook& node = overview.nodes.emplace_back();
  node.name = "node-1";
  node.connected = true;
  node.slots[1][1] = 2;
  node.slots[1][3] = overview.slots_faulty = 1;
  overview.decisions.Add(std::chrono::microseconds(200));
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
    exporter_->Serve([this] { return overview_; }, {"1.0", "abc", "/", ""});
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
  EXPECT_EQ(Value(samples, "hierad_job_loss_scale"), 65536);
  EXPECT_EQ(Value(samples, "hierad_job_samples_per_second"), 99.5);
  EXPECT_EQ(Value(samples, "hierad_job_attempts_total"), 2);
  EXPECT_EQ(Value(samples, "hierad_build_info"), 1);
  EXPECT_GT(Value(samples, "process_resident_memory_bytes"), 1e6);
  EXPECT_EQ(samples.find("hierad_job_info")->second.first.at("name"), "my-job");
  EXPECT_EQ(samples.find("hierad_job_info")->second.first.at("state"), "running");
  EXPECT_EQ(samples.find("hierad_job_info")->second.first.at("data"), "synthetic");
  EXPECT_EQ(samples.count("hierad_jobs"), 8u);   // one a state, zeros included
  EXPECT_EQ(samples.find("hierad_job_restarts_total")->second.first.at("class"), "cuda_oom");
  EXPECT_EQ(Value(samples, "hierad_job_checkpoint_seconds"), 0.75);
  EXPECT_EQ(Value(samples, "hierad_job_checkpoints_left_out"), 4);
  EXPECT_EQ(Value(samples, "hierad_rank_report_age_seconds"), 1);
  EXPECT_EQ(Value(samples, "hierad_rank_memory_bytes"), 1 << 30);
  EXPECT_EQ(Value(samples, "hierad_rank_data_wait_seconds_total"), 1.25);
  EXPECT_EQ(Value(samples, "hierad_rank_data_bytes_total"), double(int64_t{5} << 40));
  EXPECT_EQ(Value(samples, "hierad_rank_data_slowest_seconds"), 0.5);
  EXPECT_EQ(Value(samples, "hierad_rank_skipped_samples_total"), 3);
  EXPECT_EQ(samples.count("hierad_decision_seconds_bucket"), Latency::kBounds.size() + 1);
  EXPECT_EQ(Value(samples, "hierad_decision_seconds_count"), 1);
  for (const auto& [name, among] : {std::pair("hierad_node_slots", 4u), std::pair("hierad_slots", 4u)}) {
    std::map<std::string, std::string> by_state;
    for (auto [at, end] = samples.equal_range(name); at != end; ++at) by_state[at->second.first.at("state")] = at->second.second;
    EXPECT_EQ(by_state.size(), among) << name;
    EXPECT_EQ(by_state["busy"] + by_state["faulty"] + by_state["free"] + by_state["lost"], "2100") << name;
  }
  EXPECT_GT(Value(samples, "hierad_disk_free_bytes"), 0);
  // The parts of a step are the step.
  double parts = 0;
  for (auto [at, end] = samples.equal_range("hierad_job_phase_seconds"); at != end; ++at) parts += std::stod(at->second.second);
  EXPECT_DOUBLE_EQ(parts, 0.5);
  // Arithmetic by hand: the plan's operations in half a second, over what the card reaches.
  const double flops = Value(samples, "hierad_job_step_flops"), floor = Value(samples, "hierad_job_step_floor_seconds");
  EXPECT_GT(flops, 1e9);
  EXPECT_NEAR(Value(samples, "hierad_job_mfu_ratio"), flops / (0.5 * FindCard("H200")->fp32_flops), 1e-6);
  EXPECT_NEAR(Value(samples, "hierad_job_floor_ratio"), 0.5 / floor, 1e-3 * 0.5 / floor);
}

// What the plan says of a step needs no known card; the rest does.
TEST_F(ExporterTest, AnUnknownCardHasNoRates) {
  Overview overview = OneJob("a");
  overview.jobs[0].card = "Some CPU @ 2.0 GHz";
  overview_ = overview;
  const Samples samples = Get();
  EXPECT_EQ(samples.count("hierad_job_step_flops"), 1u);
  EXPECT_EQ(samples.count("hierad_job_mfu_ratio") + samples.count("hierad_job_floor_ratio"), 0u);
}

TEST_F(ExporterTest, AnEndedJobShowsItsEndOnly) {
  Overview overview = OneJob("a");
  overview.jobs[0].job.set_state(v1::SUCCEEDED);
  overview.jobs[0].job.set_finished_ms(5000);
  overview_ = overview;
  const Samples samples = Get();
  EXPECT_EQ(samples.find("hierad_job_info")->second.first.at("state"), "succeeded");
  EXPECT_EQ(Value(samples, "hierad_job_finished_timestamp_seconds"), 5);
  EXPECT_EQ(Value(samples, "hierad_job_loss"), 0.25);
  for (const char* name : {"hierad_job_samples_per_second", "hierad_job_step_seconds", "hierad_rank_step", "hierad_job_mfu_ratio"}) {
    EXPECT_EQ(samples.count(name), 0u) << name;
  }
}

// As Prometheus' own tool reads it, hostile names included.
TEST_F(ExporterTest, PromtoolFindsNothing) {
  Overview overview = OneJob("quote\"d back\\slash\nline \xff");
  overview.jobs.push_back(overview.jobs[0]);
  overview.jobs.back().job.set_id(8);
  overview.jobs.back().job.mutable_spec()->set_name(std::string(2000, '"'));
  overview.jobs.back().job.mutable_last()->set_loss(std::nan(""));
  overview.jobs.back().job.set_best_eval_loss(0.5);
  overview.jobs.back().job.set_checkpoint_ms(5);
  overview.jobs.back().job.set_started_ms(5);
  overview_ = overview;
  const std::string text = Scrape(exporter_->port());
  const std::string path = testing::TempDir() + absl::StrCat("/hierad_scrape_", getpid());
  ASSERT_TRUE(WriteFileAtomic(path, text).ok());
  FILE* tool = popen(absl::StrCat("promtool check metrics <", path, " 2>&1").c_str(), "r");
  std::string said(4096, '\0');
  said.resize(fread(said.data(), 1, said.size(), tool));
  EXPECT_EQ(pclose(tool), 0) << said << "(promtool comes with Debian's package prometheus; tools/setup installs it)";
  unlink(path.c_str());
}

// Of every line of the table a live or an ended job shows something, so that no name is a promise only.
TEST_F(ExporterTest, TheTableHasNoDeadLines) {
  Overview overview = OneJob("a");
  v1::Job& job = overview.jobs[0].job;
  job.set_best_eval_loss(0.5);
  job.set_checkpoint_ms(5);
  job.set_started_ms(5);
  overview.nodes[0].last_seen_ms = 1;
  overview.jobs.push_back(overview.jobs[0]);
  overview.jobs.back().job.set_id(8);
  overview.jobs.back().job.set_state(v1::FAILED);
  overview_ = overview;
  const std::string text = Scrape(exporter_->port());
  for (const MetricGroup& group : MetricGroups()) {
    for (const MetricInfo& info : group.metrics) EXPECT_THAT(text, HasSubstr(absl::StrCat("# HELP ", info.name, " "))) << info.name;
  }
}

// docs/metrics.md is made from the table; HIERAD_WRITE_REFERENCE=1 writes it anew.
TEST(MetricsPage, IsTheTable) {
  const std::string path = absl::StrCat(getenv("HIERAD_SOURCE_DIR"), "/docs/metrics.md");
  const std::string begin = "<!-- from server/metric_table.cc -->\n", end = "<!-- end -->\n";
  auto page = ReadFile(path, 1 << 20);
  ASSERT_TRUE(page.ok()) << page.status();
  const size_t from = page->find(begin), to = page->find(end);
  ASSERT_TRUE(from != std::string::npos && to != std::string::npos) << path << " lacks its marks";
  const std::string made = page->substr(0, from + begin.size()) + MetricTables() + page->substr(to);
  if (getenv("HIERAD_WRITE_REFERENCE") != nullptr) {
    ASSERT_TRUE(WriteFileAtomic(path, made).ok());
    return;
  }
  EXPECT_EQ(*page, made) << "write it anew: HIERAD_WRITE_REFERENCE=1 HIERAD_SOURCE_DIR=$PWD build/release/bin/tests/server_parts_test";
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
  for (const auto& [name, sample] : samples) EXPECT_EQ(sample.first.count("job_id") + sample.first.count("node"), 0u) << name;
}

TEST_F(ExporterTest, NonFiniteValuesParse) {
  Overview overview = OneJob("a");
  overview.jobs[0].job.mutable_last()->set_loss(std::nan(""));
  overview.jobs[0].job.mutable_last()->set_grad_norm(INFINITY);
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
