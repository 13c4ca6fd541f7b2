// Whose a rank is: the account it runs as, and how a process gives up what it does not need.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace hierad {

struct Account {
  uid_t uid = 0;
  gid_t gid = 0;
  std::string name, home;
};

// "alice", or "uid 1000" where hierad's machine has no name for it. NotFound: this machine has no such user. A bare number is not enough: its
// groups would be a guess, and a guess may be the group of disks.
absl::StatusOr<Account> FindAccount(const std::string& name);

// Whose account ranks run as, as --worker-user and --root-ranks say.
struct RankRights {
  // "": of root the submitter's, of anyone else the own one. "submitter": the submitter's. NAME: always this one, never root.
  std::string worker_user;
  bool root_allowed = false;   // where it is the submitter's and that is root: root all the same
};

// FailedPrecondition: this process cannot take another account, being no root or a root without CAP_SETUID and CAP_SETGID.
absl::Status CanTakeAccounts();

// Of the rank of a job that `submitter` has submitted; nullopt: the account that this process has. FailedPrecondition: it would be
// root and that is not allowed, or another one and this process cannot take it.
absl::StatusOr<std::optional<Account>> AccountFor(const RankRights& rights, const std::string& submitter);

// In a child of one thread, before exec: takes the account and gives up every capability for good. Without an account it keeps
// its own, and root stays root. no_new_privs in any case. 0, or errno of what failed.
int DropPrivileges(const std::optional<Account>& account);

// While it lives, this thread's access to files is the account's: for paths that the account chose, in a process of root. Whoever makes
// one looks at its status: without the capabilities of root nothing is switched, and nothing must be touched.
class FilesAs {
 public:
  explicit FilesAs(const std::optional<Account>& account);
  ~FilesAs();
  FilesAs(const FilesAs&) = delete;
  FilesAs& operator=(const FilesAs&) = delete;
  const absl::Status& status() const { return status_; }

 private:
  const bool switched_;
  std::vector<gid_t> groups_;   // these three: what the thread had before
  uid_t uid_ = 0;
  gid_t gid_ = 0;
  absl::Status status_;
};

}  // namespace hierad
