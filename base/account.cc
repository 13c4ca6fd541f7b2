#include "base/account.h"

#include <grp.h>
#include <linux/capability.h>
#include <pwd.h>
#include <sys/fsuid.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <vector>

#include "base/status.h"
#include "base/text.h"

namespace hierad {
namespace {

constexpr char kUid[] = "uid ";
constexpr int kHighestCapability = 63;   // more than any kernel has; those that it lacks are refused, which is as good

absl::Status NeverRoot(const std::string& what) {
  return absl::FailedPreconditionError(what + ": ranks do not run as root; submit as another user, or set worker_user to an account for "
                                              "ranks, or root_ranks: allow where all that root submits may run as root, as in a container");
}

}  // namespace

absl::StatusOr<Account> FindAccount(const std::string& name) {
  Account account{.uid = 0, .gid = 0, .name = name, .home = "/"};
  passwd entry;
  passwd* found = nullptr;
  std::vector<char> buffer(64 << 10);
  if (name.rfind(kUid, 0) == 0) {
    const char* const end = name.data() + name.size();
    const auto [next, error] = std::from_chars(name.data() + sizeof kUid - 1, end, account.uid);
    if (error != std::errc() || next != end) return absl::NotFoundError("\"" + Printable(name) + "\" is no account");
    getpwuid_r(account.uid, &entry, buffer.data(), buffer.size(), &found);
    if (found == nullptr) {
      return absl::NotFoundError("this machine has no user of " + name + ", so the groups of that account are not known; make the account on "
                                 "every node, or set worker_user to an account for ranks");
    }
  } else {
    getpwnam_r(name.c_str(), &entry, buffer.data(), buffer.size(), &found);
    if (found == nullptr) {
      return absl::NotFoundError("this machine has no user \"" + Printable(name) + "\"; make the account on every node, or give "
                                 "hierad-agent --worker-user NAME");
    }
  }
  return Account{found->pw_uid, found->pw_gid, found->pw_name, found->pw_dir};
}

absl::Status CanTakeAccounts() {
  if (geteuid() != 0) return absl::FailedPreconditionError("only root can take another account");
  __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct data[2] = {};
  constexpr uint32_t kNeeded = 1u << CAP_SETUID | 1u << CAP_SETGID;
  if (syscall(SYS_capget, &header, data) == 0 && (data[0].effective & kNeeded) == kNeeded) return absl::OkStatus();
  return absl::FailedPreconditionError("this process is root without CAP_SETUID and CAP_SETGID, so it cannot take another account, and as root "
                                       "it does not act in its place; give it these capabilities (of a container: --cap-add SETUID --cap-add "
                                       "SETGID), or start it as the account that ranks are to have");
}

absl::StatusOr<std::optional<Account>> AccountFor(const RankRights& rights, const std::string& submitter) {
  if (rights.worker_user.empty() && geteuid() != 0) return std::optional<Account>();
  const bool submitters = rights.worker_user.empty() || rights.worker_user == "submitter";
  ASSIGN_OR_RETURN(Account account, FindAccount(submitters ? submitter : rights.worker_user));
  if (account.uid == 0 && !(submitters && rights.root_allowed)) {
    return NeverRoot(submitters ? "the job was submitted by root" : "worker_user " + Printable(rights.worker_user));
  }
  if (account.uid == geteuid()) return std::optional<Account>();
  if (geteuid() != 0) {
    return absl::FailedPreconditionError("only an agent of root can start ranks as \"" + Printable(account.name) + "\"; start hierad-agent "
                                         "as root, or as that user");
  }
  if (const absl::Status can = CanTakeAccounts(); !can.ok()) {
    return absl::FailedPreconditionError("no rank is started as \"" + Printable(account.name) + "\": " + std::string(can.message()));
  }
  return std::optional<Account>(std::move(account));
}

int DropPrivileges(const std::optional<Account>& account) {
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) return errno;
  if (!account && geteuid() == 0) return 0;
  if (account && initgroups(account->name.c_str(), account->gid) != 0) return errno;
  if (account && setresgid(account->gid, account->gid, account->gid) != 0) return errno;
  // The bounding set first, while that is still allowed: without it even an exec as uid 0 gets nothing back.
  for (int capability = 0; capability <= kHighestCapability; ++capability) prctl(PR_CAPBSET_DROP, capability, 0, 0, 0);
  if (account && setresuid(account->uid, account->uid, account->uid) != 0) return errno;
  prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
  __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
  const __user_cap_data_struct none[2] = {};
  return syscall(SYS_capset, &header, none) == 0 ? 0 : errno;
}

FilesAs::FilesAs(const std::optional<Account>& account) : switched_(account.has_value()) {
  if (!switched_) return;
  groups_.resize(size_t(std::max(0, getgroups(0, nullptr))));
  groups_.resize(size_t(std::max(0, getgroups(int(groups_.size()), groups_.data()))));
  int count = 1024;
  std::vector<gid_t> groups(size_t{1024});
  if (getgrouplist(account->name.c_str(), account->gid, groups.data(), &count) < 0) count = 0;
  // Not setgroups(): glibc's is for all threads.
  const bool grouped = syscall(SYS_setgroups, size_t(std::max(0, count)), groups.data()) == 0;
  gid_ = gid_t(setfsgid(account->gid));
  uid_ = uid_t(setfsuid(account->uid));
  // Both say nothing of a failure; asked with an id that there is not, they say what holds.
  if (grouped && gid_t(setfsgid(gid_t(-1))) == account->gid && uid_t(setfsuid(uid_t(-1))) == account->uid) return;
  status_ = absl::FailedPreconditionError("cannot look at files with the rights of \"" + Printable(account->name) + "\" alone: this process "
                                          "lacks CAP_SETUID or CAP_SETGID; give it both (in a container: --cap-add SETUID --cap-add SETGID)");
}

FilesAs::~FilesAs() {
  if (!switched_) return;
  setfsuid(uid_);
  setfsgid(gid_);
  syscall(SYS_setgroups, groups_.size(), groups_.data());
}

}  // namespace hierad
