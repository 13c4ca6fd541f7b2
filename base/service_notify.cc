#include "base/service_notify.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>

#include "base/fs.h"

namespace hierad {
namespace {

std::string Take(const char* name) {
  const char* value = std::getenv(name);
  std::string text = value == nullptr ? "" : value;
  unsetenv(name);
  return text;
}

}  // namespace

ServiceNotify::ServiceNotify() : socket_(Take("NOTIFY_SOCKET")) {
  const std::string period_us = Take("WATCHDOG_USEC"), pid = Take("WATCHDOG_PID");
  const long long us = std::atoll(period_us.c_str());
  if (us > 0 && (pid.empty() || std::atol(pid.c_str()) == long(getpid()))) watchdog_ = std::chrono::milliseconds(us / 2000);
}

void ServiceNotify::Send(std::string_view state) const {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (socket_.empty() || socket_.size() >= sizeof address.sun_path) return;
  std::memcpy(address.sun_path, socket_.data(), socket_.size());
  if (socket_[0] == '@') address.sun_path[0] = '\0';   // an abstract name
  const UniqueFd fd(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!fd) return;
  [[maybe_unused]] const ssize_t sent =
      sendto(fd.get(), state.data(), state.size(), MSG_NOSIGNAL | MSG_DONTWAIT, reinterpret_cast<sockaddr*>(&address),
             socklen_t(offsetof(sockaddr_un, sun_path) + socket_.size()));
}

}  // namespace hierad
