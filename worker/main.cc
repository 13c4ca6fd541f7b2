// hiera-worker: one rank of one attempt, started by the agent; a run without hierad; and the tools that need the engine.
#include <CLI/CLI.hpp>

#include <csignal>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/worker_exit.h"
#include "hierad/version.h"
#include "worker/doctor/doctor_tool.h"
#include "worker/export/export_tool.h"
#include "worker/probe/probe_tool.h"
#include "worker/worker_process.h"

namespace hierad {
namespace {

TrainerParts EngineParts(const TrainerOptions& options) {
  TrainerParts parts;
  parts.make_step = MakeStep;
  parts.batch_memory = BatchMemory(options.cuda);
  return parts;
}

int Main(int argc, char** argv) {
  const auto start = Clock::System().Monotonic();
  SetUpWorkerProcess();
  const std::string tool = argc > 1 ? argv[1] : "";
  if (tool == "doctor" || tool == "export" || tool == "probe") {
    std::signal(SIGTERM, SIG_DFL);
    std::signal(SIGINT, SIG_DFL);
    std::signal(SIGUSR1, SIG_DFL);
    const auto run = tool == "doctor" ? DoctorMain : tool == "export" ? ExportMain : ProbeMain;
    return run(argc - 1, argv + 1);
  }
  CLI::App app("Trains one rank of a job. Exit code: 0 completed, 1 wrong usage, 40 fenced, else 40 + the reason's number.", "hiera-worker");
  app.require_subcommand(1);
  app.set_version_flag("--version", absl::StrCat("hiera-worker ", std::string(Version()), " (", std::string(Commit()), ", ", std::string(BuildType()), ")"));
  int fd = -1;
  std::string job, run_folder;
  CLI::App* run = app.add_subcommand("run", "What hierad-agent starts");
  run->add_option("--assignment-fd", fd, "Descriptor of the serialized Assignment")->required();
  CLI::App* local = app.add_subcommand("run-local", "One rank in this process, without hierad");
  local->add_option("job", job, "job.yaml")->required();
  local->add_option("--run-folder", run_folder, "Folder of the run; an interrupted run goes on from its newest checkpoint")->required();
  app.add_subcommand("doctor", "The engine's figures for hierctl doctor, as JSON");
  app.add_subcommand("export", "A run's weights as one file for PyTorch; see hiera-worker export --help");
  app.add_subcommand("probe", "Linear probe of a run's encoder; see hiera-worker probe --help");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kWorkerExitUsage;
  }
  return run->parsed() ? RunAssigned(fd, argv, start, EngineParts) : RunLocal(job, run_folder, argv, start, EngineParts);
}

}  // namespace
}  // namespace hierad

int main(int argc, char** argv) { return hierad::Main(argc, argv); }
