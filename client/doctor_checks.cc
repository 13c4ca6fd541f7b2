#include "client/doctor_checks.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "base/job_validate.h"
#include "base/plan/parameters.h"
#include "base/plan/plan_report.h"
#include "base/text.h"
#include "client/render.h"

namespace hierad {
namespace {

constexpr int64_t kMib = 1 << 20;
constexpr int64_t kDockerShm = 64 * kMib;               // what a container gets when nobody says more
constexpr int64_t kNcclShmPerRank = 64 * kMib;          // its buffers to the other ranks of a node, with room to spare
constexpr int64_t kLeastMemlock = 64 * kMib;            // registering memory for RDMA
constexpr int64_t kLeastOpenFiles = 256, kGoodOpenFiles = 1024;
constexpr double kFullCard = 0.95;                      // of its memory planned: fragmentation and neighbours decide
constexpr double kDataMargin = 1.2;                     // the loader should be so much faster than the step
constexpr double kSlowDisk = 100e6;                     // bytes a second
constexpr double kMostCheckpointShare = 0.1;            // of the time between two

// "13.0" of 13000.
std::string CudaText(int version) { return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10); }
std::string NcclText(int version) { return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." + std::to_string(version % 100); }

class Examination {
 public:
  Examination(const DoctorFigures& figures, const v1::JobSpec* job) : f_(figures), job_(job) {
    gpu_ = job == nullptr ? !f_.gpus.cards.empty() : UsesGpu(*job, !f_.gpus.cards.empty());
    if (job == nullptr) return;
    mode_ = ResolvedMode(job->step(), gpu_);
    v1::JobSpec resolved = *job;
    resolved.mutable_step()->set_mode(mode_);
    resolved.mutable_resources()->set_device(gpu_ ? "cuda" : "cpu");
    if (auto report = ReportPlan(resolved, {.samples = f_.samples.value_or(0)}); report.ok()) {
      plan_ = *report;
    } else {
      plan_problem_ = std::string(report.status().message());
    }
    least_bytes_ = LeastMemory(*job).value_or(0);
  }

  std::vector<DoctorCheck> Run() {
    Engine();
    if (job_ != nullptr) {
      StaticShapes();
      LastBatch();
      Capture();
      Allocator();
      gpu_ ? CardMemory() : HostMemory();
      DataRate();
    }
    Cards();
    VisibleDevices();
    Driver();
    Nccl();
    Clocks();
    Ecc();
    SharedMemory();
    LockedMemory();
    OpenFiles();
    DiskSpace();
    DiskSpeed();
    return std::move(checks_);
  }

 private:
  void Pass(const std::string& name, const std::string& seen) { checks_.push_back({name, Verdict::kPass, seen, ""}); }
  void Warn(const std::string& name, const std::string& seen, const std::string& advice) { checks_.push_back({name, Verdict::kWarn, seen, advice}); }
  void Fail(const std::string& name, const std::string& seen, const std::string& advice) { checks_.push_back({name, Verdict::kFail, seen, advice}); }
  // A fault for a job that must have a GPU, else something to know.
  void FailIfWanted(const std::string& name, const std::string& seen, const std::string& advice) {
    const bool wanted = job_ != nullptr && job_->resources().device() == "cuda";
    wanted ? Fail(name, seen, advice) : Warn(name, seen, advice);
  }

  int Ranks() const { return job_ == nullptr ? 1 : job_->resources().ranks(); }
  // Ranks of the job that this node would run.
  int LocalRanks() const { return gpu_ && !f_.gpus.cards.empty() ? std::min(Ranks(), int(f_.gpus.cards.size())) : Ranks(); }

  void Engine() {
    if (f_.worker_problem.empty()) return;
    Fail("engine", f_.worker_problem, "neither cards nor data were looked at");
  }

  void StaticShapes() {
    if (!plan_) {
      if (mode_ == "fused") return Fail("static shapes", plan_problem_, "change what it names");
      return Warn("static shapes", plan_problem_, "the plan's figures are missing below");
    }
    Pass("static shapes", "mode " + mode_ + ": " + std::to_string(plan_->kernels_per_step) + " operations a step, no size depends on the data");
  }

  void LastBatch() {
    const int64_t effective = int64_t{job_->step().batch_per_rank()} * Ranks() * job_->step().accumulation();
    const int64_t visits = (job_->data().source() == "synthetic" ? job_->data().synthetic_samples() : f_.samples.value_or(0)) * job_->data().repeat();
    const std::string policy = job_->data().last_batch();
    if (visits == 0) return Pass("last batch", policy + "; the number of samples is not known");
    const int64_t rest = visits % effective;
    const std::string of = std::to_string(visits) + " visits an epoch, " + std::to_string(effective) + " a step";
    if (rest == 0) return Pass("last batch", of + ": none is short");
    if (policy == "pad") return Pass("last batch", of + ": the last has " + std::to_string(rest) + ", its empty places weigh nothing in the same graph");
    if (visits < effective) return Fail("last batch", of + ": drop leaves no step at all", "use data.last_batch: pad, or a smaller step.batch_per_rank");
    const std::string dropped = of + ": drop leaves out " + std::to_string(rest) + " each epoch";
    if (rest * 10 > visits) return Warn("last batch", dropped, "use data.last_batch: pad");
    Pass("last batch", dropped + ", others each time");
  }

  void Capture() {
    const std::string backend = job_->step().sdpa_backend();
    if (!gpu_ || (mode_ != "graph_safe" && mode_ != "fused")) return Pass("capture", "mode " + mode_ + (gpu_ ? "" : " on a CPU") + " captures nothing");
    if (mode_ == "fused") return Pass("capture", "own attention kernels, graphs of its own");
    if (backend == "cudnn") {
      return Warn("capture", "step.sdpa_backend cudnn makes its plans lazily, which a capture may not allow", "use step.sdpa_backend: auto, which takes one that is safe");
    }
    Pass("capture", "attention by " + (backend == "auto" ? std::string("flash or mem_efficient, chosen as safe") : backend));
  }

  void Allocator() {
    if (!gpu_) return Pass("allocator", "host memory; no pool to fragment");
    if (mode_ == "fused") return Pass("allocator", "arenas at fixed addresses; the step allocates nothing");
    if (mode_ == "graph_safe") return Pass("allocator", "torch's, one pool owned by the graph; the step allocates nothing");
    if (f_.torch_allocator.value_or("").find("expandable_segments:True") != std::string::npos) return Pass("allocator", "torch's, with expandable segments");
    Warn("allocator", "torch's caching allocator, which can fragment in mode " + mode_,
         "use step.mode: fused or graph_safe, or set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True");
  }

  static constexpr char kSmaller[] = "lower step.batch_per_rank (hierctl plan --fit tells the largest), or raise step.accumulation instead";

  void CardMemory() {
    if (!plan_ || f_.gpus.cards.empty()) return;
    const int64_t wants = plan_->total_device_bytes();
    const GpuCard* tightest = &f_.gpus.cards[0];
    for (const GpuCard& card : f_.gpus.cards) {
      if (card.memory_bytes < tightest->memory_bytes || (card.memory_bytes == tightest->memory_bytes && card.free_bytes < tightest->free_bytes)) tightest = &card;
    }
    const std::string estimate = plan_->exact ? "planned " : "at most ";
    const std::string seen = estimate + BytesText(wants) + " a rank; card " + std::to_string(tightest->index) + " has " + BytesText(tightest->memory_bytes) +
                             ", " + BytesText(tightest->free_bytes) + " free";
    if (least_bytes_ + plan_->context_bytes > tightest->memory_bytes) return Fail("memory headroom", seen + "; at least " + BytesText(least_bytes_) + " are needed", kSmaller);
    if (wants > tightest->free_bytes && wants <= tightest->memory_bytes) {
      return Warn("memory headroom", seen, "another process holds memory of the card (nvidia-smi names it); end it, or use another card");
    }
    if (double(wants) > kFullCard * double(tightest->memory_bytes)) return Warn("memory headroom", seen, kSmaller);
    Pass("memory headroom", seen);
  }

  void HostMemory() {
    if (!plan_ || !f_.memory_bytes || !f_.memory_free_bytes) return;
    const int64_t wants = plan_->total_device_bytes() * Ranks();
    const std::string seen = "at most " + BytesText(wants) + " for " + std::to_string(Ranks()) + (Ranks() == 1 ? " rank" : " ranks") + "; the host has " +
                             BytesText(*f_.memory_bytes) + ", " + BytesText(*f_.memory_free_bytes) + " free";
    if (least_bytes_ * Ranks() > *f_.memory_bytes) return Fail("memory headroom", seen + "; at least " + BytesText(least_bytes_ * Ranks()) + " are needed", kSmaller);
    if (wants > *f_.memory_free_bytes) return Warn("memory headroom", seen, kSmaller);
    Pass("memory headroom", seen);
  }

  void DataRate() {
    if (!f_.data_problem.empty()) return Fail("data rate", f_.data_problem, "mend the data, or data.path; nothing could be read");
    if (!f_.data_samples_per_s) return;
    const std::string read = CountText(*f_.data_samples_per_s) + " samples/s read by " + std::to_string(f_.data_threads) + (f_.data_threads == 1 ? " thread" : " threads");
    if (!f_.step_problem.empty()) return Fail("data rate", read + "; the step failed: " + f_.step_problem, "mend what it names, or try a smaller step.batch_per_rank");
    if (!f_.step_ms) return Pass("data rate", read + "; the step was not timed: " + (f_.step_skipped.empty() ? "not known why" : f_.step_skipped));
    const double takes = double(job_->step().batch_per_rank()) * job_->step().accumulation() / *f_.step_ms * 1e3;
    const std::string seen = read + "; a rank's step of " + NumberText(*f_.step_ms) + " ms takes " + CountText(takes) + "/s";
    if (*f_.data_samples_per_s >= kDataMargin * takes) return Pass("data rate", seen);
    const int waits = int(std::lround(100 * std::max(0.0, 1 - *f_.data_samples_per_s / takes)));
    Warn("data rate", seen + (waits > 0 ? ": the step will wait " + std::to_string(waits) + "% of its time" : ": hardly any margin"),
         "raise data.workers where there are cores, or keep the data smaller, on a faster disk, or as .npy");
  }

  void Cards() {
    if (!f_.worker_problem.empty()) return;
    const bool wanted = job_ != nullptr && job_->resources().device() == "cuda";
    if (!f_.gpus.problem.empty()) return FailIfWanted("GPU", f_.gpus.problem, "install or restart NVIDIA's driver");
    if (f_.gpus.cards.empty() && f_.gpus.silent.empty()) {
      if (wanted) return Fail("GPU", "none", "resources.device is cuda; use cpu or auto, or another node");
      return Pass("GPU", "none");
    }
    std::string seen;
    for (const GpuCard& card : f_.gpus.cards) {
      seen += (seen.empty() ? "" : "; ") + std::to_string(card.index) + ": " + PrintableSentence(card.name) + ", " + BytesText(card.memory_bytes);
    }
    if (!f_.gpus.silent.empty()) {
      return Fail("GPU", std::to_string(f_.gpus.silent.size()) + " of " + std::to_string(f_.gpus.silent.size() + f_.gpus.cards.size()) + " cards do not answer" +
                             (seen.empty() ? "" : " (others: " + seen + ")"), "see nvidia-smi and dmesg (Xid); reset the card or restart the machine");
    }
    if (wanted && Ranks() > int(f_.gpus.cards.size())) {
      return Warn("GPU", seen + ": fewer than the job's " + std::to_string(Ranks()) + " ranks", "the others need further nodes, or lower resources.ranks");
    }
    Pass("GPU", seen);
  }

  void VisibleDevices() {
    if (!f_.cuda_visible_devices) return Pass("visible devices", "CUDA_VISIBLE_DEVICES is not set: all");
    const std::string shown = "CUDA_VISIBLE_DEVICES=" + Printable(*f_.cuda_visible_devices, 200);
    if (f_.cuda_visible_devices->empty()) {
      return FailIfWanted("visible devices", shown + ": empty, so CUDA sees no card", "unset it, or name cards by UUID (nvidia-smi -L)");
    }
    std::map<std::string, std::string> seen;   // UUID, or the entry itself -> entry
    for (const std::string& entry : Split(*f_.cuda_visible_devices, ',')) {
      const auto card = std::find_if(f_.gpus.cards.begin(), f_.gpus.cards.end(), [&](const GpuCard& c) { return NamesCard(entry, c.index, c.uuid); });
      const bool known = card != f_.gpus.cards.end();
      const auto [first, fresh] = seen.try_emplace(known ? card->uuid : entry, entry);
      if (!fresh) {
        return Fail("visible devices", shown + ": " + Printable(first->second, 80) + " and " + Printable(entry, 80) + " are the same card" +
                                           (known ? " (" + card->uuid + ")" : ""), "name each card once, by UUID (nvidia-smi -L): two ranks on one card hang in NCCL");
      }
      if (!known && !f_.gpus.cards.empty()) {
        return FailIfWanted("visible devices", shown + ": no card is called " + Printable(entry, 80), "CUDA stops reading there; see nvidia-smi -L");
      }
    }
    Pass("visible devices", shown);
  }

  void Driver() {
    if (f_.gpus.cards.empty()) return;
    const std::string seen = "driver " + PrintableSentence(f_.gpus.driver) + " runs CUDA up to " + CudaText(f_.gpus.cuda) + "; this build brings " +
                             (f_.cuda_runtime > 0 ? CudaText(f_.cuda_runtime) : std::string("none"));
    if (f_.cuda_runtime == 0) return Fail("driver", seen, "this hiera-worker was built without CUDA; install one that has it");
    // A driver runs every runtime of its own major version, and older ones.
    if (f_.gpus.cuda / 1000 < f_.cuda_runtime / 1000) return Fail("driver", seen, "install a newer driver (CUDA 13 needs 580 or later, CUDA 12 525)");
    Pass("driver", seen);
  }

  void Nccl() {
    if (f_.gpus.cards.empty()) return;
    if (f_.nccl == 0) {
      if (Ranks() > 1) return Fail("NCCL", "none in this build", "install a hiera-worker with NCCL, or use one rank");
      return Pass("NCCL", "none in this build; one rank needs none");
    }
    Pass("NCCL", NcclText(f_.nccl));
  }

  void Clocks() {
    if (f_.gpus.cards.empty()) return;
    std::string seen, slowed;
    for (const GpuCard& card : f_.gpus.cards) {
      if (card.sm_mhz) {
        seen += (seen.empty() ? "" : "; ") + std::to_string(card.index) + ": " + std::to_string(*card.sm_mhz) + " MHz" +
                (card.most_sm_mhz ? " of " + std::to_string(*card.most_sm_mhz) : "") + (card.temperature_c ? ", " + std::to_string(*card.temperature_c) + " C" : "");
      }
      const uint64_t why = card.slowed.value_or(0);
      if ((why & (kSlowedByHardware | kSlowedByHeat | kSlowedByPowerBrake)) == 0) continue;
      slowed += (slowed.empty() ? "card " : ", card ") + std::to_string(card.index) + " by " +
                ((why & kSlowedByHeat) != 0 ? "heat" : (why & kSlowedByPowerBrake) != 0 ? "the power supply" : "hardware");
    }
    if (seen.empty()) seen = "not told";
    if (slowed.empty()) return Pass("clocks", seen);
    Warn("clocks", seen + "; held down: " + slowed, "see nvidia-smi -q -d PERFORMANCE; cool the card or mend its power");
  }

  void Ecc() {
    if (f_.gpus.cards.empty()) return;
    std::string off, errors;
    bool told = false;
    for (const GpuCard& card : f_.gpus.cards) {
      told = told || card.ecc.has_value();
      if (card.ecc == false) off += (off.empty() ? "" : ", ") + std::to_string(card.index);
      if (card.uncorrected_errors.value_or(0) > 0) {
        errors += (errors.empty() ? "card " : ", card ") + std::to_string(card.index) + ": " + std::to_string(*card.uncorrected_errors) + " uncorrected errors";
      }
    }
    if (!errors.empty()) return Fail("ECC", errors + " over its life", "run dcgmi diag -r 3 and have the card replaced if they grow; its results may be wrong");
    if (!off.empty()) return Warn("ECC", "off on card " + off, "turn it on with nvidia-smi -e 1 and a reboot: a flipped bit goes unseen without it");
    Pass("ECC", told ? "on, no uncorrected error" : "not told (consumer cards have none)");
  }

  void SharedMemory() {
    if (!f_.shm_bytes || !f_.shm_free_bytes) return Warn("/dev/shm", "not there", "mount a tmpfs on it");
    const std::string seen = BytesText(*f_.shm_bytes) + ", " + BytesText(*f_.shm_free_bytes) + " free";
    static constexpr char kLarger[] = "give the container --shm-size=1g (Docker's default is 64 MiB), or remount /dev/shm larger";
    if (!gpu_) return Pass("/dev/shm", seen + "; CPU ranks do not use it");
    const int64_t needed = LocalRanks() > 1 ? LocalRanks() * kNcclShmPerRank : 0;
    if (needed > *f_.shm_free_bytes) {
      return Fail("/dev/shm", seen + "; NCCL may take " + BytesText(needed) + " for " + std::to_string(LocalRanks()) + " ranks on this node", kLarger);
    }
    if (*f_.shm_bytes <= kDockerShm) return Warn("/dev/shm", seen + ": enough for one rank, not for several", kLarger);
    Pass("/dev/shm", seen);
  }

  void LockedMemory() {
    if (!f_.memlock_bytes) return;
    const std::string seen = *f_.memlock_bytes == DoctorFigures::kUnlimited ? "unlimited" : BytesText(*f_.memlock_bytes);
    static constexpr char kRaise[] = "set LimitMEMLOCK=infinity in the unit, --ulimit memlock=-1 for a container, or memlock in /etc/security/limits.conf";
    if (!gpu_ || *f_.memlock_bytes >= kLeastMemlock) return Pass("memlock", seen);
    const bool several_nodes = job_ != nullptr && Ranks() > int(f_.gpus.cards.size());
    if (several_nodes) return Fail("memlock", seen + "; NCCL over RDMA between nodes locks its buffers", kRaise);
    Warn("memlock", seen + "; enough on one node, not for NCCL over RDMA", kRaise);
  }

  void OpenFiles() {
    if (!f_.open_files) return;
    const std::string seen = *f_.open_files == DoctorFigures::kUnlimited ? "unlimited" : std::to_string(*f_.open_files);
    static constexpr char kRaise[] = "raise it: ulimit -n 4096, or LimitNOFILE in the unit";
    if (*f_.open_files < kLeastOpenFiles) return Fail("open files", seen, kRaise);
    if (*f_.open_files < kGoodOpenFiles) return Warn("open files", seen, kRaise);
    Pass("open files", seen);
  }

  // Weights and two moments in fp32.
  int64_t CheckpointBytes() const { return plan_ ? 12 * plan_->parameters : 0; }

  void DiskSpace() {
    if (!f_.disk_free_bytes) {
      if (!f_.disk_problem.empty()) Fail("disk space", f_.disk_problem, "give an output.folder (or --folder) that can be written");
      return;
    }
    const std::string seen = BytesText(*f_.disk_free_bytes) + " free at " + PrintableSentence(f_.disk_folder);
    if (job_ == nullptr || CheckpointBytes() == 0) return Pass("disk space", seen);
    // Those kept, the one being written, and the exported weights.
    const int64_t kept = job_->checkpoint().keep_last() + (job_->checkpoint().keep_best() ? 1 : 0) + 1;
    const int64_t needed = kept * CheckpointBytes() + 4 * plan_->parameters;
    const std::string whole = seen + "; " + std::to_string(kept) + " checkpoints of " + BytesText(CheckpointBytes()) + " and the weights take " + BytesText(needed);
    static constexpr char kRoom[] = "make room, choose another output.folder, or lower checkpoint.keep_last";
    if (*f_.disk_free_bytes < 2 * CheckpointBytes()) return Fail("disk space", whole, kRoom);
    if (*f_.disk_free_bytes < needed) return Warn("disk space", whole, kRoom);
    Pass("disk space", whole);
  }

  void DiskSpeed() {
    if (!f_.disk_bytes_per_s) {
      if (!f_.disk_problem.empty() && f_.disk_free_bytes) Fail("disk speed", f_.disk_problem, "give an output.folder (or --folder) that can be written");
      return;
    }
    const std::string seen = NumberText(*f_.disk_bytes_per_s / 1e6) + " MB/s written and synced at " + PrintableSentence(f_.disk_folder);
    static constexpr char kFaster[] = "put output.folder on a faster disk, or raise checkpoint.every_steps";
    if (CheckpointBytes() == 0) {
      if (*f_.disk_bytes_per_s < kSlowDisk) return Warn("disk speed", seen, kFaster);
      return Pass("disk speed", seen);
    }
    const double writing_s = double(CheckpointBytes()) / *f_.disk_bytes_per_s;
    std::string whole = seen + "; a checkpoint takes " + DurationText(writing_s);
    if (!f_.step_ms) return Pass("disk speed", whole);
    const double between_s = double(job_->checkpoint().every_steps()) * *f_.step_ms / 1e3;
    whole += ", one is made every " + DurationText(between_s);
    if (writing_s > kMostCheckpointShare * between_s) return Warn("disk speed", whole, kFaster);
    Pass("disk speed", whole);
  }

  const DoctorFigures& f_;
  const v1::JobSpec* const job_;
  bool gpu_ = false;
  std::string mode_, plan_problem_;
  std::optional<PlanReport> plan_;
  int64_t least_bytes_ = 0;
  std::vector<DoctorCheck> checks_;
};

}  // namespace

const char* VerdictName(Verdict verdict) {
  switch (verdict) {
    case Verdict::kPass: return "pass";
    case Verdict::kWarn: return "warn";
    case Verdict::kFail: return "fail";
  }
  return "";
}

std::vector<DoctorCheck> Examine(const DoctorFigures& figures, const v1::JobSpec* job) { return Examination(figures, job).Run(); }

}  // namespace hierad
