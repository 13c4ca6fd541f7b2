// The folder a job writes to: checks at submission, creation at placement.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/account.h"
#include "server/job_row.h"

namespace hierad {

// `folder` made comparable: lexically normal, links in the part that exists followed, no slash at the end. Any thread.
std::string NormalFolder(const std::string& folder);

// A folder given by the user (empty: none is) must not hold an earlier run's checkpoints: a new job would replace them. Any thread.
absl::Status CheckOutputFolder(const std::string& folder);

// Makes it and writes there the resolved job.yaml and the mark of the attempt that begins: ranks of an older one end.
// All of it with the rights of the account that the ranks will run as; none: hierad's own. Errors as MakeOutputFolder's.
absl::Status MakeRunFolder(const JobRow& job, const std::vector<std::string>& allowed_roots, const std::string& credential,
                           const std::optional<Account>& account);

}  // namespace hierad
