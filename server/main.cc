// hierad: flags and wiring.
#include <signal.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <future>
#include <memory>
#include <thread>

#include "absl/strings/str_cat.h"
#include "base/fs.h"
#include "base/status.h"
#include "base/subprocess.h"
#include "hierad/version.h"
#include "server/config.h"
#include "server/coordinator.h"
#include "server/exporter.h"
#include "server/local_agent.h"
#include "server/peer_identity.h"
#include "server/rpc_server.h"
#include "server/state_folder.h"
#include "server/store.h"

namespace hierad {
namespace {

constexpr char kSystemConfig[] = "/etc/hierad/hierad.yaml";

// Everything that can be refused is refused before any state changes.
absl::Status Serve(const ServerConfig& config, const sigset_t& stop_signals) {
  const Clock& clock = Clock::System();
  const std::string version(Version()), commit(Commit());
  if (!config.tcp.empty()) {
    ASSIGN_OR_RETURN(const HostPort address, ParseHostPort(config.tcp));
    RETURN_IF_ERROR(CheckListen("tcp", address));
  }
  std::unique_ptr<Exporter> exporter;
  if (config.metrics != "off") {
    ASSIGN_OR_RETURN(exporter, Exporter::Listen(config.metrics));
  }
  RETURN_IF_ERROR(PrepareStateFolder(config.state_folder));
  ASSIGN_OR_RETURN(const UniqueFd lock, LockFile(JoinPath(config.state_folder, "hierad.lock"), "another hierad"));

  ASSIGN_OR_RETURN(std::unique_ptr<Store> store, Store::Open(JoinPath(config.state_folder, "hierad.db")));
  CoordinatorOptions options;
  options.runs_folder = config.runs_folder;
  options.node_lost_after = std::chrono::milliseconds(static_cast<int64_t>(config.node_lost_after_s * 1000));
  options.stop_grace = std::chrono::milliseconds(static_cast<int64_t>(config.stop_grace_s * 1000));
  ASSIGN_OR_RETURN(std::unique_ptr<Coordinator> coordinator, Coordinator::Create(options, std::move(store), &clock));
  std::thread loop([&] { coordinator->Run(); });
  const auto end_loop = [&] {
    coordinator->Stop();
    loop.join();
  };

  auto rpc = RpcServer::Start({config.listen, config.tcp, version, commit, UserName(geteuid()), config.certificates, config.access,
                               config.access_group}, coordinator.get(), &clock);
  if (!rpc.ok()) {
    end_loop();
    return rpc.status();
  }
  std::unique_ptr<LocalAgent> agent;
  if (config.agent == "auto") {
    auto folder = ProgramFolder();
    LocalAgentOptions agent_options{folder.ok() ? JoinPath(*folder, "hierad-agent") : "hierad-agent", config.listen,
                                    JoinPath(config.state_folder, "agent"), config.agent_lifetime, config.cpu_slots};
    agent = std::make_unique<LocalAgent>(agent_options, &clock);
    if (absl::Status started = agent->Start(); !started.ok()) {
      (*rpc)->Stop();
      end_loop();
      return started;
    }
  }
  if (exporter != nullptr) {
    exporter->Serve([&] {
      auto promise = std::make_shared<std::promise<absl::StatusOr<Overview>>>();
      auto future = promise->get_future();
      coordinator->Look([promise](absl::StatusOr<Overview> overview) { promise->set_value(std::move(overview)); });
      return future.get();
    }, version, commit);
  }
  spdlog::info("hierad {} ({}) listens on {}{}{}; state in {}", version, commit, config.listen, config.tcp.empty() ? "" : ", ", config.tcp, config.state_folder);

  int number = 0;
  sigwait(&stop_signals, &number);
  spdlog::info("stopping on signal {}", number);
  coordinator->BeginDrain();
  if (agent != nullptr && config.agent_lifetime == "session") {
    // While the workers end, their last words still come in.
    agent->End(options.stop_grace + std::chrono::seconds(10));
  }
  agent.reset();
  exporter.reset();
  coordinator->EndSessions();
  (*rpc)->Stop();
  end_loop();
  spdlog::info("stopped");
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  CLI::App app{"hierad: queues, places and follows training jobs."};
  app.set_version_flag("--version", absl::StrCat(std::string(Version()), " (", std::string(Commit()), ")"));
  std::string config_file;
  ServerConfig flags;
  app.add_option("--config", config_file, absl::StrCat("Settings (configs/hierad.yaml shows all); default: ", kSystemConfig, " if it is there"));
  app.add_option("--state,--state-folder", flags.state_folder, absl::StrCat("Folder of hierad's state; default: ", DefaultStateFolder()));
  app.add_option("--listen", flags.listen, "unix:/path; default: unix:STATE/hierad.sock");
  app.add_option("--access", flags.access, "Who may open that socket: owner, group, everyone; default: owner");
  app.add_option("--access-group", flags.access_group, "The group, for --access group");
  app.add_option("--tcp", flags.tcp, "host:port, mutual TLS; default: none");
  app.add_option("--certificates", flags.certificates, "Folder with ca.crt, tls.crt and tls.key, for --tcp");
  app.add_option("--metrics", flags.metrics, "host:port of the Prometheus exporter, or off; default: 127.0.0.1:9464");
  app.add_option("--agent", flags.agent, "auto: see to the agent of this machine; none; default: auto");
  app.add_option("--agent-lifetime", flags.agent_lifetime, "service: workers outlive hierad; session: they end with it; default: service");
  app.add_option("--cpu-slots", flags.cpu_slots, "CPU ranks at a time on this machine; default: one per core");
  app.add_option("--runs,--runs-folder", flags.runs_folder, "Folder of the runs; default: STATE/runs");
  app.add_option("--stop-grace,--stop-grace-s", flags.stop_grace_s, "Seconds from SIGTERM to SIGKILL of a cancelled worker; default: 30");
  app.add_option("--node-lost-after,--node-lost-after-s", flags.node_lost_after_s, "Seconds without a report until a node is given up; default: 15");
  app.add_option("--log-level", flags.log_level, "debug, info, warn, error; default: info");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 1;
  }
  ServerConfig config;
  absl::Status status;
  if (config_file.empty() && Exists(kSystemConfig)) config_file = kSystemConfig;
  if (!config_file.empty()) status = ReadConfig(config_file, &config);
  const auto over = [&app](const char* flag, auto& value, const auto& given) {
    if (app.count(flag) > 0) value = given;
  };
  over("--state", config.state_folder, flags.state_folder);
  over("--listen", config.listen, flags.listen);
  over("--access", config.access, flags.access);
  over("--access-group", config.access_group, flags.access_group);
  over("--tcp", config.tcp, flags.tcp);
  over("--certificates", config.certificates, flags.certificates);
  over("--metrics", config.metrics, flags.metrics);
  over("--agent", config.agent, flags.agent);
  over("--agent-lifetime", config.agent_lifetime, flags.agent_lifetime);
  over("--cpu-slots", config.cpu_slots, flags.cpu_slots);
  over("--runs", config.runs_folder, flags.runs_folder);
  over("--stop-grace", config.stop_grace_s, flags.stop_grace_s);
  over("--node-lost-after", config.node_lost_after_s, flags.node_lost_after_s);
  over("--log-level", config.log_level, flags.log_level);
  if (status.ok()) status = CompleteConfig(&config);

  spdlog::set_default_logger(spdlog::stderr_logger_mt("hierad"));
  spdlog::set_pattern("%Y-%m-%dT%H:%M:%S.%e%z %l %v");
  spdlog::set_level(spdlog::level::from_str(config.log_level));
  // Taken by sigwait; blocked in every thread, so before any is made.
  sigset_t stop_signals;
  sigemptyset(&stop_signals);
  sigaddset(&stop_signals, SIGTERM);
  sigaddset(&stop_signals, SIGINT);
  sigaddset(&stop_signals, SIGHUP);
  pthread_sigmask(SIG_BLOCK, &stop_signals, nullptr);
  signal(SIGPIPE, SIG_IGN);
  umask(022);
  if (status.ok()) status = Serve(config, stop_signals);
  if (!status.ok()) {
    fprintf(stderr, "hierad: %s\n", std::string(status.message()).c_str());
    return 1;
  }
  return 0;
}

}  // namespace
}  // namespace hierad

int main(int argc, char** argv) { return hierad::Main(argc, argv); }
