#include "server/credential.h"

#include <sys/random.h>

#include <cerrno>
#include <cstdlib>

#include "absl/strings/escaping.h"

namespace hierad {

std::string NewCredential() {
  char bytes[32];
  size_t have = 0;
  while (have < sizeof(bytes)) {
    const ssize_t got = getrandom(bytes + have, sizeof(bytes) - have, 0);
    if (got < 0 && errno != EINTR) std::abort();   // no entropy source: nothing may run
    if (got > 0) have += static_cast<size_t>(got);
  }
  return absl::BytesToHexString(absl::string_view(bytes, sizeof(bytes)));
}

bool SameSecret(std::string_view a, std::string_view b) {
  if (a.size() != b.size() || a.empty()) return false;
  unsigned char difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference |= static_cast<unsigned char>(a[i] ^ b[i]);
  return difference == 0;
}

}  // namespace hierad
