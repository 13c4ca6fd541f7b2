// The page that hierad serves on the loopback: jobs, loss, step budget, logs, slots. It only shows, and each user what the unix
// socket would show: the kernel knows the uid of the connection's other end on one machine. A submitter sees its own jobs. The page
// asks in the name of whoever opened the browser, so requests that another site's page makes it send are refused
// by their Host, and no answer may be framed or read from elsewhere.
//
// Threads: answers are given on the HTTP library's threads (kThreads); they ask the coordinator and wait.
#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/authz.h"
#include "server/coordinator.h"
#include "server/history.h"

struct mg_connection;
struct mg_context;

namespace hierad {

struct WebSources {
  Coordinator* coordinator = nullptr;
  const History* history = nullptr;
  std::function<Caller(uid_t)> caller;   // no roles that read: refused
};

struct WebAnswer {
  int code = 200;
  std::string type, body;
};

// The answer for `caller` to GET `path` with `query` ("rank=1&x=2"). Free of HTTP.
WebAnswer AnswerWeb(const WebSources& sources, const Caller& caller, const std::string& path, const std::string& query);

class WebServer {
 public:
  static constexpr int kThreads = 8;

  // `address`: host:port on the loopback. The message of a failure names the address and the cause.
  static absl::StatusOr<std::unique_ptr<WebServer>> Start(const std::string& address, WebSources sources);
  ~WebServer();
  int port() const;   // for address with port 0

 private:
  WebServer(WebSources sources, std::string ip) : sources_(std::move(sources)), ip_(std::move(ip)) {}
  static int Handle(mg_connection* connection, void* self);

  const WebSources sources_;
  const std::string ip_;   // that it listens on
  mg_context* context_ = nullptr;
};

}  // namespace hierad
