#include "base/output_folder.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "base/fs.h"
#include "base/fs_beneath.h"
#include "base/status.h"
#include "base/text.h"

namespace hierad {

absl::Status MakeOutputFolder(const OutputFolder& folder, const std::optional<Account>& account) {
  const FilesAs rights(account);
  if (folder.given && !folder.allowed_roots.empty()) {
    if (absl::Status beneath = CheckBeneath(folder.allowed_roots, folder.path); !beneath.ok()) {
      return Annotate(beneath, "output.folder; hierad's setting allowed_roots says what paths may be");
    }
  }
  RETURN_IF_ERROR(MakeFolders(folder.path));
  struct stat parent, made;
  if (folder.given || stat(FolderOf(folder.path).c_str(), &parent) != 0 || (parent.st_mode & (S_IWGRP | S_IWOTH)) == 0) return absl::OkStatus();
  if (lstat(folder.path.c_str(), &made) != 0) return ErrnoStatus(errno, "cannot find the run's folder", folder.path);
  const uid_t owner = account ? account->uid : geteuid();
  if (S_ISDIR(made.st_mode) && made.st_uid == owner) return absl::OkStatus();
  return absl::PermissionDeniedError(absl::StrCat("the run's folder \"", Printable(folder.path), "\" was made beforehand by uid ", made.st_uid,
                                                  ", not by uid ", owner, " whose ranks would write there; have it removed and submit again"));
}

}  // namespace hierad
