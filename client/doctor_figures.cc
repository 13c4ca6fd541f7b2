#include "client/doctor_figures.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/fs.h"
#include "base/job_yaml.h"
#include "base/status.h"
#include "base/subprocess.h"
#include "client/worker_tool.h"

namespace hierad {
namespace {

constexpr int64_t kDiskProbeBytes = 64 << 20;
constexpr std::chrono::seconds kWorkerTimeout{180};   // reading for two seconds and nine steps, on a slow machine

std::optional<int64_t> Limit(int resource) {
  rlimit limit{};
  if (getrlimit(resource, &limit) != 0) return std::nullopt;
  return limit.rlim_cur == RLIM_INFINITY ? DoctorFigures::kUnlimited : int64_t(limit.rlim_cur);
}

std::optional<std::string> Environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::nullopt : std::optional<std::string>(value);
}

void ReadMemory(DoctorFigures* figures) {
  std::ifstream info("/proc/meminfo");
  for (std::string line; std::getline(info, line);) {
    const auto value = [&](const std::string& key, std::optional<int64_t>* to) {
      if (line.rfind(key, 0) == 0) *to = std::strtoll(line.c_str() + key.size(), nullptr, 10) * 1024;
    };
    value("MemTotal:", &figures->memory_bytes);
    value("MemAvailable:", &figures->memory_free_bytes);
  }
}

// Bytes a second into a file of its own, synced; the file is gone before it is closed.
absl::StatusOr<double> TimeDisk(const std::string& folder, int64_t bytes) {
  std::string path = JoinPath(folder, ".hierctl-doctor-XXXXXX");
  UniqueFd fd(mkostemp(path.data(), O_CLOEXEC));
  if (!fd) return ErrnoStatus(errno, "cannot write in", folder);
  unlink(path.c_str());
  std::string piece(1 << 20, '\0');
  for (size_t i = 0; i < piece.size(); ++i) piece[i] = char((i * 2654435761u) >> 13);   // nothing that compresses to nothing
  const auto begin = std::chrono::steady_clock::now();
  for (int64_t done = 0; done < bytes; done += int64_t(piece.size())) RETURN_IF_ERROR(WriteAll(fd.get(), piece, path));
  if (fsync(fd.get()) != 0) return ErrnoStatus(errno, "cannot sync in", folder);
  return double(bytes) / std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

void ReadDisk(std::string folder, DoctorFigures* figures) {
  while (!Exists(folder) && folder != "/" && folder != ".") folder = FolderOf(folder);
  figures->disk_folder = folder;
  const auto free = FreeBytes(folder);
  if (!free.ok()) {
    figures->disk_problem = std::string(free.status().message());
    return;
  }
  figures->disk_free_bytes = *free;
  if (*free < 4 * kDiskProbeBytes) return;   // it is said to be full; no room is taken to time it
  const auto speed = TimeDisk(folder, kDiskProbeBytes);
  if (speed.ok()) {
    figures->disk_bytes_per_s = *speed;
  } else {
    figures->disk_problem = std::string(speed.status().message());
  }
}

// The job in a file that is gone once this is.
class JobFileOnDisk {
 public:
  static absl::StatusOr<JobFileOnDisk> Make(const v1::JobSpec& job) {
    JobFileOnDisk file;
    std::string path = (Environment("TMPDIR").value_or("/tmp")) + "/hierctl-doctor-XXXXXX";
    UniqueFd fd(mkostemp(path.data(), O_CLOEXEC));
    if (!fd) return ErrnoStatus(errno, "cannot write", path);
    file.path_ = path;
    RETURN_IF_ERROR(WriteAll(fd.get(), ToJobYaml(job), path));
    return file;
  }
  JobFileOnDisk(JobFileOnDisk&& other) noexcept : path_(std::move(other.path_)) { other.path_.clear(); }
  ~JobFileOnDisk() {
    if (!path_.empty()) unlink(path_.c_str());
  }
  const std::string& path() const { return path_; }

 private:
  JobFileOnDisk() = default;
  std::string path_;
};

absl::Status Ask(const v1::JobSpec* job, DoctorFigures* figures) {
  SubprocessOptions options;
  ASSIGN_OR_RETURN(const std::string worker, FindWorker());
  options.argv = {worker, "doctor"};
  std::optional<JobFileOnDisk> file;
  if (job != nullptr) {
    ASSIGN_OR_RETURN(JobFileOnDisk made, JobFileOnDisk::Make(*job));
    options.argv.push_back(made.path());
    file.emplace(std::move(made));
  }
  ASSIGN_OR_RETURN(const CommandResult result, RunCommand(options, kWorkerTimeout));
  if (!result.exit.ok()) {
    std::string words = result.err;
    words.erase(words.find_last_not_of('\n') + 1);
    return absl::InternalError("hiera-worker doctor ended with " + result.exit.Describe() + (words.empty() ? "" : ": " + PrintableSentence(words, 400)));
  }
  return ParseWorkerFigures(result.out, figures);
}

template <typename Value>
void Take(const nlohmann::json& from, const char* key, std::optional<Value>* to) {
  if (from.contains(key) && !from[key].is_null()) *to = from[key].get<Value>();
}

GpuCards CardsFrom(const nlohmann::json& gpus) {
  GpuCards all;
  all.library = gpus.at("library").get<bool>();
  all.problem = gpus.at("problem").get<std::string>();
  all.driver = gpus.at("driver").get<std::string>();
  all.cuda = gpus.at("cuda").get<int>();
  all.silent = gpus.at("silent").get<std::vector<unsigned>>();
  for (const nlohmann::json& from : gpus.at("cards")) {
    GpuCard& card = all.cards.emplace_back();
    card.index = from.at("index").get<unsigned>();
    card.uuid = from.at("uuid").get<std::string>();
    card.name = from.at("name").get<std::string>();
    card.memory_bytes = from.at("memory_bytes").get<int64_t>();
    card.free_bytes = from.at("free_bytes").get<int64_t>();
    Take(from, "sm_mhz", &card.sm_mhz);
    Take(from, "most_sm_mhz", &card.most_sm_mhz);
    Take(from, "temperature_c", &card.temperature_c);
    Take(from, "slowed", &card.slowed);
    Take(from, "ecc", &card.ecc);
    Take(from, "uncorrected_errors", &card.uncorrected_errors);
  }
  return all;
}

}  // namespace

void ReadMachine(const std::string& folder, DoctorFigures* figures) {
  struct statvfs shm {};
  if (statvfs("/dev/shm", &shm) == 0) {
    figures->shm_bytes = int64_t(shm.f_blocks) * int64_t(shm.f_frsize);
    figures->shm_free_bytes = int64_t(shm.f_bavail) * int64_t(shm.f_frsize);
  }
  figures->memlock_bytes = Limit(RLIMIT_MEMLOCK);
  figures->open_files = Limit(RLIMIT_NOFILE);
  figures->cuda_visible_devices = Environment("CUDA_VISIBLE_DEVICES");
  figures->torch_allocator = Environment("PYTORCH_CUDA_ALLOC_CONF");
  ReadMemory(figures);
  ReadDisk(folder, figures);
}

void AskWorker(const v1::JobSpec* job, DoctorFigures* figures) {
  if (const absl::Status asked = Ask(job, figures); !asked.ok()) figures->worker_problem = std::string(asked.message());
}

absl::Status ParseWorkerFigures(const std::string& text, DoctorFigures* figures) {
  try {
    const nlohmann::json json = nlohmann::json::parse(text);
    figures->gpus = CardsFrom(json.at("gpus"));
    figures->cuda_runtime = json.at("cuda_runtime").get<int>();
    figures->nccl = json.at("nccl").get<int>();
    const nlohmann::json none = nlohmann::json::object();
    const nlohmann::json& data = json.contains("data") ? json["data"] : none;
    const nlohmann::json& step = json.contains("step") ? json["step"] : none;
    Take(data, "samples", &figures->samples);
    Take(data, "samples_per_s", &figures->data_samples_per_s);
    figures->data_threads = data.value("threads", 0);
    figures->data_problem = data.value("problem", "");
    Take(step, "ms", &figures->step_ms);
    figures->step_problem = step.value("problem", "");
    figures->step_skipped = step.value("skipped", "");
    return absl::OkStatus();
  } catch (const nlohmann::json::exception&) {
    return absl::InvalidArgumentError("hiera-worker doctor printed what this hierctl does not understand; install both of one version");
  }
}

}  // namespace hierad
