// Certificates as files: a folder with ca.crt (whom to trust), tls.crt (one's own, with its chain) and tls.key, as
// deploy/certs makes it.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "hierad/v1/worker.pb.h"

namespace hierad {

inline constexpr char kCaFile[] = "ca.crt", kCertificateFile[] = "tls.crt", kKeyFile[] = "tls.key";

// FailedPrecondition: a key that others may read. The error names the file.
absl::StatusOr<v1::Certificates> ReadCertificates(const std::string& folder);

}  // namespace hierad
