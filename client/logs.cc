#include <ctime>
#include <optional>
#include <regex>

#include "base/attempt_log.h"
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
    if (const auto attempt = ParseAttemptLine(line)) attempt_ = attempt->attempt;
    if (const int64_t time = TimeOfLine(line); time != 0 && since_ms_ != 0) in_time_ = time >= since_ms_;
    if (attempt_wanted_ != 0 && attempt_ != attempt_wanted_) return false;
    return in_time_ && (!grep_ || std::regex_search(line.substr(0, kMatchedBytes), *grep_));
  }
  void Begin(int attempt) { attempt_ = attempt; }   // the lines that follow are of it
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

  void Add(int attempt, const std::string& chunk) {
    if (attempt != 0) filter_.Begin(attempt);
    const bool all = options_.attempt == 0 && options_.since_s == 0 && options_.grep.empty();
    if (options_.raw && !context_.json && all) {
      *context_.out << chunk;
      mid_line_ = !chunk.empty() && chunk.back() != '\n';
    } else {
      for (const char c : chunk) {
        if (c == '\n' || held_.size() >= kLineBytes) Flush();
        if (c != '\n') held_ += c;
      }
    }
    context_.out->flush();
  }

  // What is missing is said whatever is looked for.
  void AddNotice(int attempt, const std::string& notice) {
    End();
    filter_.Begin(attempt);
    if (mid_line_) *context_.out << "\n";
    mid_line_ = false;
    Print(notice, true);
    context_.out->flush();
  }

  void End() {
    if (!held_.empty()) Flush();
  }

 private:
  void Flush() {
    if (filter_.Wants(held_)) Print(held_, false);
    held_.clear();
  }

  void Print(const std::string& text, bool notice) {
    if (context_.json) {
      *context_.out << JsonText({{"rank", options_.rank}, {"attempt", filter_.attempt()}, {"line", text}, {"notice", notice}});
    } else if (options_.raw && !notice) {
      *context_.out << text << "\n";
    } else {
      // A tab is harmless and common in logs.
      std::string line;
      for (const std::string& part : Split(text, '\t')) line += (line.empty() ? "" : "\t") + PrintableSentence(part, 2 * kLineBytes);
      *context_.out << line << "\n";
    }
  }

  const LogsOptions& options_;
  LineFilter filter_;
  const Context& context_;
  std::string held_;
  bool mid_line_ = false;   // of what was printed as it came
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
  request.set_attempt(options.attempt);
  const auto reader = (*connection)->stub().Logs(&call, request);
  LinePrinter printer(options, *std::move(filter), context);
  v1::LogsReply reply;
  while (reader->Read(&reply)) reply.notice().empty() ? printer.Add(reply.attempt(), reply.chunk()) : printer.AddNotice(reply.attempt(), reply.notice());
  printer.End();
  const grpc::Status status = reader->Finish();
  return status.ok() ? kExitOk : Fail((*connection)->ErrorFrom(status), context);
}

}  // namespace hierad
