#include <unistd.h>

#include <cerrno>
#include <utility>

#include "base/subprocess.h"
#include "client/commands.h"

namespace hierad {

namespace {

int BecomeWorker(std::vector<std::string> words, const Context& context) {
  const auto worker = FindProgram("hiera-worker");
  if (!worker.ok()) return Fail(absl::FailedPreconditionError(std::string(worker.status().message()) + "; install it beside hierctl"), context);
  words.insert(words.begin(), *worker);
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  context.out->flush();
  // In place of hierctl: the terminal, its signals and the exit code are the worker's own.
  ::execv(argv[0], argv.data());
  return Fail(ErrnoStatus(errno, "cannot start", *worker), context);
}

}  // namespace

int Probe(const std::string& run_folder, const std::vector<std::string>& arguments, const Context& context) {
  std::vector<std::string> words = {"probe", "--run", run_folder};
  words.insert(words.end(), arguments.begin(), arguments.end());
  return BecomeWorker(std::move(words), context);
}

int Data(const std::vector<std::string>& arguments, const Context& context) {
  std::vector<std::string> words = {"data"};
  words.insert(words.end(), arguments.begin(), arguments.end());
  return BecomeWorker(std::move(words), context);
}

}  // namespace hierad
