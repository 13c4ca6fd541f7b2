#include "server/rpc_server.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>
#include <grp.h>
#include <pwd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/channel/certificates.h"
#include "base/fs.h"
#include "base/limits.h"
#include "base/status.h"
#include "base/text.h"
#include "server/config.h"

namespace hierad {
namespace {

constexpr unsigned kCertificateLookS = 2;   // between two looks at the certificates' files
constexpr int kThreads = 2048;   // of synchronous calls: the streams of ControlService, and short calls such as 16 clients with 64 submissions each

// A socket left by a killed hierad is removed; one that somebody listens on, or another kind of file, is not.
absl::Status ClearSocket(const std::string& path) {
  const std::string shown = absl::StrCat("listen: \"", Printable(path), "\" ");
  struct stat info;
  if (lstat(path.c_str(), &info) != 0) {
    if (errno == ENOENT) return MakeFolders(FolderOf(path), 0700);
    return ErrnoStatus(errno, "listen: cannot look at", path);
  }
  if (!S_ISSOCK(info.st_mode)) return absl::FailedPreconditionError(absl::StrCat(shown, "is there and is not a socket; give another path with --listen"));
  UniqueFd probe(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
  if (probe && connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) {
    return absl::UnavailableError(absl::StrCat(shown, "is in use by another program; end that one, or give another path with --listen"));
  }
  if (unlink(path.c_str()) != 0) return ErrnoStatus(errno, "listen: cannot remove the old socket", path);
  return absl::OkStatus();
}

// Who may open the socket.
struct Access {
  mode_t mode = 0600;
  gid_t group = static_cast<gid_t>(-1);
  bool shared = false;
};

absl::StatusOr<Access> AccessOf(const RpcServerOptions& options, const std::string& path) {
  Access access;
  if (options.access == "owner") return access;
  access.shared = true;
  access.mode = options.access == "group" ? 0660 : 0666;
  if (options.access == "group") {
    group entry;
    group* found = nullptr;
    std::vector<char> buffer(64 << 10);
    if (getgrnam_r(options.access_group.c_str(), &entry, buffer.data(), buffer.size(), &found) != 0 || found == nullptr) {
      return absl::NotFoundError(absl::StrCat("access_group: there is no group \"", Printable(options.access_group), "\" on this machine"));
    }
    access.group = found->gr_gid;
  }
  struct stat info;
  if (stat(FolderOf(path).c_str(), &info) == 0 && (info.st_mode & (options.access == "group" ? 011 : 001)) == 0) {
    return absl::FailedPreconditionError(absl::StrCat("access: ", options.access, ", but others cannot enter \"", Printable(FolderOf(path)),
                                                      "\"; put the socket elsewhere, as with --listen unix:/run/hierad/hierad.sock"));
  }
  return access;
}

bool IsMember(uid_t uid, gid_t group) {
  passwd entry;
  passwd* found = nullptr;
  std::vector<char> buffer(64 << 10);
  if (getpwuid_r(uid, &entry, buffer.data(), buffer.size(), &found) != 0 || found == nullptr) return false;
  std::vector<gid_t> groups(1024);
  int count = static_cast<int>(groups.size());
  if (getgrouplist(found->pw_name, found->pw_gid, groups.data(), &count) < 0) return false;
  return std::find(groups.begin(), groups.begin() + count, group) != groups.begin() + count;
}

std::shared_ptr<grpc::ServerCredentials> TlsCredentials(const std::string& folder) {
  auto provider = std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(
      JoinPath(folder, kKeyFile), JoinPath(folder, kCertificateFile), JoinPath(folder, kCaFile), kCertificateLookS);
  grpc::experimental::TlsServerCredentialsOptions options(provider);
  options.watch_root_certs();
  options.watch_identity_key_cert_pairs();
  options.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  return grpc::experimental::TlsServerCredentials(options);
}

}  // namespace

RpcServer::RpcServer(const RpcServerOptions& options, std::unique_ptr<PeerIdentity> peers, Coordinator* coordinator, const Clock* clock)
    : peers_(std::move(peers)), authz_(peers_.get(), options.owner),
      control_(coordinator, &authz_, clock, options.history, options.version, options.commit, options.allowed_roots), agents_(coordinator, &authz_), workers_(coordinator) {}

RpcServer::~RpcServer() { Stop(); }

Caller RpcServer::CallerOfUser(uid_t uid) const {
  Caller caller = authz_.CallerOfUser(uid);
  if (!caller.AllJobs() && group_ != static_cast<gid_t>(-1) && !IsMember(uid, group_)) caller.roles = 0;
  return caller;
}

absl::StatusOr<std::unique_ptr<RpcServer>> RpcServer::Start(const RpcServerOptions& options, Coordinator* coordinator, const Clock* clock) {
  const std::string path = options.listen.substr(5);
  RETURN_IF_ERROR(ClearSocket(path));
  if (!options.tcp.empty()) {
    ASSIGN_OR_RETURN(const HostPort address, ParseHostPort(options.tcp));
    RETURN_IF_ERROR(CheckListen("tcp", address));
    RETURN_IF_ERROR(ReadCertificates(options.certificates).status());
  }
  ASSIGN_OR_RETURN(const Access access, AccessOf(options, path));
  std::unique_ptr<PeerIdentity> peers;
  if (access.shared) {
    ASSIGN_OR_RETURN(peers, PeerIdentity::Listen(path, access.mode, access.group));
  }
  std::unique_ptr<RpcServer> rpc(new RpcServer(options, std::move(peers), coordinator, clock));
  rpc->group_ = access.group;
  static const bool plugins = [] {
    grpc::EnableDefaultHealthCheckService(true);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    return true;
  }();
  (void)plugins;
  grpc::ServerBuilder builder;
  int unix_port = 0, tcp_port = 0;
  const auto listen = [&](const std::string& address, const std::shared_ptr<grpc::ServerCredentials>& credentials, int* port) {
    credentials->SetAuthMetadataProcessor(rpc->authz_.Processor());
    builder.AddListeningPort(address, credentials, port);
  };
  listen(options.listen, grpc::experimental::LocalServerCredentials(UDS), &unix_port);
  if (!options.tcp.empty()) listen(options.tcp, TlsCredentials(options.certificates), &tcp_port);
  builder.SetMaxReceiveMessageSize(static_cast<int>(limits::kGrpcMessageBytes));
  builder.SetMaxSendMessageSize(static_cast<int>(limits::kGrpcMessageBytes));
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);   // else a second hierad would share the port in silence
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 10000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 5000);
  grpc::ResourceQuota quota("hierad");
  quota.SetMaxThreads(kThreads);
  builder.SetResourceQuota(quota);
  builder.RegisterService(&rpc->control_);
  builder.RegisterService(&rpc->agents_);
  builder.RegisterService(&rpc->workers_);
  // Between bind and chmod nobody else may connect.
  const mode_t before = umask(0177);
  rpc->server_ = builder.BuildAndStart();
  umask(before);
  if (rpc->server_ == nullptr || unix_port == 0 || (!options.tcp.empty() && tcp_port == 0)) {
    return absl::UnavailableError(absl::StrCat("cannot listen on ", options.listen, options.tcp.empty() ? "" : absl::StrCat(" and ", options.tcp),
                                               "; is the folder there and writable, and the address free?"));
  }
  if ((access.shared && access.group != static_cast<gid_t>(-1) && chown(path.c_str(), static_cast<uid_t>(-1), access.group) != 0) ||
      chmod(path.c_str(), access.mode) != 0) {
    return ErrnoStatus(errno, "listen: cannot set who may open the socket", path);
  }
  return rpc;
}

void RpcServer::Stop() {
  if (server_ == nullptr) return;
  control_.EndStreams();
  server_->Shutdown(std::chrono::system_clock::now() + std::chrono::seconds(2));
  server_->Wait();
  server_.reset();
}

}  // namespace hierad
