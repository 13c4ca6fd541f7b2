#include "server/authz.h"

#include <google/protobuf/descriptor.h>
#include <grpc/grpc_security_constants.h>
#include <unistd.h>

#include <algorithm>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/channel/peer_token.h"
#include "base/text.h"
#include "server/rpc_status.h"

namespace hierad {
namespace {

constexpr uint32_t kReaders = kViewer | kSubmitter | kAdmin;
constexpr uint32_t kWriters = kSubmitter | kAdmin;
constexpr uint32_t kEveryone = kReaders | kAgent | kWorker;

struct Rule {
  std::string_view method;
  uint32_t roles;
};

// A submitter's rights end at its own jobs: ControlService sees to that for each method that names a job.
constexpr Rule kRules[] = {
    {"/hierad.v1.ControlService/Submit", kWriters},
    {"/hierad.v1.ControlService/Validate", kReaders},
    {"/hierad.v1.ControlService/Get", kReaders},
    {"/hierad.v1.ControlService/List", kReaders},
    {"/hierad.v1.ControlService/Watch", kReaders},
    {"/hierad.v1.ControlService/Logs", kReaders},
    {"/hierad.v1.ControlService/Metrics", kReaders},
    {"/hierad.v1.ControlService/Cancel", kWriters},
    {"/hierad.v1.ControlService/Pause", kWriters},
    {"/hierad.v1.ControlService/Resume", kWriters},
    {"/hierad.v1.ControlService/Checkpoint", kWriters},
    {"/hierad.v1.ControlService/SetLr", kWriters},
    {"/hierad.v1.ControlService/SetLogLevel", kWriters},
    {"/hierad.v1.ControlService/DrainNode", kAdmin},
    {"/hierad.v1.ControlService/CollectGarbage", kAdmin},
    {"/hierad.v1.ControlService/ListCheckpoints", kReaders},
    {"/hierad.v1.ControlService/Nodes", kReaders},
    {"/hierad.v1.ControlService/Version", kReaders},
    {"/hierad.v1.AgentService/Session", kAgent},
    {"/hierad.v1.WorkerService/Session", kWorker},
    // gRPC's own; they tell nothing of jobs.
    {"/grpc.health.v1.Health/Check", kEveryone},
    {"/grpc.health.v1.Health/Watch", kEveryone},
    {"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", kEveryone},
};

constexpr struct {
  Role role;
  std::string_view name;
} kRoleNames[] = {{kViewer, "viewer"}, {kSubmitter, "submitter"}, {kAdmin, "admin"}, {kAgent, "agent"}, {kWorker, "worker"}};

std::string RoleWords(uint32_t roles) {
  std::vector<std::string> words;
  for (const auto& [role, name] : kRoleNames) {
    if ((roles & role) != 0) words.emplace_back(name);
  }
  return words.empty() ? "none" : absl::StrJoin(words, " or ");
}

bool IsName(std::string_view name) {
  return !name.empty() && name.size() <= 63 && std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || c == '.' || c == '_' || c == '-';
  });
}

class AuthzProcessor : public grpc::AuthMetadataProcessor {
 public:
  explicit AuthzProcessor(const Authz* authz) : authz_(authz) {}
  bool IsBlocking() const override { return false; }

  grpc::Status Process(const InputMetadata& metadata, grpc::AuthContext* context, OutputMetadata*, OutputMetadata*) override {
    const auto value = [&](const char* key) {
      const auto found = metadata.find(key);
      return found == metadata.end() ? std::string_view() : std::string_view(found->second.data(), found->second.size());
    };
    auto caller = authz_->CallerOf(*context, value(kPeerTokenKey));
    if (!caller.ok()) return ToRpc(caller.status());
    const std::string_view method = value(":path");
    const uint32_t allowed = RolesFor(method);
    if ((caller->roles & allowed) != 0) return grpc::Status::OK;
    return grpc::Status(grpc::StatusCode::PERMISSION_DENIED,
                        absl::StrCat(Printable(method, 100), " is for the role ", RoleWords(allowed), "; you are ", RoleWords(caller->roles),
                                     caller->name.empty() ? "" : absl::StrCat(" \"", caller->name, "\"")));
  }

