#include "worker/worker_process.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <thread>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/failpoint.h"
#include "base/fs.h"
#include "base/job_paths.h"
#include "base/job_validate.h"
#include "base/job_yaml.h"
#include "base/log_format.h"
#include "base/status.h"
#include "base/worker_exit.h"
#include "hierad/v1/worker.pb.h"
#include "hierad/version.h"
#include "worker/attempt_watch.h"
#include "worker/data/loader.h"
#include "worker/session.h"

namespace hierad {
namespace {

constexpr std::chrono::seconds kEndTimeout{10};   // hierad may be restarting; past it the exit code has to say it
constexpr int64_t kAssignmentBytes = 4 << 20;

std::atomic<bool> terminate_asked{false};   // by SIGTERM or SIGINT; looked at between steps
static_assert(std::atomic<bool>::is_always_lock_free);

}  // namespace

void SetUpWorkerProcess() {
  // NCCL reads it once: buffers of a recorded step are not registered with it, which a process that dies may not undo. Now,
  // while there is one thread.
  setenv("NCCL_GRAPH_REGISTER", "0", /*overwrite=*/0);
  struct sigaction action{};
  action.sa_handler = [](int) { terminate_asked = true; };
  action.sa_flags = SA_RESTART;
  sigaction(SIGTERM, &action, nullptr);
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGUSR1, &action, nullptr);   // how some batch systems announce the end
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);   // a limit on file size is an error of write, like a full disk
  std::set_new_handler([] {
    static const char kText[] = "out of memory on the host: lower step.batch_per_rank, data.workers or the ranks per node\n";
    if (write(2, kText, sizeof kText - 1) < 0) {
    }
    _exit(WorkerExitCode(v1::REASON_HOST_OOM));
  });
}

namespace {

void SetUpLog(LogLine::Fields fields) {
  auto logger = std::make_shared<spdlog::logger>("rank", std::make_shared<spdlog::sinks::stderr_sink_mt>());
  logger->set_formatter(std::make_unique<LogLine>("hiera-worker", std::move(fields)));
  logger->flush_on(spdlog::level::trace);
  spdlog::set_default_logger(std::move(logger));
}

int Cores() { return std::max(1, int(std::thread::hardware_concurrency())); }

void ChooseThreads(int slot_threads, int local_ranks, TrainerOptions* options) {
  const int share = std::max(1, Cores() / std::max(1, local_ranks));
  options->threads = share;
  if (slot_threads > 0) options->threads = slot_threads;
  if (options->spec.resources().has_threads_per_rank()) options->threads = options->spec.resources().threads_per_rank();
  options->loader_threads = LoaderThreads(options->spec, options->cuda, share);
}

// OpenMP's threads spin at their barriers, which on cores shared with other processes makes a step ten times as long. They
// read how to wait when they are loaded, before main: so the program is started once more, with that said.
void WaitWithoutSpinning(const TrainerOptions& options, char** argv) {
  if (options.cuda || options.threads < 2 || std::getenv("OMP_WAIT_POLICY") != nullptr) return;
  setenv("OMP_WAIT_POLICY", "passive", 0);
  char path[PATH_MAX] = {};
  if (readlink("/proc/self/exe", path, sizeof path - 1) > 0) execv(path, argv);
  spdlog::warn("cannot start anew with OMP_WAIT_POLICY=passive; set it for a run on busy cores");
}

// Runs to the end and leaves the process: destructors of a GPU's libraries may wait for a peer that is gone.
[[noreturn]] void RunToTheEnd(TrainerOptions options, const MakeParts& make_parts, Session* session) {
  const auto leave = [session](v1::Reason reason, const std::string& message) {
    spdlog::log(reason == v1::REASON_COMPLETED ? spdlog::level::info : spdlog::level::err, "end ({}): {}", v1::Reason_Name(reason), message);
    (void)Failpoint("worker.end");
    if (!session->End(reason, message, kEndTimeout)) spdlog::warn("hierad did not confirm the end; the exit code says it");
    (void)Failpoint("worker.ended");
    spdlog::default_logger()->flush();
    std::fflush(nullptr);
    _exit(WorkerExitCode(reason));
  };
  TrainerParts parts = make_parts(options);
  parts.give_up = leave;
  Trainer trainer(std::move(options), std::move(parts), session);
  const TrainEnd end = trainer.Run();
  leave(end.reason, end.message);
  std::abort();
}

absl::StatusOr<v1::Assignment> ReadAssignment(int fd) {
  std::string data;
  char buffer[65536];
  lseek(fd, 0, SEEK_SET);   // a memfd may stand at its end
  ssize_t n;
  while ((n = read(fd, buffer, sizeof buffer)) > 0 && int64_t(data.size()) < kAssignmentBytes) data.append(buffer, size_t(n));
  if (n < 0) return ErrnoStatus(errno, "cannot read the assignment from descriptor", std::to_string(fd));
  v1::Assignment assignment;
  if (data.empty() || !assignment.ParseFromString(data)) {
    return absl::InternalError(absl::StrCat("descriptor ", fd, " holds no assignment (", data.size(), " bytes); hiera-worker run is started by hierad-agent"));
  }
  if (assignment.attempt() < 1 || assignment.world_size() < 1 || assignment.rank() < 0 || assignment.rank() >= assignment.world_size() ||
      assignment.run_folder().empty() || assignment.run_folder()[0] != '/') {
    return absl::InternalError(absl::StrCat("the assignment says attempt ", assignment.attempt(), ", rank ", assignment.rank(), " of ",
                                            assignment.world_size(), ", run folder \"", Printable(assignment.run_folder()), "\""));
  }
  if (assignment.endpoint().rfind("unix:", 0) != 0 && assignment.certificates().key().empty()) {
    return absl::InternalError(absl::StrCat("the assignment names hierad at \"", Printable(assignment.endpoint()), "\" and no certificates for it"));
  }
  return assignment;
}

// The keeper has made the run's folder and put this process into it; what is written from here on goes by the path.
absl::Status CheckRunFolder(const std::string& path) {
  struct stat own, named;
  if (stat(".", &own) != 0 || stat(path.c_str(), &named) != 0) return ErrnoStatus(errno, "cannot find the run's folder", path);
  if (own.st_dev == named.st_dev && own.st_ino == named.st_ino) return absl::OkStatus();
  return absl::PermissionDeniedError(absl::StrCat("the run's folder \"", Printable(path), "\" was exchanged for another while the attempt began; "
                                                  "nothing was written there; put the folder back, or submit with another output.folder"));
}

}  // namespace

