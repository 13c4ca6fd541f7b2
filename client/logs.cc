#include "base/text.h"
#include "client/commands.h"
#include "client/job_json.h"

namespace hierad {
namespace {

constexpr size_t kLineBytes = 64 << 10;   // a longer line is printed in pieces

// Cuts the stream into lines and prints each.
class LinePrinter {
 public:
  LinePrinter(const LogsOptions& options, const Context& context) : options_(options), context_(context) {}

  void Add(const std::string& chunk) {
    if (options_.raw && !context_.json) {
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
    if (context_.json) {
      *context_.out << JsonText({{"rank", options_.rank}, {"line", held_}});
    } else {
      // A tab is harmless and common in logs.
      std::string line;
      for (const std::string& part : Split(held_, '\t')) line += (line.empty() ? "" : "\t") + PrintableSentence(part, 2 * kLineBytes);
      *context_.out << line << "\n";
    }
    held_.clear();
  }

  const LogsOptions& options_;
  const Context& context_;
  std::string held_;
};

}  // namespace

int Logs(uint64_t job_id, const LogsOptions& options, const Context& context) {
  auto connection = Connection::Open(context.server);
  if (!connection.ok()) return Fail(connection.status(), context);
  grpc::ClientContext call;
  v1::LogsRequest request;
  request.set_job_id(job_id);
  request.set_rank(options.rank);
  request.set_follow(options.follow);
  request.set_tail_lines(options.tail_lines);
  const auto reader = (*connection)->stub().Logs(&call, request);
  LinePrinter printer(options, context);
  v1::LogsReply reply;
  while (reader->Read(&reply)) printer.Add(reply.chunk());
  printer.End();
  const grpc::Status status = reader->Finish();
  return status.ok() ? kExitOk : Fail((*connection)->ErrorFrom(status), context);
}

}  // namespace hierad
