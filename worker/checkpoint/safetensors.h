// safetensors files: fp32 tensors by name. Reading is strict (no holes, no overlaps, no trailing bytes, header at most
// 100 MB, doubled keys refused); legal rarities (empty tensors, scalars, __metadata__, padded header) are accepted.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/fs.h"

namespace hierad {

struct TensorView {
  std::string name;
  std::vector<int64_t> shape;
  const float* data;
};

// Streams to `path` (created, fsynced); returns the file's SHA-256.
absl::StatusOr<std::string> WriteSafetensors(const std::string& path, const std::vector<TensorView>& tensors,
                                             const std::map<std::string, std::string>& metadata);

struct Tensor {
  std::vector<int64_t> shape;
  std::vector<float> data;     // F32 as is; F16, BF16, F64 converted
};
struct SafetensorsFile {
  std::map<std::string, Tensor> tensors;
  std::map<std::string, std::string> metadata;
};
// Refusals name file, tensor and rule.
absl::StatusOr<SafetensorsFile> ReadSafetensors(const std::string& path);
absl::StatusOr<SafetensorsFile> ReadSafetensors(const UniqueFd& fd, const std::string& path);   // an open file; the path is for messages

}  // namespace hierad
