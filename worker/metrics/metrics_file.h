// metrics.jsonl: one JSON object a line, one line an optimizer step, each step exactly once over all attempts. A resumed
// run drops the lines beyond the checkpoint it starts from: those steps are run again. Keys are StepMetrics' fields;
// non-finite numbers, which JSON lacks, are the strings "NaN", "Infinity", "-Infinity". Used by one thread, but for SyncFlushed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/fs.h"
#include "hierad/v1/job.pb.h"

namespace hierad {

class MetricsFile {
 public:
  // Opens `run_folder`/metrics.jsonl to go on after `step`: lines of later steps and a torn last line are cut off.
  // `recent`: the last of the lines kept, at most `most_recent`.
  static absl::StatusOr<MetricsFile> Open(const std::string& run_folder, int64_t step, size_t most_recent,
                                          std::vector<v1::StepMetrics>* recent);

  // A line that cannot be written now (a full disk) is kept and written with a later one: the error may be passing.
  absl::Status Append(const v1::StepMetrics& metrics);
  // Writes what could not be written before.
  absl::Status Flush();
  // All lines that were written survive a power failure: called before a checkpoint that stands for them becomes durable. By
  // any thread.
  absl::Status SyncFlushed() const;

 private:
  std::string path_;
  UniqueFd fd_;
  int64_t size_ = 0;        // of whole lines
  std::string pending_;     // as bounded as the trainer's patience with a disk that takes nothing
};

std::string MetricsLine(const v1::StepMetrics& metrics);   // without the newline
// False: no line that MetricsLine makes.
bool ParseMetricsLine(const std::string& line, v1::StepMetrics* metrics);

}  // namespace hierad
