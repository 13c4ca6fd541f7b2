// Addresses of this machine.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace hierad {

// The numeric address by which this machine reaches `endpoint` ("host:port"); the loopback's for "unix:".
absl::StatusOr<std::string> AddressToward(const std::string& endpoint);

}  // namespace hierad
