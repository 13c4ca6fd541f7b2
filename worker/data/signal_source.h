// Raw signals as their file holds them: channels of equal length, before pooling, padding and normalisation.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/plan/geometry.h"
#include "hierad/v1/job.pb.h"
#include "worker/data/dataset.h"

namespace hierad {

// Thread-safe after opening.
class SignalSource {
 public:
  virtual ~SignalSource() = default;
  virtual int64_t count() const = 0;
  virtual int64_t channels() const = 0;
  virtual const std::vector<int64_t>& axes() const = 0;    // of one channel; one entry for a time series
  virtual int64_t num_classes() const = 0;                 // 0: no labels
  virtual std::string class_name(int64_t label) const = 0;
  virtual int64_t label(uint64_t sample) const = 0;        // -1: none
  // One sample, row-major [channels, axes...], as fp32. Values may be non-finite: the caller looks.
  virtual absl::Status Read(uint64_t sample, float* x_CT) const = 0;
  // The narrowest of kU8, kI16, kF16 and kF32 that holds the values of all samples.
  virtual DType row_type() const { return DType::kF32; }
  // Of one sample the points [first, first + count) of every channel, [channels, count] of row_type().
  virtual absl::Status ReadRow(uint64_t sample, int64_t first, int64_t count, void* row) const;
  virtual std::string SampleName(uint64_t sample) const = 0;
  virtual std::string Describe() const = 0;                // "npy <f4 C", "ts"
  virtual bool always_finite() const { return false; }     // whole numbers: nothing to look for
  virtual int64_t sample_bytes() const { return 0; }       // that a read takes from files, about
};

// UEA/UCR .ts text. All of it is held in memory as fp32. `data`: unequal, missing.
absl::StatusOr<std::unique_ptr<SignalSource>> OpenTs(const std::string& path, const v1::DataSpec& data);

// NumPy arrays [N, C, axes...], or [N, axes...] where the model takes one channel; `dims`: axes of the model's input. An
// .npy file (labels, if <stem>_labels.npy stands beside it), an .npz (its arrays x and y), or a folder of either, whose
// files are one set in the order of their names (classes.txt: names of the classes, one a line).
absl::StatusOr<std::unique_ptr<SignalSource>> OpenNpy(const std::string& path, int dims, int64_t in_chans);

// EDF, EDF+ and BDF recordings, a file or a folder of them, cut into windows; filtered and resampled as `data` says.
absl::StatusOr<std::unique_ptr<SignalSource>> OpenRecordings(const v1::DataSpec& data, const std::string& path, const Geometry& geometry, Subset subset);

}  // namespace hierad
