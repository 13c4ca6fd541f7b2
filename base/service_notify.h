// What systemd wants to hear of a service of Type=notify: that it is ready, that it lives, that it stops. Without systemd
// (no NOTIFY_SOCKET) nothing happens.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <string_view>

namespace hierad {

class ServiceNotify {
 public:
  // Takes NOTIFY_SOCKET and WATCHDOG_USEC out of the environment, so that no child speaks in our name. Before any thread.
  ServiceNotify();

  // "READY=1", "STOPPING=1", "WATCHDOG=1", "STATUS=...".
  void Send(std::string_view state) const;
  // How often to send WATCHDOG=1: half of what systemd waits. None: it does not wait.
  std::optional<std::chrono::milliseconds> watchdog() const { return watchdog_; }

 private:
  std::string socket_;
  std::optional<std::chrono::milliseconds> watchdog_;
};

}  // namespace hierad
