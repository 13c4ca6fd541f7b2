// The labelled samples of one split: read once, in order, without augmentation; copies left out.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/plan/geometry.h"
#include "hierad/v1/job.pb.h"
#include "worker/data/dataset.h"
#include "worker/probe/logistic.h"
#include "worker/step/step.h"

namespace hierad {

// What every row of the table is computed from.
struct ProbeSamples {
  std::vector<float> x_NCS;              // prepared samples
  int64_t size = 0;                      // numbers in one
  std::vector<int32_t> labels_N;
  std::vector<int64_t> indices_N;        // in the file
  int64_t copies = 0;                    // left out
  std::vector<std::string> class_names;  // of the file

  int64_t count() const { return labels_N.size(); }
};

// `seen`: hashes of the samples before; those read here are added.
absl::StatusOr<ProbeSamples> ReadProbeSamples(const v1::JobSpec& spec, const std::string& path, const Geometry& geometry,
                                              ChannelStatistics* statistics, int threads, std::set<std::string>* seen);

// Labels of `test` renumbered to the classes of `train`, by name.
absl::Status MatchClasses(const ProbeSamples& train, ProbeSamples* test);

// Encoder features, batch by batch.
absl::StatusOr<LabelledRows> EncoderRows(const ProbeSamples& samples, int64_t batch, int32_t num_classes, Step* step);
// Mean over 16 equal parts of each channel: 16 in time, 4 x 4 of an image (for a video, of all its frames).
LabelledRows RawRows(const ProbeSamples& samples, const Geometry& geometry, int32_t num_classes);

}  // namespace hierad
