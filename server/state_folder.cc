#include "server/state_folder.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/text.h"

namespace hierad {
namespace {

// Not in linux/magic.h of every distribution.
constexpr long kCifs = 0xFF534D42, kSmb2 = 0xFE534D42, kFuse = 0x65735546, kLustre = 0x0BD00BD0, kGpfs = 0x47504653,
               kCeph = 0x00C36400, kBeegfs = 0x19830326, kGfs2 = 0x01161970, kOcfs2 = 0x7461636F, kNine = 0x01021997;

}  // namespace

const char* RefusedFileSystem(long magic) {
  switch (magic & 0xFFFFFFFF) {
    case NFS_SUPER_MAGIC: return "NFS";
    case SMB_SUPER_MAGIC:
    case kCifs:
    case kSmb2: return "SMB";
    case AFS_SUPER_MAGIC: return "AFS";
    case CODA_SUPER_MAGIC: return "Coda";
    case kNine: return "9p";
    case kFuse: return "FUSE";
    case kLustre: return "Lustre";
    case kGpfs: return "GPFS";
    case kCeph: return "Ceph";
    case kBeegfs: return "BeeGFS";
    case kGfs2: return "GFS2";
    case kOcfs2: return "OCFS2";
    default: return nullptr;
  }
}

absl::Status PrepareStateFolder(const std::string& path) {
  const std::string shown = absl::StrCat("the state folder \"", Printable(path), "\" ");
  struct stat info;
  if (stat(path.c_str(), &info) == 0 && !S_ISDIR(info.st_mode)) {
    return absl::FailedPreconditionError(absl::StrCat(shown, "is not a folder; give another with --state"));
  }
  if (absl::Status made = MakeFolders(path, 0700); !made.ok()) {
    return absl::Status(made.code(), absl::StrCat(shown, "cannot be made: ", made.message(), "; give another with --state"));
  }
  struct statfs disk;
  if (statfs(path.c_str(), &disk) != 0) return ErrnoStatus(errno, "cannot look at the state folder", path);
  if (const char* kind = RefusedFileSystem(static_cast<long>(disk.f_type))) {
    return absl::FailedPreconditionError(absl::StrCat(shown, "is on a ", kind, " file system, where the store's locks do not hold; "
                                                      "give a folder on a local disk with --state (runs may stay there: --runs)"));
  }
  const std::string probe = JoinPath(path, absl::StrCat(".probe-", getpid()));
  UniqueFd file(open(probe.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!file) {
    return absl::PermissionDeniedError(absl::StrCat(shown, "cannot be written (", strerror(errno), "); give hierad's user the right, or another folder with --state"));
  }
  unlink(probe.c_str());
  return absl::OkStatus();
}

absl::StatusOr<UniqueFd> LockFile(const std::string& path, const std::string& who) {
  UniqueFd file(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  if (!file) return ErrnoStatus(errno, "cannot open the lock", path);
  if (flock(file.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) return ErrnoStatus(errno, "cannot lock", path);
    const int pid = LockOwner(path);
    return absl::FailedPreconditionError(absl::StrCat("\"", Printable(FolderOf(path)), "\" is in use by ", who, pid > 0 ? absl::StrCat(" (process ", pid, ")") : "",
                                                      "; end that one, or give another folder"));
  }
  const std::string pid = absl::StrCat(getpid());
  if (ftruncate(file.get(), 0) != 0 || pwrite(file.get(), pid.data(), pid.size(), 0) != static_cast<ssize_t>(pid.size())) {
    return ErrnoStatus(errno, "cannot write", path);
  }
  return file;
}

bool IsLocked(const std::string& path) {
  UniqueFd file(open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!file) return false;
  // A shared lock: two that ask at once do not see each other.
  return flock(file.get(), LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
}

int LockOwner(const std::string& path) {
  auto text = ReadFile(path, 64);
  int pid = 0;
  return text.ok() && absl::SimpleAtoi(*text, &pid) && pid > 0 ? pid : 0;
}

}  // namespace hierad
