// The weights of a run as one safetensors file that a person loads in PyTorch, by FAIR's names or by timm's. Renaming
// only: no tensor is computed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace hierad {

struct ExportOptions {
  std::string source;              // a run's folder: its newest checkpoint that verifies; or one checkpoint's folder
  std::string to = "safetensors";  // FAIR's names; or "timm"
  std::string out;                 // file; empty: in the run's exported/, named for source and `to`
};

struct ExportReport {
  std::string path, to;
  int64_t step = 0;
  size_t tensors = 0, left_out = 0;   // left_out: parameters that timm's Hiera has no place for
  int64_t bytes = 0;
  std::string model;                  // the line of Python that makes the model it fits
  std::vector<std::string> damaged;   // checkpoints that could not be used

  std::string Text() const;           // ends with the Python that loads it
  std::string Json() const;           // one object; keys are these fields and `python`, the lines
};

// Replaces the file as a whole. USER_ERROR: no run or checkpoint there; CHECKPOINT: none that can be read, or no space.
absl::StatusOr<ExportReport> Export(const ExportOptions& options);

}  // namespace hierad
