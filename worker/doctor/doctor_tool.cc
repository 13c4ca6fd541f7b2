#include "worker/doctor/doctor_tool.h"

#include <CLI/CLI.hpp>
#include <cstdio>
#include <string>

#include "base/gpu_cards.h"
#include "base/job_validate.h"
#include "base/job_yaml.h"
#include "base/status.h"
#include "worker/doctor/doctor.h"

namespace hierad {
namespace {

absl::StatusOr<v1::JobSpec> ReadJob(const std::string& path) {
  ASSIGN_OR_RETURN(v1::JobSpec spec, ReadJobYaml(path));
  FillDefaults(&spec);
  RETURN_IF_ERROR(CheckJob(spec));
  return spec;
}

}  // namespace

int DoctorMain(int argc, char** argv) {
  CLI::App app("The engine's figures for hierctl doctor, as JSON", "hiera-worker doctor");
  std::string job, nvml = kNvml;
  app.add_option("job", job, "job.yaml, whose data and step are timed here for some seconds")->type_name("JOB.yaml");
  app.add_option("--nvml", nvml, "NVIDIA's management library")->capture_default_str();
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 1;
  }
  absl::StatusOr<v1::JobSpec> spec = v1::JobSpec();
  if (!job.empty()) spec = ReadJob(job);
  if (!spec.ok()) {
    std::fprintf(stderr, "hiera-worker doctor: %s\n", std::string(spec.status().message()).c_str());
    return 1;
  }
  std::fputs(DoctorFigures(job.empty() ? nullptr : &*spec, nvml).c_str(), stdout);
  return 0;
}

}  // namespace hierad
