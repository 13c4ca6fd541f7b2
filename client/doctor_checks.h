// The judgement of `hierctl doctor`: figures in, verdicts out; pure.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/gpu_cards.h"
#include "hierad/v1/job.pb.h"

namespace hierad {

// What was seen. Nothing known: nullopt, or empty.
struct DoctorFigures {
  static constexpr int64_t kUnlimited = INT64_MAX;
  std::optional<int64_t> shm_bytes, shm_free_bytes;           // /dev/shm
  std::optional<int64_t> memlock_bytes, open_files;           // soft limits; kUnlimited
  std::optional<int64_t> memory_bytes, memory_free_bytes;     // of the host
  std::optional<std::string> cuda_visible_devices, torch_allocator;   // environment: CUDA_VISIBLE_DEVICES, PYTORCH_CUDA_ALLOC_CONF
  std::string disk_folder;                                    // where checkpoints go
  std::optional<int64_t> disk_free_bytes;
  std::optional<double> disk_bytes_per_s;                     // written and synced
  std::string disk_problem;

  std::string worker_problem;                                 // of hiera-worker doctor; then all below is unknown
  GpuCards gpus;
  int cuda_runtime = 0, nccl = 0;                             // of the build
  std::optional<int64_t> samples;
  std::optional<double> data_samples_per_s, step_ms;
  int data_threads = 0;
  std::string data_problem, step_problem, step_skipped;
};

enum class Verdict { kPass, kWarn, kFail };
const char* VerdictName(Verdict verdict);   // "pass", "warn", "fail"

struct DoctorCheck {
  std::string name;      // stable: it is the JSON's
  Verdict verdict = Verdict::kPass;
  std::string seen;      // the figure
  std::string advice;    // what to do; empty with a pass
};

// `job` null: the machine alone. It has its defaults filled in and is legal.
std::vector<DoctorCheck> Examine(const DoctorFigures& figures, const v1::JobSpec* job);

}  // namespace hierad
