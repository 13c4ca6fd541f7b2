// What a command writes to and knows about where it runs. main fills it from the process; tests from strings.
#pragma once

#include <functional>
#include <ostream>
#include <string>

#include "absl/status/status.h"
#include "base/clock.h"

namespace hierad {

// Exit codes of hierctl.
enum ExitCode : int {
  kExitOk = 0,             // also: the job SUCCEEDED
  kExitUsage = 1,          // wrong usage, or the job or request was refused
  kExitUnreachable = 2,
  kExitFailed = 100,       // the job FAILED
  kExitNotFinished = 101,
  kExitNotFound = 102,
  kExitCancelled = 103,
};

struct Context {
  std::ostream* out = nullptr;
  std::ostream* err = nullptr;
  const Clock* clock = nullptr;
  bool live = false;       // stdout is a terminal that can be redrawn
  bool color = false;
  bool unicode = false;    // the locale shows block characters
  std::function<int()> columns = [] { return 80; };
  std::function<int()> rows = [] { return 24; };
  bool json = false;
  bool csv = false;        // of `metrics` alone
  std::string server;      // as given by --server or HIERAD_SERVER; empty: the default
};

// Says what went wrong, on stderr (with json also as {"error": ...} on stdout). The exit code that goes with it.
int Fail(const absl::Status& status, const Context& context);

}  // namespace hierad
