// Who a process is, on a unix socket that several users may open. gRPC does not show a connection's peer credentials, so
// hierad listens at SOCKET.peer too: whoever connects there is told a token for the uid that the kernel vouches for, and
// sends it with its calls. Where there is no such socket, only hierad's own user can open the other, and no token is needed.
#pragma once

#include <string>

namespace hierad {

inline constexpr char kPeerTokenKey[] = "hierad-peer-token";   // in a call's metadata
inline constexpr size_t kPeerTokenBytes = 64;                  // hexadecimal digits

inline std::string PeerSocketPath(const std::string& socket_path) { return socket_path + ".peer"; }

// The token for this process; empty: there is no such socket, or nobody answers there.
std::string FetchPeerToken(const std::string& socket_path);

}  // namespace hierad
