// Status macros, and the reason class that an error carries from where it is known to where the job ends.
// absl::Status throughout; exceptions of YAML, c10 and CUDA are turned into Status at one adapter each.
#pragma once

#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "hierad/v1/job.pb.h"

#define HIERAD_CONCAT_INNER(a, b) a##b
#define HIERAD_CONCAT(a, b) HIERAD_CONCAT_INNER(a, b)

#define RETURN_IF_ERROR(expr)                                  \
  do {                                                         \
    if (absl::Status s_ = (expr); !s_.ok()) return s_;         \
  } while (false)

#define ASSIGN_OR_RETURN(lhs, expr) \
  HIERAD_ASSIGN_OR_RETURN_INNER(HIERAD_CONCAT(statusor_, __LINE__), lhs, expr)
#define HIERAD_ASSIGN_OR_RETURN_INNER(var, lhs, expr) \
  auto var = (expr);                                  \
  if (!var.ok()) return std::move(var).status();      \
  lhs = *std::move(var)

namespace hierad {

// An error of a given class. `message`: one sentence, what, where, the value seen, the value allowed, what to do.
absl::Status ErrorOf(v1::Reason reason, std::string_view message);

// The class an error carries; without one: by its code (InvalidArgument, NotFound, FailedPrecondition -> user error;
// DataLoss -> data error; Unavailable, DeadlineExceeded -> peer lost; Cancelled -> cancelled; else REASON_CRASHED).
v1::Reason ReasonOf(const absl::Status& status);

// `context: message`, keeping code and class.
absl::Status Annotate(const absl::Status& status, std::string_view context);

}  // namespace hierad
