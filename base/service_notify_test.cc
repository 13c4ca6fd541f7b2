#include "base/service_notify.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "base/fs.h"

namespace hierad {
namespace {

TEST(ServiceNotify, TellsSystemdAndNobodyElse) {
  std::string folder = testing::TempDir() + "/notify_XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  const std::string path = folder + "/s";
  const UniqueFd fd(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strcpy(address.sun_path, path.c_str());
  ASSERT_EQ(bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  setenv("NOTIFY_SOCKET", path.c_str(), 1);
  setenv("WATCHDOG_USEC", "30000000", 1);
  setenv("WATCHDOG_PID", std::to_string(getpid()).c_str(), 1);
  const ServiceNotify notify;
  EXPECT_EQ(std::getenv("NOTIFY_SOCKET"), nullptr);
  EXPECT_EQ(std::getenv("WATCHDOG_USEC"), nullptr);
  EXPECT_EQ(notify.watchdog(), std::chrono::seconds(15));
  notify.Send("READY=1");
  char text[64] = "";
  EXPECT_EQ(recv(fd.get(), text, sizeof text, MSG_DONTWAIT), 7);
  EXPECT_STREQ(text, "READY=1");
  // A period that is another process's, and no systemd at all.
  setenv("WATCHDOG_USEC", "30000000", 1);
  setenv("WATCHDOG_PID", "1", 1);
  const ServiceNotify none;
  EXPECT_FALSE(none.watchdog().has_value());
  none.Send("READY=1");
  EXPECT_LT(recv(fd.get(), text, sizeof text, MSG_DONTWAIT), 0);
  EXPECT_TRUE(RemoveTree(folder).ok());
}

}  // namespace
}  // namespace hierad
