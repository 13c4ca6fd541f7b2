// hierad's side of base/channel/peer_token.h: listens at SOCKET.peer and tells each process that connects the token of the
// uid that the kernel names (SO_PEERCRED). A uid keeps its token until hierad ends. One thread of its own.
#pragma once

#include <sys/types.h>

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/fs.h"

namespace hierad {

class PeerIdentity {
 public:
  static constexpr size_t kUsers = 65536;   // then tokens of earlier ones are forgotten: they ask again

  // The socket gets `mode` and, unless it is -1, the group.
  static absl::StatusOr<std::unique_ptr<PeerIdentity>> Listen(const std::string& socket_path, mode_t mode, gid_t group);
  ~PeerIdentity();   // removes the socket

  std::optional<uid_t> Find(const std::string& token) const;   // any thread

 private:
  PeerIdentity(std::string path, UniqueFd listener, UniqueFd wake);
  void Serve();
  std::string TokenOf(uid_t uid);

  const std::string path_;
  const UniqueFd listener_, wake_;
  mutable std::mutex mutex_;
  std::map<uid_t, std::string> tokens_;
  std::map<std::string, uid_t> users_;
  std::thread thread_;
};

// The user's name, or "uid N".
std::string UserName(uid_t uid);

}  // namespace hierad
