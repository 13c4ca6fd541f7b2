// hierad: flags and wiring.
#include <signal.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <memory>
#include <thread>

#include "absl/strings/str_cat.h"
#include "base/fs.h"
#include "base/service_notify.h"
#include "base/status.h"
#include "base/subprocess.h"
#include "hierad/version.h"
#include "server/await.h"
#include "server/config.h"
#include "server/coordinator.h"
#include "server/daemon_log.h"
#include "server/exporter.h"
#include "server/history.h"
#include "server/local_agent.h"
#include "server/peer_identity.h"
#include "server/rpc_server.h"
#include "server/run_folder.h"
#include "server/state_folder.h"
#include "server/store.h"
#include "server/web.h"

namespace hierad {
namespace {

constexpr int kReloadSignal = SIGUSR1;   // the log level is read again; SIGHUP is a terminal that goes
constexpr char kSystemConfig[] = "/etc/hierad/hierad.yaml";

// Meanwhile systemd is told, where it asks, that the coordinator answers.
int AwaitSignal(const sigset_t& signals, const ServiceNotify& notify, Coordinator* coordinator) {
  const auto alive = std::make_shared<std::atomic<bool>>(true);
  while (true) {
    if (!notify.watchdog()) {
      int number = 0;
      sigwait(&signals, &number);
      return number;
    }
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(*notify.watchdog());
    const timespec wait{seconds.count(), (*notify.watchdog() - seconds).count() * 1'000'000};
    const int number = sigtimedwait(&signals, nullptr, &wait);
    if (number > 0) return number;
    if (alive->exchange(false)) notify.Send("WATCHDOG=1");
    coordinator->Get(0, [alive](const absl::StatusOr<v1::Job>&) { *alive = true; });
  }
}

// Everything that can be refused is refused before any state changes.
absl::Status Serve(const ServerConfig& config, const std::string& config_file, const sigset_t& signals, const ServiceNotify& notify) {
  const Clock& clock = Clock::System();
  const std::string version(Version()), commit(Commit());
  if (!config.tcp.empty()) {
    ASSIGN_OR_RETURN(const HostPort address, ParseHostPort(config.tcp));
    RETURN_IF_ERROR(CheckListen("tcp", address));
  }
  if (config.web != "off") {
    ASSIGN_OR_RETURN(const HostPort address, ParseHostPort(config.web));
    RETURN_IF_ERROR(CheckListen("web", address));
  }
  std::unique_ptr<Exporter> exporter;
  if (config.metrics != "off") {
    ASSIGN_OR_RETURN(exporter, Exporter::Listen(config.metrics));
  }
  RETURN_IF_ERROR(PrepareStateFolder(config.state_folder));
  ASSIGN_OR_RETURN(const UniqueFd lock, LockFile(JoinPath(config.state_folder, "hierad.lock"), "another hierad"));

  ASSIGN_OR_RETURN(std::unique_ptr<Store> store, Store::Open(JoinPath(config.state_folder, "hierad.db")));
  CoordinatorOptions options;
  options.runs_folder = NormalFolder(config.runs_folder);   // the administrator may have links on it, users may not
  options.account_for = [rights = RightsOf(config)](const std::string& submitter) { return AccountFor(rights, submitter); };
  options.allowed_roots = AllowedRoots(config);
  ASSIGN_OR_RETURN(const std::unique_ptr<History> history, History::Open(JoinPath(config.state_folder, "history")));
  options.history = history.get();
  const auto seconds = [](double s) { return std::chrono::milliseconds(static_cast<int64_t>(s * 1000)); };
  options.node_lost_after = seconds(config.node_lost_after_s);
  options.stop_grace = seconds(config.stop_grace_s);
  options.hang_after = seconds(config.hang_after_s);
  options.pause_grace = seconds(config.pause_grace_s);
  options.disk_reserve_bytes = static_cast<int64_t>(config.disk_reserve_gib * (1 << 30));
  ASSIGN_OR_RETURN(std::unique_ptr<Coordinator> coordinator, Coordinator::Create(options, std::move(store), &clock));
  std::thread loop([&] { coordinator->Run(); });
  const auto end_loop = [&] {
    coordinator->Stop();
    loop.join();
  };

  auto rpc = RpcServer::Start({config.listen, config.tcp, version, commit, history.get(), UserName(geteuid()), config.certificates, config.access,
                               config.access_group, AllowedRoots(config)}, coordinator.get(), &clock);
  if (!rpc.ok()) {
    end_loop();
    return rpc.status();
  }
  if (geteuid() == 0 && config.worker_user.empty() && config.root_ranks == "refuse" && config.access == "owner" && config.tcp.empty()) {
    spdlog::warn("no job can run: ranks do not run as root, and only root may submit here (access: owner); set root_ranks: allow (in a container or on "
                 "a machine of your own), or worker_user, or access: docs/operations.md, \"Whose account ranks run as\"");
  }
  std::unique_ptr<LocalAgent> agent;
  if (config.agent == "auto") {
    auto folder = ProgramFolder();
    LocalAgentOptions agent_options{folder.ok() ? JoinPath(*folder, "hierad-agent") : "hierad-agent", config.listen,
                                    JoinPath(config.state_folder, "agent"), config.agent_lifetime, config.cpu_slots, config.worker_user, config.root_ranks};
    agent = std::make_unique<LocalAgent>(agent_options, &clock);
    if (absl::Status started = agent->Start(); !started.ok()) {
      (*rpc)->Stop();
      end_loop();
      return started;
    }
  }
  if (exporter != nullptr) {
    exporter->Serve([&] { return Await<Overview>([&](auto reply) { coordinator->Look(reply); }); }, {version, commit, config.state_folder, config.runs_folder});
  }
  std::unique_ptr<WebServer> web;
  if (config.web != "off") {
    auto started = WebServer::Start(config.web, {coordinator.get(), history.get(), [&](uid_t uid) { return (*rpc)->CallerOfUser(uid); }});
    if (!started.ok()) {
      agent.reset();
      (*rpc)->Stop();
      end_loop();
      return started.status();
    }
    web = *std::move(started);
    const size_t colon = config.web.rfind(':');
    spdlog::info("the web page is at http://{}:{}/", config.web.substr(0, colon), web->port());
  }
  spdlog::info("hierad {} ({}) listens on {}{}{}; state in {}", version, commit, config.listen, config.tcp.empty() ? "" : ", ", config.tcp, config.state_folder);

  notify.Send("READY=1");
  int number = 0;
  while ((number = AwaitSignal(signals, notify, coordinator.get())) == kReloadSignal) {
    if (absl::Status read = ReloadLogLevel(config_file); !read.ok()) spdlog::warn("the log level stays as it is: {}", std::string(read.message()));
  }
  notify.Send("STOPPING=1");
  spdlog::info("stopping on signal {}", number);
  coordinator->BeginDrain();
  if (agent != nullptr && config.agent_lifetime == "session") {
    // While the workers end, their last words still come in.
    agent->End(options.stop_grace + std::chrono::seconds(10));
  }
  agent.reset();
  web.reset();
  exporter.reset();
  coordinator->EndSessions();
  (*rpc)->Stop();
  end_loop();
  spdlog::info("stopped");
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  const ServiceNotify notify;
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
  app.add_option("--web", flags.web, "host:port on the loopback of the web page, or off; default: off");
  app.add_option("--agent", flags.agent, "auto: see to the agent of this machine; none; default: auto");
  app.add_option("--agent-lifetime", flags.agent_lifetime, "service: workers outlive hierad; session: they end with it; default: service");
  app.add_option("--worker-user", flags.worker_user, "Whose account ranks run as, where hierad is root: a user name, or submitter (default)");
  app.add_option("--root-ranks", flags.root_ranks, "Jobs that root submits to a hierad of root: refuse, or allow (they run as root); default: refuse");
  app.add_option("--cpu-slots", flags.cpu_slots, "CPU ranks at a time on this machine; default: one per core");
  app.add_option("--runs,--runs-folder", flags.runs_folder, "Folder of the runs; default: STATE/runs");
  app.add_option("--stop-grace,--stop-grace-s", flags.stop_grace_s, "Seconds from SIGTERM to SIGKILL of a cancelled worker; default: 30");
  app.add_option("--node-lost-after,--node-lost-after-s", flags.node_lost_after_s, "Seconds without a report until a node is given up; default: 15");
  app.add_option("--hang-after,--hang-after-s", flags.hang_after_s, "Seconds without a step, or 10 median steps if more, that are a hang; default: 30");
  app.add_option("--pause-grace,--pause-grace-s", flags.pause_grace_s, "Seconds for the last step and checkpoint of a paused job; default: 600");
  app.add_option("--disk-reserve,--disk-reserve-gib", flags.disk_reserve_gib, "GiB; less free on a run's disk lets no job in; default: 1");
  app.add_option("--log-level", flags.log_level, "debug, info, warn, error; default: info");
  app.add_option("--log-format", flags.log_format, "text, or json: an object a line, also of agent and workers; default: text");
  app.add_option("--log-file", flags.log_file, "Log here, 16 MiB and four older files at most; default: stderr");
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
  over("--web", config.web, flags.web);
  over("--agent", config.agent, flags.agent);
  over("--agent-lifetime", config.agent_lifetime, flags.agent_lifetime);
  over("--worker-user", config.worker_user, flags.worker_user);
  over("--root-ranks", config.root_ranks, flags.root_ranks);
  over("--cpu-slots", config.cpu_slots, flags.cpu_slots);
  over("--runs", config.runs_folder, flags.runs_folder);
  over("--stop-grace", config.stop_grace_s, flags.stop_grace_s);
  over("--node-lost-after", config.node_lost_after_s, flags.node_lost_after_s);
  over("--hang-after", config.hang_after_s, flags.hang_after_s);
  over("--pause-grace", config.pause_grace_s, flags.pause_grace_s);
  over("--disk-reserve", config.disk_reserve_gib, flags.disk_reserve_gib);
  over("--log-level", config.log_level, flags.log_level);
  over("--log-format", config.log_format, flags.log_format);
  over("--log-file", config.log_file, flags.log_file);
  if (status.ok()) status = CompleteConfig(&config);

  SetUpDaemonLog(config);
  // Taken by sigwait; blocked in every thread, so before any is made.
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIGHUP);
  sigaddset(&signals, kReloadSignal);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  signal(SIGPIPE, SIG_IGN);
  umask(022);
  if (status.ok()) status = Serve(config, config_file, signals, notify);
  if (!status.ok()) {
    fprintf(stderr, "hierad: %s\n", std::string(status.message()).c_str());
    return 1;
  }
  return 0;
}

}  // namespace
}  // namespace hierad

int main(int argc, char** argv) { return hierad::Main(argc, argv); }
