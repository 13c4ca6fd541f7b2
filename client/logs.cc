#include <ctime>
#include <optional>
#include <regex>

#include "base/text.h"
#include "client/commands.h"
#include "client/job_json.h"

namespace hierad {
namespace {

constexpr size_t kLineBytes = 64 << 10;   // a longer line is printed in pieces

// "2026-11-30T16:11:10.123Z ..." as workers write it (base/log_format.h), also as JSON; 0: the line begins otherwise.
int64_t TimeOfLine(const std::string& line) {
  std::tm parts{};
  int millis = 0, end = 0;
  constexpr char kJson[] = "{\"time\":\"";
  const size_t start = line.rfind(kJson, 0) == 0 ? sizeof kJson - 1 : 0;
  const int fields = std::sscanf(line.c_str() + start, "%4d-%2d-%2dT%2d:%2d:%2d.%3dZ%n", &parts.tm_year, &parts.tm_mon, &parts.tm_mday,
                                 &parts.tm_hour, &parts.tm_min, &parts.tm_sec, &millis, &end);
  if (fields != 7 || end != 24) return 0;
  parts.tm_year -= 1900;
  --parts.tm_mon;
  return int64_t(::timegm(&parts)) * 1000 + millis;
}

// Of the agent's line at the head of each attempt, "---- job 7, attempt 2, rank 0, ..."; 0: another line.
int AttemptOfLine(const std::string& line) {
  unsigned long long job = 0;
  int attempt = 0;
  return std::sscanf(line.c_str(), "---- job %llu, attempt %d,", &job, &attempt) == 2 ? attempt : 0;
}

// Which lines are wanted. What has no time of its own (a trace below an error) goes with the line before it.
class LineFilter {
 public:
  // InvalidArgument: no regular expression.
  static absl::StatusOr<LineFilter> From(const LogsOptions& options, const Clock& clock) {
    LineFilter filter;
    filter.attempt_wanted_ = options.attempt;
    if (options.since_s > 0) filter.since_ms_ = clock.UnixMs() - int64_t(options.since_s * 1000);
    filter.in_time_ = filter.since_ms_ == 0;
    if (options.grep.empty()) return filter;
    try {
      filter.grep_ = std::regex(options.grep, std::regex::ECMAScript | std::regex::optimize);
    } catch (const std::regex_error& error) {
      return absl::InvalidArgumentError("--grep \"" + Printable(options.grep, 80) + "\" is no regular expression: " + error.what());
    }
    return filter;
  }

  bool Wants(const std::string& line) {
    if (const int attempt = AttemptOfLine(line)) attempt_ = attempt;
    if (const int64_t time = TimeOfLine(line); time != 0 && since_ms_ != 0) in_time_ = time >= since_ms_;
    if (attempt_wanted_ != 0 && attempt_ != attempt_wanted_) return false;
    return in_time_ && (!grep_ || std::regex_search(line.substr(0, kMatchedBytes), *grep_));
  }
  int attempt() const { return attempt_; }

 private:
  static constexpr size_t kMatchedBytes = 8192;   // of a line: the library's matcher takes stack by the byte

  int attempt_wanted_ = 0, attempt_ = 0;
  int64_t since_ms_ = 0;
  bool in_time_ = true;
  std::optional<std::regex> grep_;
};

// Cuts the stream into lines and prints those that are wanted.
class LinePrinter {
 public:
  LinePrinter(const LogsOptions& options, LineFilter filter, const Context& context)
      : options_(options), filter_(std::move(filter)), context_(context) {}

  void Add(const std::string& chunk) {
    const bool all = options_.attempt == 0 && options_.since_s == 0 && options_.grep.empty();
    if (options_.raw && !context_.json && all) {
      *context_.out << chunk;
    } else {
      for (const char c : chunk) {
        if (c == '\n' || held_.size() >= kLineBytes) Flush();
        if (c != '\n') held_ += c;
      }
    }
    context_.out->flush();
  }

  void End() {
    if (!held_.empty()) Flush();
  }

 private:
  void Flush() {
    if (filter_.Wants(held_)) Print();
    held_.clear();
  }

  void Print() {
    if (context_.json) {
      *context_.out << JsonText({{"rank", options_.rank}, {"attempt", filter_.attempt()}, {"line", held_}});
    } else if (options_.raw) {
      *context_.out << held_ << "\n";
    } else {
      // A tab is harmless and common in logs.
      std::string line;
      for (const std::string& part : Split(held_, '\t')) line += (line.empty() ? "" : "\t") + PrintableSentence(part, 2 * kLineBytes);
      *context_.out << line << "\n";
    }
  }

  const LogsOptions& options_;
  LineFilter filter_;
  const Context& context_;
  std::string held_;
};

}  // namespace

int Logs(uint64_t job_id, const LogsOptions& options, const Context& context) {
  auto filter = LineFilter::From(options, *context.clock);
  if (!filter.ok()) return Fail(filter.status(), context);
  auto connection = Connection::Open(context.server);
  if (!connection.ok()) return Fail(connection.status(), context);
  grpc::ClientContext call;
  v1::LogsRequest request;
  request.set_job_id(job_id);
  request.set_rank(options.rank);
  request.set_follow(options.follow);
  request.set_tail_lines(options.tail_lines);
  const auto reader = (*connection)->stub().Logs(&call, request);
  LinePrinter printer(options, *std::move(filter), context);
  v1::LogsReply reply;
  while (reader->Read(&reply)) printer.Add(reply.chunk());
  printer.End();
  const grpc::Status status = reader->Finish();
  return status.ok() ? kExitOk : Fail((*connection)->ErrorFrom(status), context);
}

}  // namespace hierad
