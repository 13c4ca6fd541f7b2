#include "base/output_folder.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "base/fs.h"
#include "base/fs_beneath.h"
#include "base/status.h"
#include "base/text.h"

namespace hierad {

absl::StatusOr<UniqueFd> MakeOutputFolder(const OutputFolder& folder, const std::optional<Account>& account) {
  const FilesAs rights(account);
  RETURN_IF_ERROR(rights.status());
  if (folder.given && !folder.allowed_roots.empty()) {
    auto beneath = MakeFoldersBeneath(folder.allowed_roots, folder.path);
    if (beneath.ok()) return beneath;
    return Annotate(beneath.status(), "output.folder; hierad's setting allowed_roots says what paths may be");
  }
  RETURN_IF_ERROR(MakeFolders(folder.path));
  struct stat parent, made;
  const bool shared = !folder.given && stat(FolderOf(folder.path).c_str(), &parent) == 0 && (parent.st_mode & (S_IWGRP | S_IWOTH)) != 0;
  UniqueFd opened(open(folder.path.c_str(), O_PATH | O_CLOEXEC | (shared ? O_NOFOLLOW : O_DIRECTORY)));
  if (!opened || fstat(opened.get(), &made) != 0) return ErrnoStatus(errno, "cannot open the run's folder", folder.path);
  const uid_t owner = account ? account->uid : geteuid();
  if (!shared || (S_ISDIR(made.st_mode) && made.st_uid == owner)) return opened;
  return absl::PermissionDeniedError(absl::StrCat("the run's folder \"", Printable(folder.path), "\" was made beforehand by uid ", made.st_uid,
                                                  ", not by uid ", owner, " whose ranks would write there; have it removed and submit again"));
}

}  // namespace hierad
