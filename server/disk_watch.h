// Whether the disks that hierad and its runs write to have room: below the reserve nothing new is let in. Loop thread only.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <string>

#include "absl/status/statusor.h"

namespace hierad {

class DiskWatch {
 public:
  using Measure = std::function<absl::StatusOr<int64_t>(const std::string& folder)>;
  static constexpr std::chrono::seconds kLookEvery{2};
  static constexpr size_t kFolders = 4096;   // remembered; then all are measured anew

  DiskWatch(int64_t reserve_bytes, Measure measure) : reserve_bytes_(reserve_bytes), measure_(std::move(measure)) {}

  // Empty: there is room for a run in `folder` (or in the nearest folder above it that is there), or it cannot be told.
  // Else a sentence with what is free and what is kept back.
  std::string Problem(const std::string& folder, std::chrono::nanoseconds now);

 private:
  struct Look {
    std::chrono::nanoseconds at{0};
    std::string problem;
  };

  const int64_t reserve_bytes_;
  const Measure measure_;
  std::map<std::string, Look> looks_;   // by the folder that was measured
};

}  // namespace hierad
