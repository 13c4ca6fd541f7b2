#include "server/peer_identity.h"

#include <poll.h>
#include <pwd.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/channel/peer_token.h"
#include "base/status.h"
#include "server/credential.h"

namespace hierad {

std::string UserName(uid_t uid) {
  passwd entry;
  passwd* found = nullptr;
  char buffer[4096];
  if (getpwuid_r(uid, &entry, buffer, sizeof(buffer), &found) == 0 && found != nullptr) return found->pw_name;
  return absl::StrCat("uid ", uid);
}

absl::StatusOr<std::unique_ptr<PeerIdentity>> PeerIdentity::Listen(const std::string& socket_path, mode_t mode, gid_t group) {
  const std::string path = PeerSocketPath(socket_path);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError(absl::StrCat("listen: the path ", path, " has ", path.size(), " bytes, a unix socket's has at most ",
                                                   sizeof(address.sun_path) - 1, "; give a shorter one with --listen unix:/path"));
  }
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  unlink(path.c_str());   // the caller has found that no other hierad listens
  UniqueFd listener(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)), wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!listener || !wake || bind(listener.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0 ||
      (group != static_cast<gid_t>(-1) && chown(path.c_str(), static_cast<uid_t>(-1), group) != 0) || chmod(path.c_str(), mode) != 0 ||
      listen(listener.get(), SOMAXCONN) != 0) {
    return ErrnoStatus(errno, "listen: cannot listen at", path);
  }
  return std::unique_ptr<PeerIdentity>(new PeerIdentity(path, std::move(listener), std::move(wake)));
}

PeerIdentity::PeerIdentity(std::string path, UniqueFd listener, UniqueFd wake)
    : path_(std::move(path)), listener_(std::move(listener)), wake_(std::move(wake)), thread_([this] { Serve(); }) {}

PeerIdentity::~PeerIdentity() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(wake_.get(), &one, sizeof(one));
  thread_.join();
  unlink(path_.c_str());
}

void PeerIdentity::Serve() {
  while (true) {
    pollfd fds[] = {{listener_.get(), POLLIN, 0}, {wake_.get(), POLLIN, 0}};
    poll(fds, 2, -1);
    if (fds[1].revents != 0) return;
    const UniqueFd fd(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    ucred peer{};
    socklen_t size = sizeof(peer);
    if (!fd || getsockopt(fd.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) continue;
    const std::string token = TokenOf(peer.uid);
    // A new socket's buffer takes it; who does not read it has nothing.
    [[maybe_unused]] const ssize_t sent = send(fd.get(), token.data(), token.size(), MSG_NOSIGNAL);
  }
}

std::string PeerIdentity::TokenOf(uid_t uid) {
  std::lock_guard lock(mutex_);
  std::string& token = tokens_[uid];
  if (token.empty()) {
    if (tokens_.size() > kUsers) {
      tokens_.clear();
      users_.clear();
    }
    const std::string fresh = NewCredential();
    tokens_[uid] = fresh;
    users_[fresh] = uid;
    return fresh;
  }
  return token;
}

std::optional<uid_t> PeerIdentity::Find(const std::string& token) const {
  std::lock_guard lock(mutex_);
  const auto found = users_.find(token);
  if (found == users_.end()) return std::nullopt;
  return found->second;
}

}  // namespace hierad
