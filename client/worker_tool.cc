#include "client/worker_tool.h"

#include <unistd.h>

#include <cerrno>

#include "base/subprocess.h"

namespace hierad {

absl::StatusOr<std::string> FindWorker() {
  auto worker = FindProgram("hiera-worker");
  if (worker.ok()) return worker;
  return absl::FailedPreconditionError(std::string(worker.status().message()) + "; install it beside hierctl");
}

int BecomeWorkerTool(std::vector<std::string> words, const Context& context) {
  const auto worker = FindWorker();
  if (!worker.ok()) return Fail(worker.status(), context);
  words.insert(words.begin(), *worker);
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  context.out->flush();
  ::execv(argv[0], argv.data());
  return Fail(ErrnoStatus(errno, "cannot start", *worker), context);
}

}  // namespace hierad
