#include "worker/probe/probe_tool.h"

#include <CLI/CLI.hpp>
#include <cstdio>
#include <string>
#include <thread>

#include "base/fs.h"
#include "worker/probe/probe.h"

namespace hierad {

int ProbeMain(int argc, char** argv) {
  CLI::App app("Linear probe of a finished run: the frozen encoder's features against three controls", "hiera-worker probe");
  ProbeOptions options;
  std::string output = "table", device = "cpu";
  options.threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  app.add_option("--run", options.run_folder, "Folder of the run (job.yaml, checkpoints/)")->required();
  app.add_option("--train", options.train_path, "Labelled data to fit on; default: the job's data.path");
  app.add_option("--test", options.test_path, "Labelled data to measure on; default: eval.path, else TRAIN's path with TEST");
  app.add_option("--group-size", options.group_size, "Consecutive TRAIN samples that share a fold (one recording); 0: none")->check(CLI::NonNegativeNumber);
  app.add_option("--device", device, "cpu or cuda")->check(CLI::IsMember({"cpu", "cuda"}))->capture_default_str();
  app.add_option("--threads", options.threads, "Compute threads")->check(CLI::Range(1, 1024));
  app.add_option("-o,--output", output, "table or json")->check(CLI::IsMember({"table", "json"}))->capture_default_str();
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 1;
  }
  options.cuda = device == "cuda";
  const absl::StatusOr<ProbeReport> report = RunProbe(options, MakeStep);
  if (!report.ok()) {
    std::fprintf(stderr, "hiera-worker probe: %s\n", std::string(report.status().message()).c_str());
    return 1;
  }
  const absl::Status written = WriteFileAtomic(JoinPath(options.run_folder, "probe.json"), report->Json());
  std::fputs((output == "json" ? report->Json() : report->Table()).c_str(), stdout);
  if (!written.ok()) {
    std::fprintf(stderr, "hiera-worker probe: %s\n", std::string(written.message()).c_str());
    return 1;
  }
  return 0;
}

}  // namespace hierad
