#include "server/config.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
#include <yaml-cpp/yaml.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <set>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/account.h"
#include "base/fs.h"
#include "base/status.h"
#include "base/text.h"

namespace hierad {
namespace {

constexpr int64_t kConfigBytes = 64 << 10;

absl::Status Bad(const std::string& what) { return absl::InvalidArgumentError(what); }

std::map<std::string, std::function<bool(const std::string&)>> Setters(ServerConfig* c) {
  const auto text = [](std::string* to) { return [to](const std::string& v) { *to = v; return true; }; };
  const auto seconds = [](double* to) { return [to](const std::string& v) { return absl::SimpleAtod(v, to); }; };
  return {
      {"state_folder", text(&c->state_folder)}, {"listen", text(&c->listen)},
      {"access", text(&c->access)}, {"access_group", text(&c->access_group)},
      {"tcp", text(&c->tcp)}, {"certificates", text(&c->certificates)}, {"metrics", text(&c->metrics)}, {"web", text(&c->web)},
      {"agent", text(&c->agent)}, {"agent_lifetime", text(&c->agent_lifetime)},
      {"worker_user", text(&c->worker_user)}, {"root_ranks", text(&c->root_ranks)},
      {"cpu_slots", [c](const std::string& v) { return v == "auto" ? (c->cpu_slots = -1, true) : absl::SimpleAtoi(v, &c->cpu_slots); }},
      {"allowed_roots", text(&c->allowed_roots)},
      {"runs_folder", text(&c->runs_folder)}, {"stop_grace_s", seconds(&c->stop_grace_s)},
      {"node_lost_after_s", seconds(&c->node_lost_after_s)}, {"hang_after_s", seconds(&c->hang_after_s)},
      {"pause_grace_s", seconds(&c->pause_grace_s)}, {"disk_reserve_gib", seconds(&c->disk_reserve_gib)},
      {"log_level", text(&c->log_level)}, {"log_format", text(&c->log_format)}, {"log_file", text(&c->log_file)},
  };
}

absl::Status Take(const YAML::Node& root, const std::string& path, ServerConfig* config) {
  const auto at = [&](const YAML::Node& node) { return absl::StrCat(path, ":", node.Mark().line + 1, ": "); };
  if (root.IsNull()) return absl::OkStatus();
  if (!root.IsMap()) return Bad(absl::StrCat(at(root), "expected settings, one `key: value` a line"));
  const auto setters = Setters(config);
  std::set<std::string> seen;
  for (const auto& pair : root) {
    const std::string key = pair.first.IsScalar() ? pair.first.Scalar() : "";
    const auto setter = setters.find(key);
    if (setter == setters.end()) {
      std::string nearest;
      for (const auto& [name, set] : setters) {
        if (nearest.empty() || EditDistance(key, name) < EditDistance(key, nearest)) nearest = name;
      }
      return Bad(absl::StrCat(at(pair.first), "there is no setting \"", Printable(key), "\"; the nearest is ", nearest));
    }
    if (!seen.insert(key).second) return Bad(absl::StrCat(at(pair.first), key, " is given twice"));
    if (pair.second.IsNull()) continue;
    if (!pair.second.IsScalar() || !setter->second(pair.second.Scalar())) {
      return Bad(absl::StrCat(at(pair.second), key, ": ", pair.second.IsScalar() ? Printable(pair.second.Scalar()) : "this", " is not a value for it; see configs/hierad.yaml"));
    }
  }
  return absl::OkStatus();
}

absl::Status Absolute(const char* what, std::string* path) {
  std::error_code error;
  const std::filesystem::path full = std::filesystem::absolute(*path, error);
  if (error) return absl::InternalError(absl::StrCat(what, ": ", error.message()));
  *path = full.lexically_normal().string();
  while (path->size() > 1 && path->back() == '/') path->pop_back();
  return absl::OkStatus();
}

absl::Status CheckWord(const char* key, const std::string& value, std::initializer_list<const char*> words) {
  std::string all;
  for (const char* word : words) {
    if (value == word) return absl::OkStatus();
    absl::StrAppend(&all, all.empty() ? "" : ", ", word);
  }
  return Bad(absl::StrCat(key, ": \"", Printable(value), "\" is none of ", all));
}

}  // namespace

absl::Status ReadConfig(const std::string& path, ServerConfig* config) {
  auto text = ReadFile(path, kConfigBytes);
  if (!text.ok()) return text.status();
  try {
    return Take(YAML::Load(*text), path, config);
  } catch (const YAML::Exception& error) {
    return Bad(absl::StrCat(path, ":", error.mark.line + 1, ": ", error.msg));
  }
}

std::string DefaultStateFolder() {
  if (geteuid() == 0) return "/var/lib/hierad";
  const char* state = std::getenv("XDG_STATE_HOME");
  if (state != nullptr && state[0] == '/') return JoinPath(state, "hierad");
  const char* home = std::getenv("HOME");
  return JoinPath(home != nullptr && home[0] == '/' ? home : "/tmp", ".local/state/hierad");
}

absl::StatusOr<HostPort> ParseHostPort(const std::string& text) {
  HostPort result;
  const size_t colon = text.rfind(':');
  std::string port = colon == std::string::npos ? "" : text.substr(colon + 1);
  result.host = text.substr(0, colon);
  if (result.host.size() > 2 && result.host.front() == '[' && result.host.back() == ']') result.host = result.host.substr(1, result.host.size() - 2);
  if (colon == std::string::npos || result.host.empty() || !absl::SimpleAtoi(port, &result.port) || result.port < 0 || result.port > 65535) {
    return Bad(absl::StrCat("\"", Printable(text), "\" is not an address of the form host:port"));
  }
  return result;
}

bool IsLoopback(const std::string& host) {
  if (host == "localhost") return true;
  in_addr v4;
  if (inet_pton(AF_INET, host.c_str(), &v4) == 1) return (ntohl(v4.s_addr) >> 24) == 127;
  in6_addr v6;
  return inet_pton(AF_INET6, host.c_str(), &v6) == 1 && IN6_IS_ADDR_LOOPBACK(&v6);
}

absl::Status CheckListen(const std::string& what, const HostPort& address) {
  const std::string where = absl::StrCat(what, ": cannot listen on ", address.host, ":", address.port, ": ");
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  const int code = getaddrinfo(address.host.c_str(), absl::StrCat(address.port).c_str(), &hints, &found);
  if (code != 0) return absl::UnavailableError(absl::StrCat(where, gai_strerror(code)));
  absl::Status status;
  for (const addrinfo* at = found; at != nullptr && status.ok(); at = at->ai_next) {
    UniqueFd fd(socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const int on = 1;
    if (!fd || setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) != 0 ||
        bind(fd.get(), at->ai_addr, at->ai_addrlen) != 0 || listen(fd.get(), 1) != 0) {
      const int error = errno;
      const char* advice = error == EADDRINUSE ? "; another program has it: end that one, or choose another address"
                           : error == EACCES   ? "; ports below 1024 need root: choose a higher one"
                                               : "; choose an address of this machine";
      status = absl::UnavailableError(absl::StrCat(where, strerror(error), advice));
    }
  }
  freeaddrinfo(found);
  return status;
}

std::vector<std::string> AllowedRoots(const ServerConfig& config) {
  return config.allowed_roots.empty() ? std::vector<std::string>() : Split(config.allowed_roots, ':');
}

RankRights RightsOf(const ServerConfig& config) { return {config.worker_user, config.root_ranks == "allow"}; }

// Ranks of another account can open only what that account can.
absl::Status CheckWorkerUser(const ServerConfig& c) {
  // By default root's hierad serves submitters too; with access: owner there is none but root.
  if (c.worker_user.empty() && (geteuid() != 0 || c.access == "owner" || c.root_ranks == "allow")) return absl::OkStatus();
  bool other = geteuid() == 0;
  if (!c.worker_user.empty() && c.worker_user != "submitter") {
    auto account = AccountFor(RightsOf(c), "");
    if (!account.ok()) return Annotate(account.status(), "worker_user");
    other = account->has_value();
  } else if (!other) {
    return Bad("worker_user: only hierad of root can start ranks as the users who submit; start it as root, or leave worker_user out");
  }
  if (!other) return absl::OkStatus();
  if (const absl::Status can = CanTakeAccounts(); !can.ok()) return Annotate(can, "worker_user: ranks run as the users who submit");
  if (c.agent == "auto" && c.access == "owner") {
    return Bad("worker_user: ranks of another account could not open hierad's socket; set access: group or everyone, and listen to a path in a "
               "folder that they may enter, such as unix:/run/hierad/hierad.sock");
  }
  if ((c.runs_folder + "/").rfind(c.state_folder + "/", 0) == 0) {
    return Bad(absl::StrCat("worker_user: ranks of another account could not enter \"", Printable(c.runs_folder), "\", which is in the state folder; "
                            "set runs_folder to a folder that they may write to"));
  }
  return absl::OkStatus();
}

absl::Status CheckLogLevel(const std::string& level) { return CheckWord("log_level", level, {"debug", "info", "warn", "error"}); }

absl::Status CompleteConfig(ServerConfig* c) {
  if (c->state_folder.empty()) c->state_folder = DefaultStateFolder();
  RETURN_IF_ERROR(Absolute("state_folder", &c->state_folder));
  if (c->runs_folder.empty()) c->runs_folder = JoinPath(c->state_folder, "runs");
  RETURN_IF_ERROR(Absolute("runs_folder", &c->runs_folder));
  for (const std::string& root : AllowedRoots(*c)) {
    if (root.empty() || root[0] != '/') {
      return Bad(absl::StrCat("allowed_roots: \"", Printable(root), "\" is not an absolute path; write folders with ':' between them, as /data:/home"));
    }
  }
  if (c->listen.empty()) c->listen = absl::StrCat("unix:", JoinPath(c->state_folder, "hierad.sock"));
  if (c->listen.rfind("unix:", 0) != 0) {
    return Bad(absl::StrCat("listen: \"", Printable(c->listen), "\" is not unix:/path; for TCP there is the setting tcp"));
  }
  std::string socket = c->listen.substr(5);
  if (socket.empty()) return Bad("listen: unix: without a path");
  RETURN_IF_ERROR(Absolute("listen", &socket));
  if (socket.size() >= sizeof(sockaddr_un::sun_path)) {
    return Bad(absl::StrCat("listen: the socket's path \"", Printable(socket), "\" has ", socket.size(), " bytes, a unix socket's has at most ",
                            sizeof(sockaddr_un::sun_path) - 1, "; give a shorter one with --listen unix:/path"));
  }
  c->listen = absl::StrCat("unix:", socket);
  RETURN_IF_ERROR(CheckWord("root_ranks", c->root_ranks, {"refuse", "allow"}));
  if (!c->tcp.empty()) {
    auto address = ParseHostPort(c->tcp);
    if (!address.ok()) return Annotate(address.status(), "tcp");
    if (c->certificates.empty()) {
      return Bad(absl::StrCat("tcp: ", Printable(c->tcp), " needs certificates: over TCP hierad speaks mutual TLS only; make them with deploy/certs and "
                              "give their folder as certificates"));
    }
    RETURN_IF_ERROR(Absolute("certificates", &c->certificates));
  }
  if (c->metrics != "off") {
    auto address = ParseHostPort(c->metrics);
    if (!address.ok()) return Annotate(address.status(), "metrics (or off)");
  }
  RETURN_IF_ERROR(CheckWord("access", c->access, {"owner", "group", "everyone"}));
  if ((c->access == "group") == c->access_group.empty()) {
    return Bad(c->access == "group" ? "access: group needs access_group, the group whose members may use hierad"
                                    : absl::StrCat("access_group: ", Printable(c->access_group), " is for access: group, not ", c->access));
  }
  RETURN_IF_ERROR(CheckWorkerUser(*c));
  if (c->web != "off") {
    auto address = ParseHostPort(c->web);
    if (!address.ok()) return Annotate(address.status(), "web (or off)");
    if (!IsLoopback(address->host)) {
      return Bad(absl::StrCat("web: ", Printable(c->web), " is not on the loopback; the page has no passwords: give 127.0.0.1:port, and reach it from elsewhere through ssh -L"));
    }
  }
  RETURN_IF_ERROR(CheckWord("agent", c->agent, {"auto", "none"}));
  RETURN_IF_ERROR(CheckWord("agent_lifetime", c->agent_lifetime, {"service", "session"}));
  RETURN_IF_ERROR(CheckLogLevel(c->log_level));
  RETURN_IF_ERROR(CheckWord("log_format", c->log_format, {"text", "json"}));
  if (!c->log_file.empty()) RETURN_IF_ERROR(Absolute("log_file", &c->log_file));
  if (c->cpu_slots < -1 || c->cpu_slots > 1024) return Bad(absl::StrCat("cpu_slots: ", c->cpu_slots, " is not in 0 to 1024"));
  if (!(c->stop_grace_s >= 0 && c->stop_grace_s <= 3600)) return Bad(absl::StrCat("stop_grace_s: ", c->stop_grace_s, " is not in 0 to 3600"));
  if (!(c->node_lost_after_s >= 3 && c->node_lost_after_s <= 3600)) {
    return Bad(absl::StrCat("node_lost_after_s: ", c->node_lost_after_s, " is not in 3 to 3600 (agents report once a second)"));
  }
  if (!(c->hang_after_s >= 5 && c->hang_after_s <= 86400)) {
    return Bad(absl::StrCat("hang_after_s: ", c->hang_after_s, " is not in 5 to 86400 (workers report once a second)"));
  }
  if (!(c->pause_grace_s >= 1 && c->pause_grace_s <= 86400)) return Bad(absl::StrCat("pause_grace_s: ", c->pause_grace_s, " is not in 1 to 86400"));
  if (!(c->disk_reserve_gib >= 0 && c->disk_reserve_gib <= 1e6)) return Bad(absl::StrCat("disk_reserve_gib: ", c->disk_reserve_gib, " is not in 0 to 1000000"));
  return absl::OkStatus();
}

}  // namespace hierad
