// hiera-worker data inspect PATH | bench JOB | prepare JOB --out FOLDER. Prints text or JSON. worker/main calls this with argv[0] =
// "data" and returns what it returns: 0, or 1 after one sentence on stderr.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "hierad/v1/job.pb.h"
#include "nlohmann/json.hpp"

namespace hierad {

int DataMain(int argc, char** argv);

using Report = nlohmann::ordered_json;

// inspect_*.cc: what a path holds. `samples`: at most so many are read for the statistics, evenly spread.
struct InspectOptions {
  std::string path;
  int64_t samples = 1000;
};
absl::StatusOr<Report> Inspect(const InspectOptions& options);
absl::StatusOr<Report> InspectArrays(const InspectOptions& options, const std::string& source);   // npy, ts
absl::StatusOr<Report> InspectRecordings(const InspectOptions& options);                          // edf
absl::StatusOr<Report> InspectImages(const InspectOptions& options);

// report.cc: for people. Lists of objects become tables.
std::string ReportText(const Report& report);

// rates.cc: the loader alone, as fast as it goes, and the stages of a read by one thread.
struct RateOptions {
  v1::JobSpec spec;              // defaults filled in
  double seconds = 5;            // of each measurement
  std::vector<int> threads;      // empty: 1 and the machine's cores
  double step_ms = 0;            // of a rank's step, to compare with; 0: not known
};
absl::StatusOr<Report> MeasureRates(const RateOptions& options);

// prepare.cc: windows of recordings, filtered and resampled, as .npy shards that source npy reads: OUT, or with data.held_out
// OUT/training and OUT/held_out. manifest.json lists inputs and shards with their SHA-256; a second call goes on after the
// last whole shard, or does nothing.
struct PrepareOptions {
  v1::JobSpec spec;              // defaults filled in
  std::string out;
  int64_t shard_bytes = 256 << 20;
};
absl::StatusOr<Report> Prepare(const PrepareOptions& options);

}  // namespace hierad
