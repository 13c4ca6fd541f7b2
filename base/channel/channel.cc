#include "base/channel/channel.h"

#include <map>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/channel/peer_token.h"
#include "base/text.h"

namespace hierad {
namespace {

class PeerTokenPlugin : public grpc::MetadataCredentialsPlugin {
 public:
  explicit PeerTokenPlugin(std::string socket_path) : socket_path_(std::move(socket_path)) {}

  // Asked anew for each call: hierad may have been started again, and its tokens with it.
  grpc::Status GetMetadata(grpc::string_ref, grpc::string_ref, const grpc::AuthContext&,
                           std::multimap<std::string, std::string>* metadata) override {
    if (std::string token = FetchPeerToken(socket_path_); !token.empty()) metadata->emplace(kPeerTokenKey, std::move(token));
    return grpc::Status::OK;
  }

 private:
  const std::string socket_path_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> CredentialsFor(const std::string& endpoint,
                                                                         const v1::Certificates& certificates) {
  if (endpoint.rfind("unix:", 0) == 0) {
    return grpc::CompositeChannelCredentials(
        grpc::experimental::LocalCredentials(UDS),
        grpc::MetadataCredentialsFromPlugin(std::make_unique<PeerTokenPlugin>(endpoint.substr(5))));
  }
  if (certificates.key().empty()) {
    return absl::FailedPreconditionError(absl::StrCat("hierad at ", PrintableSentence(endpoint), " speaks TLS only, and no certificates are given; "
                                                      "make them with deploy/certs and name their folder"));
  }
  return grpc::SslCredentials({certificates.ca(), certificates.key(), certificates.certificate()});
}

}  // namespace hierad
