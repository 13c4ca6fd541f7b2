// What hierad checks of a submission before the coordinator sees it: hierad trusts no client.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "hierad/v1/control.pb.h"

namespace hierad {

// Fills defaults and makes the output folder comparable. Problems as sentences; empty: legal.
std::vector<std::string> PrepareSpec(v1::JobSpec* spec, const std::vector<std::string>& allowed_roots = {});

// 1 to limits::kClientKeyBytes printable characters.
absl::Status CheckClientKey(const std::string& key);

// Problems as one InvalidArgument.
absl::Status AsStatus(const std::vector<std::string>& problems);

}  // namespace hierad
