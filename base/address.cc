#include "base/address.h"

#include <netdb.h>
#include <sys/socket.h>

#include <cerrno>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "base/fs.h"

namespace hierad {

absl::StatusOr<std::string> AddressToward(const std::string& endpoint) {
  if (endpoint.rfind("unix:", 0) == 0) return std::string("127.0.0.1");
  const size_t colon = endpoint.rfind(':');
  std::string host = endpoint.substr(0, colon), why = "it has no port";
  if (host.size() > 2 && host.front() == '[') host = host.substr(1, host.size() - 2);
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (colon != std::string::npos) {
    const int code = getaddrinfo(host.c_str(), endpoint.substr(colon + 1).c_str(), &hints, &found);
    why = code != 0 ? gai_strerror(code) : "";
    if (code != 0) found = nullptr;
  }
  char address[NI_MAXHOST] = "";
  for (const addrinfo* at = found; at != nullptr && address[0] == '\0'; at = at->ai_next) {
    // Connecting a datagram socket sends nothing; it only chooses the way.
    const UniqueFd fd(socket(at->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    sockaddr_storage own{};
    socklen_t size = sizeof own;
    if (!fd || connect(fd.get(), at->ai_addr, at->ai_addrlen) != 0 ||
        getsockname(fd.get(), reinterpret_cast<sockaddr*>(&own), &size) != 0 ||
        getnameinfo(reinterpret_cast<sockaddr*>(&own), size, address, sizeof address, nullptr, 0, NI_NUMERICHOST) != 0) {
      why = std::generic_category().message(errno);
    }
  }
  if (found != nullptr) freeaddrinfo(found);
  if (address[0] != '\0') return std::string(address);
  return absl::UnavailableError(absl::StrCat("cannot tell this machine's address on the way to \"", Printable(endpoint), "\": ", why));
}

}  // namespace hierad
