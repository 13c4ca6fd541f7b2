// Credentials of a channel to hierad.
#pragma once

#include <grpcpp/security/credentials.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "hierad/v1/worker.pb.h"

namespace hierad {

// `endpoint`: unix:/path, where a call says who it comes from (peer_token.h), or host:port (also with a scheme before it),
// where only mutual TLS is spoken: FailedPrecondition without certificates.
absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> CredentialsFor(const std::string& endpoint,
                                                                         const v1::Certificates& certificates);

}  // namespace hierad
