#include "base/fs_beneath.h"

#include <fcntl.h>
#include <linux/openat2.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace hierad {
namespace {

// `path` from `root` on, without slashes before it; nullopt-like: false when it is not lexically beneath.
bool Relative(const std::string& root, const std::string& path, std::string* rest) {
  if (path.empty() || path.find('\0') != std::string::npos) return false;
  if (path[0] != '/') {
    *rest = path;
    return true;
  }
  std::string folder = root;
  while (!folder.empty() && folder.back() == '/') folder.pop_back();
  if (path.compare(0, folder.size(), folder) != 0) return false;
  const std::string tail = path.substr(folder.size());
  if (!tail.empty() && tail[0] != '/') return false;
  const size_t begin = tail.find_first_not_of('/');
  rest->assign(begin == std::string::npos ? std::string(1, '.') : tail.substr(begin));
  return true;
}

// Component by component, no link at all: for kernels without openat2.
int OpenByParts(int root, const std::string& relative, int flags, int mode) {
  UniqueFd folder(fcntl(root, F_DUPFD_CLOEXEC, 0));
  std::vector<std::string> parts;
  for (std::string& part : Split(relative, '/')) {
    if (part == "..") return errno = EXDEV, -1;
    if (!part.empty() && part != ".") parts.push_back(std::move(part));
  }
  if (parts.empty()) parts.push_back(".");
  for (size_t i = 0; folder && i + 1 < parts.size(); ++i) {
    folder = UniqueFd(openat(folder.get(), parts[i].c_str(), O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  }
  return folder ? openat(folder.get(), parts.back().c_str(), flags | O_NOFOLLOW | O_CLOEXEC, mode) : -1;
}

int Open(int root, const std::string& relative, int flags, int mode, uint64_t resolve = RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS) {
  open_how how{};
  how.flags = uint64_t(flags) | O_CLOEXEC;
  how.mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? uint64_t(mode) : 0;
  how.resolve = resolve;
  for (int tries = 0;; ++tries) {
    const int fd = int(syscall(SYS_openat2, root, relative.c_str(), &how, sizeof how));
    // EAGAIN: something was renamed on the way and ".." could not be judged.
    if (fd >= 0 || (errno != EAGAIN && errno != ENOSYS) || tries > 100) return fd;
    if (errno == ENOSYS) return OpenByParts(root, relative, flags, mode);
  }
}

bool HasDots(const std::string& path) {
  const std::vector<std::string> parts = Split(path, '/');
  return std::find(parts.begin(), parts.end(), "..") != parts.end();
}

absl::Status LeadsOut(const std::string& path, const std::string& roots) {
  return absl::PermissionDeniedError(absl::StrCat("\"", Printable(path), "\" leads out of ", roots));
}

}  // namespace

absl::StatusOr<UniqueFd> OpenBeneath(const std::string& root, const std::string& path, int flags, int mode) {
  std::string relative;
  if (!Relative(root, path, &relative)) return LeadsOut(path, Printable(root));
  const UniqueFd folder(open(root.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  if (!folder) return ErrnoStatus(errno, "cannot open the root", root);
  UniqueFd fd(Open(folder.get(), relative, flags, mode));
  if (fd) return fd;
  if (errno == EXDEV || errno == ELOOP) return LeadsOut(path, Printable(root));
  return ErrnoStatus(errno, "cannot open", path);
}

absl::StatusOr<UniqueFd> OpenWithoutLinks(const std::string& path, int flags) {
  std::string relative;
  if (path.empty() || path[0] != '/' || !Relative("/", path, &relative)) return absl::InvalidArgumentError("\"" + Printable(path) + "\" is not an absolute path");
  const UniqueFd root(open("/", O_PATH | O_DIRECTORY | O_CLOEXEC));
  UniqueFd fd(root ? Open(root.get(), relative, flags, 0, RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS) : -1);
  if (fd) return fd;
  if (errno == EXDEV || errno == ELOOP) return absl::PermissionDeniedError("\"" + Printable(path) + "\" leads over a link");
  return ErrnoStatus(errno, "cannot open", path);
}

absl::StatusOr<HeldRoots> HeldRoots::Open(const std::vector<std::string>& roots) {
  HeldRoots held;
  held.all_ = Printable(absl::StrJoin(roots, ", "));
  for (const std::string& root : roots) {
    UniqueFd folder(open(root.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
    if (folder) held.roots_.push_back({root, std::move(folder)});
  }
  if (held.roots_.empty()) {
    return absl::FailedPreconditionError(absl::StrCat("none of the folders that paths of jobs may be in is there: ", held.all_,
                                                      "; see hierad's setting allowed_roots"));
  }
  return held;
}

absl::StatusOr<UniqueFd> HeldRoots::Open(const std::string& path, int flags) const {
  if (path.empty() || path[0] != '/' || HasDots(path)) return LeadsOut(path, all_);
  for (const Root& root : roots_) {
    std::string relative;
    if (!Relative(root.path, path, &relative)) continue;
    UniqueFd fd(::hierad::Open(root.folder.get(), relative, flags, 0));
    if (fd) return fd;
    if (errno != EXDEV && errno != ELOOP) return ErrnoStatus(errno, "cannot open", path);
  }
  return LeadsOut(path, all_);
}

absl::StatusOr<UniqueFd> MakeFoldersBeneath(const std::vector<std::string>& roots, const std::string& path) {
  const std::string all = Printable(absl::StrJoin(roots, ", "));
  if (path.empty() || path[0] != '/' || HasDots(path)) return LeadsOut(path, all);
  std::string there;
  const auto root = std::find_if(roots.begin(), roots.end(), [&](const std::string& each) { return Relative(each, path, &there); });
  if (root == roots.end()) return LeadsOut(path, all);
  const UniqueFd top(open(root->c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  if (!top) return ErrnoStatus(errno, "cannot open the root", *root);
  std::vector<std::string> missing;   // the last first
  UniqueFd folder;
  while (!(folder = UniqueFd(Open(top.get(), there, O_PATH | O_DIRECTORY, 0)))) {
    if (errno == EXDEV || errno == ELOOP) return LeadsOut(path, all);
    if (errno != ENOENT || there == ".") return ErrnoStatus(errno, "cannot open the folder", path);
    const size_t slash = there.rfind('/');
    missing.push_back(slash == std::string::npos ? there : there.substr(slash + 1));
    there = slash == std::string::npos ? std::string(1, '.') : there.substr(0, slash);
  }
  for (; !missing.empty(); missing.pop_back()) {
    const std::string& name = missing.back();
    if (name.empty() || name == ".") continue;
    if (mkdirat(folder.get(), name.c_str(), 0755) != 0 && errno != EEXIST) return ErrnoStatus(errno, "cannot create folder", path);
    folder = UniqueFd(openat(folder.get(), name.c_str(), O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    if (folder) continue;
    if (errno != ENOTDIR && errno != ELOOP) return ErrnoStatus(errno, "cannot open the folder", path);
    return absl::PermissionDeniedError(absl::StrCat("\"", Printable(path), "\" cannot be made: \"", Printable(name),
                                                    "\" on the way is a link that leads nowhere, or no folder"));
  }
  return folder;
}

absl::Status CheckBeneath(const std::vector<std::string>& roots, const std::string& path) {
  const std::string all = Printable(absl::StrJoin(roots, ", "));
  if (path.empty() || path[0] != '/' || HasDots(path)) return LeadsOut(path, all);
  for (const std::string& root : roots) {
    std::string relative;
    if (!Relative(root, path, &relative)) continue;
    // The deepest part that exists tells: what is made below it later is made there.
    while (true) {
      const auto fd = OpenBeneath(root, relative, O_PATH);
      if (fd.ok()) return absl::OkStatus();
      if (!absl::IsNotFound(fd.status())) return fd.status();
      // Missing because a link on the way points nowhere: whatever comes there is not known to be beneath.
      const auto last = OpenBeneath(root, relative, O_PATH | O_NOFOLLOW);
      if (last.ok()) return LeadsOut(path, all);
      if (relative == ".") return fd.status();
      const size_t slash = relative.rfind('/');
      relative = slash == std::string::npos ? std::string(1, '.') : relative.substr(0, slash);
    }
  }
  return LeadsOut(path, all);
}

}  // namespace hierad
