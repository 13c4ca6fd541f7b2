// TensorBoard's event file: TFRecords of tensorflow.Event messages, written by hand since neither is a dependency. One file
// an attempt; its first entry tells TensorBoard from which step on an earlier attempt's points no longer count. Buffered,
// and a loss of the newest seconds in a crash harms nothing: metrics.jsonl has every step. Used by one thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/fs.h"
#include "hierad/v1/job.pb.h"

namespace hierad {

class EventFile {
 public:
  static constexpr size_t kBufferBytes = 64 << 10;
  static constexpr std::chrono::seconds kFlushEvery{2};

  // In `run_folder`, for an attempt that begins after `step`.
  static absl::StatusOr<EventFile> Open(const std::string& run_folder, int64_t step);

  absl::Status Add(const v1::StepMetrics& metrics);
  absl::Status AddPicture(int64_t step, const std::string& tag, int width, int height, const std::string& png);
  absl::Status Flush();
  const std::string& path() const { return path_; }

 private:
  absl::Status Write(const std::string& event);

  std::string path_;
  UniqueFd fd_;
  std::string pending_;
  std::chrono::nanoseconds flushed_{0};
};

std::string TfRecord(std::string_view data);

}  // namespace hierad
