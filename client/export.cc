#include "client/commands.h"
#include "client/worker_tool.h"

namespace hierad {
namespace {

bool IsNumber(const std::string& text) {
  return !text.empty() && text.size() <= 18 && text.find_first_not_of("0123456789") == std::string::npos;
}

// The folder of job `text`, as hierad knows it.
absl::StatusOr<std::string> RunFolderOf(const std::string& text, const Context& context) {
  auto connection = Connection::Open(context.server);
  if (!connection.ok()) return connection.status();
  v1::GetRequest request;
  request.set_job_id(std::stoull(text));
  const auto job = (*connection)->Call(&Connection::Stub::Get, request);
  if (!job.ok()) return job.status();
  return job->run_folder();
}

}  // namespace

int Export(const ExportCommandOptions& options, const Context& context) {
  std::string source = options.source;
  if (IsNumber(source)) {
    const auto folder = RunFolderOf(source, context);
    if (!folder.ok()) return Fail(folder.status(), context);
    source = *folder;
  }
  std::vector<std::string> words = {"export", source, "--to", options.to};
  if (!options.out.empty()) words.insert(words.end(), {"--out", options.out});
  if (context.json) words.insert(words.end(), {"--output", "json"});
  return BecomeWorkerTool(words, context);
}

}  // namespace hierad
