#include "server/rpc_server.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/resource_quota.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/fs.h"
#include "base/limits.h"
#include "base/status.h"
#include "base/text.h"
#include "server/config.h"

namespace hierad {
namespace {

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

}  // namespace

RpcServer::RpcServer(const RpcServerOptions& options, Coordinator* coordinator, const Clock* clock)
    : control_(coordinator, clock, options.version, options.commit), agents_(coordinator), workers_(coordinator) {}

RpcServer::~RpcServer() { Stop(); }

absl::StatusOr<std::unique_ptr<RpcServer>> RpcServer::Start(const RpcServerOptions& options, Coordinator* coordinator, const Clock* clock) {
  const std::string path = options.listen.substr(5);
  RETURN_IF_ERROR(ClearSocket(path));
  if (!options.tcp.empty()) {
    ASSIGN_OR_RETURN(const HostPort address, ParseHostPort(options.tcp));
    RETURN_IF_ERROR(CheckListen("tcp", address));
  }
  std::unique_ptr<RpcServer> rpc(new RpcServer(options, coordinator, clock));
  static const bool plugins = [] {
    grpc::EnableDefaultHealthCheckService(true);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    return true;
  }();
  (void)plugins;
  grpc::ServerBuilder builder;
  int unix_port = 0, tcp_port = 0;
  builder.AddListeningPort(options.listen, grpc::InsecureServerCredentials(), &unix_port);
  if (!options.tcp.empty()) builder.AddListeningPort(options.tcp, grpc::InsecureServerCredentials(), &tcp_port);
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
  if (chmod(path.c_str(), 0600) != 0) return ErrnoStatus(errno, "listen: cannot protect the socket", path);
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
