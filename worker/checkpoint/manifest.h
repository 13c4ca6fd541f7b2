// manifest.json and state.json of a checkpoint. Non-finite numbers are the strings "NaN", "Infinity", "-Infinity".
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "hierad/v1/job.pb.h"
#include "worker/checkpoint/checkpoint.h"

namespace hierad {

inline constexpr char kModelFile[] = "model.safetensors";
inline constexpr char kAverageFile[] = "model_ema.safetensors";   // of an export
inline constexpr char kOptimizerFile[] = "optimizer.safetensors";
inline constexpr char kStateFile[] = "state.json";
inline constexpr char kManifestFile[] = "manifest.json";
inline constexpr char kDamagedMark[] = "DAMAGED";

struct Manifest {
  struct File {
    int64_t bytes = 0;
    std::string sha256;
  };
  int64_t step = 0;
  int64_t created_ms = 0;
  std::optional<double> eval_loss;
  std::map<std::string, File> files;

  std::string ToText() const;
  // DataLoss says what is wrong, without the path.
  static absl::StatusOr<Manifest> FromText(const std::string& text);
};

std::string StateToText(const CheckpointContents& contents, const v1::JobSpec& spec);
// The job in it.
absl::StatusOr<v1::JobSpec> JobFromStateText(const std::string& text);
// All but the flat buffers.
absl::StatusOr<CheckpointContents> StateFromText(const std::string& text);

// "step-000000012", and back (-1: no such name).
std::string CheckpointName(int64_t step);
int64_t StepOfName(const std::string& name);

}  // namespace hierad