 private:
  const Authz* const authz_;
};

}  // namespace

uint32_t RolesFor(std::string_view method) {
  for (const Rule& rule : kRules) {
    if (rule.method == method) return rule.roles;
  }
  return 0;
}

std::vector<std::string> TableErrors(const std::vector<std::string>& proto_files) {
  std::vector<std::string> errors;
  std::set<std::string, std::less<>> methods;
  for (const std::string& name : proto_files) {
    const auto* file = google::protobuf::DescriptorPool::generated_pool()->FindFileByName(name);
    for (int s = 0; file != nullptr && s < file->service_count(); ++s) {
      const auto* service = file->service(s);
      for (int m = 0; m < service->method_count(); ++m) {
        const std::string method = absl::StrCat("/", service->full_name(), "/", service->method(m)->name());
        methods.insert(method);
        if (RolesFor(method) == 0) errors.push_back(absl::StrCat(method, " has no rule in server/authz.cc: say there which roles may call it"));
      }
    }
  }
  for (const Rule& rule : kRules) {
    if (rule.method.rfind("/grpc.", 0) != 0 && methods.count(rule.method) == 0) {
      errors.push_back(absl::StrCat("server/authz.cc has a rule for ", std::string(rule.method), ", which no service has"));
    }
  }
  return errors;
}

absl::StatusOr<Caller> Authz::LocalCaller(std::string_view token) const {
  if (peers_ == nullptr) return Caller{kEveryone, owner_, false, true};
  if (token.empty()) return Caller{kWorker, "", false};
  const std::optional<uid_t> uid = peers_->Find(std::string(token));
  if (!uid) return absl::UnauthenticatedError("the peer token is not of this hierad; call again");
  return CallerOfUser(*uid);
}

Caller Authz::CallerOfUser(uid_t uid) const {
  if (uid == 0 || uid == geteuid()) return Caller{kEveryone, UserName(uid), false, true};
  return Caller{peers_ == nullptr ? 0u : kSubmitter | kWorker, UserName(uid), false, true};
}

absl::StatusOr<Caller> Authz::CertifiedCaller(const grpc::AuthContext& context) {
  constexpr std::string_view kScheme = "hierad://";
  std::vector<std::string> ours;
  for (const grpc::string_ref& uri : context.FindPropertyValues(GRPC_PEER_URI_PROPERTY_NAME)) {
    std::string text(uri.data(), uri.size());
    if (text.rfind(kScheme, 0) == 0) ours.push_back(text.substr(kScheme.size()));
  }
  if (ours.size() != 1) {
    return absl::UnauthenticatedError(absl::StrCat("the certificate has ", ours.size(), " names of the form URI:hierad://ROLE/NAME, not one; "
                                                   "deploy/certs makes such certificates"));
  }
  const std::string& text = ours.front();
  const size_t slash = text.find('/');
  for (const auto& [role, name] : kRoleNames) {
    if (slash == name.size() && text.compare(0, slash, name) == 0 && IsName(std::string_view(text).substr(slash + 1))) {
      return Caller{role, text.substr(slash + 1), role == kAgent};
    }
  }
  return absl::UnauthenticatedError(absl::StrCat("the certificate's name hierad://", Printable(text, 100), " is of no known role"));
}

absl::StatusOr<Caller> Authz::CallerOf(const grpc::AuthContext& context, std::string_view token) const {
  const auto transport = context.FindPropertyValues(GRPC_TRANSPORT_SECURITY_TYPE_PROPERTY_NAME);
  if (transport.size() == 1 && transport[0] == "local") return LocalCaller(token);
  return CertifiedCaller(context);
}

absl::StatusOr<Caller> Authz::CallerOf(const grpc::ServerContextBase& context) const {
  const auto token = context.client_metadata().find(kPeerTokenKey);
  const auto auth = context.auth_context();
  if (auth == nullptr) return absl::UnauthenticatedError("the connection says nothing of who calls");
  return CallerOf(*auth, token == context.client_metadata().end() ? std::string_view()
                                                                  : std::string_view(token->second.data(), token->second.size()));
}

std::shared_ptr<grpc::AuthMetadataProcessor> Authz::Processor() const { return std::make_shared<AuthzProcessor>(this); }

}  // namespace hierad
