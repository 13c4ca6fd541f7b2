#include "server/submission.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/fs_beneath.h"
#include "base/job_validate.h"
#include "base/job_yaml.h"
#include "base/limits.h"
#include "base/text.h"
#include "hierad/v1/key.pb.h"
#include "server/run_folder.h"

namespace hierad {
namespace {

constexpr size_t kSpecBytes = 256 << 10;   // a job file has at most 64 KiB; as a message with defaults it is no larger
constexpr size_t kPathBytes = 4095;        // PATH_MAX without its NUL

// Every key annotated as a path: absolute, without "..", without odd characters that logs and lists would show wrong.
// With roots: beneath one of them.
void CheckPaths(const google::protobuf::Message& message, const std::string& prefix, const std::vector<std::string>& roots,
                std::vector<std::string>* problems) {
  const auto* reflection = message.GetReflection();
  std::vector<const google::protobuf::FieldDescriptor*> fields;
  reflection->ListFields(message, &fields);
  for (const auto* field : fields) {
    const std::string name = prefix.empty() ? field->name() : absl::StrCat(prefix, ".", field->name());
    if (field->cpp_type() == google::protobuf::FieldDescriptor::CPPTYPE_MESSAGE) {
      if (!field->is_repeated()) CheckPaths(reflection->GetMessage(message, field), name, roots, problems);
      continue;
    }
    if (!field->options().GetExtension(v1::key).path()) continue;
    const std::string path = reflection->GetString(message, field);
    if (path.empty()) continue;
    const std::string shown = absl::StrCat(name, ": \"", Printable(path, 200), "\" ");
    if (path[0] != '/') problems->push_back(absl::StrCat(shown, "is not an absolute path; hierctl makes it one from the folder of job.yaml"));
    if (path.size() > kPathBytes) problems->push_back(absl::StrCat(shown, "has ", path.size(), " bytes, at most ", kPathBytes));
    if (path.find('\0') != std::string::npos) problems->push_back(absl::StrCat(shown, "contains a NUL byte"));
    const std::vector<std::string> parts = Split(path, '/');
    if (std::find(parts.begin(), parts.end(), "..") != parts.end()) problems->push_back(absl::StrCat(shown, "contains \"..\"; give the path without it"));
    if (roots.empty()) continue;
    if (const absl::Status beneath = CheckBeneath(roots, path); !beneath.ok()) {
      problems->push_back(absl::StrCat(name, ": ", absl::string_view(beneath.message()), "; hierad's setting allowed_roots says what paths may be"));
    }
  }
}

}  // namespace

std::vector<std::string> PrepareSpec(v1::JobSpec* spec, const std::vector<std::string>& allowed_roots) {
  if (spec->ByteSizeLong() > kSpecBytes) return {absl::StrCat("the job has ", spec->ByteSizeLong(), " bytes, at most ", kSpecBytes)};
  FillDefaults(spec);
  std::vector<std::string> problems = ValidateJob(*spec);
  CheckPaths(*spec, "", allowed_roots, &problems);
  if (problems.empty() && !spec->output().folder().empty()) {
    spec->mutable_output()->set_folder(NormalFolder(spec->output().folder()));
  }
  return problems;
}

absl::Status CheckClientKey(const std::string& key) {
  const bool printable = std::all_of(key.begin(), key.end(), [](unsigned char c) { return c > ' ' && c < 127; });
  if (key.empty() || key.size() > limits::kClientKeyBytes || !printable) {
    return absl::InvalidArgumentError(absl::StrCat("client_key: \"", Printable(key, 160), "\" is not 1 to ", limits::kClientKeyBytes,
                                                   " printable characters without spaces"));
  }
  return absl::OkStatus();
}

absl::Status AsStatus(const std::vector<std::string>& problems) {
  if (problems.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrJoin(problems, "\n"));
}

}  // namespace hierad
