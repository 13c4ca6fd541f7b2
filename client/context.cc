#include "client/context.h"

#include "base/text.h"
#include "client/job_json.h"

namespace hierad {

int Fail(const absl::Status& status, const Context& context) {
  const std::string message(status.message());
  *context.err << "hierctl: " << message << "\n";
  if (context.json) {
    const std::string code = absl::StatusCodeToString(status.code());
    *context.out << JsonText({{"error", {{"code", code}, {"message", message}}}});
  }
  switch (status.code()) {
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kDeadlineExceeded: return kExitUnreachable;
    case absl::StatusCode::kNotFound: return kExitNotFound;
    default: return kExitUsage;
  }
}

}  // namespace hierad
