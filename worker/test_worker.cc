// hiera-worker with a step of a few numbers instead of a model: the same process, session, trainer, loader and checkpoints,
// without LibTorch. For tests that start and kill hundreds of them. A job named "...-step20" takes 20 ms a step.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

#include "base/clock.h"
#include "worker/fake_parts.h"
#include "worker/worker_process.h"

namespace hierad {
namespace {

std::chrono::milliseconds StepTime(const std::string& name) {
  const size_t at = name.rfind("-step");
  return std::chrono::milliseconds(at == std::string::npos ? 0 : std::atoi(name.c_str() + at + 5));
}

TrainerParts FakeEngine(const TrainerOptions& options) {
  TrainerParts parts;
  const auto time = StepTime(options.spec.name());
  parts.make_step = [time](const StepOptions& o, const Geometry& g, const ParameterTable& t, Communicator* c) {
    FakeStep::Faults faults;
    faults.see_rate = [time](int64_t, double) { SleepFor(time); };
    return absl::StatusOr<std::unique_ptr<Step>>(std::make_unique<FakeStep>(o, g, t, c, faults));
  };
  return parts;
}

int Main(int argc, char** argv) {
  const auto start = Clock::System().Monotonic();
  SetUpWorkerProcess();
  if (argc != 4 || std::string(argv[1]) != "run" || std::string(argv[2]) != "--assignment-fd") {
    std::fprintf(stderr, "usage: %s run --assignment-fd N\n", argv[0]);
    return 1;
  }
  return RunAssigned(std::atoi(argv[3]), argv, start, FakeEngine);
}

}  // namespace
}  // namespace hierad

int main(int argc, char** argv) { return hierad::Main(argc, argv); }
