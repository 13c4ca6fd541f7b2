// hierad-agent: flags and wiring.
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <random>
#include <string>

#include "CLI/CLI.hpp"
#include "base/channel/certificates.h"
#include "base/fs.h"
#include "base/limits.h"
#include "base/log_format.h"
#include "base/service_notify.h"
#include "base/status.h"
#include "hierad/version.h"
#include "base/account.h"
#include "server/agent/agent.h"
#include "server/agent/cgroup.h"
#include "server/agent/keeper.h"
#include "server/agent/ranks.h"
#include "server/agent/slots.h"
#include "spdlog/sinks/stdout_color_sinks.h"
#include "spdlog/spdlog.h"

namespace hierad {
namespace {

struct Flags {
  std::string server, node, state, worker, address, certificates, worker_certificates, worker_user, gpus = "auto", lifetime = "service", root_ranks = "refuse";
  int cpu_slots = -1;
  double memory_max_gib = 0;
  int64_t log_bytes = limits::kLogFileBytes;
};

std::string HostName() {
  char name[HOST_NAME_MAX + 1] = "";
  gethostname(name, sizeof name - 1);
  return name;
}

std::string OwnFolder() {
  char path[PATH_MAX] = "";
  const ssize_t n = readlink("/proc/self/exe", path, sizeof path - 1);
  return n > 0 ? FolderOf(std::string(path, size_t(n))) : ".";
}

std::string RandomId() {
  std::random_device random;
  char text[17];
  std::snprintf(text, sizeof text, "%08x%08x", random(), random());
  return text;
}

// Held as long as the process lives: closed on exec, so no rank inherits it.
absl::StatusOr<UniqueFd> LockState(const std::string& folder) {
  RETURN_IF_ERROR(MakeFolders(folder, 0700));
  const std::string path = JoinPath(folder, "agent.lock");
  UniqueFd lock(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  if (!lock) return ErrnoStatus(errno, "cannot open", path);
  // hierad looks now and then whether the lock is held, by holding it for a moment: so not a single try.
  bool held = false;
  for (int tries = 0; !held && tries < 10; ++tries) {
    if (tries > 0) poll(nullptr, 0, 20);
    held = flock(lock.get(), LOCK_EX | LOCK_NB) == 0;
  }
  if (!held) {
    char pid[32] = "";
    if (pread(lock.get(), pid, sizeof pid - 1, 0) <= 0) std::strcpy(pid, "unknown");
    return absl::FailedPreconditionError("the state folder \"" + folder + "\" is in use by another agent (process " +
                                         pid + "); stop that one, or give this one another --state");
  }
  const std::string pid = std::to_string(getpid());
  if (ftruncate(lock.get(), 0) != 0) return ErrnoStatus(errno, "cannot write", path);
  RETURN_IF_ERROR(WriteAll(lock.get(), pid, path));
  return lock;
}

// The folder's identity, made once.
absl::StatusOr<std::string> StateId(const std::string& folder) {
  const std::string path = JoinPath(folder, "agent.id");
  if (!Exists(path)) RETURN_IF_ERROR(WriteFileAtomic(path, RandomId(), 0600));
  ASSIGN_OR_RETURN(std::string id, ReadFile(path, 64));
  if (id.size() != 16 || id.find_first_not_of("0123456789abcdef") != std::string::npos) {
    return absl::DataLossError("\"" + path + "\" is damaged: it should hold 16 hexadecimal digits; remove it while no "
                               "rank of this agent runs");
  }
  return id;
}

absl::Status CheckCertificates(const Flags& flags) {
  if (flags.server.rfind("unix:", 0) == 0) return absl::OkStatus();
  if (flags.certificates.empty() || flags.worker_certificates.empty()) {
    return absl::InvalidArgumentError("hierad at " + Printable(flags.server) + " speaks TLS only: give --certificates and "
                                      "--worker-certificates, folders that deploy/certs makes");
  }
  RETURN_IF_ERROR(ReadCertificates(flags.certificates).status());
  return ReadCertificates(flags.worker_certificates).status();
}

// As whom ranks run, and whether they get control groups.
absl::Status ChooseRights(const Flags& flags, Ranks::Options* ranks) {
  ranks->rights = {flags.worker_user, flags.root_ranks == "allow"};
  // The name is looked at now; whose a submitter's job is, when it comes.
  if (!flags.worker_user.empty() && flags.worker_user != "submitter") RETURN_IF_ERROR(AccountFor(ranks->rights, "").status());
  if (flags.worker_user == "submitter" && geteuid() != 0) {
    return absl::FailedPreconditionError("--worker-user submitter: only an agent of root can start ranks as the users who submit; start "
                                         "hierad-agent as root");
  }
  if (flags.worker_user == "submitter") {
    if (const absl::Status can = CanTakeAccounts(); !can.ok()) return absl::FailedPreconditionError("--worker-user submitter: " + std::string(can.message()));
  }
  if (geteuid() == 0 && ranks->rights.root_allowed) spdlog::warn("ranks of jobs that root submits run as root (--root-ranks allow)");
  ranks->log_bytes = flags.log_bytes;
  ranks->memory_max = int64_t(flags.memory_max_gib * double(int64_t{1} << 30));
  auto home = FindCgroupHome();
  if (home.ok()) {
    if (const absl::Status tried = TryCgroup(*home, ranks->memory_max); !tried.ok()) home = tried;
  }
  ranks->cgroup_home = home.value_or("");
  if (home.ok()) {
    spdlog::info("ranks get control groups below {}", *home);
  } else if (ranks->memory_max > 0) {
    return absl::FailedPreconditionError("--memory-max: " + std::string(home.status().message()) + "; leave it out, or start the agent by its "
                                                                                                   "unit of systemd 254, with DelegateSubgroup=agent");
  } else {
    spdlog::info("ranks get no control groups ({}); their trees are found through /proc", std::string(home.status().message()));
  }
  return absl::OkStatus();
}

absl::Status Serve(const Flags& flags, const ServiceNotify& notify) {
  RETURN_IF_ERROR(CheckCertificates(flags));
  // Before any thread exists: every thread of gRPC inherits the mask, so the signals come to the loop alone.
  sigset_t signals;
  sigemptyset(&signals);
  for (const int number : {SIGTERM, SIGINT, SIGCHLD}) sigaddset(&signals, number);
  sigprocmask(SIG_BLOCK, &signals, nullptr);
  signal(SIGPIPE, SIG_IGN);
  const UniqueFd signal_fd(signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK));

  char absolute[PATH_MAX];
  RETURN_IF_ERROR(MakeFolders(flags.state, 0700));
  if (realpath(flags.state.c_str(), absolute) == nullptr) return ErrnoStatus(errno, "cannot use", flags.state);
  const std::string state = absolute;
  ASSIGN_OR_RETURN(const UniqueFd lock, LockState(state));
  SlotOptions slot_options{.cpu_slots = flags.cpu_slots, .detect_gpus = flags.gpus == "auto"};
  slot_options.cuda_visible_devices = std::getenv("CUDA_VISIBLE_DEVICES");
  Agent::Options options{.server = flags.server, .certificates = flags.certificates, .node = flags.node, .instance = RandomId()};
  ASSIGN_OR_RETURN(options.slots, DetectSlots(slot_options));
  options.session_lifetime = flags.lifetime == "session";
  options.signals = signal_fd.get();
  options.notify = &notify;
  if (std::any_of(options.slots.begin(), options.slots.end(), [](const v1::Slot& slot) { return slot.kind() == v1::Slot::CUDA; })) options.nvml = kNvml;
  // Absolute: the worker is started in the run's folder.
  std::error_code error;
  const std::string worker = std::filesystem::absolute(flags.worker, error).string();
  Ranks::Options ranks_options{.state_folder = state, .worker = worker, .server = flags.server,
                               .worker_certificates = flags.worker_certificates, .address = flags.address};
  ASSIGN_OR_RETURN(ranks_options.agent_id, StateId(state));
  RETURN_IF_ERROR(ChooseRights(flags, &ranks_options));
  options.rights = ranks_options.rights;
  ASSIGN_OR_RETURN(std::unique_ptr<Ranks> ranks, Ranks::Open(ranks_options));
  spdlog::info("hierad-agent {} on {}: {} slots, {} ranks adopted, state {}", std::string(Version()), flags.node,
               options.slots.size(), ranks->running(), state);
  return Agent(std::move(options), std::move(ranks)).Run();
}

int Main(int argc, char** argv) {
  const ServiceNotify notify;
  Flags flags;
  flags.node = HostName();
  flags.worker = JoinPath(OwnFolder(), "hiera-worker");
  CLI::App app{"hierad-agent: runs the ranks that hierad gives to this node."};
  app.set_version_flag("--version", std::string(Version()) + " (" + std::string(Commit()) + ")");
  app.add_option("--server", flags.server, "hierad's endpoint: unix:/path or host:port")->required();
  app.add_option("--node", flags.node, "Name of this node")->capture_default_str();
  app.add_option("--certificates", flags.certificates, "Folder with ca.crt, tls.crt and tls.key of this agent, for host:port");
  app.add_option("--worker-certificates", flags.worker_certificates, "The same of its ranks, for host:port");
  app.add_option("--worker-user", flags.worker_user,
                 "Whose account ranks run as, for an agent of root: a user name, or submitter (who submitted the job; default); never root's");
  app.add_option("--root-ranks", flags.root_ranks, "Jobs that root submits, for an agent of root - refuse; allow: they run as root")
      ->check(CLI::IsMember({"refuse", "allow"}))->capture_default_str();
  app.add_option("--memory-max", flags.memory_max_gib, "GiB of memory of each rank, by its control group; default: no limit")
      ->check(CLI::Range(0.0, 1e6));
  app.add_option("--log-bytes", flags.log_bytes, "A rank's log of more bytes is moved to rank-N.log.1 and begun anew")
      ->check(CLI::Range(int64_t{4096}, limits::kLogFileMost))->capture_default_str();
  app.add_option("--address", flags.address,
                 "Where ranks of this node listen for those of other nodes; default: the address on the way to hierad");
  app.add_option("--state", flags.state, "Folder of this agent alone; made if missing")->required();
  app.add_option("--cpu-slots", flags.cpu_slots, "CPU ranks at a time; default: one per core")
      ->check(CLI::Range(0, 1024));
  app.add_option("--worker", flags.worker, "The worker's binary")->capture_default_str();
  app.add_option("--gpus", flags.gpus, "auto: one slot per NVIDIA GPU found; none")
      ->check(CLI::IsMember({"auto", "none"}))->capture_default_str();
  app.add_option("--lifetime", flags.lifetime,
                 "At SIGTERM - service: ranks go on for the next agent; session: they are ended first")
      ->check(CLI::IsMember({"service", "session"}))->capture_default_str();
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 1;
  }
  spdlog::set_default_logger(spdlog::stderr_color_mt("hierad-agent"));
  spdlog::set_formatter(std::make_unique<LogLine>("hierad-agent", LogLine::Fields{}));
  if (const absl::Status status = Serve(flags, notify); !status.ok()) {
    std::fprintf(stderr, "hierad-agent: %s\n", std::string(status.message()).c_str());
    return 1;
  }
  return 0;
}

}  // namespace
}  // namespace hierad

int main(int argc, char** argv) {
  if (argc > 1 && std::strcmp(argv[1], "--keeper") == 0) return hierad::KeeperMain(argc, argv);
  return hierad::Main(argc, argv);
}
