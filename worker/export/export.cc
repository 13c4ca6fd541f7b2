#include "worker/export/export.h"

#include <cerrno>
#include <climits>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <sys/stat.h>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/fs.h"
#include "base/job_yaml.h"
#include "base/plan/parameters.h"
#include "base/status.h"
#include "worker/checkpoint/checkpoint.h"
#include "worker/checkpoint/manifest.h"
#include "worker/export/python_model.h"

namespace hierad {
namespace {

constexpr char kSuffix[] = ".safetensors";

struct Source {
  Geometry geometry{};
  ParameterTable table{};
  CheckpointContents contents;
  std::string run_folder;   // empty: a checkpoint that is in no run
  std::string name;         // of the file, without suffix
  std::vector<std::string> damaged;
};

absl::StatusOr<std::string> Resolve(const std::string& path) {
  char absolute[PATH_MAX];
  if (realpath(path.c_str(), absolute) == nullptr) return ErrnoStatus(errno, "cannot open", path);
  return std::string(absolute);
}

absl::Status MakeTable(const v1::JobSpec& spec, Source* source) {
  ASSIGN_OR_RETURN(source->geometry, Geometry::From(spec.model()));
  source->table = ParameterTable::For(source->geometry);
  return absl::OkStatus();
}

absl::StatusOr<Source> ReadSource(const std::string& given) {
  ASSIGN_OR_RETURN(const std::string path, Resolve(given));
  Source source;
  if (Exists(JoinPath(path, kManifestFile))) {
    ASSIGN_OR_RETURN(const v1::JobSpec spec, JobOfCheckpoint(path));
    RETURN_IF_ERROR(MakeTable(spec, &source));
    ASSIGN_OR_RETURN(source.contents, ReadCheckpoint(path, source.table));
    source.name = path.substr(path.rfind('/') + 1);
    const std::string folder = FolderOf(path);
    if (absl::EndsWith(folder, "/checkpoints")) source.run_folder = FolderOf(folder);
    return source;
  }
  if (!Exists(JoinPath(path, "job.yaml"))) {
    return ErrorOf(v1::REASON_USER_ERROR, absl::StrCat("\"", Printable(given), "\" is neither a run's folder (it has no job.yaml) nor a "
                                                       "checkpoint (it has no manifest.json)"));
  }
  ASSIGN_OR_RETURN(v1::JobSpec spec, ReadJobYaml(JoinPath(path, "job.yaml")));
  FillDefaults(&spec);
  RETURN_IF_ERROR(MakeTable(spec, &source));
  auto newest = ReadNewest(path, source.table, &source.damaged);
  if (absl::IsNotFound(newest.status())) {
    return absl::NotFoundError(absl::StrCat(std::string(newest.status().message()), " yet; checkpoint.every_steps is ", spec.checkpoint().every_steps()));
  }
  RETURN_IF_ERROR(newest.status());
  source.contents = *std::move(newest);
  source.run_folder = path;
  source.name = "model";
  return source;
}

absl::StatusOr<std::string> Target(const ExportOptions& options, const Source& source) {
  if (!options.out.empty()) {
    if (absl::EndsWith(options.out, kSuffix) && options.out != kSuffix) return options.out;
    return ErrorOf(v1::REASON_USER_ERROR, absl::StrCat("--out \"", Printable(options.out), "\": the file's name must end in ", kSuffix));
  }
  if (source.run_folder.empty()) {
    return ErrorOf(v1::REASON_USER_ERROR, absl::StrCat("\"", Printable(options.source), "\" lies in no run's checkpoints folder; name the file to write by --out"));
  }
  return JoinPath(JoinPath(source.run_folder, "exported"), absl::StrCat(source.name, options.to == "timm" ? ".timm" : "", kSuffix));
}

// A path as a Python literal; json's escapes are Python's too.
std::string Quoted(const std::string& text) { return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace); }

std::vector<std::string> Python(const ExportReport& report) {
  return {absl::StrCat("import ", report.to == "timm" ? "timm" : "hiera", ", safetensors.torch"), absl::StrCat("model = ", report.model),
          absl::StrCat("model.load_state_dict(safetensors.torch.load_file(", Quoted(report.path), "))")};
}

}  // namespace

absl::StatusOr<ExportReport> Export(const ExportOptions& options) {
  ASSIGN_OR_RETURN(const Source source, ReadSource(options.source));
  ExportReport report;
  report.to = options.to;
  report.step = source.contents.state.step;
  report.damaged = source.damaged;
  ASSIGN_OR_RETURN(report.path, Target(options, source));
  const bool timm = options.to == "timm";
  report.model = timm ? TimmModel(source.geometry) : FairModel(source.geometry);
  std::vector<TensorView> tensors;
  for (const Parameter& p : source.table.parameters) {
    const std::optional<std::string> name = timm ? TimmName(p.name) : p.name;
    if (!name) {
      ++report.left_out;
      continue;
    }
    tensors.push_back({*name, p.shape, source.contents.state.parameters.data() + p.offset});
  }
  report.tensors = tensors.size();
  RETURN_IF_ERROR(MakeFolders(FolderOf(report.path)));
  RETURN_IF_ERROR(WriteModel(report.path, tensors, report.step, {{"hierad.task", source.geometry.spec.task()}, {"hierad.model", report.model}}));
  struct stat info{};
  if (stat(report.path.c_str(), &info) == 0) report.bytes = info.st_size;
  return report;
}

std::string ExportReport::Text() const {
  std::string text;
  for (const std::string& path : damaged) absl::StrAppend(&text, "not used, damaged: ", PrintableSentence(path), "\n");
  absl::StrAppendFormat(&text, "%s: step %d, %d tensors by %s names, %.1f MB\n", PrintableSentence(path), step, tensors,
                        to == "timm" ? "timm's" : "FAIR's", double(bytes) / 1e6);
  if (left_out > 0) absl::StrAppendFormat(&text, "left out, since timm's Hiera has no decoder: %d tensors of the decoder and the fusion heads\n", left_out);
  absl::StrAppend(&text, "\n");
  for (const std::string& line : Python(*this)) absl::StrAppend(&text, "    ", line, "\n");
  return text;
}

std::string ExportReport::Json() const {
  const nlohmann::ordered_json json = {{"path", path}, {"to", to}, {"step", step}, {"tensors", tensors}, {"left_out", left_out}, {"bytes", bytes},
                                       {"model", model}, {"python", Python(*this)}, {"damaged_checkpoints", damaged}};
  return json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace hierad