int RefuseUsage(const absl::Status& status) {
  std::fprintf(stderr, "hiera-worker: %s\n", std::string(status.message()).c_str());
  return kWorkerExitUsage;
}

int RunAssigned(int fd, char** argv, std::chrono::nanoseconds start, const MakeParts& make_parts) {
  const auto assignment = ReadAssignment(fd);
  if (!assignment.ok()) return RefuseUsage(assignment.status());
  SetUpLog({{"job", int64_t(assignment->job_id())}, {"attempt", assignment->attempt()}, {"rank", assignment->rank()}});
  TrainerOptions options;
  options.spec = assignment->spec();
  FillDefaults(&options.spec);
  SetLogLevel(options.spec.output().log_level());
  options.run_folder = assignment->run_folder();
  options.unique_name = absl::StrCat("hierad-", assignment->job_id(), "-", assignment->attempt());
  options.rank = assignment->rank();
  options.world_size = assignment->world_size();
  if (assignment->local_world_size() < assignment->world_size()) options.collective_address = assignment->node_address();
  options.cuda = assignment->slot().kind() == v1::Slot::CUDA;
  options.terminate = &terminate_asked;
  options.process_start = start;
  for (const v1::CheckpointInfo& info : assignment->checkpoints()) {
    if (!info.damaged()) options.known_checkpoint_step = std::max(options.known_checkpoint_step, info.step());
  }
  ChooseThreads(assignment->slot().threads(), assignment->local_world_size(), &options);
  if (lseek(fd, 0, SEEK_SET) == 0) WaitWithoutSpinning(options, argv);   // a pipe cannot be read twice
  close(fd);
  spdlog::info("hiera-worker {} ({}): job {}, attempt {}, rank {} of {}, slot {}, pid {}", std::string(Version()), std::string(Commit()),
               assignment->job_id(), assignment->attempt(), assignment->rank(), assignment->world_size(), assignment->slot().id(), getpid());
  (void)Failpoint("worker.begin");
  if (const absl::Status confined = ConfineJobPaths({assignment->allowed_roots().begin(), assignment->allowed_roots().end()}); !confined.ok()) {
    spdlog::error("{}", std::string(confined.message()));
    return WorkerExitCode(v1::REASON_USER_ERROR);
  }
  if (const absl::Status same = CheckRunFolder(options.run_folder); !same.ok()) {
    spdlog::error("{}", std::string(same.message()));
    return WorkerExitCode(v1::REASON_USER_ERROR);
  }
  const AttemptWatch watch(options.run_folder, assignment->credential(), [] {
    std::fprintf(stderr, "a newer attempt of this job has taken the run folder: ending at once\n");
    _exit(kWorkerExitFenced);
  });
  const auto session = ConnectSession(*assignment, &terminate_asked);
  RunToTheEnd(std::move(options), make_parts, session.get());
}

int RunLocal(const std::string& job, const std::string& run_folder, char** argv, std::chrono::nanoseconds start,
             const MakeParts& make_parts) {
  SetUpLog({{"rank", 0}});
  TrainerOptions options;
  auto spec = ReadJobYaml(job);
  if (!spec.ok()) return RefuseUsage(spec.status());
  options.spec = *std::move(spec);
  FillDefaults(&options.spec);
  SetLogLevel(options.spec.output().log_level());
  if (absl::Status legal = CheckJob(options.spec); !legal.ok()) return RefuseUsage(legal);
  if (options.spec.resources().ranks() != 1) {
    return RefuseUsage(absl::InvalidArgumentError(absl::StrCat("resources.ranks is ", options.spec.resources().ranks(),
                                                        "; run-local runs one rank: set it to 1, or submit the job to hierad")));
  }
  char absolute[PATH_MAX];
  if (absl::Status made = MakeFolders(run_folder); !made.ok()) return RefuseUsage(made);
  if (realpath(run_folder.c_str(), absolute) == nullptr) return RefuseUsage(ErrnoStatus(errno, "cannot resolve", run_folder));
  options.run_folder = absolute;
  options.cuda = UsesGpu(options.spec, CudaDeviceCount() > 0);
  options.terminate = &terminate_asked;
  options.process_start = start;
  if (absl::Status written = WriteFileAtomic(JoinPath(options.run_folder, "job.yaml"), ToJobYaml(options.spec)); !written.ok()) return RefuseUsage(written);
  ChooseThreads(0, 1, &options);
  WaitWithoutSpinning(options, argv);
  const auto session = MakeLocalSession();
  RunToTheEnd(std::move(options), make_parts, session.get());
}

}  // namespace hierad
