#include "base/text.h"
#include "client/commands.h"
#include "client/job_json.h"
#include "client/job_text.h"
#include "client/render.h"
#include "hierad/version.h"

namespace hierad {

int Nodes(const Context& context) {
  auto connection = Connection::Open(context.server);
  if (!connection.ok()) return Fail(connection.status(), context);
  const auto reply = (*connection)->Call(&Connection::Stub::Nodes, v1::NodesRequest());
  if (!reply.ok()) return Fail(reply.status(), context);
  if (context.json) {
    Json nodes = Json::array();
    for (const v1::Node& node : reply->nodes()) nodes.push_back(JsonOf(node));
    *context.out << JsonText({{"nodes", std::move(nodes)}});
  } else if (reply->nodes().empty()) {
    *context.out << "no node has registered; start hierad-agent on one\n";
  } else {
    *context.out << NodeTable({reply->nodes().begin(), reply->nodes().end()}, context);
  }
  return kExitOk;
}

int PrintVersion(const Context& context) {
  const std::string version(Version()), commit(Commit());
  if (!context.json) *context.out << "hierctl " << version << " (" << commit << ")\n";
  auto connection = Connection::Open(context.server);
  if (!connection.ok()) return Fail(connection.status(), context);
  const auto reply = (*connection)->Call(&Connection::Stub::Version, v1::VersionRequest());
  const Json own = {{"version", version}, {"commit", commit}, {"build", std::string(BuildType())}};
  if (!reply.ok()) {
    if (!context.json) return Fail(reply.status(), context);
    *context.out << JsonText({{"hierctl", own}, {"hierad", nullptr}});
    Context quiet = context;
    quiet.json = false;
    return Fail(reply.status(), quiet);
  }
  if (context.json) {
    *context.out << JsonText({{"hierctl", own},
                              {"hierad", {{"version", reply->version()}, {"commit", reply->commit()},
                                          {"started_ms", reply->started_ms()}, {"address", (*connection)->target()}}}});
  } else {
    *context.out << "hierad  " << PrintableSentence(reply->version()) << " (" << PrintableSentence(reply->commit())
                 << ") at " << PrintableSentence((*connection)->target()) << ", since "
                 << LocalTime(reply->started_ms()) << "\n";
  }
  return kExitOk;
}

}  // namespace hierad
