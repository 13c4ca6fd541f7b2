#include "base/channel/peer_token.h"

#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>

#include <cstring>

#include "base/fs.h"

namespace hierad {

std::string FetchPeerToken(const std::string& socket_path) {
  const std::string path = PeerSocketPath(socket_path);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path) return "";
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  const UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const timeval patience{2, 0};
  if (!fd || setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience) != 0 ||
      connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
    return "";
  }
  char token[kPeerTokenBytes];
  const ssize_t n = recv(fd.get(), token, sizeof token, MSG_WAITALL);
  return n == ssize_t(sizeof token) ? std::string(token, sizeof token) : "";
}

}  // namespace hierad
