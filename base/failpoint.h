// Named places where a test makes things go wrong. Only builds with tests (failpoint.cc is then compiled with
// HIERAD_FAILPOINTS) look at the environment; in others a failpoint does nothing.
//
// The environment variable HIERAD_FAILPOINTS names a folder, which every process inherits. A file there, named like a
// failpoint, arms it; its text is
//     ACTION [SKIP [ARGUMENT]]
// with SKIP passes by this process before it acts (0), and ACTION
//     kill          SIGKILL to this very process
//     error         an Unavailable error: a fault that passes (a report that is lost, a commit that was made and is said to
//                   have failed, an fsync that failed, depending on the place)
//     enospc        ResourceExhausted, as a full disk gives it
//     delay         ARGUMENT milliseconds, then on
//     value         for places that measure something: ARGUMENT is what they measure
// It acts once: the file is renamed to NAME.fired, which one process alone can do. `value` stays until it is taken away.
#pragma once

#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "base/status.h"

namespace hierad {

absl::Status Failpoint(const char* name);
std::optional<int64_t> FailpointValue(const char* name);

}  // namespace hierad

// Returns the error that the failpoint is armed with, from a function that gives a Status.
#define HIERAD_FAILPOINT(name) RETURN_IF_ERROR(::hierad::Failpoint(name))
