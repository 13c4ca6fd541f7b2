// The folder that a job writes to, as each process that begins to write there makes it: hierad, a node's keeper.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/account.h"
#include "base/fs.h"

namespace hierad {

struct OutputFolder {
  std::string path;                        // absolute
  bool given = false;                      // by the job's user; else hierad has named it, in runs_folder
  std::vector<std::string> allowed_roots;  // of paths that users give; none: anywhere
};

// Makes it where it is not there, with the rights of `account` (none: this process's own), and opens it (O_PATH). All that is written to it
// goes from that descriptor: whoever may rename the folder could put another in its place at any time.
// PermissionDenied: it is given and leads out of the roots by now, whatever it did when the job was submitted; or it is not, others may
// make folders beside it, and somebody else has made it (or a link of that name) beforehand, who could change all that comes there.
absl::StatusOr<UniqueFd> MakeOutputFolder(const OutputFolder& folder, const std::optional<Account>& account);

}  // namespace hierad
