#include "worker/data_tool/data_tool.h"

#include <sys/stat.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/fs.h"
#include "base/job_validate.h"
#include "base/job_yaml.h"
#include "base/status.h"

namespace hierad {
namespace {

int Fail(const absl::Status& status) {
  std::fprintf(stderr, "hiera-worker data: %s\n", std::string(status.message()).c_str());
  return 1;
}

absl::StatusOr<v1::JobSpec> ReadJob(const std::string& path, const std::vector<std::string>& set) {
  JobYamlOptions options;
  options.overrides = set;
  options.override_folder = ".";
  ASSIGN_OR_RETURN(v1::JobSpec spec, ReadJobYaml(path, options, nullptr));
  FillDefaults(&spec);
  return spec;
}

// The source that can read a path, by the names of its files.
absl::StatusOr<std::string> SourceOf(const std::string& path) {
  struct stat status{};
  if (stat(path.c_str(), &status) != 0) return ErrnoStatus(errno, "cannot find", path);
  const auto by_name = [](const std::string& name) -> std::string {
    static constexpr std::pair<const char*, const char*> kEnds[] = {{".npy", "npy"}, {".npz", "npy"}, {".ts", "ts"}, {".edf", "edf"}, {".bdf", "edf"}, {".jpg", "images"},
                                                                    {".jpeg", "images"}, {".png", "images"}, {".webp", "images"}, {".tif", "images"}, {".tiff", "images"}};
    for (const auto& [end, source] : kEnds)
      if (absl::EndsWithIgnoreCase(name, end)) return source;
    return "";
  };
  if (!S_ISDIR(status.st_mode)) {
    const std::string source = by_name(path);
    if (!source.empty() && source != "images") return source;
    return ErrorOf(v1::REASON_USER_ERROR, absl::StrCat(Printable(path), source.empty() ? " is of no kind that is read (.npy, .npz, .ts, .edf, .bdf, or a folder of these or of images)" : " is one image; name the folder"));
  }
  // The first file that says something, looking two folders deep.
  std::vector<std::string> folders = {path};
  for (int depth = 0; depth < 3; ++depth) {
    std::vector<std::string> below;
    for (const std::string& folder : folders) {
      const auto names = ListFolder(folder);
      if (!names.ok()) continue;
      for (const std::string& name : *names) {
        struct stat entry{};
        const std::string full = JoinPath(folder, name);
        if (name[0] == '.' || stat(full.c_str(), &entry) != 0) continue;
        if (S_ISDIR(entry.st_mode)) below.push_back(full);
        else if (const std::string source = by_name(name); !source.empty() && source != "ts") return source;
      }
    }
    folders = below;
  }
  return ErrorOf(v1::REASON_DATA_ERROR, absl::StrCat(Printable(path), ": no file that is read (.npy, .npz, .edf, .bdf, .jpg, .png, .webp, .tif) in it or two folders below; .ts files are named one by one"));
}

}  // namespace

absl::StatusOr<Report> Inspect(const InspectOptions& options) {
  ASSIGN_OR_RETURN(const std::string source, SourceOf(options.path));
  if (source == "edf") return InspectRecordings(options);
  if (source == "images") return InspectImages(options);
  return InspectArrays(options, source);
}

int DataMain(int argc, char** argv) {
  CLI::App app("Looks at training data, measures the loader, prepares recordings once", "hiera-worker data");
  app.require_subcommand(1);
  app.footer("inspect PATH [--samples N] | bench JOB [--set KEY=VALUE] [--seconds S] [--threads N...] [--step-ms MS] | prepare JOB --out FOLDER [--set KEY=VALUE] [--shard-mb MB]; each with -o text|json");
  InspectOptions inspect;
  RateOptions rates;
  PrepareOptions prepare;
  std::string job, output = "text";
  std::vector<std::string> set;
  int64_t shard_mb = 256;
  const auto with_output = [&](CLI::App* command) {
    command->add_option("-o,--output", output, "text or json")->check(CLI::IsMember({"text", "json"}))->capture_default_str();
    return command;
  };
  CLI::App* inspect_command = with_output(app.add_subcommand("inspect", "What a file or folder holds, what is odd about it, and the data: block for job.yaml"));
  inspect_command->add_option("path", inspect.path, "File or folder")->required();
  inspect_command->add_option("--samples", inspect.samples, "Samples read for the statistics, at most, evenly spread")->check(CLI::PositiveNumber)->capture_default_str();
  CLI::App* bench = with_output(app.add_subcommand("bench", "Samples and MB a second of the loader alone, by stage, against the step's need"));
  bench->add_option("job", job, "job.yaml")->required();
  bench->add_option("--set", set, "section.key=value over the file");
  bench->add_option("--seconds", rates.seconds, "Of each measurement")->check(CLI::Range(0.05, 600.0))->capture_default_str();
  bench->add_option("--threads", rates.threads, "Readers to try; default: 1 and the machine's cores")->check(CLI::Range(1, 256));
  bench->add_option("--step-ms", rates.step_ms, "Time of a rank's step, to compare with")->check(CLI::PositiveNumber);
  CLI::App* prepare_command = with_output(app.add_subcommand("prepare", "Filters, resamples and cuts recordings once, into .npy shards with a manifest; may be interrupted and called again"));
  prepare_command->add_option("job", job, "job.yaml with data.source edf")->required();
  prepare_command->add_option("--set", set, "section.key=value over the file");
  prepare_command->add_option("--out", prepare.out, "Folder of the shards")->required();
  prepare_command->add_option("--shard-mb", shard_mb, "Size of a shard, about")->check(CLI::Range(1, 1 << 20))->capture_default_str();
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 1;
  }
  absl::StatusOr<Report> report;
  if (inspect_command->parsed()) {
    report = Inspect(inspect);
  } else {
    auto spec = ReadJob(job, set);
    if (!spec.ok()) return Fail(spec.status());
    if (const absl::Status legal = CheckJob(*spec); !legal.ok()) return Fail(legal);
    rates.spec = prepare.spec = *spec;
    prepare.shard_bytes = shard_mb << 20;
    report = bench->parsed() ? MeasureRates(rates) : Prepare(prepare);
  }
  if (!report.ok()) return Fail(report.status());
  std::fputs(output == "json" ? (report->dump(2, ' ', false, Report::error_handler_t::replace) + "\n").c_str() : ReportText(*report).c_str(), stdout);
  return std::fflush(stdout) == 0 ? 0 : 1;
}

}  // namespace hierad
