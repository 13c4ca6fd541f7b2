// hierad's own log: lines on stderr, or in a file that is moved aside when it is full; the older ones are kept as NAME.1.EXT (the
// newest of them) and so on.
#pragma once

#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "server/config.h"

namespace hierad {

struct LogFileLimits {
  size_t bytes = 16 << 20;   // of one file
  size_t older = 4;          // files beside the one that is written
};

// spdlog's default logger from here on, and the format of all that hierad starts. A log_file that cannot be opened is said on stderr,
// which then takes the lines.
void SetUpDaemonLog(const ServerConfig& config, const LogFileLimits& limits = {});
// log_level of a file of settings, taken on at once. Errors: there is none, it cannot be read, the word is none.
absl::Status ReloadLogLevel(const std::string& config_file);

}  // namespace hierad
