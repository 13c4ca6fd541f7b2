#include "client/connection.h"

#include <grpc/support/time.h>
#include <grpcpp/channel.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "base/channel/certificates.h"
#include "base/channel/channel.h"
#include "base/fs.h"
#include "base/limits.h"
#include "base/status.h"
#include "base/text.h"

namespace hierad {
namespace {

constexpr char kSystemSocket[] = "/run/hierad/hierad.sock";
constexpr char kElsewhere[] = ", or name another address with --server or HIERAD_SERVER";

// Why a Unix socket cannot be reached: gRPC's own text buries it.
int ConnectErrno(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.c_str(), std::min(path.size(), sizeof address.sun_path - 1));
  UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd) return errno;
  return ::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0 ? 0 : errno;
}

// `guessed`: nobody named the address.
std::string Unreachable(const std::string& target, bool guessed, const std::string& detail) {
  const std::string shown = PrintableSentence(target);
  if (target.rfind("unix:", 0) != 0) {
    return "cannot reach hierad at " + shown + ": " + detail + "; check that it runs and listens there" + kElsewhere;
  }
  switch (ConnectErrno(target.substr(5))) {
    case 0: return "hierad at " + shown + " broke off: " + detail;
    case ENOENT:
    case ENOTDIR:
      if (guessed) {
        std::string places;
        for (const std::string& path : DefaultSockets()) places += (places.empty() ? "" : ", ") + PrintableSentence(path);
        return "cannot reach hierad: there is no socket at any of the usual places (" + places + "); start hierad" + kElsewhere;
      }
      return "cannot reach hierad: there is no socket at " + shown + "; start hierad" + kElsewhere;
    case ECONNREFUSED:
      return "cannot reach hierad: nothing listens at " + shown + " any more; start hierad again" + kElsewhere;
    case EACCES:
    case EPERM:
      return "cannot reach hierad: you may not open " + shown +
             "; join the group that the socket belongs to" + kElsewhere;
    default: return "cannot reach hierad at " + shown + ": " + detail + "; check that it runs" + kElsewhere;
  }
}

}  // namespace

std::vector<std::string> DefaultSockets() {
  std::vector<std::string> paths = {kSystemSocket};
  const auto below = [&](const char* variable, const char* rest) {
    const char* folder = std::getenv(variable);
    if (folder != nullptr && *folder == '/') paths.push_back(JoinPath(folder, rest));
    return folder != nullptr && *folder == '/';
  };
  below("XDG_RUNTIME_DIR", "hierad.sock");
  if (!below("XDG_STATE_HOME", "hierad/hierad.sock")) below("HOME", ".local/state/hierad/hierad.sock");
  paths.push_back("/var/lib/hierad/hierad.sock");
  return paths;
}

std::string DefaultServer() {
  std::string existing;
  for (const std::string& path : DefaultSockets()) {
    if (path.size() >= sizeof sockaddr_un{}.sun_path) continue;
    const int error = ConnectErrno(path);
    if (error == 0) return "unix:" + path;
    if (existing.empty() && error != ENOENT && error != ENOTDIR) existing = path;
  }
  return "unix:" + (existing.empty() ? kSystemSocket : existing);
}

absl::StatusOr<std::string> ServerTarget(const std::string& address) {
  const std::string path = address.rfind("unix:", 0) == 0 ? address.substr(5) : address;
  if (path.size() != address.size() || (!path.empty() && path[0] == '/')) {
    if (path.empty()) return absl::InvalidArgumentError("the server's address is \"unix:\" without a path");
    if (path.size() >= sizeof sockaddr_un{}.sun_path) {
      return absl::InvalidArgumentError("the socket's path has " + std::to_string(path.size()) +
                                        " bytes; the system allows " +
                                        std::to_string(sizeof sockaddr_un{}.sun_path - 1));
    }
    return "unix:" + path;
  }
  const size_t colon = address.rfind(':');
  const std::string port = colon == std::string::npos ? "" : address.substr(colon + 1);
  const bool digits = !port.empty() && port.size() <= 5 &&
                      std::all_of(port.begin(), port.end(), [](char c) { return c >= '0' && c <= '9'; });
  if (!digits || colon == 0 || std::stoi(port) < 1 || std::stoi(port) > 65535) {
    return absl::InvalidArgumentError("\"" + Printable(address) + "\" is no address of a server; write unix:/path or host:port");
  }
  return "dns:///" + address;
}

std::string CertificatesFolder() {
  const char* named = std::getenv("HIERAD_CERTIFICATES");
  if (named != nullptr && *named != '\0') return named;
  const char* config = std::getenv("XDG_CONFIG_HOME");
  if (config != nullptr && *config == '/') return JoinPath(config, "hierad");
  const char* home = std::getenv("HOME");
  return JoinPath(home != nullptr && *home == '/' ? home : "/", ".config/hierad");
}

Connection::Connection(std::string target, bool guessed, const std::shared_ptr<grpc::ChannelCredentials>& credentials)
    : target_(std::move(target)), guessed_(guessed) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(int(limits::kGrpcMessageBytes));
  arguments.SetMaxSendMessageSize(int(limits::kGrpcMessageBytes));
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);   // hierad is near; a web proxy is not the way to it
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 1000);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  if (target_.rfind("unix:", 0) != 0) {
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 30'000);
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10'000);
  }
  stub_ = v1::ControlService::NewStub(grpc::CreateCustomChannel(target_, credentials, arguments));
  if (target_.rfind("dns:///", 0) == 0) target_ = target_.substr(7);
}

absl::StatusOr<std::unique_ptr<Connection>> Connection::Open(const std::string& address) {
  ASSIGN_OR_RETURN(std::string target, ServerTarget(address.empty() ? DefaultServer() : address));
  v1::Certificates certificates;
  if (target.rfind("unix:", 0) != 0) {
    const std::string folder = CertificatesFolder();
    auto read = ReadCertificates(folder);
    if (!read.ok()) {
      return absl::FailedPreconditionError("hierad speaks TLS only at " + PrintableSentence(address) + ", and there are no usable certificates in \"" +
                                           Printable(folder) + "\" (HIERAD_CERTIFICATES names another folder; deploy/certs makes them): " +
                                           std::string(read.status().message()));
    }
    certificates = *std::move(read);
  }
  ASSIGN_OR_RETURN(const auto credentials, CredentialsFor(target, certificates));
  return std::unique_ptr<Connection>(new Connection(std::move(target), address.empty(), credentials));
}

void Connection::SetDeadline(grpc::ClientContext* context, std::chrono::nanoseconds timeout) {
  context->set_deadline(gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_nanos(timeout.count(), GPR_TIMESPAN)));
}

absl::Status Connection::ErrorFrom(const grpc::Status& status) const {
  std::string message;
  for (const std::string& line : Split(status.error_message(), '\n')) {
    message += (message.empty() ? "" : "\n") + PrintableSentence(line);
  }
  switch (status.error_code()) {
    case grpc::StatusCode::OK: return absl::OkStatus();
    case grpc::StatusCode::UNAVAILABLE: return absl::UnavailableError(Unreachable(target_, guessed_, message));
    case grpc::StatusCode::DEADLINE_EXCEEDED:
      return absl::DeadlineExceededError("hierad at " + PrintableSentence(target_) + " did not answer in time; its log says what it is at");
    case grpc::StatusCode::UNIMPLEMENTED:
      return absl::UnimplementedError("what answers at " + PrintableSentence(target_) +
                                      " does not know this request; it is an older hierad, or not hierad");
    default: return absl::Status(absl::StatusCode(status.error_code()), message);
  }
}

}  // namespace hierad
