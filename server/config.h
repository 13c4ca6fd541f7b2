// hierad's settings: configs/hierad.yaml, then flags over it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/account.h"

namespace hierad {

struct ServerConfig {
  std::string state_folder;              // empty: DefaultStateFolder()
  std::string listen;                    // unix:/path; empty: unix:STATE/hierad.sock
  std::string access = "owner";          // who may open that socket: owner, group, everyone
  std::string access_group;              // for access: group
  std::string tcp;                       // host:port, mutual TLS; empty: none
  std::string certificates;              // folder with ca.crt, tls.crt, tls.key; for tcp
  std::string metrics = "127.0.0.1:9464";   // host:port, or off
  std::string web = "off";               // host:port on the loopback of the page, or off
  std::string agent = "auto";            // auto: hierad sees to a local agent; none
  std::string agent_lifetime = "service";   // service: workers outlive hierad; session: they end with it
  std::string worker_user;               // whose account ranks run as; empty: of root's hierad the submitter's, else its own
  std::string root_ranks = "refuse";     // jobs that root submits to root's hierad: refuse, allow (as root)
  int cpu_slots = -1;                    // of the local agent; -1: its own choice
  std::string runs_folder;               // empty: STATE/runs
  std::string allowed_roots;             // folders, ':' between them; empty: paths of jobs may be anywhere
  double stop_grace_s = 30;
  double node_lost_after_s = 15;
  double hang_after_s = 30;              // no step for so long, or 10 median steps if more, is a hang
  double pause_grace_s = 600;            // for the last step and checkpoint of a paused job
  double disk_reserve_gib = 1;           // less free on a run's disk: no job is let in; 0: never looked at
  std::string log_level = "info";        // debug, info, warn, error
  std::string log_format = "text";       // text, json
  std::string log_file;                  // empty: stderr
};

// Reads `path` into `config`; what the file does not name stays. Unknown keys, doubled keys and wrong types are refused
// with file and line.
absl::Status ReadConfig(const std::string& path, ServerConfig* config);

// Fills what depends on other settings, makes paths absolute, and checks everything.
absl::Status CompleteConfig(ServerConfig* config);

absl::Status CheckLogLevel(const std::string& level);

std::vector<std::string> AllowedRoots(const ServerConfig& config);
RankRights RightsOf(const ServerConfig& config);

// /var/lib/hierad for root, else $XDG_STATE_HOME/hierad or ~/.local/state/hierad.
std::string DefaultStateFolder();

struct HostPort {
  std::string host;   // without brackets
  int port = 0;
};
absl::StatusOr<HostPort> ParseHostPort(const std::string& text);
bool IsLoopback(const std::string& host);

// Whether the address can be listened on now: Unavailable (in use), PermissionDenied, ... with the address and why.
absl::Status CheckListen(const std::string& what, const HostPort& address);

}  // namespace hierad
