// Who may call what. One table over every RPC (kRules, in authz.cc): the build fails when a method of proto/ is not in it
// (hierad_authz_check), and a method that is not in it is refused.
//
// Who calls is known from the connection:
//   unix socket, private (mode 0600)   whoever can open it is hierad's own user: everything
//   unix socket, shared                by peer credentials (base/channel/peer_token.h): root and hierad's own user everything,
//                                      others are submitters; without a token only a rank's session, which has its own secret
//   TLS                                by the certificate's one SAN of the form URI:hierad://ROLE/NAME
#pragma once

#include <grpcpp/security/auth_context.h>
#include <grpcpp/security/auth_metadata_processor.h>
#include <grpcpp/server_context.h>
#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "server/peer_identity.h"

namespace hierad {

enum Role : uint32_t { kViewer = 1, kSubmitter = 2, kAdmin = 4, kAgent = 8, kWorker = 16 };

struct Caller {
  uint32_t roles = 0;
  std::string name;      // who owns what it submits; of an agent by certificate: the node it may speak for
  bool bound = false;    // an agent that may speak for that node only
  bool local = false;    // by the kernel's word a user of hierad's machine; else `name` is what a certificate says
  // Otherwise it sees and ends its own jobs only. (A viewer cannot reach what changes anything.)
  bool AllJobs() const { return (roles & (kViewer | kAdmin)) != 0; }
};

// The roles that may call `method` ("/hierad.v1.ControlService/Get"); 0: it is not in the table.
uint32_t RolesFor(std::string_view method);

// Methods of the services in these files (as protoc names them) without a rule, and rules without a method.
std::vector<std::string> TableErrors(const std::vector<std::string>& proto_files);

class Authz {
 public:
  // `peers`: of a shared socket; null: it is private. `owner`: the user that hierad runs as.
  Authz(const PeerIdentity* peers, std::string owner) : peers_(peers), owner_(std::move(owner)) {}

  // Unauthenticated, with what is missing.
  absl::StatusOr<Caller> CallerOf(const grpc::AuthContext& context, std::string_view token) const;
  absl::StatusOr<Caller> CallerOf(const grpc::ServerContextBase& context) const;
  // A process of this user on hierad's own machine: what it may on the unix socket, if it can open it. No roles: nothing.
  Caller CallerOfUser(uid_t uid) const;

  // For a listener's credentials: refuses calls before they reach a service. Outlived by this.
  std::shared_ptr<grpc::AuthMetadataProcessor> Processor() const;

 private:
  absl::StatusOr<Caller> LocalCaller(std::string_view token) const;
  static absl::StatusOr<Caller> CertifiedCaller(const grpc::AuthContext& context);

  const PeerIdentity* const peers_;
  const std::string owner_;
};

}  // namespace hierad
