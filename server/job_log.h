// Reading the log of one rank while it may still grow, and be rotated. One thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/account.h"
#include "base/fs.h"

namespace hierad {

class JobLog {
 public:
  // `tail_lines` > 0: begins at the last so many lines of what is there at the first read.
  // `account`: with whose rights it is read, the ranks' own: the path is the submitter's word, and may lead anywhere.
  JobLog(std::string path, uint64_t tail_lines, std::optional<Account> account = std::nullopt)
      : path_(std::move(path)), tail_lines_(tail_lines), account_(std::move(account)) {}

  // The next bytes, at most limits::kLogChunkBytes; empty: nothing new. NotFound: there is no log yet.
  absl::StatusOr<std::string> Read();

 private:
  absl::Status Open();

  const std::string path_;
  uint64_t tail_lines_;
  const std::optional<Account> account_;
  UniqueFd fd_;
  int64_t offset_ = 0;
};

}  // namespace hierad
