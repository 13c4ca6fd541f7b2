#include "server/web.h"

#include <arpa/inet.h>
#include <civetweb.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <set>
#include <sstream>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/fs.h"
#include "base/limits.h"
#include "base/status.h"
#include "base/text.h"
#include "server/await.h"
#include "server/config.h"
#include "server/rank_log.h"
#include "server/web_json.h"
#include "server/web_page.h"

namespace hierad {
namespace {

constexpr int64_t kPoints = 600;        // of a curve: more than it has pixels
constexpr uint64_t kLogLines = 300;
constexpr size_t kLogBytes = 128 << 10;

WebAnswer JsonAnswer(const nlohmann::json& json) { return {200, "application/json", WebText(json)}; }
WebAnswer Refusal(int code, const std::string& sentence) { return {code, "text/plain; charset=utf-8", sentence + "\n"}; }
WebAnswer Refusal(const absl::Status& status) {
  const int code = absl::IsNotFound(status) ? 404 : absl::IsInvalidArgument(status) ? 400 : absl::IsUnavailable(status) ? 503 : 500;
  return Refusal(code, std::string(status.message()));
}

WebAnswer AnswerOverview(const WebSources& s, const Caller& caller) {
  const std::string whose = caller.AllJobs() ? "" : caller.name;
  // Those with workers, however old, then the newest.
  v1::ListRequest request, working;
  request.set_limit(limits::kListLimit);
  working.set_limit(limits::kListLimit);
  for (const v1::JobState state : {v1::STARTING, v1::RUNNING, v1::STOPPING}) working.add_states(state);
  auto jobs = Await<v1::ListReply>([&](auto reply) { s.coordinator->List(working, whose, reply); });
  if (!jobs.ok()) return Refusal(jobs.status());
  auto newest = Await<v1::ListReply>([&](auto reply) { s.coordinator->List(request, whose, reply); });
  if (!newest.ok()) return Refusal(newest.status());
  std::set<uint64_t> seen;
  for (const v1::Job& job : jobs->jobs()) seen.insert(job.id());
  for (v1::Job& job : *newest->mutable_jobs()) {
    if (jobs->jobs_size() < limits::kListLimit && seen.insert(job.id()).second) *jobs->add_jobs() = std::move(job);
  }
  auto nodes = Await<v1::NodesReply>([&](auto reply) { s.coordinator->Nodes(reply); });
  if (!nodes.ok()) return Refusal(nodes.status());
  nlohmann::json list = nlohmann::json::array(), places = nlohmann::json::array(), counts = nlohmann::json::object();
  for (const v1::Job& job : jobs->jobs()) {
    list.push_back(WebSummary(job));
    auto& count = counts[v1::JobState_Name(job.state())];
    count = count.is_null() ? 1 : count.get<int64_t>() + 1;
  }
  int64_t slots = 0, busy = 0, faulty = 0;
  for (const v1::Node& node : nodes->nodes()) {
    places.push_back(WebNode(node));
    for (const v1::SlotUse& use : node.slots()) {
      ++slots;
      busy += use.job_id() != 0;
      faulty += !use.fault().empty();
    }
  }
  return JsonAnswer({{"only_of", whose}, {"jobs", std::move(list)}, {"nodes", std::move(places)}, {"totals", {{"jobs", std::move(counts)}, {"slots", slots}, {"slots_busy", busy}, {"slots_faulty", faulty}}}});
}

WebAnswer AnswerMetrics(const WebSources& s, const v1::Job& job) {
  if (s.history == nullptr) return JsonAnswer(WebPoints({}));
  auto steps = s.history->Read(job.id(), {});
  if (!steps.ok()) return Refusal(steps.status());
  // Each `every`-th of what there is, and the newest.
  const int64_t every = std::max<int64_t>(1, (int64_t(steps->steps.size()) + kPoints - 1) / kPoints);
  HistorySteps few;
  for (size_t i = 0; i < steps->steps.size(); ++i) {
    if (int64_t(i) % every == 0 || i + 1 == steps->steps.size()) few.steps.push_back(std::move(steps->steps[i]));
  }
  return JsonAnswer(WebPoints(few));
}

WebAnswer AnswerLog(const WebSources& s, const v1::Job& job, const std::string& query) {
  int rank = 0;
  for (const std::string& part : Split(query, '&')) {
    if (part.rfind("rank=", 0) == 0 && !absl::SimpleAtoi(part.substr(5), &rank)) rank = -1;
  }
  if (rank < 0 || rank >= job.spec().resources().ranks()) return Refusal(400, absl::StrCat("rank: job ", job.id(), " has ranks 0 to ", job.spec().resources().ranks() - 1));
  const auto account = s.coordinator->AccountOf(job.submitter());
  if (!account.ok()) return Refusal(account.status());
  RankLog log(s.coordinator, job, {.rank = rank, .tail_lines = kLogLines}, *account);
  std::string text;
  while (true) {
    auto next = log.Read();
    if (!next.ok()) return Refusal(next.status());
    if (next->empty()) break;
    if (!next->notice.empty()) absl::StrAppend(&text, text.empty() || text.back() == '\n' ? "" : "\n", next->notice, "\n");
    text += next->bytes;
    if (text.size() > kLogBytes) text.erase(0, text.size() - kLogBytes);
  }
  return JsonAnswer({{"text", text}});
}

WebAnswer AnswerJob(const WebSources& s, const Caller& caller, const std::string& rest, const std::string& query) {
  const size_t slash = rest.find('/');
  const std::string number = rest.substr(0, slash), what = slash == std::string::npos ? "" : rest.substr(slash + 1);
  uint64_t id = 0;
  if (!absl::SimpleAtoi(number, &id)) return Refusal(404, absl::StrCat("\"", Printable(number, 40), "\" is not the number of a job"));
  auto job = Await<v1::Job>([&](auto reply) { s.coordinator->Get(id, reply); });
  if (!job.ok()) return Refusal(job.status());
  if (!caller.AllJobs() && job->submitter() != caller.name) return Refusal(403, absl::StrCat("job ", id, " is not yours; you are ", Printable(caller.name)));
  if (what.empty()) return JsonAnswer(WebDetail(*job));
  if (what == "metrics") return AnswerMetrics(s, *job);
  if (what == "log") return AnswerLog(s, *job, query);
  return Refusal(404, "there is no such page");
}

// An address and port as the kernel's tables of connections write them: in /proc/net/tcp, and in tcp6 also one of IPv4 mapped.
std::vector<std::string> InTables(const std::string& ip, int port) {
  const std::string end = absl::StrFormat(":%04X", port);
  in_addr v4{};
  if (inet_pton(AF_INET, ip.c_str(), &v4) == 1) {
    const std::string word = absl::StrFormat("%08X", v4.s_addr);
    return {word + end, "0000000000000000FFFF0000" + word + end};
  }
  in6_addr v6{};
  if (inet_pton(AF_INET6, ip.c_str(), &v6) != 1) return {};
  uint32_t words[4];
  std::memcpy(words, &v6, sizeof words);
  return {absl::StrFormat("%08X%08X%08X%08X", words[0], words[1], words[2], words[3]) + end};
}

// The uid that owns the other end of a connection on this machine; -1: none found. Addresses count as ports do: somebody else
// may hold the same port of another loopback address.
int64_t PeerUid(const std::vector<std::string>& client, const std::vector<std::string>& server) {
  const auto one_of = [](const std::vector<std::string>& forms, const std::string& address) { return std::find(forms.begin(), forms.end(), address) != forms.end(); };
  for (const char* table : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ifstream in(table);
    std::string line;
    std::getline(in, line);   // heading
    while (std::getline(in, line)) {
      // sl local_address rem_address st tx:rx tr:when retrnsmt uid ...
      std::istringstream words(line);
      std::string sl, local, remote, state, queues, timer, retransmit;
      int64_t uid = -1;
      if (!(words >> sl >> local >> remote >> state >> queues >> timer >> retransmit >> uid)) continue;
      if (state == "01" && one_of(client, local) && one_of(server, remote)) return uid;
    }
  }
  return -1;
}

bool IsOwnHost(const char* host) {
  if (host == nullptr) return false;
  const std::string text = host;
  const size_t colon = text.rfind(':');
  std::string name = colon != std::string::npos && text.find(']', colon) == std::string::npos ? text.substr(0, colon) : text;
  if (name.size() > 2 && name.front() == '[') name = name.substr(1, name.size() - 2);
  return IsLoopback(name);
}

int Send(mg_connection* connection, const WebAnswer& answer) {
  const std::string head = absl::StrCat(
      "HTTP/1.1 ", answer.code, answer.code == 200 ? " OK" : " Refused", "\r\nContent-Type: ", answer.type, "\r\nContent-Length: ", answer.body.size(),
      "\r\nCache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\nX-Frame-Options: DENY\r\nReferrer-Policy: no-referrer\r\n"
      "Cross-Origin-Resource-Policy: same-origin\r\n"
      "Content-Security-Policy: default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src data:; connect-src 'self'\r\n\r\n");
  mg_write(connection, head.data(), head.size());
  mg_write(connection, answer.body.data(), answer.body.size());
  return answer.code;
}

}  // namespace

int WebServer::Handle(mg_connection* connection, void* self) {
  const WebSources& sources = static_cast<const WebServer*>(self)->sources_;
  const mg_request_info* request = mg_get_request_info(connection);
  if (!IsOwnHost(mg_get_header(connection, "Host"))) return Send(connection, Refusal(403, "this page answers to the loopback only; ask for http://127.0.0.1:PORT/"));
  if (std::string_view(request->request_method) != "GET") return Send(connection, Refusal(405, "this page only shows: GET"));
  const int64_t uid = PeerUid(InTables(request->remote_addr, request->remote_port), InTables(static_cast<const WebServer*>(self)->ip_, request->server_port));
  const Caller caller = uid < 0 ? Caller() : sources.caller(static_cast<uid_t>(uid));
  if ((caller.roles & (kViewer | kSubmitter | kAdmin)) == 0) {
    return Send(connection, Refusal(403, "this page is for the users who may use this hierad; ask its owner"));
  }
  return Send(connection, AnswerWeb(sources, caller, request->local_uri != nullptr ? request->local_uri : "", request->query_string != nullptr ? request->query_string : ""));
}

WebAnswer AnswerWeb(const WebSources& sources, const Caller& caller, const std::string& path, const std::string& query) {
  if (path == "/") return {200, "text/html; charset=utf-8", kWebPageHtml};
  if (path == "/page.css") return {200, "text/css; charset=utf-8", kWebPageCss};
  if (path == "/page.js") return {200, "text/javascript; charset=utf-8", kWebPageJs};
  if (path == "/api/overview") return AnswerOverview(sources, caller);
  const std::string jobs = "/api/jobs/";
  if (path.rfind(jobs, 0) == 0) return AnswerJob(sources, caller, path.substr(jobs.size()), query);
  return Refusal(404, "there is no such page");
}

absl::StatusOr<std::unique_ptr<WebServer>> WebServer::Start(const std::string& address, WebSources sources) {
  ASSIGN_OR_RETURN(const HostPort parsed, ParseHostPort(address));
  RETURN_IF_ERROR(CheckListen("web", parsed));
  std::unique_ptr<WebServer> server(new WebServer(std::move(sources), parsed.host == "localhost" ? "127.0.0.1" : parsed.host));
  const std::string threads = absl::StrCat(kThreads);
  const char* options[] = {"listening_ports", address.c_str(), "num_threads", threads.c_str(), "request_timeout_ms", "10000",
                           "enable_directory_listing", "no", nullptr};
  mg_callbacks callbacks{};
  callbacks.log_message = [](const mg_connection*, const char*) { return 1; };   // not to stderr in a form of its own
  server->context_ = mg_start(&callbacks, nullptr, options);
  if (server->context_ == nullptr) return absl::UnavailableError(absl::StrCat("web: cannot listen on ", Printable(address)));
  mg_set_request_handler(server->context_, "/", Handle, server.get());
  return server;
}

WebServer::~WebServer() {
  if (context_ != nullptr) mg_stop(context_);
}

int WebServer::port() const {
  mg_server_port ports[4] = {};
  return mg_get_server_ports(context_, 4, ports) > 0 ? ports[0].port : 0;
}

}  // namespace hierad
