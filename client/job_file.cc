#include "client/job_file.h"

#include <filesystem>
#include <iostream>
#include <iterator>

#include "base/fs.h"
#include "base/job_validate.h"
#include "base/limits.h"
#include "base/plan/geometry.h"
#include "base/plan/parameters.h"
#include "base/text.h"
#include "client/render.h"

namespace hierad {
namespace {

constexpr int kNearName = 3;              // letters that a name suggested instead of a missing one may differ by
constexpr int kNamesLookedAt = 10'000;

absl::StatusOr<v1::JobSpec> Read(const std::string& path, const std::vector<std::string>& overrides, KeyOrigins* origins) {
  JobYamlOptions options;
  options.overrides = overrides;
  std::error_code error;
  options.override_folder = std::filesystem::current_path(error).string();
  if (path != "-") return ReadJobYaml(path, options, origins);
  options.file_name = "stdin";
  options.base_folder = options.override_folder;
  std::string text;
  // One byte past the limit is enough for the reader to refuse it.
  char c;
  while (int64_t(text.size()) <= limits::kJobYamlBytes && std::cin.get(c)) text += c;
  return ParseJobYaml(text, options, origins);
}

std::string InQuotes(const std::string& path) { return "\"" + Printable(path, 4096) + "\""; }

// "job.yaml:7: model.input_size: ..." where the problem's key was given, else as it is.
std::string Located(const std::string& problem, const KeyOrigins& origins) {
  const auto at = origins.find(problem.substr(0, problem.find(':')));
  return at == origins.end() ? problem : at->second + ": " + problem;
}

}  // namespace

JobFile ReadJobFile(const std::string& path, const std::vector<std::string>& overrides) {
  JobFile file;
  auto spec = Read(path, overrides, &file.origins);
  if (!spec.ok()) {
    file.problems = Split(std::string(spec.status().message()), '\n');
    return file;
  }
  file.spec = *std::move(spec);
  FillDefaults(&file.spec);
  for (const std::string& problem : ValidateJob(file.spec)) file.problems.push_back(Located(problem, file.origins));
  return file;
}

std::vector<std::string> MissingFiles(const JobFile& file) {
  const v1::JobSpec& spec = file.spec;
  std::vector<std::string> missing;
  for (const auto& [key, path] : {std::pair<std::string, std::string>{"data.path", spec.data().path()},
                                  {"eval.path", spec.eval().path()}, {"model.init_from", spec.model().init_from()}}) {
    std::error_code error;
    if (path.empty() || std::filesystem::status(path, error).type() != std::filesystem::file_type::not_found) continue;
    // The likeliest slip of the fingers is in the last name.
    const std::filesystem::path wanted(path);
    std::string nearest;
    int least = std::min<int>(kNearName, int(wanted.filename().string().size()) / 3) + 1, looked = 0;
    for (std::filesystem::directory_iterator at(wanted.parent_path(), error), end; !error && at != end && looked < kNamesLookedAt; at.increment(error), ++looked) {
      const std::string name = at->path().filename().string();
      if (const int distance = EditDistance(name, wanted.filename().string()); distance < least) {
        least = distance;
        nearest = name;
      }
    }
    missing.push_back(Located(key + ": " + InQuotes(path) + " is not on this machine" +
                              (nearest.empty() ? "" : "; did you mean " + InQuotes(nearest) + "?"), file.origins));
  }
  return missing;
}

std::string EffectiveJobYaml(const JobFile& file) {
  v1::JobSpec spec = file.spec;
  if (const auto geometry = Geometry::From(spec.model()); geometry.ok()) *spec.mutable_model() = geometry->spec;
  if (!spec.optimizer().has_lr()) spec.mutable_optimizer()->set_lr(PeakLr(spec));
  return ExplainedJobYaml(spec, file.origins);
}

std::string JobSummary(const v1::JobSpec& spec) {
  const auto geometry = Geometry::From(spec.model());
  if (!geometry.ok()) return PrintableSentence(std::string(geometry.status().message()));
  std::string text = geometry->spec.task() + " on [";
  for (size_t i = 0; i < geometry->input_size.size(); ++i) text += (i ? ", " : "") + std::to_string(geometry->input_size[i]);
  text += "] x " + std::to_string(spec.model().in_chans()) + " channels";
  if (geometry->spec.task() == "mae") {
    text += ", " + std::to_string(geometry->num_kept) + " of " + std::to_string(geometry->num_mask_units) + " mask units kept";
  }
  text += "; " + CountText(double(ParameterTable::For(*geometry).num_elements)) + " parameters; effective batch " +
          std::to_string(EffectiveBatch(spec)) + "; peak rate " + NumberText(PeakLr(spec));
  return text;
}

}  // namespace hierad
