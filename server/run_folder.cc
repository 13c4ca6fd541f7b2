#include "server/run_folder.h"

#include <sys/stat.h>

#include <filesystem>

#include "absl/strings/str_cat.h"
#include "base/attempt_mark.h"
#include "base/fs.h"
#include "base/fs_descriptor.h"
#include "base/job_yaml.h"
#include "base/output_folder.h"
#include "base/status.h"
#include "base/text.h"

namespace hierad {

std::string NormalFolder(const std::string& folder) {
  std::error_code error;
  std::filesystem::path path = std::filesystem::weakly_canonical(folder, error);
  if (error) path = std::filesystem::path(folder).lexically_normal();
  std::string text = path.string();
  while (text.size() > 1 && text.back() == '/') text.pop_back();
  return text;
}

absl::Status CheckOutputFolder(const std::string& folder) {
  if (folder.empty()) return absl::OkStatus();   // hierad will name one
  struct stat info;
  if (stat(folder.c_str(), &info) == 0 && !S_ISDIR(info.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat("output.folder: \"", Printable(folder), "\" is not a folder; give another path"));
  }
  const std::string checkpoints = JoinPath(folder, "checkpoints");
  if (!Exists(checkpoints)) return absl::OkStatus();
  auto names = ListFolder(checkpoints);
  if (!names.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("output.folder: cannot look into \"", Printable(checkpoints), "\": ", absl::string_view(names.status().message())));
  }
  if (names->empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("output.folder: \"", Printable(folder), "\" holds checkpoints of an earlier run (", Printable(names->back()),
                                                    "), which a new job would replace; give another folder, or move that one away"));
}

absl::Status MakeRunFolder(const JobRow& job, const std::vector<std::string>& allowed_roots, const std::string& credential,
                           const std::optional<Account>& account) {
  ASSIGN_OR_RETURN(const UniqueFd folder, MakeOutputFolder({job.run_folder, !job.spec.output().folder().empty(), allowed_roots}, account));
  const FilesAs rights(account);
  RETURN_IF_ERROR(rights.status());
  const auto write = [&](const char* name, const std::string& text) {
    return WriteFileAtomicIn(folder.get(), name, text, 0644, JoinPath(job.run_folder, name));
  };
  RETURN_IF_ERROR(write(kAttemptMarkFile, AttemptMark(credential)));
  return write("job.yaml", ToJobYaml(job.spec));
}

}  // namespace hierad
